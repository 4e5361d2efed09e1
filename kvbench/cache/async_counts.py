"""Counts that a device sends to the host asynchronously, so that a decode step never synchronises."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

Receiver = Callable[[list[int]], None]


def to_device(
    numbers: Sequence[int] | Sequence[Sequence[int]] | Sequence[Sequence[float]],
    device: torch.device,
    dtype: torch.dtype = torch.int64,
) -> Tensor:
    """The host's numbers on a device, in their shape, without a wait for what it is doing."""
    made = torch.tensor(numbers, dtype=dtype)
    return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made.to(device)


def one_row(row: int, device: torch.device) -> Tensor:
    """A row's number on a device, int64 [1], without a wait for what it is doing."""
    return torch.full((1,), row, dtype=torch.int64, device=device)


@dataclass(frozen=True, eq=False)
class Padding:
    """Device tensors that mark live rows and padding rows.

    Args:
        live: int64 [S], 1 for a row and 0 after the last one.
        seen: int64 [S] rows whose numbers a step looks at: what pads looks like the first row, so that it breaks no
            rule of a plan.
    """

    live: Tensor
    seen: Tensor


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of a cache: int64 [S] on its device, and their numbers on the host.

    Captured steps have a list of numbers, which a replay for other rows changes in place. Empty = unknown on the host,
    so that list lengths are read from the device. A captured step has one size for several numbers of rows: with a
    `padding`, S may exceed them, and the missing ones are the store's spare row, which takes no slot and is reported to
    no receiver.
    """

    tensor: Tensor
    numbers: Sequence[int] = ()
    padding: Padding | None = None

    @classmethod
    def of(cls, numbers: Sequence[int], device: torch.device) -> "Rows":
        return cls(to_device(numbers, device), numbers)

    @classmethod
    def padded(cls, numbers: list[int], spare: int, size: int, device: torch.device) -> "Rows":
        pads = size - len(numbers)
        listed = [*numbers, *[spare] * pads], [1] * len(numbers) + [0] * pads, [*numbers, *numbers[:1] * pads]
        tensor, live, seen = to_device(listed, device)
        return cls(tensor, numbers, Padding(live, seen))

    @property
    def looked_at(self) -> "Rows":
        """Counts in a policy's view."""
        return self if self.padding is None else Rows(self.padding.seen, self.numbers)

    def take(self, others: "Rows") -> None:
        """Takes as many other rows in the place of these."""
        assert isinstance(self.numbers, list), "they are changed in place"
        self.numbers[:] = others.numbers
        self.tensor.copy_(others.tensor)
        if self.padding is not None and others.padding is not None:
            self.padding.live.copy_(others.padding.live)
            self.padding.seen.copy_(others.padding.seen)

    def __len__(self) -> int:
        return len(self.tensor)

    def on(self, device: torch.device) -> "Rows":
        return self if self.tensor.device == device else Rows(self.tensor.to(device), self.numbers)


@dataclass
class ReplayLog:
    """Numbers that each replay of a captured step sends to the host.

    The count that each receiver takes, and the tensor that holds all of them after a replay.
    """

    posts: list[tuple[int, Callable[[], Receiver]]] = field(default_factory=list)
    numbers: Tensor | None = None


class AsyncCounts:
    """Numbers on their way from the device to the host.

    A step posts what it counted; all of it leaves in one copy when the step ends (`send`), and the host takes it in
    when the next step begins (`collect`). By then it has seen the logits of the step before, so that nothing is waited
    for. Where numbers are not late, as in main memory, each is handed over when it is posted.
    """

    def __init__(self, is_late: bool) -> None:
        self.is_late = is_late
        self._posted: list[tuple[Tensor, Receiver]] = []
        self.log: ReplayLog | None = None  # of a step that is being captured
        self.at_full_width = False  # steps read tables as wide as they are, as those that are captured do
        self._sent: list[tuple[Tensor, list[tuple[int, Receiver]], torch.cuda.Event | None]] = []

    def post(self, numbers: Tensor, bind: Callable[[], Receiver]) -> None:
        """Hands integers (any shape and integer or bool type) to a receiver, now or later.

        `bind` makes the receiver from the host's state at that step: it is called here, and again in every replay of a
        captured step.
        """
        if not self.is_late:
            bind()(numbers.flatten().tolist())
            return
        self._posted.append((numbers.flatten(), bind()))
        if self.log is not None:
            self.log.posts.append((numbers.numel(), bind))

    def send(self) -> None:
        """Starts the copy of everything that was posted."""
        if not self._posted:
            return
        posted, self._posted = self._posted, []
        numbers = torch.cat([x.long() for x, _ in posted])
        if self.log is not None:  # a replay's numbers lie where those of the captured step do
            self.log.numbers = numbers
            return
        self._start(numbers, [(x.numel(), receive) for x, receive in posted])

    def resend(self, log: ReplayLog) -> None:
        """Starts the copy of what a replay of a captured step counted, once it is launched."""
        if log.numbers is not None:
            self._start(log.numbers, [(count, bind()) for count, bind in log.posts])

    def _start(self, numbers: Tensor, receivers: list[tuple[int, Receiver]]) -> None:
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
        """Delivers everything sent, except the last `leave` steps, then raises the first receiver's exception."""
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


class HostCounts:
    """Upper bound of the slots that a list of each row holds, kept on the host without reading the device."""

    def __init__(self) -> None:
        self._longest: dict[int, list[int]] = {}  # by row: most slots of a list, by tier
        self._grown: Counter[int] = Counter()  # slots that lists of a row may have got, in all

    def advance(self, numbers: Sequence[int], slots: int) -> None:
        """Notes that every list of rows may have so many slots more, in any tier."""
        for number in numbers:
            self._grown[number] += slots
            if number in self._longest:
                self._longest[number] = [held + slots for held in self._longest[number]]

    def longest(self, numbers: Sequence[int], tier: int) -> int | None:
        """Most slots of a list of rows in a tier; None where nothing is known."""
        if not numbers or not all(number in self._longest for number in numbers):
            return None
        return max(self._longest[number][tier] for number in numbers)

    def copy(self, source: int, number: int) -> None:
        """Notes that a row's lists hold what another one's do."""
        if source in self._longest:
            self._longest[number] = list(self._longest[source])

    def forget(self, number: int) -> None:
        """Notes that nothing is known of a row's lists any more."""
        self._longest.pop(number, None)

    def learner(self, rows: Rows) -> Receiver:
        """A receiver of what lists of rows hold now at most: by tier, the rows' numbers."""
        named, size = {number: self._grown[number] for number in rows.numbers}, len(rows)

        def learn(values: list[int]) -> None:
            for index, (number, grown) in enumerate(named.items()):
                since = self._grown[number] - grown  # by steps that began meanwhile
                self._longest[number] = [held + since for held in values[index::size]]

        return learn
