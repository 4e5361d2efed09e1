"""Garbage collection thresholds: high while libraries are imported, which make many objects that all stay."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

SELDOM = 2_000_000  # objects that are made between two collections, which is more than all libraries together make
_before: tuple[int, int, int] | None = None  # the caller's own numbers, while they are not in force


@contextmanager
def seldom() -> Iterator[None]:
    """Collect seldom, until `usual` or the end; then as before."""
    global _before
    _before = _before or gc.get_threshold()
    gc.set_threshold(SELDOM)
    freezes = not gc.get_freeze_count()
    try:
        yield
    finally:
        usual()
        if freezes:
            gc.unfreeze()


def usual() -> None:
    """Collect garbage at the usual rate inside `seldom`; outside of it nothing changes.

    From here on a cycle may hold tensors. Existing objects are not scanned until the end: a scan takes a third of a
    second.
    """
    global _before
    if _before is not None:
        if not gc.get_freeze_count():  # else the caller has his own way
            gc.freeze()
        gc.set_threshold(*_before)
        _before = None
