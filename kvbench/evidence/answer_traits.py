"""Answer length against another run's, share of answers that end in a loop, and worst-token distance to the full cache.

A mean score hides all three.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvbench.evidence.load import Group, StoredRun
from kvbench.evidence.samples import NoCommonSample, by_subset, curve_of, pair, strata_of
from kvbench.results.measures import DP, KL, KL_MAX, KL_NEW, LENGTH, LOOPS, TOP1, TOTAL, Measure
from kvbench.show.across import NONE, TOKENS, statistic
from kvbench.show.csv_file import Cell, csv_row
from kvbench.show.terminal import number, span
from kvbench.stats.shares import Difference

LONGER = "answer longer\nby, tokens"
# Of all forced tokens together, where a run says what was measured of each (`fidelity.per_token`).
POOLED = ("kl_99", "kl_999", "perplexity", "log_ratio")


def longer(mine: StoredRun | None, theirs: StoredRun | None, resamples: int, seed: int) -> Difference | None:
    """The difference in tokens of an answer, paired; None where the two have no answers to the same samples."""
    if mine is None or theirs is None:
        return None
    try:
        return pair(curve_of(mine, LENGTH), curve_of(theirs, LENGTH), LENGTH).paired(LENGTH, resamples, seed)
    except NoCommonSample:
        return None


def mean_of(run: StoredRun | None, what: Measure) -> float | None:
    """The mean of a measure over the samples of a run, subsets as they weigh; None where no sample has it."""
    values = curve_of(run, what).values if run else {}
    if run is None or not values:
        return None
    return float(strata_of(values, by_subset(values).values(), run.record.weighting).mean())


def longer_text(difference: Difference | None) -> str:
    """The difference in tokens with its interval."""
    if difference is None:
        return NONE
    ends = span(difference.interval[0], LENGTH.scale, signed=True)
    return f"{number(difference.value, LENGTH.scale, signed=True)} {ends}"


def columns(pairs: Sequence[tuple[StoredRun | None, Difference | None]]) -> dict[str, list[str]]:
    """Heading -> the cells of all runs: bytes where models stand together, and lengths where runs have answers."""
    totals = [number(mean_of(run, TOTAL), TOTAL.scale) for run, _ in pairs]
    first = {f"{TOTAL.short},\n{TOTAL.unit}": totals} if any(text != NONE for text in totals) else {}
    if not any(paired for _, paired in pairs):
        return first
    loops = [number(mean_of(run, LOOPS), LOOPS.scale) for run, _ in pairs]
    return first | {LONGER: [longer_text(paired) for _, paired in pairs], "loops\n%": loops}


def csv_cells(run: StoredRun | None, difference: Difference | None) -> dict[str, Cell]:
    """The same, unrounded; bytes as such, loops as a share."""
    low, high = (difference.interval[0] if difference else None) or (None, None)
    total = mean_of(run, TOTAL)
    return csv_row(total_bytes=total) | csv_row(
        longer=difference.value if difference else None, longer_low=low, longer_high=high, loops=mean_of(run, LOOPS)
    )


def largest(run: StoredRun, what: Measure) -> float | None:
    """The largest value of a measure in any sample of a run; None where no sample has it."""
    return max(curve_of(run, what).values.values(), default=None)


def traits_table(group: Group, differences: Mapping[str, Difference | None]) -> dict[str, Any]:
    """Table of a report: tail, first choices and answers of every run; columns that no run has are left out.

    Args:
        differences: Folder of a run -> its difference in length.
    """

    def mean(what: Measure) -> Callable[[StoredRun], str]:
        return lambda run: number(mean_of(run, what), what.scale)

    def pooled(name: str) -> Callable[[StoredRun], str]:
        return lambda run: statistic((run.record.task_aggregate.get("tokens") or {}).get(name), TOKENS[name][1])

    each: dict[str, Callable[[StoredRun], str]] = {
        f"{KL.short}, nats": mean(KL),
        f"{KL_NEW.short}, nats": mean(KL_NEW),
        **{TOKENS[name][0]: pooled(name) for name in POOLED},
        KL_MAX.short: lambda run: number(largest(run, KL_MAX), KL_MAX.scale),
        f"{DP.short}, points": mean(DP),
        f"{TOP1.short}, %": mean(TOP1),
        f"{LENGTH.short} of an answer": mean(LENGTH),
        LONGER.replace("\n", " "): lambda run: longer_text(differences.get(run.name)),
        f"{LOOPS.short}, %": mean(LOOPS),
    }
    cells = {heading: [cell(run) for run in group.runs] for heading, cell in each.items()}
    kept = {heading: column for heading, column in cells.items() if any(text != NONE for text in column)}
    return {
        "caption": "What a mean hides: the worst tokens, and what the answers are like.",
        "headings": ["run", *kept],
        "rows": [
            {"label": run.label, "cells": [column[index] for column in kept.values()]}
            for index, run in enumerate(group.runs)
        ],
        "legend": [
            f"{KL.short}, {DP.short} (root mean square of what the forced token's probability changed by) and "
            f"{TOP1.short}: means over samples. {KL_MAX.short}: the largest of all forced tokens.",
            f"{KL_NEW.short}: over the tokens that do not copy the prompt, told by runs of three tokens. KL on gold "
            "answers need not rank runs as their scores do: gold answers copy much of the prompt.",
            "KL 99 %, KL 99.9 %, perplexity: over all forced tokens together, with the block bootstrap's interval, of "
            "runs with fidelity.per_token=true.",
            "loops: answers that end in the same tokens three times in a row or more, 16 tokens at least. Longer: the "
            "paired difference to the run that all are compared with.",
        ],
    }
