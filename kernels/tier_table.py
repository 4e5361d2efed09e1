"""A tier of all lists as kernels find it in page tables, and what a search of its slots goes by."""

from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from kvbench.kernels.format import PageFormat

ExtremeOf = Literal["mean", "score", "pos"]


@dataclass(frozen=True, kw_only=True)
class SlotSearch:
    """What the slot with the smallest value is sought by; ties go to the lower position, then to the lower slot.

    Tensors are int64, one number per sequence, or per list (`per_list`).

    Args:
        by: `score`, `pos`, or `mean` = score / max(1, seen - max(pos, floor)).
        seen: Tokens before the incoming one.
        floor: Position from which queries were counted, or None.
        before: Only slots whose position is smaller.
        exact: Only the slot at this position.
        first: Only slots whose position is at least this; one number where a backend searches.
    """

    by: ExtremeOf
    seen: Tensor
    floor: Tensor | None = None
    before: Tensor | None = None
    exact: Tensor | None = None
    first: int | Tensor = 0

    def per_list(self, lists: int) -> "SlotSearch":
        """The same with every sequence's numbers repeated for its lists."""
        given = {name: getattr(self, name) for name in ("seen", "floor", "before", "exact")}
        return replace(self, **{name: x.repeat_interleave(lists) for name, x in given.items() if x is not None})


@dataclass(frozen=True)
class KeyRotation:
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
        rotation: How stored keys are rotated when they are read, or None.
    """

    fmt: PageFormat
    entries: Tensor
    is_reversed: bool
    num_slots: Tensor
    width: int
    rotation: KeyRotation | None = None
