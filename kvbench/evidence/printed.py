"""A score printed elsewhere, as a frontier shows it."""

from typing import NamedTuple


class PrintedPoint(NamedTuple):
    """A score printed elsewhere, as a difference to the same table's uncompressed cache."""

    source: str
    """Paper that printed it."""
    method: str
    """Name of the run's method that it is of."""
    memory_pct: float
    """Memory as printed, % of the uncompressed cache."""
    difference: float
    """In the unit of the score, 0.01 being one point."""
