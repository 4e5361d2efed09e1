"""Points that a cheaper run dominates beyond chance, and where the others stand by their estimates."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import combinations

import numpy as np

from kvbench.evidence.budget_curves import TIE
from kvbench.evidence.frontier import Cost, Panel
from kvbench.evidence.legends import BEST, DOMINATED, NEAR, OPEN
from kvbench.stats import studentised
from kvbench.stats.paired import ALPHA, holm
from kvbench.stats.sign_test import sign_flips
from kvbench.stats.strata import Strata, has_spread, standard_error
from kvbench.stats.studentised import LEVEL

TOO_FEW, UNFIT = "n too small", "no standing"


def best_so_far(costs: Sequence[float], qualities: Sequence[float], higher_is_better: bool) -> list[int]:
    """The points that no other point beats, by the estimates alone, in order of cost, of which less is better."""
    sign = 1 if higher_is_better else -1
    order = sorted(range(len(costs)), key=lambda index: (costs[index], -sign * qualities[index]))
    kept: list[int] = []
    for index in order:
        if not kept or sign * qualities[index] > sign * qualities[kept[-1]]:
            kept.append(index)
    return kept


def is_cheaper(mine: Cost, theirs: Cost) -> bool:
    """True if cheaper by more than a tie of 1 %, by the paired 95 % interval too."""
    if mine.shares is None or theirs.shares is None or mine.value >= (1 - TIE) * theirs.value:
        return False
    from scipy.stats import t  # slow to import

    gaps = tuple(
        share - (1 - TIE) * other for share, other in zip(mine.shares.values, theirs.shares.values, strict=True)
    )
    weighted = Strata(gaps, mine.shares.weights)
    if weighted.weighs_samples_alike:
        weighted = Strata((weighted.flat,), (1.0,))
    if not any(map(has_spread, weighted.values)):
        return True
    error = standard_error(weighted)
    if error is None:
        return False
    return bool(float(weighted.mean()) + t.ppf((1 + LEVEL) / 2, error[1]) * error[0] < 0)


@lru_cache(maxsize=64)
def pair_p_values(panel: Panel) -> dict[tuple[str, str], float]:
    """Two-sided p value of a difference in quality of every two points, by their keys; 1 where nothing can be said."""
    points = panel.points
    pairs = list(combinations(points, 2))
    draws = studentised.resamples_for(len(pairs) or 1, panel.resamples)
    p_values: dict[tuple[str, str], float] = {}
    graded: dict[tuple[str, str], Strata] = {}
    for first, second in pairs:
        both, key = panel.difference(first, second, draws), (first.key, second.key)
        if both.pairs is not None:
            p_values[key] = 1.0 if both.p is None else both.p
        elif both.few_differ or both.error is None or abs(both.value) <= both.error[0]:
            p_values[key] = 1.0  # a difference of one standard error is none, and needs no resampling to see it
        else:
            graded[key] = both.strata
    if graded:
        values = tuple(np.stack(parts, axis=1) for parts in zip(*(g.values for g in graded.values()), strict=True))
        columns = Strata(values, points[0].scores.weights)
        above, below = studentised.p_values(columns, resamples=draws, seed=panel.seed)
        flipped = sign_flips(columns, draws=draws, seed=panel.seed)
        both_tests = np.maximum(np.minimum(1.0, 2 * np.fmin(above, below)), flipped)
        p_values |= dict(zip(graded, np.nan_to_num(both_tests, nan=1.0).tolist(), strict=True))
    return p_values | {(b, a): p for (a, b), p in p_values.items()}


@lru_cache(maxsize=256)
def standing(panel: Panel, axis: str) -> dict[str, str]:
    """Standing of each point that has the cost: its key -> one of `MEANING`.

    `no standing` or `n too small` for all where the full cache's answers are unfit as a reference, or too few.

    A point dominates another if it is cheaper by more than 1 % and its quality is better beyond chance, at 5 % for the
    whole table: Holm's correction is over all pairs of which one is cheaper. Times give no standing.
    """
    points = [p for p in panel.points if axis in p.costs and p.costs[axis].shares is not None]
    if not points:
        return {}
    if panel.unfit or not panel.is_enough:
        return {point.key: UNFIT if panel.unfit else TOO_FEW for point in points}
    p_of = pair_p_values(panel)
    sign = 1 if panel.what.higher_is_better else -1
    quality = {point.key: sign * point.quality for point in points}
    cheaper = {
        point.key: [other.key for other in points if is_cheaper(other.costs[axis], point.costs[axis])]
        for point in points
    }
    pairs = [(mine, other) for mine, others in cheaper.items() for other in others]
    corrected = holm([p_of[pair] if quality[pair[1]] > quality[pair[0]] else 1.0 for pair in pairs])
    beaten = {mine for (mine, _), p in zip(pairs, corrected, strict=True) if p is not None and p < ALPHA}
    result = {}
    for point in points:
        key, cost = point.key, point.costs[axis].value
        best = max((quality[other.key] for other in points if other.costs[axis].value < cost), default=-np.inf)
        tied = [other for other in points if cost <= other.costs[axis].value <= cost / (1 - TIE)]
        clear = max((quality[other] for other in cheaper[key]), default=-np.inf)
        if key in beaten:
            result[key] = DOMINATED
        elif best >= quality[key] or max(quality[other.key] for other in tied) > quality[key] + panel.margin:
            result[key] = OPEN
        else:
            result[key] = BEST if quality[key] - clear > panel.margin else NEAR
    return result
