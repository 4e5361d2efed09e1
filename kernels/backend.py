"""What every backend is: the data that its operations take."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from kvbench.kernels.format import PageFormat

Reduce = Literal["sum", "mean", "max"]


@dataclass
class TierPages:
    """One tier of one layer, for the sequences of a step.

    Args:
        fmt: The tier's page format.
        ids: int64 [S, H, m] page ids in slot order; entries past a list's end are ignored.
        num_k: int64 [S, H] keys held; slot i < num_k is read.
        num_v: int64 [S, H] values held (differs from `num_k` only behind a residual buffer).
        rotation: fp32 angles [S, m * T, D / 2] to rotate the stored keys by (cache-relative positions), or None.
    """

    fmt: PageFormat
    ids: Tensor
    num_k: Tensor
    num_v: Tensor
    rotation: Tensor | None = None


@dataclass
class Ring:
    """The residual buffers of one layer: token i of a list lies at i modulo the buffer's length.

    Args:
        k: [S, H, Rk, D] keys.
        v: [S, H, Rv, D] values.
        num_tokens: int64 [S, H] tokens of the list, in tier 0 and buffer together.
    """

    k: Tensor
    v: Tensor
    num_tokens: Tensor


@dataclass(kw_only=True)
class StepRing:
    """The residual buffers of a step, and what leaves them.

    Args:
        k: [rows, L, H, Rk, D]; v: [rows, L, H, Rv, D], the whole buffers.
        rows: int64 [S] rows of the step's sequences.
        num_tokens: int64 [S, L, H] tokens of each list, the incoming one included.
        before: int64 [S, L, H] twice: keys and values in pages so far.
        after: Likewise once this step is over.
        flush_first: Quantise before attention, so that it reads the codes.
    """

    k: Tensor
    v: Tensor
    rows: Tensor
    num_tokens: Tensor
    before: tuple[Tensor, Tensor]
    after: tuple[Tensor, Tensor]
    flush_first: bool
