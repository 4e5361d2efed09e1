"""Which points are on the frontier, which might be, and which are not: dominance that respects the intervals."""

from collections.abc import Sequence

import numpy as np

from kvbench.evidence.frontier import Panel
from kvbench.stats import paired as stats

FRONTIER, OPEN, DOMINATED = "frontier", "open", "dominated"


def best_so_far(costs: Sequence[float], qualities: Sequence[float], higher_is_better: bool) -> list[int]:
    """The points that no other point beats, by the estimates alone, in order of cost.

    Args:
        costs: Lower is better.
        qualities: One for each cost.
        higher_is_better: Direction of the quality.
    """
    sign = 1 if higher_is_better else -1
    order = sorted(range(len(costs)), key=lambda index: (costs[index], -sign * qualities[index]))
    kept: list[int] = []
    for index in order:
        if not kept or sign * qualities[index] > sign * qualities[kept[-1]]:
            kept.append(index)
    return kept


def surely_below(draws: np.ndarray, than: np.ndarray, freedom: float) -> np.ndarray:
    """For which columns the 95 % interval of the paired difference to another column lies below zero.

    Args:
        draws: [resamples, points] values in the resamples.
        than: [resamples] values of one point in the same resamples.
        freedom: Degrees of freedom of the differences.

    Returns:
        bool [points].
    """
    upper = 100 * stats.tails(freedom)[1]
    return np.percentile(draws - than[:, None], upper, axis=0) < 0


def standing(panel: Panel, axis: str) -> dict[str, str]:
    """Where each point stands.

    A point beats another beyond chance when the intervals of both paired differences, of cost and of quality, exclude
    zero. Paired intervals are narrower than the points' own, and are what decides; they are not corrected for the
    number of pairs.

    Args:
        panel: The points.
        axis: Name of the cost; points without it have no standing.

    Returns:
        Key -> `frontier` (no estimate is both cheaper and better), `open` (one is, but that can be chance), or
        `dominated` (some other point is cheaper and better beyond chance).
    """
    points = [point for point in panel.points if axis in point.costs]
    if not points:
        return {}
    costs, qualities = [point.costs[axis].value for point in points], [point.quality for point in points]
    front = set(best_so_far(costs, qualities, panel.what.higher_is_better))
    cost_draws = np.stack([point.costs[axis].draws for point in points], axis=1)
    worse = np.stack([point.draws for point in points], axis=1) * (-1 if panel.what.higher_is_better else 1)
    result = {}
    for index, point in enumerate(points):
        if index in front:
            result[point.key] = FRONTIER
            continue
        cheaper = surely_below(cost_draws, cost_draws[:, index], panel.freedom)
        better = surely_below(worse[:, cheaper], worse[:, index], panel.freedom)
        result[point.key] = DOMINATED if better.any() else OPEN
    return result
