"""A tier of all lists as kernels find it in page tables, and what a search of it goes by."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from kvbench.kernels.format import PageFormat

ExtremeOf = Literal["mean", "score", "pos"]


@dataclass(frozen=True)
class Turn:
    """The angles that stored keys are rotated by when they are read: a position times the rotary frequencies.

    Args:
        frequencies: fp32 [D / 2].
        ages: int64 [S, n] places of the slots in the cache, from the oldest on, which put the newest token of every
            list at its true position; None = slot i lies at position i.
    """

    frequencies: Tensor
    ages: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class TierTable:
    """One tier of all lists, as a step reads it from the tables that a backend keeps itself.

    Args:
        fmt: The tier's page format.
        entries: int32 [lists, max_pages] page ids.
        is_reversed: A list's pages begin at the right end of its entries.
        num_slots: int32 [lists] slots held.
        width: Pages of a list of the step at most.
        turn: How stored keys are rotated, or None.
    """

    fmt: PageFormat
    entries: Tensor
    is_reversed: bool
    num_slots: Tensor
    width: int
    turn: Turn | None = None
