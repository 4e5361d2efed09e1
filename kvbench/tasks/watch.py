"""Shows what a task does while it is loaded: work that takes long before the first prompt is read.

A task knows nothing of bars and terminals. Who loads it may watch, and says how the work is shown.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar

Watcher = Callable[[str, int], AbstractContextManager[Callable[[], None]]]

_watcher: ContextVar[Watcher | None] = ContextVar("watcher", default=None)


@contextmanager
def watched(watcher: Watcher) -> Iterator[None]:
    """Let somebody see the long work that is done inside.

    Args:
        watcher: Takes what is done and its number of steps, and gives a context for the time of the work with a
            function to call after each step.
    """
    before = _watcher.set(watcher)
    try:
        yield
    finally:
        _watcher.reset(before)


def long_work(label: str, steps: int) -> AbstractContextManager[Callable[[], None]]:
    """A context for work that takes long, with a function to call after each of its steps.

    Args:
        label: What is done.
        steps: How many there are.
    """
    watcher = _watcher.get()
    return nullcontext(lambda: None) if watcher is None else watcher(label, steps)
