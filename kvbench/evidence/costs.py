"""What a run costs: bytes against the FP16 cache of the same tokens, or time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kvbench.evidence.pairing import SampleName
from kvbench.evidence.runs import StoredRun
from kvbench.results.measures import TIME, Measure
from kvbench.results.sample import SampleRecord
from kvbench.results.summary import values_by_sample
from kvbench.stats import studentised
from kvbench.stats.strata import FEWEST_SAMPLES, Strata, has_spread, weighed

Interval = tuple[float, float]
# Two passes of the same thing at other hours differ by more than the samples of one pass do, so an interval over
# samples would be one of the machine's load. Only interleaved rounds (`kvbench bench`) measure time.
NO_EVIDENCE = frozenset({TIME.name})


@dataclass(kw_only=True)
class Cost:
    """What one run costs, in one measure."""

    value: float
    interval: Interval | None
    """None where nothing can be said: too few samples, or a time."""
    shares: Strata | None
    """What each sample adds to the value, to first order: `value` is their mean. None for what is no evidence."""


def _columns(
    runs: Sequence[StoredRun], samples: dict[str, list[SampleName]], pick: Callable[[SampleRecord], float | None]
) -> list[np.ndarray]:
    """One number per sample and run, [n, runs] for each subset; NaN where a record lacks it."""
    tables = []
    for run in runs:
        found, _ = values_by_sample(run.samples.values(), pick)
        tables.append({(subset, s): value for subset, values in found.items() for s, value in values.items()})
    return [np.array([[t.get(s, np.nan) for t in tables] for s in members]) for members in samples.values()]


def costs_of(axis: Measure, runs: Sequence[StoredRun], samples: dict[str, list[SampleName]]) -> list[Cost | None]:
    """The cost of each run over the same samples.

    Args:
        axis: Which cost, one of `kvbench.results.measures.COSTS`.
        runs: The runs.
        samples: Subset -> samples that all of them have.

    Returns:
        None for a run whose records lack what the cost needs.
    """
    above, below = (_columns(runs, samples, pick) for pick in (axis.above, axis.below))
    found: list[Cost | None] = []
    with np.errstate(invalid="ignore", divide="ignore"):
        values = np.concatenate(above).sum(axis=0) / np.concatenate(below).sum(axis=0)
        scale = np.concatenate(below).mean(axis=0)
    for index, value in enumerate(values):
        if not np.isfinite(value):
            found.append(None)
        elif axis.name in NO_EVIDENCE:
            found.append(Cost(value=float(value), interval=None, shares=None))
        else:
            parts = [
                value + (a[:, index] - value * b[:, index]) / scale[index] for a, b in zip(above, below, strict=True)
            ]
            shares = weighed(parts, "sample")
            found.append(Cost(value=float(value), interval=cost_interval(shares), shares=shares))
    return found


def cost_interval(shares: Strata) -> Interval | None:
    """95 % interval of a cost; without width where no sample costs another share."""
    value = float(shares.mean())
    if shares.count < FEWEST_SAMPLES:
        return None
    pooled = Strata((shares.flat,), (1.0,)) if shares.weighs_samples_alike else shares
    return studentised.interval(pooled) if any(map(has_spread, pooled.values)) else (value, value)
