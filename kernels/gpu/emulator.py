"""The meaning of a CUDA graph, without one: a step that cannot be captured is found on the CPU.

`record(step)` runs a step once and keeps every torch operation and every Triton launch with the very tensors that it
got; a replay carries them out again into the same tensors. Whatever the step took from the host, such as a number that
should have changed or a size, is frozen as in a real graph, so that replayed steps differ from eager ones. Reading back
while it is recorded raises, and so does making a tensor of the host's numbers, which a GPU would have to fetch from
memory that is not pinned. Memory that a step allocated is overwritten before every replay, as by other graphs of the
same memory pool.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from kvbench.kernels import checks
from kvbench.kernels.gpu import parts

READS_BACK = {"_local_scalar_dense", "nonzero", "nonzero_numpy", "masked_select", "_unique2", "equal", "is_nonzero"}
# A graph has a memory pool of its own: what is allocated in it lies at the same place in every replay.
GARBAGE = 255  # a byte of which floating-point numbers are NaN, and whole ones -1
FROM_HOST = {"lift", "lift_fresh", "lift_fresh_copy"}  # what torch.tensor and its like end with
ALLOCATES = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


class NotCapturable(RuntimeError):
    """A step reads something back to the host, or copies something from it."""


def _as_tuple(x: object) -> tuple:
    return tuple(x) if isinstance(x, list | tuple) else (x,)


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.tape: list[Callable[[], object]] = []
        self.allocated: list[torch.UntypedStorage] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name, kwargs = function.overloadpacket.__name__, kwargs or {}
        masks = name in ("index", "index_put", "index_put_") and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        if name in READS_BACK or masks:
            raise NotCapturable(f"{function} reads back to the host: its result decides a size or a number")
        if name in FROM_HOST:
            raise NotCapturable(f"numbers of the host become a tensor {list(args[0].shape)}: make it before the step")
        out = function(*args, **kwargs)
        inputs = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        made = [x.untyped_storage() for x in _as_tuple(out) if isinstance(x, torch.Tensor)]
        self.allocated += [storage for storage in made if storage.data_ptr() not in inputs]
        if name not in ALLOCATES:
            self.tape.append(lambda: self._rerun(function, args, kwargs, out))
        return out

    @staticmethod
    def _rerun(function: Callable, args: tuple, kwargs: dict, out: object) -> None:
        for new, old in zip(_as_tuple(function(*args, **kwargs)), _as_tuple(out), strict=True):
            if isinstance(old, torch.Tensor) and new.data_ptr() != old.data_ptr():
                old.copy_(new)

    def launch(self, kernel: Any, grid: tuple, arguments: tuple, constants: dict) -> None:
        with _disable_current_modes():
            kernel[grid](*arguments, **constants)
        self.tape.append(lambda: kernel[grid](*arguments, **constants))


@contextmanager
def _without_a_look() -> Iterator[None]:
    """Skips `checks.within`: contents of indices are checked in main memory alone, which stands for a device's here."""
    within, checks.within = checks.within, lambda *_: None
    try:
        yield
    finally:
        checks.within = within


def record(step: Callable[[], object]) -> Callable[[], None]:
    """Runs a step once and returns its replay.

    Args:
        step: Works on tensors in main memory, where Triton kernels are interpreted, or on a GPU's.

    Raises:
        NotCapturable: It reads something back, or makes a tensor of the host's numbers.
    """
    recorder = _Recorder()
    with _without_a_look(), parts.recording(recorder.launch), recorder:
        step()

    @torch.inference_mode()  # in which what a step made in it may be written to
    def replay() -> None:
        for storage in recorder.allocated:
            torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).fill_(GARBAGE)
        for operation in recorder.tape:
            operation()

    return replay
