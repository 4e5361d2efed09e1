"""What a device counts and the host learns later, so that a decode step never waits for the device."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

Receiver = Callable[[list[int]], None]


def to_device(numbers: Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """The host's numbers on a device, int64 in their shape, without a wait for what it is doing."""
    made = torch.tensor(numbers, dtype=torch.int64)
    return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made.to(device)


@dataclass
class Tape:
    """What the host does in a step that was captured, to be done again in every replay.

    Args:
        effects: What it notes.
        posts: How many numbers the device tells it, and who receives them.
        numbers: All of them, where every replay leaves them.
    """

    effects: list[Callable[[], None]] = field(default_factory=list)
    posts: list[tuple[int, Callable[[], Receiver]]] = field(default_factory=list)
    numbers: Tensor | None = None


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
        self.tape: Tape | None = None  # takes down what the host does in a step, while one is captured
        self._sent: list[tuple[Tensor, list[tuple[int, Receiver]], torch.cuda.Event | None]] = []

    def post(self, numbers: Tensor, bind: Callable[[], Receiver]) -> None:
        """Hands whole numbers (any shape and integer or bool type) to a receiver, now or later.

        Args:
            numbers: What the device counted.
            bind: Called when they are posted, and again in every replay of a captured step: the receiver, with whatever
                it has to know of the host's state at that step.
        """
        if not self.is_late:
            bind()(numbers.flatten().tolist())
            return
        self._posted.append((numbers.flatten(), bind()))
        if self.tape is not None:
            self.tape.posts.append((numbers.numel(), bind))

    def also(self, effect: Callable[[], None]) -> None:
        """Does what the host notes in a step, now and in every replay of it."""
        effect()
        if self.tape is not None:
            self.tape.effects.append(effect)

    def send(self) -> None:
        """Starts the copy of everything that was posted."""
        if not self._posted:
            return
        posted, self._posted = self._posted, []
        numbers = torch.cat([x.long() for x, _ in posted])
        if self.tape is not None:  # a replay's numbers lie where those of the captured step do
            self.tape.numbers = numbers
            return
        self._start(numbers, [(x.numel(), receive) for x, receive in posted])

    def send_again(self, tape: Tape, *, with_effects: bool = True) -> None:
        """What the host does in a replay of a captured step, once it is launched."""
        for effect in tape.effects if with_effects else ():
            effect()
        if tape.numbers is not None:
            self._start(tape.numbers, [(count, bind()) for count, bind in tape.posts])

    def _start(self, numbers: Tensor, receivers: list[tuple[int, Receiver]]) -> None:
        """Starts a copy to the host, behind what the device was told so far."""
        arrived = None
        if numbers.is_cuda:
            there = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            there.copy_(numbers, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()
        else:
            there = numbers.to("cpu", non_blocking=True, copy=True)  # the next replay writes to them again
        self._sent.append((there, receivers, arrived))

    def collect(self, leave: int = 0) -> None:
        """Hands over what was sent; all of it, and only then raises what the first receiver raised.

        Args:
            leave: Steps sent last that are not waited for.
        """
        end = len(self._sent) - leave
        if end <= 0:
            return
        sent, self._sent = self._sent[:end], self._sent[end:]
        failed: Exception | None = None
        for numbers, receivers, arrived in sent:
            if arrived is not None:
                arrived.synchronize()
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
