"""The first segment that requests share which follow one another: read and compressed once, forked for each."""

from collections.abc import Callable, Hashable, Sequence
from itertools import pairwise

from kvbench.engine.long_logits import Logits
from kvbench.engine.requests import Request
from kvbench.engine.runner import Runner


class SharedContexts:
    """Opens the rows of requests with several segments.

    Args:
        runner: Opens, forks and closes rows.
        requests: All requests of the run, in order.
        begins_with: All that the compressed first segment of a request depends on.
        read: Reads the first segment of a request into a row.
    """

    def __init__(
        self,
        runner: Runner,
        requests: Sequence[Request],
        begins_with: Callable[[Request], Hashable],
        read: Callable[[Request], tuple[int, Logits]],
    ) -> None:
        self._runner, self._begins_with, self._read = runner, begins_with, read
        self._held: tuple[Hashable, int] | None = None  # what was read for the next requests, too, and its row
        self._followed = {
            one.sample_id
            for one, other in pairwise(requests)
            if begins_with(one) == begins_with(other) and min(len(one.segments), len(other.segments)) > 1
        }

    @property
    def num_rows(self) -> int:
        """Rows that are open beside those of the requests at most."""
        return int(bool(self._followed))

    def holds(self, request: Request) -> bool:
        """Whether the first segment of a request was read for an earlier one."""
        return self._held is not None and self._held[0] == self._begins_with(request)

    def open_row(self, request: Request) -> int:
        """A row with the first segment of a request: of its own, or a fork of what the requests around it share."""
        is_last = request.sample_id not in self._followed
        if not self.holds(request):
            self.close()
            row, _ = self._read(request)
            if is_last:
                return row
            self._held = self._begins_with(request), row
        assert self._held is not None
        row = self._held[1]
        if is_last:
            self._held = None
            return row
        return self._runner.fork(row)

    def close(self) -> None:
        """Gives up what is held for requests that did not come."""
        if self._held is not None and self._held[1] in self._runner.open_rows:
            self._runner.close(self._held[1])
        self._held = None

    def forget_closed(self) -> None:
        """Notes that rows were closed by others; to be called before the next row is opened."""
        if self._held is not None and self._held[1] not in self._runner.open_rows:
            self._held = None
