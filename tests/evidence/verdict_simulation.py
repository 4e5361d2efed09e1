"""Rates of wrong verdicts, by simulation: `make simulate`, or with few trials inside the default suite.

Every table has twelve methods that are as good as the full cache, with costs in order, or one. A verdict that any of
them is worse or better, and a *dominated*, is false. So is an *equal* where every method truly loses the margin.
"""

import sys
from types import SimpleNamespace

import numpy as np

from kvbench.evidence.compare import correct
from kvbench.evidence.compared import ComparedRun
from kvbench.evidence.dominance import standing
from kvbench.evidence.frontier import Cost, Panel, Point
from kvbench.evidence.legends import DOMINATED, EQUAL_LEVEL
from kvbench.results.measures import score
from kvbench.stats import studentised
from kvbench.stats.paired import ALPHA, difference
from kvbench.stats.sign_test import sign_flips
from kvbench.stats.strata import Strata, weighed

SIZES = {8: ((8,), (5, 3)), 24: ((24,), (16, 8)), 100: ((100,), (60, 30, 10)), 500: ((500,), (300, 150, 50))}
KINDS = ("normal", "skewed", "skewed loss", "yes or no")
MARGIN = 0.5


def draw(kind: str, rng: np.random.Generator, size: int, methods: int) -> tuple[np.ndarray, np.ndarray]:
    """Values [size] of the full cache and [size, methods] of methods that are as good on average.

    `normal` and `skewed` methods are one another's equals sample by sample; a `skewed loss` is a method that mostly
    gains a little and sometimes loses much, so that its differences are not symmetric.
    """
    if kind == "yes or no":
        right = rng.random(size) < 0.7
        kept, other = rng.random((size, methods)) < 0.85, rng.random((size, methods)) < 0.7
        return right.astype(float), np.where(kept, right[:, None], other).astype(float)
    base = rng.normal(size=size)
    if kind == "normal":
        return base + rng.normal(size=size), base[:, None] + rng.normal(size=(size, methods))
    if kind == "skewed":
        return base + rng.lognormal(size=size), base[:, None] + rng.lognormal(size=(size, methods))
    return base, base[:, None] + rng.lognormal(size=(size, methods)) - np.exp(0.5)


def tables(kind: str, sizes: tuple[int, ...], methods: int, rng: np.random.Generator) -> list[Strata]:
    """The columns of one table, the full cache's first."""
    parts = [draw(kind, rng, size, methods) for size in sizes]
    columns = [weighed([part[0] for part in parts])]
    return columns + [weighed([part[1][:, m] for part in parts]) for m in range(methods)]


def row(mine: Strata, theirs: Strata, resamples: int) -> ComparedRun:
    """A row of `kvbench compare` of right and wrong answers, without the runs."""
    what = score()
    return ComparedRun(
        what=what,
        pairs=SimpleNamespace(is_enough=True),
        difference=difference(mine, theirs, bounded=what.bounded, resamples=resamples),
        extremes=None,
        margin=0.05,
        null=0.0,
        changes=[],
    )


def panel(columns: list[Strata], resamples: int) -> Panel:
    """A panel of `kvbench report view=pareto`, every method 5 % dearer than the one before."""
    points = []
    for index, scores in enumerate(columns):
        cost = 0.1 * 1.05**index
        costs = {"resident": Cost(value=cost, shares=Strata((np.full(scores.count, cost),), (1.0,)))}
        names = dict.fromkeys(("key", "label", "method", "series"), str(index))
        points.append(
            Point(**names, family="evicts", scores=scores, score_interval=None, quality=scores.mean(), costs=costs)
        )
    questions = [[("t", str(place), str(i)) for i in range(size)] for place, size in enumerate(columns[0].sizes)]
    return Panel(
        title="",
        kin="",
        what=score(),
        points=points,
        questions=questions,
        reference=None,
        margin=0.01,
        resamples=resamples,
    )


def yes_no(sizes: tuple[int, ...], trials: int, methods: int = 12, resamples: int = 999) -> dict:
    """Shares of tables with a false verdict, by the commands' own rows and panels."""
    rng = np.random.default_rng(list(sizes))
    found = {"covered": 0, "one row": 0, "compare": 0, "equal": 0, "dominated": 0}
    for _ in range(trials):
        columns = tables("yes or no", sizes, methods, rng)
        rows = [row(mine, columns[0], resamples) for mine in columns[1:]]
        low, high = rows[0].interval
        found["covered"] += low <= 0 <= high
        found["one row"] += rows[0].p < 0.05
        correct(rows)
        found["compare"] += any(item.verdict in ("worse", "better") for item in rows)
        found["dominated"] += DOMINATED in standing(panel(columns[1:], resamples), "resident").values()
    return {name: count / trials for name, count in found.items()}


def graded(kind: str, sizes: tuple[int, ...], trials: int, methods: int = 12) -> dict:
    """The same for graded values, all tables at once by the functions that rows and panels call."""
    rng = np.random.default_rng(list(sizes))
    parts = [draw(kind, rng, size * trials, methods) for size in sizes]
    weights = (1 / len(sizes),) * len(sizes)

    def columns(make, count: int) -> Strata:
        values = []
        for size, (full, mine) in zip(sizes, parts, strict=True):
            made = make(full.reshape(size, trials, 1), mine.reshape(size, trials, methods))
            values.append(made.reshape(size, trials * count))
        return Strata(tuple(values), weights)

    def p_of(strata: Strata, tests: int) -> np.ndarray:
        draws = studentised.resamples_for(tests, 999)
        above, below = studentised.p_values(strata, resamples=draws)
        both = np.maximum(2 * np.minimum(above, below), sign_flips(strata, draws=draws))
        return np.nan_to_num(both, nan=1.0).reshape(trials, -1)

    p = p_of(columns(lambda full, mine: mine - full, methods), methods)
    lossy = columns(lambda full, mine: mine - full + MARGIN, methods)
    _, below = studentised.p_values(lossy, null=MARGIN, resamples=studentised.resamples_for(methods, 999))
    about = lossy.map(lambda values: values - MARGIN)
    flipped = sign_flips(about, draws=studentised.resamples_for(methods, 999)) / 2
    is_equal = np.nan_to_num(np.maximum(below, flipped), nan=1.0) < EQUAL_LEVEL / methods
    is_equal &= np.asarray(about.mean()) < 0
    first, second = np.triu_indices(methods, 1)
    pairs = p_of(columns(lambda _, mine: mine[..., second] - mine[..., first], len(first)), len(first))
    # The dearer of two is dominated where the cheaper is better: half of the differences that show.
    worse = columns(lambda _, mine: mine[..., second] - mine[..., first], len(first)).mean().reshape(trials, -1) > 0
    return {
        "covered": np.mean(p >= ALPHA),
        "one row": np.mean(p < ALPHA),
        "compare": np.mean((p < ALPHA / methods).any(axis=1)),  # Holm's first step; without one there is no second
        "equal": np.mean(is_equal.reshape(trials, -1).any(axis=1)),
        "dominated": np.mean(((pairs < ALPHA / len(first)) & worse).any(axis=1)),
    }


def main() -> None:
    """Print the table."""
    settings = dict(word.split("=") for word in sys.argv[1:])
    trials = int(settings.get("trials", 1000))
    names = [name for name in KINDS if name in settings.get("kinds", ",".join(KINDS)).split(",")]
    print(f"{trials} tables of 12 rows each; shares in %")
    heads = ("covered", "1 row", "12 rows", "equal", "dominated")
    print(f"{'differences':12} {'n':>4} {'subsets':12} " + " ".join(f"{head:>9}" for head in heads), flush=True)
    for kind in names:
        for count, shapes in SIZES.items():
            if count > int(settings.get("most", 500)):
                continue
            for sizes in shapes:
                got = yes_no(sizes, trials) if kind == "yes or no" else graded(kind, sizes, trials)
                text = "-".join(map(str, sizes))
                shares = " ".join(f"{100 * value:9.1f}" for value in got.values())
                print(f"{kind:12} {count:4} {text:12} {shares}", flush=True)


if __name__ == "__main__":
    main()
