"""Methods across groups, such as the benchmarks of a suite.

The results of each method on all of them, and whether two groups rank the methods alike.

A method is the same in two groups by its settings. Its place in a group is that of its mean paired difference to the
full cache.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean

import numpy as np
from omegaconf import DictConfig
from scipy.stats import rankdata

from kvbench.config.files import FULL
from kvbench.evidence.compared import ComparedRun
from kvbench.evidence.load import Group, StoredRun
from kvbench.evidence.samples import Curve, by_subset, curve_of, measure, shared, strata_of
from kvbench.results import summary
from kvbench.results.measures import RESIDENT, SHARE_MARK, TIME
from kvbench.show.terminal import NO_INTERVAL, number
from kvbench.stats.ranks import FEWEST_RUNS, Agreement, agreement
from kvbench.stats.strata import Strata


@dataclass(frozen=True, kw_only=True)
class Between:
    """Two groups that rank the same methods."""

    titles: tuple[str, str]
    num_runs: int
    agreement: Agreement

    @property
    def words(self) -> str:
        """One line."""
        names = f"{self.titles[0]} and {self.titles[1]}"
        if self.agreement.value is None:
            return f"{names}: one of them has no order of {self.num_runs} runs"
        ends = NO_INTERVAL if self.agreement.interval is None else "[{:+.2f}, {:+.2f}]".format(*self.agreement.interval)
        halves = ", ".join("unknown" if half is None else f"{half:+.2f}" for half in self.agreement.halves)
        return f"{names}: {self.agreement.value:+.2f} {ends} over {self.num_runs} runs; each with itself: {halves}"


def between(
    groups: Sequence[Group], metric: str, cfg: DictConfig, key: Callable[[StoredRun], str] = lambda run: run.method_key
) -> list[Between]:
    """Spearman's rank correlation of the methods that two groups share, for every two groups.

    Questions are resampled within each group.

    Args:
        key: Identifies a method across two groups.
    """
    curves: list[dict[str, Curve]] = []
    for group in groups:
        what = measure(metric, group)
        runs = [run for run in group.runs if run.method != FULL and run.complete]
        curves.append({key(run): curve for run in runs if (curve := curve_of(run, what)).values})
    result = []
    for (first, mine), (second, theirs) in combinations(zip(groups, curves, strict=True), 2):
        keys = [name for name in mine if name in theirs]
        one = _strata(first, metric, [mine[name] for name in keys])
        other = _strata(second, metric, [theirs[name] for name in keys])
        if len(keys) >= FEWEST_RUNS and one and other:
            both = agreement(one, other, resamples=cfg.resamples, seed=cfg.seed, same_questions=False)
            result.append(Between(titles=(first.title, second.title), num_runs=len(keys), agreement=both))
    return result


def _strata(group: Group, metric: str, curves: Sequence[Curve]) -> Strata | None:
    """Values [questions, runs] of each subset, larger where better; None without a question that all runs have."""
    members = list(by_subset(shared(curves)).values())
    if not members:
        return None
    sign = 1 if measure(metric, group).higher_is_better else -1
    columns = [strata_of(curve.values, members, curve.weighting) for curve in curves]
    rows = zip(*(column.values for column in columns), strict=True)
    return Strata(tuple(sign * np.stack(row, axis=1) for row in rows), columns[0].weights)


def summaries(groups: Sequence[Group], rows: Sequence[Sequence[ComparedRun]], cfg: DictConfig) -> list[dict]:
    """Table of methods by groups for each model that has several groups, as on the page.

    Difference and verdict in each, mean rank, bytes and time; and the rank correlations of its groups.
    """
    result = []
    for model in dict.fromkeys(group.model for group in groups):
        mine = [
            (group, list(group_rows))
            for group, group_rows in zip(groups, rows, strict=True)
            if group.model == model and group_rows
        ]
        if len(mine) > 1:
            metric = str(cfg.metric).removesuffix(SHARE_MARK)  # a share of one number orders runs as the score does
            said = [one.words for one in between([group for group, _ in mine], metric, cfg)]
            result.append({"title": f"All tasks with {model}", "agreements": said} | _table(mine))
    return result


def _table(mine: Sequence[tuple[Group, list[ComparedRun]]]) -> dict:
    """Headings and rows of methods by groups, the best mean place first."""
    by_key = [{row.run.method_key: row for row in group_rows if row.run} for _, group_rows in mine]
    everywhere = [key for key in by_key[0] if all(key in rows for rows in by_key)]
    places = dict.fromkeys(everywhere, 0.0)
    for rows in by_key:
        signed = [rows[key].value * (1 if rows[key].what.higher_is_better else -1) for key in everywhere]
        for key, rank in zip(everywhere, rankdata(np.round([-value for value in signed], 12)), strict=True):
            places[key] += float(rank) / len(by_key)
    shown = []
    for key in sorted({key: None for rows in by_key for key in rows}, key=lambda key: places.get(key, np.inf)):
        there = [rows[key] for rows in by_key if key in rows]
        cells = [cell_of(rows.get(key)) for rows in by_key]
        cells += [{"text": f"{places[key]:.1f}" if key in places else "-", "style": ""}]
        cells += [{"text": text, "style": ""} for text in costs_of(there)]
        shown.append({"label": there[0].label, "cells": cells})
    tasks = [group.task for group, _ in mine]
    names = tasks if len(set(tasks)) == len(tasks) else [group.title for group, _ in mine]
    return {
        "headings": ["method", *names, "mean place", f"{RESIDENT.short} %", f"{TIME.unit} / token"],
        "rows": shown,
        "apart": False,
        "note": f"Difference to the full cache with its 95 % interval, coloured by the verdict. Places are among the "
        f"{len(everywhere)} runs that every task has; bytes and times are means over tasks.",
    }


def cell_of(row: ComparedRun | None) -> dict[str, str]:
    """The difference to the full cache with its interval, in the colour of its verdict."""
    if row is None:
        return {"text": "-", "style": ""}
    ends = "" if row.interval is None else " [{}, {}]".format(*(number(x, row.what.scale, True) for x in row.interval))
    return {"text": f"{number(row.value, row.what.scale, True)}{ends}", "style": row.verdict.replace(" ", "-")}


def costs_of(rows: Sequence[ComparedRun]) -> tuple[str, str]:
    """Resident bytes in percent of an FP16 full cache, and the time of a token: means over groups."""
    runs = [row.run for row in rows if row.run]
    ratios = [summary.ledger(list(run.samples.values())).get(f"{RESIDENT.name}_ratio") for run in runs]
    known = [ratio for ratio in ratios if ratio is not None]
    times = [summary.sums(run.samples.values(), TIME) for run in runs]
    each = [seconds / tokens for seconds, tokens in times if seconds and tokens]
    return (
        f"{RESIDENT.scale * fmean(known):.1f}" if known else "-",
        f"{TIME.scale * fmean(each):.3g}" if each else "-",
    )
