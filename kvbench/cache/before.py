"""How much rows held before a step: for rows that had ended when the step began, which only the step's end told."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from kvbench.cache.store import CompressedStore


class Before:
    """Copies of the counts of a store, on its device; a step changes nothing else that the ledger looks at.

    Args:
        store: A cache in one place.
    """

    def __init__(self, store: CompressedStore) -> None:
        self._store, (part,) = store, store.holding.parts
        self._held: list[Tensor] = part.held_counts
        self._before = [count.clone() for count in self._held]

    def note(self) -> None:
        """Notes what all rows hold; waits for nothing."""
        torch._foreach_copy_(self._before, self._held)

    @contextmanager
    def told(self, row: int) -> Iterator[None]:
        """Lets the ledger say what a row held when `note` was called, one step ago. The row can only be closed then:
        what lies in its pages is still of one token more."""
        now, seen = [count.clone() for count in self._held], self._store.counters.seen
        torch._foreach_copy_(self._held, self._before)
        seen[row] -= 1
        try:
            yield
        finally:
            torch._foreach_copy_(self._held, now)
            seen[row] += 1
