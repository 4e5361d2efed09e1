"""Counts what a decode step would cost on a GPU, without one: waits of the host, torch kernels, Triton launches.

Tensors in main memory stand for those of a device, and Triton's kernels are interpreted. What would make the host wait
for the device is counted by the line that asks: numbers and lists read, sizes that depend on content, tensors made of
the host's numbers. What `AsyncCounts` was told (`.to("cpu", non_blocking=True)`) is the host's own once it has arrived.
"""

import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from kvbench.kernels import checks
from kvbench.kernels.gpu import parts

# Operations that wait for the device, by the name of their packet.
READS = {
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "_unique2",
    "unique_dim",
    "equal",
    "repeat_interleave",
    "lift_fresh",  # a tensor of the host's numbers: a copy from memory that is not pinned
}
ALLOCATES = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
HERE = __file__
IDLE = (
    "_attend",
    "_finish",
    "_add_scores",
    "_append_ring",
    "_demote_both",
    "_write_both",
    "_write_side",
    "_write_key_groups",
    "_sum_columns",
)


_arrived: list[torch.Tensor] = []  # what the host was sent


@dataclass
class Cost:
    """What some code did.

    Args:
        reads: Waits of the host, by the line that asked.
        kernels: Torch operations that would be kernels, by name.
        launches: Triton kernels, by name.
    """

    reads: Counter[str] = field(default_factory=Counter)
    kernels: Counter[str] = field(default_factory=Counter)
    launches: Counter[str] = field(default_factory=Counter)

    @property
    def totals(self) -> tuple[int, int, int]:
        """Reads, torch kernels, Triton launches."""
        return self.reads.total(), self.kernels.total(), self.launches.total()


def _line() -> str:
    """The innermost line of kvbench that runs."""
    for frame in reversed(traceback.extract_stack()):
        for folder in ("/kvbench/", "/kernels/", "/methods/"):
            if folder in frame.filename and "/site-packages/" not in frame.filename and frame.filename != HERE:
                return f"{frame.filename.rsplit(folder, 1)[1]}:{frame.lineno} {frame.line}"
    return "the caller"


def run(kernel, grid, arguments, constants) -> None:
    """Runs a launch in the interpreter, unless nothing that a step decides hangs on what it computes."""
    if not kernel.__name__.startswith(IDLE):
        with _disable_current_modes():
            kernel[grid](*arguments, **constants)


class _Counted(TorchDispatchMode):
    def __init__(self, cost: Cost) -> None:
        super().__init__()
        self.cost = cost

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name, kwargs = function.overloadpacket.__name__, kwargs or {}
        masks = name in ("index", "index_put", "index_put_") and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        if name == "lift_fresh" and _line().startswith("cache/async_counts.py"):
            self.cost.kernels["copy to the device"] += 1  # `to_device` pins the numbers on a GPU
        elif masks or (name in READS and "output_size" not in {k for k, v in kwargs.items() if v is not None}):
            self.cost.reads[_line()] += 1
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in function._schema.returns)
        if not is_view and name not in ALLOCATES and name not in READS:
            self.cost.kernels[name] += 1
        return function(*args, **kwargs)

    def note(self, kernel, grid, arguments, constants) -> None:
        self.cost.launches[kernel.__name__] += 1

    def launch(self, kernel, grid, arguments, constants) -> None:
        self.note(kernel, grid, arguments, constants)
        run(kernel, grid, arguments, constants)


@contextmanager
def metered(*, runs: bool = True, cost: Cost | None = None) -> Iterator[Cost]:
    """Counts what is done while this is open; `runs` interprets the kernels that a step's decisions hang on."""
    cost, tensor = cost or Cost(), torch.Tensor
    own_to, own_tolist, own_numpy = tensor.to, tensor.tolist, tensor.numpy

    def to(self, *args, **kwargs):
        if args[:1] != ("cpu",):
            return own_to(self, *args, **kwargs)
        if not kwargs.get("non_blocking"):
            cost.reads[_line()] += 1
            return own_to(self, *args, **kwargs)
        with _disable_current_modes():
            _arrived.append(self.clone())
        cost.kernels["copy to the host"] += 1
        return _arrived[-1]

    def read(self, own):
        if not any(self is host for host in _arrived):
            cost.reads[_line()] += 1
        with _disable_current_modes():
            return own(self)

    mode = _Counted(cost)
    with (
        patch.object(tensor, "to", to),
        patch.object(tensor, "tolist", lambda self: read(self, own_tolist)),
        patch.object(tensor, "numpy", lambda self: read(self, own_numpy)),
        patch.object(checks, "within", lambda *_: None),  # looks at what indices hold, in main memory alone
        parts.recording(mode.launch if runs else mode.note),
        mode,
    ):
        yield cost
