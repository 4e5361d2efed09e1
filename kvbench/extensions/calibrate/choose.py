"""Choice among measured trials: losses against the full cache, bytes, and the winner.

The winner is the cheapest trial whose loss is within the margin, or the one with the highest score. Also simulates how
often a setting is confirmed that should not be.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvbench.extensions.calibrate.measure import Trial
from kvbench.extensions.calibrate.plan import PAPER, Number, Rule
from kvbench.policy.by_layer import read_table
from kvbench.results.measures import LOSSES, RESIDENT, SCORE, Measure, score
from kvbench.results.sample import SampleRecord
from kvbench.results.summary import values_by_sample
from kvbench.stats import studentised
from kvbench.stats.intervals import BOOTSTRAP, Estimate
from kvbench.stats.paired import Paired, paired
from kvbench.stats.strata import FEWEST_SAMPLES, Strata, has_spread, weighed

TRIALS = 400  # simulated calibrations
RESAMPLES = 499  # per simulated calibration
ALLOWED = 0.1  # share of false confirmations above which a calibration warns


@dataclass(kw_only=True)
class Measured:
    """Loss and bytes of one trial, against another trial on the same samples."""

    settings: dict[str, Number]
    hash: str
    """Hash of the trial's run."""
    num_samples: int
    """Samples that ended well."""
    num_failed: int
    """Samples that did not end well; a trial with one is never chosen."""
    score: float | None
    losses: dict[str, Estimate]
    """Criterion -> loss, positive when worse, with its paired 95 % interval."""
    bytes_ratio: Estimate
    """Resident bytes at the end of the answer, as a share of an FP16 full cache."""
    resident_bytes: float
    """Mean per sample."""
    slot_ratio: float | None
    """Share of the tokens' slots that are held."""
    tier_shares: list[float]
    """Share of the held slots in each tier."""
    samples: list[dict]
    """One row per answer: its score, NLL, KL and resident bytes."""
    lost: list[float] = field(default_factory=list)
    """Loss of each sample in the rule's criterion."""
    within: bool = False
    """True if the rule accepts the trial."""


def evaluate(trial: Trial, reference: Trial, rule: Rule) -> Measured:
    """Compares a measured trial with another one on the same samples: the full cache, or the uncalibrated method."""
    ok = [record for record in trial.records if record["status"] == "ok"]
    task = trial.experiment.task
    losses = {name: loss(trial, reference, name, rule) for name in LOSSES}
    ratios, resident = _bytes(ok, rule)
    held = np.array([record["kept"].get("slots_per_tier", []) for record in ok], dtype=float).sum(axis=0)
    shares = [record["kept"]["slot_ratio"] for record in ok if "slot_ratio" in record["kept"]]
    by_subset = values_by_sample(trial.records, score(task.primary).above)[0]
    means = [np.mean(list(values.values())) for values in by_subset.values()]
    result = Measured(
        settings=trial.settings,
        hash=trial.experiment.hash,
        num_samples=len({record["sample_id"] for record in ok}),
        num_failed=len(trial.records) - len(ok),
        score=float(np.mean(means)) if means else None,
        losses={name: value for name, value in losses.items() if value.value is not None},
        bytes_ratio=ratios,
        resident_bytes=resident,
        slot_ratio=float(np.mean(shares)) if shares else None,
        tier_shares=[float(share) for share in held / held.sum()] if np.size(held) and held.sum() else [],
        samples=[_row(record, task.primary) for record in trial.records],
    )
    decides, _ = losses_of(trial, reference, rule.criterion, rule)
    result.lost = [] if decides is None else decides.strata.flat.tolist()
    result.within = accepts(rule, result)
    return result


def loss(trial: Trial, reference: Trial, criterion: str, rule: Rule) -> Estimate:
    """Loss of a trial with its paired 95 % interval, positive when worse.

    The interval has no width where every sample loses the same NLL or KL, most often none.
    """
    losses, what = losses_of(trial, reference, criterion, rule)
    if losses is None:
        return Estimate()
    result = losses.estimate()
    if not what.bounded and losses.strata.count >= FEWEST_SAMPLES and not has_spread(losses.strata.flat):
        result.low = result.high = losses.value
        result.interval = "identical"
    return result


def losses_of(trial: Trial, reference: Trial, criterion: str, rule: Rule) -> tuple[Paired | None, Measure]:
    """Losses of the samples that ended well in both trials (None without any), and their measure."""
    task = trial.experiment.task
    primary = score(task.primary, task.metrics[task.primary].higher_is_better)
    what = primary if criterion == SCORE.name else LOSSES[criterion].measure
    mine, theirs = (values_by_sample(item.records, what.above)[0] for item in (trial, reference))
    pairs = {
        subset: [(value, theirs[subset][name]) for name, value in values.items() if name in theirs[subset]]
        for subset, values in mine.items()
        if subset in theirs
    }
    if what.higher_is_better:
        pairs = {subset: [(b, a) for a, b in values] for subset, values in pairs.items()}
    return paired(pairs, task.weighting, bounded=what.bounded, resamples=rule.resamples, seed=rule.seed), what


def accepts(rule: Rule, measured: Measured) -> bool:
    """True if the loss is within the margin, and every sample ended well."""
    estimate = measured.losses.get(rule.criterion)
    if estimate is None or measured.num_failed:
        return False
    bound = estimate.high if rule.proof == "interval" else estimate.value
    return bound is not None and bound <= rule.margin


def choose(measured: Sequence[Measured], rule: Rule) -> int | None:
    """Index of the rule's choice, if any.

    `cheapest`: the fewest bytes that the rule accepts; of nearly equal bytes the earlier, gentler value: a threshold
    that frees no memory should not be paid for. `paper`: the highest score, of equal ones the earlier value.
    """
    if rule.name == PAPER:
        lost = [_lost(item, rule) for item in measured]
        least = min((value for value in lost if value is not None), default=0.0)
        return next((index for index, value in enumerate(lost) if value is not None and _same(value, least)), None)
    good = [index for index, item in enumerate(measured) if item.within]
    fewest = min((measured[index].resident_bytes for index in good), default=0.0)
    return next((index for index in good if measured[index].resident_bytes <= (1 + rule.tie) * fewest), None)


def _lost(measured: Measured, rule: Rule) -> float | None:
    """Mean loss, None unless every sample ended well."""
    estimate = measured.losses.get(rule.criterion)
    return None if estimate is None or measured.num_failed else estimate.value


def _same(a: float, b: float) -> bool:
    """True for values that are equal up to the order of summation."""
    return abs(a - b) < 1e-9


def is_out_of_reach(measured: Sequence[Measured], rule: Rule) -> bool:
    """True if every point loses more than the margin on average."""
    return all(value is None or value > rule.margin for value in (_lost(item, rule) for item in measured))


def why(name: str, values: Sequence[Number], measured: Sequence[Measured], best: int | None, rule: Rule) -> str:
    """Explain a choice in one sentence, with the values of the setting `name`."""
    lost = LOSSES[rule.criterion]
    margin = f"{lost.scale * rule.margin:g} {lost.unit}"
    if best is None:
        return f"{name}: none of {len(values)} values is accepted"
    point, said = measured[best], f"{name}={value_text(values[best])}: "
    if rule.name == PAPER:
        losses, least = [_lost(item, rule) for item in measured], _lost(point, rule) or 0.0
        ties = [at for at, mean in enumerate(losses) if at != best and mean is not None and _same(mean, least)]
        said += f"the highest score, {SCORE.scale * (point.score or 0):.1f} %, of {len(values)} values"
        shared = f"; shared with {', '.join(value_text(values[at]) for at in ties)}, and the gentler value wins"
        return said + (shared if ties else "")
    ratio = f"{RESIDENT.scale * (point.bytes_ratio.value or 0):.1f} % of the FP16 bytes"
    good = sum(item.within for item in measured)
    return said + f"{ratio}, the fewest of the {good} of {len(values)} values that lose at most {margin} ({rule.proof})"


def losses_by_value(points: Sequence[Measured], parameter: str) -> str:
    """Format the other settings that are constant over all points of a tuned one, as `alpha_l=0`, or follow it."""
    shown = {}
    for name in [name for name in points[0].settings if name != parameter]:
        values = [point.settings[name] for point in points]
        if len(set(values)) == 1:
            shown[name] = values[0]
        elif values == [point.settings[parameter] for point in points]:
            shown[name] = parameter
    return settings_text(shown)


def settings_text(settings: dict) -> str:
    """Format settings as `alpha_h=1 alpha_l=0.02`."""
    return " ".join(f"{name}={value_text(value)}" for name, value in settings.items())


def value_text(value: Number | None) -> str:
    """Format a value as `0.02`; a table of layers as counts of each precision."""
    if not isinstance(value, str) or " " not in value:
        return f"{value:g}" if isinstance(value, int | float) else str(value)
    counts = Counter(tier for row in read_table(value)[0] for tier in row[:1])
    return "(" + ", ".join(f"{count} {tier}" for tier, count in counts.items()) + ")"


def _row(record: SampleRecord, primary: str) -> dict:
    fidelity = record["fidelity"] or {}
    return {
        "sample_id": record["sample_id"],
        "repeat": record["repeat"],
        "status": record["status"],
        "score": record["scores"].get(primary),
        **{name: fidelity.get(lost.measure.key) for name, lost in LOSSES.items() if name != SCORE.name},
        "resident_bytes": record["ledger"].get(RESIDENT.key),
    }


def _bytes(records: Sequence[SampleRecord], rule: Rule) -> tuple[Estimate, float]:
    """Share of the FP16 cache with its interval over samples, and mean bytes."""
    if not records:
        return Estimate(), 0.0
    resident = np.array([RESIDENT.above(record) for record in records], dtype=float)
    fp16 = np.array([RESIDENT.below(record) for record in records], dtype=float)
    value = float(resident.sum() / fp16.sum())
    shares = value + (resident - value * fp16) / fp16.mean()
    each = resident / fp16
    within = float(each.min()), float(each.max())
    ends = studentised.interval(weighed([shares]), resamples=rule.resamples, seed=rule.seed, within=within)
    if ends is None and len(records) >= FEWEST_SAMPLES and not has_spread(shares):
        ends = (value, value)
    low, high = ends or (None, None)
    share = Estimate(value=value, num_samples=len(records), low=low, high=high, interval=BOOTSTRAP if ends else "")
    return share, float(resident.mean())


def false_confirmations(
    shape: np.ndarray, rule: Rule, *, num_points: int, num_tuning: int, num_held_out: int, trials: int = TRIALS
) -> float:
    """Share of calibrations that confirm a setting whose true loss is the margin, when every setting's is.

    Of many settings that all lose a little more than the margin, the luckiest on the tuning samples is chosen. Held-out
    samples then judge it, and they too can be lucky. The simulation draws losses with the shape that was measured,
    moves their true mean to just the margin, and counts how often the rule chooses one and confirms it.
    """
    if len(shape) < 2 or np.ptp(shape) == 0:
        return 0.0  # no spread: no setting can pass by luck
    rng = np.random.default_rng(rule.seed)
    centred = np.asarray(shape, dtype=float) - np.mean(shape) + rule.margin
    count = num_tuning + num_held_out
    # Settings next to one another in a grid answer the same prompts, so a sample's losses go up and down together:
    # half of the variance is the sample's own, half the setting's.
    shared_error = rng.choice(centred, (count, trials, 1)) - rule.margin
    each = rng.choice(centred, (count, trials, num_points)) - rule.margin
    losses = rule.margin + (shared_error + each) / np.sqrt(2)
    is_good = _accepted(losses[:num_tuning].reshape(num_tuning, -1), rule).reshape(trials, num_points)
    confirmed = _accepted(losses[num_tuning:].reshape(num_held_out, -1), rule).reshape(trials, num_points)
    if rule.name == PAPER:  # the best by chance, accepted or not
        best = losses[:num_tuning].mean(axis=0).argmin(axis=1)
        return float(np.mean(confirmed[np.arange(trials), best]))
    # The cheapest accepted one: any of them, as bytes do not depend on losses; the last of the grid.
    last = num_points - 1 - np.argmax(is_good[:, ::-1], axis=1)
    return float(np.mean(is_good.any(axis=1) & confirmed[np.arange(trials), last]))


def _accepted(losses: np.ndarray, rule: Rule) -> np.ndarray:
    """Mask of the columns whose bound of the mean loss is within the margin."""
    means = losses.mean(axis=0)
    if rule.proof == "mean":
        return means <= rule.margin
    if len(losses) < FEWEST_SAMPLES:
        return np.zeros(losses.shape[1], dtype=bool)
    strata = Strata((losses,), (1.0,))
    _, below = studentised.p_values(strata, null=rule.margin, resamples=RESAMPLES, seed=rule.seed)
    return (means <= rule.margin) & (below < (1 - studentised.LEVEL) / 2)
