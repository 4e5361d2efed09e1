"""What a device counts and the host learns later, so that a decode step never waits for the device."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Receiver = Callable[[list[int]], None]


def to_device(numbers: Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """The host's numbers on a device, int64 in their shape, without a wait for what it is doing."""
    made = torch.tensor(numbers, dtype=torch.int64)
    return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made.to(device)


class Late:
    """Numbers on their way from the device to the host.

    A step posts what it counted; all of it leaves in one copy when the step ends (`send`), and the host takes it in
    when the next step begins (`collect`). By then it has seen the logits of the step before, so that nothing is waited
    for. In main memory every number is handed over when it is posted.

    Args:
        is_late: Whether numbers wait for `collect`.
    """

    def __init__(self, is_late: bool) -> None:
        self.is_late = is_late
        self._posted: list[tuple[Tensor, Receiver]] = []
        self._sent: list[tuple[Tensor, list[tuple[int, Receiver]]]] = []
        self._arrived: torch.cuda.Event | None = None

    def post(self, numbers: Tensor, receive: Receiver) -> None:
        """Hands whole numbers (any shape and integer or bool type) to `receive`, now or later."""
        if self.is_late:
            self._posted.append((numbers.flatten(), receive))
        else:
            receive(numbers.flatten().tolist())

    def send(self) -> None:
        """Starts the copy of everything that was posted."""
        if not self._posted:
            return
        posted, self._posted = self._posted, []
        numbers = torch.cat([x.long() for x, _ in posted])
        self._sent.append((numbers.to("cpu", non_blocking=True), [(x.numel(), receive) for x, receive in posted]))
        if numbers.is_cuda:
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def collect(self) -> None:
        """Hands over what was sent; all of it, and only then raises what the first receiver raised."""
        if not self._sent:
            return
        if self._arrived is not None:
            self._arrived.synchronize()
        sent, self._sent, self._arrived = self._sent, [], None
        failed: Exception | None = None
        for numbers, receivers in sent:
            values, begin = numbers.tolist(), 0
            for count, receive in receivers:
                try:
                    receive(values[begin : begin + count])
                except Exception as error:
                    failed = failed or error
                begin += count
        if failed is not None:
            raise failed

    def drop(self) -> None:
        """Forgets what was posted and not sent, since the step that it is about did not end."""
        self._posted = []
