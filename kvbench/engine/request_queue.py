"""Queue of requests: their order, and the time from which each may come."""

import time
from collections.abc import Callable, Sequence
from heapq import heappop, heappush

from kvbench.engine.requests import Request


class Clock:
    """Clock of a run that skips idle time: seconds since the first look, without the waits for the next request.

    Args:
        tick: Seconds that work has taken so far, from any beginning; a simulation has its own.

    Attributes:
        idle_s: Seconds that were skipped.
    """

    def __init__(self, tick: Callable[[], float] = time.perf_counter) -> None:
        self._tick, self.idle_s = tick, 0.0
        self._begin: float | None = None

    def busy_s(self) -> float:
        """Seconds of work since the first look."""
        if self._begin is None:
            self._begin = self._tick()
        return self._tick() - self._begin

    def now_s(self) -> float:
        """Seconds since the first look, those that were passed over included."""
        return self.busy_s() + self.idle_s

    def wait_until(self, at_s: float) -> None:
        """Passes over the time until a moment, where it lies ahead; to a nanosecond after it, whatever is rounded."""
        self.idle_s = max(self.idle_s, at_s - self.busy_s() + 1e-9)


class RequestQueue:
    """Requests in their own order, which depends on nothing else: a preempted one comes back to its index.

    Args:
        requests: Requests in the order in which they are answered.
        group: Requests that are answered together before the next ones begin; None = each comes as soon as there is
            room.
        arrivals_s: Seconds of the clock, ascending, at which each request is there; None = all are.
        clock: Clock of the run.

    Attributes:
        cancelled: Requests that were cancelled.
        read_s: Time at which the prompt of each request was first read, so that its first token was known.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        *,
        group: int | None = None,
        arrivals_s: Sequence[float] | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.requests, self._group, self._arrivals_s, self.clock = requests, group, arrivals_s, clock or Clock()
        self._index = {request.sample_id: index for index, request in enumerate(requests)}
        self._left = list(range(len(requests)))
        self._now = 0  # the group whose requests may come
        self.cancelled: set[str] = set()
        self.read_s: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._left)

    def index(self, sample_id: str) -> int:
        """Index of a request in the order."""
        return self._index[sample_id]

    def first(self, num_live: int) -> Request | None:
        """The next request, while `num_live` are being answered; None where it may not come yet."""
        while self._left and self.requests[self._left[0]].sample_id in self.cancelled:
            heappop(self._left)
        if not self._left:
            return None
        index = self._left[0]
        if self._group is not None and index // self._group != self._now:
            if num_live:
                return None
            self._now = index // self._group
        if self._arrivals_s is not None and self._arrivals_s[index] > self.clock.now_s():
            return None
        return self.requests[index]

    def take(self) -> Request:
        """Takes the request that `first` gave."""
        return self.requests[heappop(self._left)]

    def note_read(self, request: Request) -> None:
        """Notes that a prompt has just been read."""
        self.read_s.setdefault(request.sample_id, self.clock.now_s())

    def put_back(self, requests: Sequence[Request]) -> None:
        """Takes back requests that have to begin again."""
        for request in requests:
            heappush(self._left, self._index[request.sample_id])

    def wait(self) -> None:
        """Passes over the time until the next request is there."""
        if self._left and self._arrivals_s is not None:
            self.clock.wait_until(self._arrivals_s[self._left[0]])
