"""How often a calibration confirms what it should not: the winner's curse, simulated over its own grid.

Of many settings that all lose a little more than the margin, the luckiest on the tuning samples is chosen. Held-out
samples then judge it, and they too can be lucky. The simulation draws losses with the shape that was measured, moves
their true mean to just the margin, and counts how often the rule chooses one and confirms it.
"""

import numpy as np

from kvbench.calibrate.plan import Rule
from kvbench.stats import studentised
from kvbench.stats.strata import FEWEST_SAMPLES, Strata

TRIALS = 400
RESAMPLES = 499
ALLOWED = 0.1  # share of false confirmations above which a calibration says so


def false_confirmations(
    shape: np.ndarray, rule: Rule, *, num_points: int, num_tuning: int, num_held_out: int, trials: int = TRIALS
) -> float:
    """Share of calibrations that confirm a setting whose true loss is the margin, when every setting's is.

    Args:
        shape: Losses of some samples; their spread and skewness are used, not their mean.
        rule: The rule of the choice and of the verdict.
        num_points: Settings of the grid.
        num_tuning: Samples that the choice is made on.
        num_held_out: Samples that the verdict is made on.
        trials: Simulated calibrations.
    """
    if len(shape) < 2 or np.ptp(shape) == 0:
        return 0.0  # nothing was lost, and nothing can be lucky
    rng = np.random.default_rng(rule.seed)
    centred = np.asarray(shape, dtype=float) - np.mean(shape) + rule.margin
    count = num_tuning + num_held_out
    # Settings next to one another in a grid answer the same prompts, so a sample's losses go up and down together:
    # half of the variance is the sample's own, half the setting's.
    own = rng.choice(centred, (count, trials, 1)) - rule.margin
    each = rng.choice(centred, (count, trials, num_points)) - rule.margin
    losses = rule.margin + (own + each) / np.sqrt(2)
    is_good = _accepted(losses[:num_tuning].reshape(num_tuning, -1), rule).reshape(trials, num_points)
    confirmed = _accepted(losses[num_tuning:].reshape(num_held_out, -1), rule).reshape(trials, num_points)
    # The cheapest that is good: any of them, as bytes know nothing of losses; the last of the grid.
    last = num_points - 1 - np.argmax(is_good[:, ::-1], axis=1)
    return float(np.mean(is_good.any(axis=1) & confirmed[np.arange(trials), last]))


def _accepted(losses: np.ndarray, rule: Rule) -> np.ndarray:
    """For which columns the rule's bound of the mean loss is within the margin."""
    means = losses.mean(axis=0)
    if rule.proof == "mean":
        return means <= rule.margin
    if len(losses) < FEWEST_SAMPLES:
        return np.zeros(losses.shape[1], dtype=bool)
    strata = Strata((losses,), (1.0,))
    _, below = studentised.p_values(strata, null=rule.margin, resamples=RESAMPLES, seed=rule.seed)
    return (means <= rule.margin) & (below < (1 - studentised.LEVEL) / 2)
