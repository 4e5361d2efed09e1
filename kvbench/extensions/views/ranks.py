"""`kvbench report view=ranks`: rank correlation of the runs by two measures, or in two groups."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from omegaconf import DictConfig
from rich.text import Text
from scipy.stats import rankdata

from kvbench.config.files import FULL
from kvbench.errors import SettingsConflict, SettingValue
from kvbench.evidence.across import between
from kvbench.evidence.budget_curves import OutOfRange, at_bytes, series_of
from kvbench.evidence.frontier import Questions, pool_strata, question
from kvbench.evidence.load import Group, patterns, sentences
from kvbench.evidence.samples import Curve, by_subset, curve_of, measure, shared, strata_of
from kvbench.evidence.settings import Bytes, bytes_wanted
from kvbench.evidence.view import Grid, Part, View, ViewResult, frame_of, line, notes
from kvbench.results.measures import Measure
from kvbench.results.refusals import NoResults
from kvbench.show import terminal
from kvbench.show.csv_file import Cell, csv_row
from kvbench.show.terminal import number
from kvbench.stats.ranks import FEWEST_RUNS, Agreement, agreement
from kvbench.stats.strata import Strata

if TYPE_CHECKING:
    import pandas as pd

Two = tuple[Measure, Measure]


@dataclass(frozen=True, kw_only=True)
class _Values:
    """Values of the runs of one group under both measures, on the questions that all of them have."""

    labels: dict[str, str]
    """Key of a run in any group -> label."""
    questions: Questions
    columns: tuple[dict[str, Strata], dict[str, Strata]]
    """Of each measure: key -> a value for each question, in the measure's own direction."""


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """Some runs in the orders of two measures."""

    title: str
    measures: Two
    runs: "pd.DataFrame"
    """A row for each: its `run`, its mean as `value` and `other_value` in the measures' own units and directions, and
    its `rank` and `other_rank` by them, 1 for the best; ties share their mean."""
    agreement: Agreement
    num_questions: int


def _sign(what: Measure) -> int:
    return 1 if what.higher_is_better else -1


def check(cfg: DictConfig) -> None:
    """Raises ValueError where `metrics` are neither two nor one, or one with `at_bytes`."""
    names = patterns(cfg.metrics) or []
    if not 1 <= len(names) == len(set(names)) <= 2:
        raise SettingValue(
            f"metrics={cfg.metrics} are not two measures; write metrics=[nll,score], or metrics=score to compare "
            "groups",
            setting="metrics",
        )
    if len(names) == 1 and cfg.at_bytes is not None:
        raise SettingsConflict(
            f"at_bytes={cfg.at_bytes} is for two measures; groups are compared by their runs: leave it out",
            setting="at_bytes",
        )


def _curves(group: Group, what: Measure, wanted: Bytes | None, notes: list[str]) -> dict[str, tuple[str, Curve]]:
    """Key -> label and values of every complete run but the full cache, or of every method at some bytes."""
    runs = [run for run in group.runs if run.method != FULL and run.complete]
    if wanted is None:
        return {run.key: (run.label, curve_of(run, what)) for run in runs}
    curves = {}
    for title, members in series_of(runs).items():
        try:
            curves[title] = title, at_bytes(title, members, what, wanted)
        except OutOfRange as error:
            if f"{error}" not in notes:
                notes.append(f"{error}")
    return curves


def _values(group: Group, what: Two, wanted: Bytes | None, notes: list[str]) -> _Values | None:
    """The values of a group; None where it has fewer than three runs, or no question that all of them have."""
    both = [_curves(group, item, wanted, notes) for item in what]
    keys = [key for key in both[0] if key in both[1] and both[0][key][1].values and both[1][key][1].values]
    common = shared(curves[key][1] for curves in both for key in keys)
    if len(keys) < FEWEST_RUNS or not common:
        notes.append(f"{group.title}: {len(keys)} runs with {len(common)} questions in common have no order")
        return None
    members = list(by_subset(common).values())
    first, second = (
        {key: strata_of(curves[key][1].values, members, curves[key][1].weighting) for key in keys} for curves in both
    )
    return _Values(
        labels={key: both[0][key][0] for key in keys},
        questions=[[question(group, sample) for sample in samples] for samples in members],
        columns=(first, second),
    )


def _ranking(title: str, what: Two, parts: Sequence[_Values], cfg: DictConfig) -> Ranking | None:
    """The order over one group, or over the mean of several; None where they share fewer than three runs."""
    import pandas as pd

    keys = [key for key in parts[0].labels if all(key in part.labels for part in parts)]
    if len(keys) < FEWEST_RUNS:
        return None
    questions, merged = [part.questions for part in parts], []
    runs: dict[str, Any] = {"run": [parts[0].labels[key] for key in keys]}
    for lead, side, item in zip(("", "other_"), (0, 1), what, strict=True):
        columns = [pool_strata(questions, [part.columns[side][key] for part in parts]) for key in keys]
        rows = zip(*(column.values for column in columns), strict=True)
        merged.append(Strata(tuple(_sign(item) * np.stack(row, axis=1) for row in rows), columns[0].weights))
        means = np.asarray(merged[-1].mean())
        runs |= {f"{lead}value": _sign(item) * means, f"{lead}rank": rankdata(-np.round(means, 12))}
    return Ranking(
        title=title,
        measures=what,
        runs=pd.DataFrame(runs, columns=["run", "value", "other_value", "rank", "other_rank"]),
        agreement=agreement(merged[0], merged[1], resamples=cfg.resamples, seed=cfg.seed),
        num_questions=merged[0].count,
    )


def rankings(groups: Sequence[Group], cfg: DictConfig) -> tuple[list[Ranking], list[str]]:
    """The orders of each group, and of the mean over the groups of each model and version of the code; and notes."""
    first, second = patterns(cfg.metrics) or []
    wanted = bytes_wanted(cfg.at_bytes)
    result: list[Ranking] = []
    notes: list[str] = []
    kins: dict[tuple, list[tuple[_Values, Two]]] = {}
    for group in groups:
        what = measure(first, group), measure(second, group)
        values = _values(group, what, wanted, notes)
        notes += [f"{group.title}: {why}" for why in map(group.unfit, what) if why]
        if values and (ranking := _ranking(group.title, what, [values], cfg)):
            result.append(ranking)
            kins.setdefault((group.model, group.runs[0].version), []).append((values, what))
    for (model, _), members in kins.items():
        title, (_, what) = f"mean over {len(members)} groups with {model}", members[0]
        if len(members) > 1 and (ranking := _ranking(title, what, [values for values, _ in members], cfg)):
            result.append(ranking)
    return result, notes


def words(ranking: Ranking) -> list[str]:
    """Sentences on the correlation, and on how much of it the questions decide."""
    names = [what.title for what in ranking.measures]
    agreement = ranking.agreement
    if agreement.value is None:
        return [f"no rank correlation: one of {' and '.join(names)} is the same for all {len(ranking.runs)} runs"]
    ends = terminal.NO_INTERVAL if agreement.interval is None else "[{:+.2f}, {:+.2f}]".format(*agreement.interval)
    text = f"Spearman's rank correlation of {len(ranking.runs)} runs over {ranking.num_questions} questions: "
    both = zip(names, agreement.halves, strict=True)
    halves = [f"{name} {'unknown' if half is None else f'{half:+.2f}'}" for name, half in both]
    last = f"each measure with itself, between two halves of the questions: {', '.join(halves)}"
    return [f"{text}{agreement.value:+.2f} {ends}", last]


def texts(ranking: Ranking) -> list[Part]:
    """An order as a table, and its correlation."""
    runs = ranking.runs.sort_values("rank", kind="stable")
    columns: list[tuple[str, list[str]]] = []
    for what, lead in zip(ranking.measures, ("", "other_"), strict=True):
        columns.append((f"{what.title}, {what.unit}", [number(value, what.scale) for value in runs[f"{lead}value"]]))
        columns.append(("rank", [f"{rank:g}" for rank in runs[f"{lead}rank"]]))
    return [Text(), Grid(title=ranking.title, names=list(runs["run"]), columns=columns), *map(line, words(ranking))]


def _correlation(agreement: Agreement) -> dict[str, Cell]:
    (low, high), (half, other_half) = agreement.interval or (None, None), agreement.halves
    return csv_row(correlation=agreement.value, low=low, high=high, half=half, other_half=other_half)


def records(ranking: Ranking) -> Iterator[dict[str, Cell]]:
    """Every run of an order, unrounded, with the correlation of its table."""
    group = csv_row(group=ranking.title, n=ranking.num_questions)
    metric, other = (what.key for what in ranking.measures)
    for row in ranking.runs.to_dict("records"):
        yield group | csv_row(run=row.pop("run"), metric=metric, other=other) | row | _correlation(ranking.agreement)


def _between(groups: Sequence[Group], metric: str, cfg: DictConfig) -> ViewResult:
    """Agreement of the groups' rankings of the runs by one measure."""
    pairs = between(groups, metric, cfg)
    if not pairs:
        raise NoResults(f"nothing to rank: no two of {len(groups)} groups share {FEWEST_RUNS} complete runs")
    legend = "\n[a, b]: 95 % percentile interval, the questions of each group resampled by themselves."
    return ViewResult(
        parts=[
            *(line(one.words) for one in pairs),
            *notes(note for group in groups for note in group.notes),
            Text(legend, style="dim"),
        ],
        frame=frame_of(
            csv_row(group=one.titles[0], other=one.titles[1], metric=metric, n=one.num_runs)
            | _correlation(one.agreement)
            for one in pairs
        ),
        names_files=False,
    )


def compute(groups: Sequence[Group], cfg: DictConfig) -> ViewResult:
    """The orders of all groups; raises ValueError where there is none."""
    if len(names := patterns(cfg.metrics) or []) == 1:
        return _between(groups, names[0], cfg)
    ranked, said = rankings(groups, cfg)
    said += [note for group in groups for note in group.notes]
    if not ranked:
        raise NoResults(f"nothing to rank. {sentences(said)}")
    legend = "\n[a, b]: 95 % percentile interval, questions resampled with all their answers."
    return ViewResult(
        parts=[*(part for one in ranked for part in texts(one)), *notes(said), Text(legend, style="dim")],
        frame=frame_of(record for one in ranked for record in records(one)),
    )


main = View(name="ranks", compute=compute, check=check)
