"""From journal records to the numbers of `run.json`: means with 95 % intervals, and the paired difference to the full
cache.

Everything here is a pure function of the records, so a table can be made again from `samples.jsonl` alone.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from kvbench.results import Comparison, Counts, Estimate, Metric, Timing

if TYPE_CHECKING:
    from kvbench.requests import Request

Z_95 = 1.959963984540054  # two-sided 95 % point of the normal distribution
Strata = dict[str, list[float]]


def wilson(successes: float, trials: int) -> tuple[float, float]:
    """Wilson's 95 % score interval of a rate.

    Args:
        successes: Number of successes, 0..trials.
        trials: Number of trials, >= 1.

    Returns:
        Lower and upper end, each in [0, 1].

    Source: Wilson 1927, JASA 22:209; without continuity correction.
    """
    rate, z2 = successes / trials, Z_95 * Z_95
    centre = (rate + z2 / (2 * trials)) / (1 + z2 / trials)
    half = Z_95 / (1 + z2 / trials) * math.sqrt(rate * (1 - rate) / trials + z2 / (4 * trials * trials))
    return max(0.0, centre - half), min(1.0, centre + half)


def newcombe(both: int, first_only: int, second_only: int, neither: int) -> tuple[float, float]:
    """95 % interval of the difference (first - second) of two rates measured on the same samples.

    Unlike the paired t interval it has a width when no sample differs, so "no difference seen" is not mistaken for
    "no difference".

    Args:
        both: Samples where both succeeded.
        first_only: Samples where only the first succeeded.
        second_only: Samples where only the second succeeded.
        neither: Samples where neither did.

    Returns:
        Lower and upper end, each in [-1, 1].

    Source: Newcombe 1998, Statistics in Medicine 17:2635, method 10.
    """
    n = both + first_only + second_only + neither
    p1, p2 = (both + first_only) / n, (both + second_only) / n
    (l1, u1), (l2, u2) = wilson(both + first_only, n), wilson(both + second_only, n)
    product = both * neither - first_only * second_only
    scale = math.sqrt((both + first_only) * (second_only + neither) * (both + second_only) * (first_only + neither))
    if product > 0:
        product = max(product - n / 2, 0)
    phi = product / scale if scale else 0.0

    def width(a: float, b: float) -> float:
        return math.sqrt(max(0.0, a * a - 2 * phi * a * b + b * b))

    return p1 - p2 - width(p1 - l1, u2 - p2), p1 - p2 + width(u1 - p1, p2 - l2)


def estimate(strata: Mapping[str, list[float]], num_nonfinite: int = 0) -> Estimate:
    """Mean of the subsets' means with a 95 % interval.

    Wilson for yes-or-no values when every subset weighs the same per sample; otherwise Student's t with the variances
    of the subsets
    added up (Welch and Satterthwaite's degrees of freedom). No interval where it cannot be told: a subset with one
    sample, or values that are all equal without being yes or no.

    Args:
        strata: Values of each subset, one per sample.
        num_nonfinite: Samples the caller left out, for the record.
    """
    strata = {name: values for name, values in strata.items() if values}
    count = sum(map(len, strata.values()))
    if not count:
        return Estimate(num_nonfinite=num_nonfinite)
    value = sum(sum(values) / len(values) for values in strata.values()) / len(strata)
    result = Estimate(value=value, num_samples=count, num_nonfinite=num_nonfinite)
    equal_weights = len({len(values) for values in strata.values()}) == 1
    if equal_weights and all(item in (0.0, 1.0) for values in strata.values() for item in values):
        result.low, result.high = wilson(sum(map(sum, strata.values())), count)
        result.interval = "wilson"
        return result
    half = _t_half_width(strata)
    if half is not None:
        result.low, result.high, result.interval = value - half, value + half, "t"
    return result


def _t_half_width(strata: Mapping[str, list[float]]) -> float | None:
    from scipy.stats import t  # slow to import, and not needed to show help or lists

    terms = []
    for values in strata.values():
        n = len(values)
        if n < 2:
            return None
        mean = sum(values) / n
        variance = sum((item - mean) ** 2 for item in values) / (n - 1)
        terms.append((variance / n / len(strata) ** 2, n - 1))
    total = sum(term for term, _ in terms)
    if total == 0:
        return None
    freedom = total**2 / sum(term**2 / dof for term, dof in terms)
    return float(t.ppf(0.975, freedom)) * math.sqrt(total)


def values_by_sample(
    records: Iterable[dict], pick: Callable[[dict], object]
) -> tuple[dict[str, dict[str, float]], int]:
    """Collect one number per sample: the mean over its answers.

    Args:
        records: Journal records; those whose status is not `ok` are left out.
        pick: Takes the number from a record; None means that it could not be written because it was not finite; a
            KeyError or
            TypeError that the record does not have it.

    Returns:
        Subset -> sample id -> value, and how many answers were not finite.
    """
    found: dict[str, dict[str, list[float]]] = {}
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
            found.setdefault(record["subset"], {}).setdefault(record["sample_id"], []).append(float(value))
    means = {
        subset: {sample: sum(values) / len(values) for sample, values in samples.items()}
        for subset, samples in found.items()
    }
    return means, num_nonfinite


def metrics(records: list[dict], infos: Mapping[str, object], primary: str) -> dict[str, Metric]:
    """Every metric of a task over the records.

    Args:
        records: Journal records.
        infos: Name -> object with `higher_is_better` and `description`.
        primary: Name of the metric that tables show.
    """
    result = {}
    for name, info in infos.items():
        means, num_nonfinite = values_by_sample(records, lambda record, name=name: record["scores"][name])
        strata = {subset: list(values.values()) for subset, values in means.items()}
        whole = estimate(strata, num_nonfinite)
        result[name] = Metric(
            **vars(whole),
            higher_is_better=info.higher_is_better,
            description=info.description,
            primary=name == primary,
            subsets={subset: estimate({subset: values}) for subset, values in strata.items()},
        )
    return result


def fidelity(records: list[dict]) -> dict[str, Estimate]:
    """Teacher-forced measurements over the records that have them; empty when none has."""
    names = dict.fromkeys(name for record in records if record.get("fidelity") for name in record["fidelity"])
    result = {}
    for name in names:
        means, num_nonfinite = values_by_sample(records, lambda record, name=name: record["fidelity"][name])
        result[name] = estimate({subset: list(values.values()) for subset, values in means.items()}, num_nonfinite)
    return result


def compare(
    records: list[dict], reference: list[dict], metric: str, folder: str, higher_is_better: bool = True
) -> Comparison:
    """Difference to the reference on the samples that ended well in both.

    Args:
        records: Journal records of the run.
        reference: Journal records of the full-cache run of the same samples.
        metric: Name of the metric to compare.
        folder: Folder of the reference, for the record.
        higher_is_better: Direction of the metric, for what counts as worse.
    """

    def pick(record: dict) -> object:
        return record["scores"][metric]

    mine, theirs = values_by_sample(records, pick)[0], values_by_sample(reference, pick)[0]
    pairs = {
        subset: [(value, theirs[subset][sample]) for sample, value in samples.items() if sample in theirs[subset]]
        for subset, samples in mine.items()
        if subset in theirs
    }
    flat = [pair for values in pairs.values() for pair in values]
    difference = estimate({subset: [a - b for a, b in values] for subset, values in pairs.items()})
    equal_weights = len({len(values) for values in pairs.values() if values}) == 1
    if flat and equal_weights and all(value in (0.0, 1.0) for pair in flat for value in pair):
        counts = [flat.count(pair) for pair in ((1.0, 1.0), (1.0, 0.0), (0.0, 1.0), (0.0, 0.0))]
        difference.low, difference.high = newcombe(*counts)
        difference.interval = "newcombe"
    elif difference.interval == "wilson":  # differences of 0 and 1 look like yes or no, and are not
        half = _t_half_width({subset: [a - b for a, b in values] for subset, values in pairs.items() if values})
        ends = (None, None) if half is None else (difference.value - half, difference.value + half)
        difference.low, difference.high = ends
        difference.interval = "" if half is None else "t"
    return Comparison(
        reference=folder,
        metric=metric,
        difference=difference,
        num_worse=sum(a < b if higher_is_better else a > b for a, b in flat),
        num_better=sum(a > b if higher_is_better else a < b for a, b in flat),
    )


def counts(records: list[dict], requests: "list[Request]", num_quarantined: int, num_damaged: int) -> Counts:
    """Samples by outcome."""
    statuses = [record["status"] for record in records]
    return Counts(
        total=sum(request.num_samples for request in requests),
        done=len(records),
        ok=statuses.count("ok"),
        nan=statuses.count("nan"),
        oom=statuses.count("oom"),
        truncated=sum(request.truncated for request in requests),
        quarantined=num_quarantined,
        damaged=num_damaged,
    )


def flatten(record: Mapping[str, object], prefix: str = "") -> dict[str, float]:
    """The numbers of a nested dict under dotted names; text, lists and None are left out."""
    result: dict[str, float] = {}
    for key, value in record.items():
        if isinstance(value, Mapping):
            result |= flatten(value, f"{prefix}{key}.")
        elif isinstance(value, int | float):
            result[f"{prefix}{key}"] = float(value)
    return result


def means(dicts: Iterable[Mapping[str, object]]) -> dict[str, float]:
    """Mean of every number over the dicts; a number that some dict lacks counts as 0 there, as an item of a ledger
    does."""
    rows = [flatten(item) for item in dicts if item]
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: sum(row.get(name, 0.0) for row in rows) / len(rows) for name in names}


def ledger(records: list[dict]) -> dict[str, float]:
    """Bytes per sample, with `resident_ratio` and `peak_ratio` to the FP16 full cache.

    These two are sums over sums, because a mean of ratios would favour short prompts; `average_ratio` compares every
    decode step with the FP16 cache of that step and is the mean over samples.
    """
    result = means(record["ledger"] for record in records if record["status"] == "ok")
    fp16 = result.get("fp16_bytes", 0.0)
    for name in ("resident", "peak"):
        if fp16 and f"{name}_bytes" in result:
            result[f"{name}_ratio"] = result[f"{name}_bytes"] / fp16
    return result


def timing(records: list[dict], wall_s: float) -> Timing:
    """Speed over the records that ended well.

    Args:
        records: Journal records; `timing.decode_share_s` is a sample's share of the decode steps it was part of.
        wall_s: Seconds spent on samples over all sessions.
    """
    rows = [record["timing"] for record in records if record["status"] == "ok" and record.get("timing")]
    prefill = [row["prefill_s"] for row in rows if row.get("prefill_s") is not None]
    seconds = sum(row.get("decode_share_s", 0.0) for row in rows)
    tokens = sum(row.get("decode_tokens", 0) for row in rows)
    return Timing(
        prefill_s=sum(prefill) / len(prefill) if prefill else None,
        decode_tokens_per_s=tokens / seconds if seconds else None,
        decode_tokens=tokens,
        wall_s=wall_s,
    )
