"""Requests that wait for their turn: in which order they come, and from when on."""

import time
from collections.abc import Sequence
from heapq import heappop, heappush

from kvbench.engine.requests import Request


class Waiting:
    """Requests in their own order, which depends on nothing else: one that had to give up its place comes back to where
    it was.

    Args:
        requests: In the order in which they are answered.
        group: Requests that are answered together before the next ones begin; None = each comes as soon as there is
            room.
        arrivals_s: Seconds from the first look on, ascending, at which each request is there; None = all are.

    Attributes:
        cancelled: Requests that nobody waits for any longer.
        read_s: When the prompt of each request had been read for the first time, so that its first token was known.
    """

    def __init__(
        self, requests: Sequence[Request], *, group: int | None = None, arrivals_s: Sequence[float] | None = None
    ) -> None:
        self.requests, self._group, self._arrivals_s = requests, group, arrivals_s
        self._places = {request.sample_id: place for place, request in enumerate(requests)}
        self._left = list(range(len(requests)))
        self._since: float | None = None
        self._now = 0  # the group whose requests may come
        self.cancelled: set[str] = set()
        self.read_s: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._left)

    def place(self, sample_id: str) -> int:
        """The place of a request in the order."""
        return self._places[sample_id]

    def elapsed_s(self) -> float:
        """Seconds since the first look."""
        if self._since is None:
            self._since = time.perf_counter()
        return time.perf_counter() - self._since

    def first(self, num_live: int) -> Request | None:
        """The next request, while `num_live` are being answered; None where it may not come yet."""
        while self._left and self.requests[self._left[0]].sample_id in self.cancelled:
            heappop(self._left)
        if not self._left:
            return None
        place = self._left[0]
        if self._group is not None and place // self._group != self._now:
            if num_live:
                return None
            self._now = place // self._group
        if self._arrivals_s is not None and self._arrivals_s[place] > self.elapsed_s():
            return None
        return self.requests[place]

    def take(self) -> Request:
        """Takes the request that `first` gave."""
        return self.requests[heappop(self._left)]

    def note_read(self, request: Request) -> None:
        """Notes that a prompt has just been read."""
        self.read_s.setdefault(request.sample_id, self.elapsed_s())

    def put_back(self, requests: Sequence[Request]) -> None:
        """Takes back requests that have to begin again."""
        for request in requests:
            heappush(self._left, self._places[request.sample_id])

    def wait(self) -> None:
        """Waits until the next request is there."""
        if self._left and self._arrivals_s is not None:
            time.sleep(max(0.0, self._arrivals_s[self._left[0]] - self.elapsed_s()))
