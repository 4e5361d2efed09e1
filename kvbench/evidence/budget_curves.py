"""Methods at equal bytes: the curve of each over its budgets, read at one number of bytes or over a range of them.

A budget in tokens is not the same number of bytes under two methods. So the value at equal bytes is interpolated
between the runs of a method, linear in the logarithm of the resident bytes. Each sample gets the value that it adds
to the interpolated mean, the part that its own bytes have in it included. Resampling these is a joint bootstrap of
quality and bytes, and the differences of two methods stay paired.
"""

from collections.abc import Callable, Sequence

import numpy as np

from kvbench.evidence.load import StoredRun
from kvbench.evidence.samples import Curve, SampleName, by_subset, curve_of, shared
from kvbench.evidence.settings import Bytes
from kvbench.results.measures import RESIDENT, Measure
from kvbench.results.refusals import NoResults
from kvbench.stats.strata import Strata, weighed

TIE = 0.01  # bytes within this share of one another are the same
STEP = 1e-6
SEEN = "%seen"  # how a budget ends that is a share of all tokens seen


class OutOfRange(NoResults):
    """The runs of a method do not span the requested bytes."""


def series_of(runs: Sequence[StoredRun]) -> dict[str, list[StoredRun]]:
    """Runs that one line may join: those of a method whose settings differ in numbers only.

    A tier is no step on the way from one budget to the next. A name is the method and, where it has several series, the
    words of one.
    """
    by_setting: dict[tuple, list[StoredRun]] = {}
    for run in runs:
        settings = {**(run.record.identity.get("method") or {}), **(run.record.identity.get("store") or {})}
        words = tuple((key, text) for key, value in settings.items() if (text := _word(value)))
        by_setting.setdefault((run.method, words, run.conditions, run.apart), []).append(run)
    names: dict[str, list[StoredRun]] = {}
    for (method, words, conditions, apart), members in by_setting.items():
        others = [key for key in by_setting if key[0] == method]
        shown = [f"{k}={v}" for k, v in words if any((k, v) not in key[1] for key in others)]
        shown += list(conditions) if len({key[2] for key in others}) > 1 else []
        names.setdefault(" ".join([*filter(None, [apart]), method, *shown]), []).extend(members)
    return names


def _word(value: object) -> str:
    """Non-numeric part of a value: empty for a budget, another number or an unset one.

    The unit of a share of all tokens seen is kept: it is not on one scale with shares of a prompt.
    """
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
        return ""
    text = str(value)
    if text.endswith(SEEN):
        return SEEN
    return "" if isinstance(value, str) and text[:1].isdigit() and not text.isalpha() else text


def _held(run: StoredRun, names: Sequence[SampleName], axis: Measure) -> np.ndarray:
    """The part of each sample in what a run holds, as a share of the FP16 cache or in bytes; their mean is that."""
    sums: dict[SampleName, list[float]] = {}
    for record in run.samples.values():
        if record["status"] != "ok":
            continue
        above, below = axis.above(record), axis.below(record)
        if above is not None and below:
            both = sums.setdefault((record["subset"], record["sample_id"]), [0.0, 0.0])
            both[0] += above
            both[1] += below
    held = np.array([sums[name] for name in names])
    share = held[:, 0].sum() / held[:, 1].sum()
    return share + (held[:, 0] - share * held[:, 1]) / held[:, 1].mean()


def at_bytes(name: str, runs: Sequence[StoredRun], what: Measure, wanted: Bytes, axis: Measure = RESIDENT) -> Curve:
    """The values of a method, whose runs are one series, at some bytes, or their mean over a range of bytes.

    The bytes are in the unit of `axis`, percent of an FP16 full cache; for two of them it is the mean over the
    logarithm of the bytes between them, which is the area under the budget curve divided by its width.

    Raises:
        OutOfRange: The runs do not span these bytes.
    """
    curves = [curve_of(run, what) for run in runs]
    common = shared(curves)
    ends = np.log(np.atleast_1d(np.asarray(wanted, dtype=float)) / axis.scale)
    if len(runs) < 2 or not common:
        raise OutOfRange(f"{name} has no two runs with common samples, so it has no curve over bytes")
    members = by_subset(common)
    names = [sample for group in members.values() for sample in group]
    shares = np.stack([_held(run, names, axis) for run in runs], axis=1)
    order = np.argsort(shares.mean(axis=0))
    shares, curves = shares[:, order], [curves[index] for index in order]
    means = shares.mean(axis=0)
    x, unit = np.log(means), axis.unit.split()[0]
    if ends[0] < x[0] - TIE or ends[-1] > x[-1] + TIE:
        low, high = axis.scale * means[[0, -1]]
        raise OutOfRange(
            f"{name} was run from {low:.1f} to {high:.1f} {unit} of the bytes only, and nothing is guessed beyond"
        )
    values = weighed(
        [np.array([[c.values[s] for c in curves] for s in group]) for group in members.values()], curves[0].weighting
    )
    read = _at if len(ends) == 1 else _area
    pseudo = _pseudo_values(values, (shares - means) / means, x, lambda y, places: read(y, places, ends))
    shown = [f"{end:g}" for end in axis.scale * np.exp(ends)]
    text = f"{name} at {shown[0]} {unit}" if len(shown) == 1 else f"{name}, {' to '.join(shown)} {unit}"
    by_sample = dict(zip(names, pseudo.tolist(), strict=True))
    total = max(curve.total for curve in curves)
    return Curve(
        label=text,
        values=by_sample,
        ranges={sample: (value, value) for sample, value in by_sample.items()},
        total=total,
        weighting=curves[0].weighting,
        progress=f"{len(by_sample)} of {total} samples",
    )


def _at(values: np.ndarray, x: np.ndarray, ends: np.ndarray) -> float:
    return float(np.interp(ends[0], x, values))


def _area(values: np.ndarray, x: np.ndarray, ends: np.ndarray) -> float:
    inside = x[(x > ends[0]) & (x < ends[1])]
    knots = np.concatenate([ends[:1], inside, ends[1:]])
    return float(np.trapezoid(np.interp(knots, x, values), knots) / (ends[1] - ends[0]))


def _pseudo_values(
    values: Strata, shifts: np.ndarray, x: np.ndarray, read: Callable[[np.ndarray, np.ndarray], float]
) -> np.ndarray:
    """First-order contribution of each sample to a function `read` of the runs' means and of their log bytes `x`.

    `read` is linear in the means. `values` are [n, runs] of each subset, `shifts` [count, runs] the contribution of
    each sample to the log bytes of each run, with the mean 0.
    """
    means = np.asarray(values.mean())
    middle = read(means, x)
    slopes = np.array([read(means + unit, x) - middle for unit in np.eye(len(x))])
    drift = np.array([(read(means, x + unit) - read(means, x - unit)) / (2 * STEP) for unit in STEP * np.eye(len(x))])
    return values.flat @ slopes + (shifts @ drift) / (values.count * values.per_sample)
