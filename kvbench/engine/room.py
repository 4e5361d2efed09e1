"""Memory of a GPU that the page pool leaves to prompts.

The pool of a GPU is made once. The memory that reading takes in addition is measured by reading the longest prompt
before; where that was too little, as with a library that takes memory later, the pool is made anew, half as large,
before a sample is lost.
"""

import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress

from kvbench.engine.requests import Request
from kvbench.engine.runner import NotFinite, Runner
from kvbench.kernels import memory

SPARE = 1.1  # times what the longest prompt took: allocators waste some
MOST_SHRINKS = 4  # of a pool


class PromptRoom:
    """Measures what reading a prompt takes, and has the runner's next cache leave it.

    Args:
        runner: Its caches leave `spare_bytes`.

    Attributes:
        shrinks: Times that the pool was made anew, half as large.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner, self.shrinks, self._measured = runner, 0, 0
        self._sizes: tuple[int, ...] | None = None

    @property
    def applies(self) -> bool:
        """True if the size of the pool follows from the free memory of one GPU."""
        runner = self._runner
        is_free = runner.options.budget_bytes is None and runner.shape.is_whole
        return is_free and memory.free_bytes(runner.device) is not None

    def measure(self, requests: Sequence[Request], read: Callable[[Request], object]) -> None:
        """Reads the longest prompt and reserves the memory that it took.

        Where there is too little for it, shorter ones are tried, and a warning says how many are longer than what could
        be read.

        Args:
            requests: Any of the run.
            read: Reads a request's prompt into an existing cache, and drops it.
        """
        ordered = sorted(requests, key=lambda request: max(map(len, request.segments)), reverse=True)
        index = self._measured = 0
        while index < len(ordered):
            try:
                peak = memory.peak_bytes(self._runner.device, lambda: _read(read, ordered[index]))  # noqa: B023
                self._runner.spare_bytes = self._measured = int(SPARE * peak)
                break
            except Exception as error:
                if not memory.is_out_of_memory(error):
                    raise
            self._runner.close_all()
            index = 2 * index + 1
        if index:
            read_tokens = ordered[index].num_prompt_tokens if index < len(ordered) else 0
            warnings.warn(
                f"{min(index, len(ordered))} of {len(ordered)} prompts, up to {ordered[0].num_prompt_tokens} tokens, "
                f"may not fit next to the model: {read_tokens} tokens could be read. They are tried, and what does not "
                "fit is recorded as oom; prefill.chunk reads prompts in pieces",
                stacklevel=2,
            )

    def shrink(self) -> bool:
        """Halves the next cache's pool relative to the present one.

        Returns False where that was done often enough, or does not apply.
        """
        free = memory.free_bytes(self._runner.device)
        if free is None or not self.applies or self.shrinks == MOST_SHRINKS:
            return False
        pool_bytes = self._runner.store.pages.pool.allocated_bytes
        self.shrinks += 1
        self._runner.spare_bytes = free + pool_bytes // 2
        warnings.warn(
            f"no memory for a prompt: the pool of pages is made anew with {pool_bytes // 2 / 1e9:.1f} GB "
            f"(it had {pool_bytes / 1e9:.1f})",
            stacklevel=2,
        )
        return True

    def begin(self, sizes: tuple[int, ...]) -> bool:
        """Begins requests that need such a cache; False where prompts of the same were measured before."""
        is_known, self._sizes = sizes == self._sizes, sizes
        self.shrinks, self._measured = 0, self._measured if is_known else 0
        self._runner.spare_bytes = self._measured
        return not is_known

    def restore(self) -> bool:
        """Reserve the longest prompt's memory in the next cache; False where the present one does."""
        had, self.shrinks = self.shrinks, 0
        self._runner.spare_bytes = self._measured
        return had > 0


def _read(read: Callable[[Request], object], request: Request) -> None:
    """Reads a prompt; logits that are not finite are found again when it is answered."""
    with suppress(NotFinite):
        read(request)
