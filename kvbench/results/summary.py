"""Numbers of `run.json` from journal records.

Means with 95 % intervals, and the paired difference to the full cache.

Everything here is a pure function of the records, so a table can be made again from `samples.jsonl` alone.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from kvbench.engine.requests import BINS
from kvbench.results.measures import FULL_LAYERS, KL_NEW, ONE_SHOT_PEAK, PEAK, PREFILL, RATE, RESIDENT, Measure, at
from kvbench.results.record import Comparison, DriftBin, Metric, Timing
from kvbench.results.sample import SampleRecord
from kvbench.stats.intervals import Estimate, estimate
from kvbench.stats.paired import paired_difference
from kvbench.stats.strata import Weighting

SCORES = (0.0, 1.0)  # every score of a task lies in between


def values_by_sample(
    records: Iterable[SampleRecord], pick: Callable[[SampleRecord], float | None]
) -> tuple[dict[str, dict[str, float]], int]:
    """Collect one number per sample that ended well: the mean over its answers.

    Args:
        pick: Takes the number from a record. None means that it was not finite; a KeyError or TypeError means that the
            record does not have it.

    Returns:
        Subset -> sample id -> value, and how many answers were not finite.
    """
    by_subset: dict[str, dict[str, list[float]]] = {}
    num_nonfinite = 0
    for record in records:
        if record["status"] != "ok":
            continue
        try:
            value = pick(record)
        except (KeyError, TypeError):
            continue
        if value is None:
            num_nonfinite += 1
        else:
            by_subset.setdefault(record["subset"], {}).setdefault(record["sample_id"], []).append(float(value))
    means = {
        subset: {sample: sum(values) / len(values) for sample, values in samples.items()}
        for subset, samples in by_subset.items()
    }
    return means, num_nonfinite


def _strata(records: Iterable[SampleRecord], *path: str) -> tuple[dict[str, list[float]], int]:
    """Subset -> the values of its samples, and how many answers were not finite."""
    means, num_nonfinite = values_by_sample(records, partial(at, path=path))
    return {subset: list(values.values()) for subset, values in means.items()}, num_nonfinite


def metrics(
    records: Sequence[SampleRecord], infos: Mapping[str, Any], primary: str, weighting: Weighting = "subset"
) -> dict[str, Metric]:
    """Every metric of a task over the records; `infos` has of each `higher_is_better` and a `description`."""
    result = {}
    for name, info in infos.items():
        strata, num_nonfinite = _strata(records, "scores", name)
        whole = estimate(strata, num_nonfinite, SCORES, weighting)
        result[name] = Metric(
            **vars(whole),
            higher_is_better=info.higher_is_better,
            description=info.description,
            primary=name == primary,
            subsets={subset: estimate({subset: values}, bounds=SCORES) for subset, values in strata.items()},
        )
    return result


def fidelity(records: Sequence[SampleRecord], weighting: Weighting = "subset") -> dict[str, Estimate]:
    """Teacher-forced measurements over the records that have them, each with its number of samples.

    Empty when none has. An answer of one token, which the prompt's exact pass predicts, has none, and one that copies
    the prompt throughout has no `kl_new`.
    """
    names = dict.fromkeys(name for record in records for name in record.get("fidelity") or ())
    result = {}
    for name in names:
        count = "num_new" if name == KL_NEW.key else "num_measured"
        measured = [record for record in records if (record["fidelity"] or {}).get(count, 1)]
        result[name] = estimate(*_strata(measured, "fidelity", name), weighting=weighting)
    return result


def drift(records: Sequence[SampleRecord]) -> list[DriftBin]:
    """Fidelity along the answers, in every bin that a token of some answer is in; in a bin every token counts alike."""
    curves = [
        one for record in records if record["status"] == "ok" and record["repeat"] == 0 and (one := record.get("drift"))
    ]
    bins = []
    for index, first in enumerate(BINS):
        here = [one for one in curves if len(one["tokens"]) > index and one["tokens"][index]]
        tokens = sum(one["tokens"][index] for one in here)
        if not tokens:
            continue
        last = BINS[index + 1] - 1 if index + 1 < len(BINS) else None
        names = {"nll": "nll", "nll_full": "nll_full", "kl": "kl", "top1": "same_first_choice"}
        means = {name: sum(one[key][index] for one in here) / tokens for name, key in names.items()}
        bins.append(DriftBin(first=first, last=last, num_tokens=int(tokens), num_samples=len(here), **means))
    return bins


def compare(
    records: Sequence[SampleRecord],
    reference: Sequence[SampleRecord],
    metric: str,
    folder: str,
    higher_is_better: bool = True,
    weighting: Weighting = "subset",
) -> Comparison:
    """Difference to the reference on the samples that ended well in both."""
    pick = partial(at, path=("scores", metric))
    mine, theirs = values_by_sample(records, pick)[0], values_by_sample(reference, pick)[0]
    pairs = {
        subset: [(value, theirs[subset][sample]) for sample, value in samples.items() if sample in theirs[subset]]
        for subset, samples in mine.items()
        if subset in theirs
    }
    flat = [pair for values in pairs.values() for pair in values]
    return Comparison(
        reference=folder,
        metric=metric,
        difference=paired_difference(pairs, weighting),
        num_worse=sum(a < b if higher_is_better else a > b for a, b in flat),
        num_better=sum(a > b if higher_is_better else a < b for a, b in flat),
    )


def flat(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of a nested dict under dotted names."""
    result: dict[str, Any] = {}
    for key, value in nested.items():
        result |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return result


def flatten(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a nested dict under dotted names; text, lists and None are left out."""
    return {key: float(value) for key, value in flat(record).items() if isinstance(value, int | float)}


def for_task(records: Iterable[SampleRecord]) -> list[dict[str, Any]]:
    """Records in the form that a task's aggregate may read.

    An answer with a score that was not finite did not end well, and its status here is `nan`.
    """
    not_finite = {"status": "nan", "scores": {}}
    return [dict(record) | (not_finite if None in record["scores"].values() else {}) for record in records]


def means(dicts: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Mean of every number over the dicts.

    A number that some dict lacks counts as 0 there, as an item of a ledger does.
    """
    rows = [flatten(item) for item in dicts if item]
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: sum(row.get(name, 0.0) for row in rows) / len(rows) for name in names}


def ledger(records: Sequence[SampleRecord]) -> dict[str, float]:
    """Bytes per sample, with their ratios to the FP16 full cache.

    `resident_ratio`, `peak_ratio` and `one_shot_peak_ratio`, and `full_layers_ratio` of the layers that a method acts
    on to theirs.

    These are sums over sums, because a mean of ratios would favour short prompts; `average_ratio` compares every
    decode step with the FP16 cache of that step and is the mean over samples.
    """
    result = means(record["ledger"] for record in records if record["status"] == "ok")
    for measure in (RESIDENT, PEAK, ONE_SHOT_PEAK, FULL_LAYERS):
        whole = result.get(measure.denominator[-1], 0.0) if measure.denominator else 0.0
        if whole and measure.key in result:
            result[f"{measure.name}_ratio"] = result[measure.key] / whole
    return result


def sums(records: Iterable[SampleRecord], measure: Measure) -> tuple[float, float]:
    """The numerator and the denominator of a measure, each added up over the records that ended well and have it."""
    ok = [record for record in records if record["status"] == "ok"]
    return sum(_known(ok, measure.above)), sum(_known(ok, measure.below))


def timing(records: Sequence[SampleRecord], wall_s: float) -> Timing:
    """Speed over the records that ended well, and the seconds spent on samples over all sessions."""
    ok = [record for record in records if record["status"] == "ok"]
    prefill, probe = _known(ok, PREFILL.above), _known(ok, lambda record: record["timing"]["probe_s"])
    tokens, seconds = sums(records, RATE)
    return Timing(
        prefill_s=sum(prefill) / len(prefill) if prefill else None,
        probe_s=sum(probe) / len(probe) if probe else None,
        decode_tokens_per_s=tokens / seconds if seconds else None,
        decode_tokens=int(tokens),
        wall_s=wall_s,
    )


def _known(records: Iterable[SampleRecord], pick: Callable[[SampleRecord], float | None]) -> list[float]:
    """The numbers of the records that have one."""
    values = []
    for record in records:
        try:
            value = pick(record)
        except (KeyError, TypeError):
            continue
        if value is not None:
            values.append(value)
    return values
