"""Projected bytes of a sequence that is not there."""

from dataclasses import dataclass

SAME = 0.01  # two projections this close are one number: how even attention is then decides about nothing but slack


@dataclass(frozen=True, kw_only=True)
class Projection:
    """Ledger of one sequence without keys and values.

    Its items and their sum as of `Ledger.itemise`, and the bytes of an FP16 full cache of the same tokens, windows and
    states included.
    """

    items: dict[str, int]
    fp16_bytes: int
    measured: bool = False
    """The shares of tiers that were measured decided it."""

    @property
    def resident_bytes(self) -> int:
        """Bytes held when the answer ends."""
        return self.items["resident_bytes"]

    @property
    def ratio(self) -> float:
        """Share of the FP16 full cache."""
        return self.resident_bytes / self.fp16_bytes


def is_one_number(least: Projection, most: Projection) -> bool:
    """True when a method keeps the same whatever attention looks like."""
    return most.resident_bytes - least.resident_bytes <= SAME * most.resident_bytes
