"""What a run costs: bytes against the FP16 cache of the same tokens, or time, with its bootstrap resamples."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from omegaconf import DictConfig

from kvbench.evidence.pairing import Sample
from kvbench.evidence.runs import StoredRun
from kvbench.results.summary import values_by_sample
from kvbench.stats import paired as stats

Interval = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Axis:
    """A cost, as a sum over samples divided by another one."""

    name: str
    title: str
    unit: str
    scale: float
    """What a value is multiplied with before it is shown."""
    above: Callable[[dict], float]
    below: Callable[[dict], float]


def _ledger(name: str) -> Callable[[dict], float]:
    return lambda record: record["ledger"][name]


AXES = {
    axis.name: axis
    for axis in (
        Axis(
            name="resident",
            title="resident bytes at the end",
            unit="% of an FP16 full cache",
            scale=100.0,
            above=_ledger("resident_bytes"),
            below=_ledger("fp16_bytes"),
        ),
        Axis(
            name="average",
            title="bytes averaged over the answer",
            unit="% of an FP16 full cache",
            scale=100.0,
            above=_ledger("average_ratio"),
            below=lambda record: 1.0,
        ),
        Axis(
            name="peak",
            title="bytes at the worst moment",
            unit="% of an FP16 full cache",
            scale=100.0,
            above=_ledger("peak_bytes"),
            below=_ledger("fp16_bytes"),
        ),
        Axis(
            name="time",
            title="time per generated token",
            unit="ms",
            scale=1000.0,
            above=lambda record: record["timing"]["decode_share_s"],
            below=lambda record: record["timing"]["decode_tokens"],
        ),
    )
}


@dataclass(kw_only=True)
class Cost:
    """One run on one axis."""

    value: float
    interval: Interval
    draws: np.ndarray
    """Value in each bootstrap resample; the same resample for every run and for the quality."""


def _columns(runs: Sequence[StoredRun], samples: dict[str, list[Sample]], pick: Callable) -> list[np.ndarray]:
    """One number per sample and run, [n, runs] for each subset; NaN where a record lacks it."""
    tables = []
    for run in runs:
        found, _ = values_by_sample(run.samples.values(), pick)
        tables.append({(subset, s): value for subset, values in found.items() for s, value in values.items()})
    return [np.array([[t.get(s, np.nan) for t in tables] for s in members]) for members in samples.values()]


def cost_of(
    axis: Axis, runs: Sequence[StoredRun], samples: dict[str, list[Sample]], cfg: DictConfig
) -> list[Cost | None]:
    """The cost of each run over the same samples, with what it is in each bootstrap resample.

    Args:
        axis: Which cost.
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
