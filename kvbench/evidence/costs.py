"""What a run costs: bytes against the FP16 cache of the same tokens, or time, with its bootstrap resamples."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from omegaconf import DictConfig

from kvbench.evidence.pairing import SampleName
from kvbench.evidence.runs import StoredRun
from kvbench.results.measures import Measure
from kvbench.results.sample import SampleRecord
from kvbench.results.summary import values_by_sample
from kvbench.stats import paired as stats

Interval = tuple[float, float]


@dataclass(kw_only=True)
class Cost:
    """What one run costs, in one measure."""

    value: float
    interval: Interval
    draws: np.ndarray
    """Value in each bootstrap resample; the same resample for every run and for the quality."""


def _columns(
    runs: Sequence[StoredRun], samples: dict[str, list[SampleName]], pick: Callable[[SampleRecord], float | None]
) -> list[np.ndarray]:
    """One number per sample and run, [n, runs] for each subset; NaN where a record lacks it."""
    tables = []
    for run in runs:
        found, _ = values_by_sample(run.samples.values(), pick)
        tables.append({(subset, s): value for subset, values in found.items() for s, value in values.items()})
    return [np.array([[t.get(s, np.nan) for t in tables] for s in members]) for members in samples.values()]


def cost_of(
    axis: Measure, runs: Sequence[StoredRun], samples: dict[str, list[SampleName]], cfg: DictConfig
) -> list[Cost | None]:
    """The cost of each run over the same samples, and its value in each bootstrap resample.

    Args:
        axis: Which cost, one of `kvbench.results.measures.COSTS`.
        runs: The runs.
        samples: Subset -> samples that all of them have.
        cfg: `resamples`, `seed`.

    Returns:
        None for a run whose records lack what the cost needs.
    """
    above, below = (_columns(runs, samples, pick) for pick in (axis.above, axis.below))
    sizes = tuple(map(len, above))

    def drawn(strata: list[np.ndarray]) -> np.ndarray:
        return stats.resampled_sums(sizes, stats.stretched(strata), cfg.resamples, cfg.seed)

    with np.errstate(invalid="ignore", divide="ignore"):
        draws = drawn(above) / drawn(below)
        values = np.concatenate(above).sum(0) / np.concatenate(below).sum(0)
    return [
        Cost(value=float(value), interval=stats.percentiles(column), draws=column)
        if np.isfinite(column).all()
        else None
        for value, column in zip(values, draws.T, strict=True)
    ]
