"""Curves along answers and streams: what every forced token says, in bins of positions, run by run."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from kvbench.config.files import FULL
from kvbench.evidence.runs import Group, StoredRun
from kvbench.results.measures import NATS_TOLERANCE
from kvbench.results.sample import SampleRecord
from kvbench.stats.intervals import Estimate, estimate

MOST_BINS = 16
KL, NLL, SAME = "kl", "nll", "same_first_choice"
COLUMNS = (KL, NLL, SAME)


@dataclass(frozen=True, kw_only=True)
class Bin:
    """One stretch of positions of one run."""

    first: int
    """Its first position, from 0."""
    last: int
    """Its last position."""
    values: Mapping[str, Estimate]
    """Column -> mean over samples of their means over the tokens here, with its interval."""

    @property
    def middle(self) -> float:
        """Where it is drawn."""
        return (self.first + self.last + 1) / 2


@dataclass(frozen=True, kw_only=True)
class Curve:
    """What one run has along its texts."""

    label: str
    method: str
    bins: list[Bin]
    prompt_only: bool = False
    """The method keeps whatever follows the prompt whole."""
    leaves: int | None = None
    """First position of the bin from which on the KL stays above the noise band; None: it never does for good."""


@dataclass(kw_only=True)
class Drawing:
    """The curves of runs that may be compared."""

    title: str
    axis: str
    """What positions count."""
    num_samples: int
    width: int
    """Tokens of a bin."""
    curves: list[Curve]
    band: list[tuple[float, float]]
    """Middle of each bin, and the upper end of the noise band there, in nats of KL."""
    judged: bool
    """There are enough samples to say where a method leaves the band."""
    notes: list[str] = field(default_factory=list)


def texts_of(run: StoredRun) -> dict[tuple[str, str], SampleRecord]:
    """The records of a run that say what was measured of every token, one for each sample."""
    return {
        (record["subset"], record["sample_id"]): record
        for (_, repeat), record in sorted(run.samples.items())
        if repeat == 0 and record["status"] == "ok" and record.get("per_token")
    }


def drawing_of(group: Group, width: int | None = None) -> Drawing | None:
    """The curves of a group.

    Args:
        group: Runs that may be compared.
        width: Tokens of a bin; None takes a power of two that makes at most sixteen.

    Returns:
        None where no run has numbers of every token.
    """
    found = {run.label: texts_of(run) for run in group.runs}
    runs = [run for run in group.runs if found[run.label]]
    common = sorted(set.intersection(*(set(found[run.label]) for run in runs))) if runs else []
    if not common:
        return None
    records = {run.label: [found[run.label][name] for name in common] for run in runs}
    seen = {_offset(record) for record in records[runs[0].label]}
    longest = max(_end(record) for several in records.values() for record in several)
    begin = min(seen)
    step = width or max(1, 2 ** math.ceil(math.log2(max(1, longest - begin) / MOST_BINS)))
    curves = {run.label: _bins(records[run.label], step) for run in runs}
    reference = group.reference
    band = _band(curves.get(reference.label, []) if reference else [], [b for bins in curves.values() for b in bins])
    drawing = Drawing(
        title=group.title,
        axis="tokens seen" if begin else "tokens of the answer",
        num_samples=len(common),
        width=step,
        curves=[],
        band=[(middle, band[middle]) for middle in sorted(band)],
        judged=any(one.values[KL].low is not None for bins in curves.values() for one in bins),
        notes=list(group.notes),
    )
    for run in runs:
        bins = curves[run.label]
        leaves = None if run.method == FULL else leaving(bins, band)
        whole = run.record.prompt_only and run.method != FULL
        drawing.curves.append(Curve(label=run.label, method=run.method, bins=bins, prompt_only=whole, leaves=leaves))
    most = max(len(found[run.label]) for run in runs)
    if len(common) < most:
        drawing.notes.append(f"drawn from the {len(common)} of {most} samples that every run has")
    if reference is None or reference.label not in curves:
        drawing.notes.append("there is no run of the full cache, so the noise band is the documented tolerance alone")
    return drawing


def leaving(bins: Sequence[Bin], band: Mapping[float, float]) -> int | None:
    """Where a run leaves the noise band for good.

    Args:
        bins: Of the run, in order.
        band: Middle of a bin -> upper end of the band.

    Returns:
        The first position of the bin from which on, to the end, the lower end of the interval of the KL is above the
        band; None where the last bin is not, or has no interval.
    """
    found = None
    for one in reversed(bins):
        low = one.values[KL].low
        if low is None or low <= band[one.middle]:
            break
        found = one.first
    return found


def _band(reference: Sequence[Bin], everything: Sequence[Bin]) -> dict[float, float]:
    """The noise band at every bin: the documented tolerance, or how far the full cache, read from its pages token by
    token, is from itself read in one pass, whichever is more."""
    band = {one.middle: NATS_TOLERANCE for one in everything}
    for one in reference:
        found = one.values[KL]
        band[one.middle] = max(NATS_TOLERANCE, found.high if found.high is not None else found.value or 0.0)
    return band


def _offset(record: SampleRecord) -> int:
    """Tokens that count before the first forced one: those of the prompt, where the task counts tokens seen."""
    seen = record["meta"].get("seen", 0)
    return seen if type(seen) is int and seen >= 0 else 0


def _end(record: SampleRecord) -> int:
    return _offset(record) + len((record.get("per_token") or {}).get(KL, ()))


def _bins(records: Sequence[SampleRecord], step: int) -> list[Bin]:
    """The bins that a token of some sample lies in."""
    means: dict[int, dict[str, list[float]]] = {}
    for record in records:
        tokens, offset = record.get("per_token") or {}, _offset(record)
        first, count = int(tokens["exact"][0]), len(tokens[KL])
        for place in range((offset + first) // step, -(-(offset + count) // step)):
            low, high = max(place * step - offset, first), min((place + 1) * step - offset, count)
            if low < high:
                cell = means.setdefault(place, {name: [] for name in COLUMNS})
                for name in COLUMNS:
                    cell[name].append(fmean(tokens[name][low:high]))
    return [
        Bin(
            first=place * step,
            last=(place + 1) * step - 1,
            values={name: _mean(values, (0.0, 1.0 if name == SAME else math.inf)) for name, values in cell.items()},
        )
        for place, cell in sorted(means.items())
    ]


def _mean(values: Sequence[float], bounds: tuple[float, float]) -> Estimate:
    """The mean of what samples have in one bin. They are means over tokens and no answers of yes or no, so where none
    differs there is nothing to take an interval from."""
    if len(set(values)) == 1:
        return Estimate(value=values[0], num_samples=len(values))
    return estimate({"": values}, bounds=bounds)
