"""`kvbench ranks`: do two measures put the runs in the same order, or do they contradict each other?"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from omegaconf import DictConfig
from rich.text import Text
from scipy.stats import rankdata

from kvbench.config.files import FULL
from kvbench.errors import check_whole
from kvbench.evidence.averages import together
from kvbench.evidence.budget_curves import OutOfRange, at_bytes, series_of
from kvbench.evidence.compare import check_at_bytes
from kvbench.evidence.frontier import Question, key_of_run, question
from kvbench.evidence.load import load_groups, patterns, version
from kvbench.evidence.pairing import Curve, curve_of, measure, strata
from kvbench.evidence.runs import Group
from kvbench.results.measures import Measure
from kvbench.results.writing import write_file
from kvbench.show import terminal
from kvbench.show.csv_file import Cell, csv_bytes
from kvbench.show.terminal import number
from kvbench.stats.ranks import FEWEST_RUNS, Agreement, agreement
from kvbench.stats.strata import Strata, weighed

Bytes = float | tuple[float, float] | None


@dataclass(frozen=True, kw_only=True)
class _Values:
    """What the runs of one group have under both measures, on the questions that all of them have."""

    labels: dict[str, str]
    """Key of a run in any group -> label."""
    questions: list[list[Question]]
    columns: tuple[dict[str, Strata], dict[str, Strata]]
    """Of each measure: key -> a value for each question, larger where better."""


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """Some runs in the orders of two measures."""

    title: str
    labels: list[str]
    measures: tuple[Measure, Measure]
    means: tuple[np.ndarray, np.ndarray]
    """[runs] in the measures' own units and directions."""
    found: Agreement
    num_questions: int

    @property
    def ranks(self) -> tuple[np.ndarray, np.ndarray]:
        """[runs] of each measure, 1 for the best; ties share their mean."""
        signs = (-1 if what.higher_is_better else 1 for what in self.measures)
        return tuple(rankdata(sign * np.round(m, 12)) for sign, m in zip(signs, self.means, strict=True))


def check(cfg: DictConfig) -> None:
    """Check the settings.

    Raises:
        ValueError: Names the setting, its value and the rule.
    """
    names = patterns(cfg.metrics) or []
    if len(names) != 2 or len(set(names)) != 2:
        raise ValueError(f"metrics={cfg.metrics} are not two measures; write metrics=[nll,score]")
    check_at_bytes(cfg.at_bytes)
    for name, least in (("resamples", 100), ("seed", 0)):
        check_whole(name, cfg[name], least)


def _curves(group: Group, what: Measure, wanted: Bytes, notes: list[str]) -> dict[str, tuple[str, Curve]]:
    """Key -> label and values of every complete run but the full cache, or of every method at some bytes."""
    runs = [run for run in group.runs if run.method != FULL and run.complete]
    if wanted is None:
        return {key_of_run(run): (run.label, curve_of(run, what)) for run in runs}
    found = {}
    for title, members in series_of(runs).items():
        try:
            found[title] = title, at_bytes(title, members, what, wanted)
        except OutOfRange as error:
            if f"{error}" not in notes:
                notes.append(f"{error}")
    return found


def _values(group: Group, what: tuple[Measure, Measure], wanted: Bytes, notes: list[str]) -> _Values | None:
    """The values of a group; None where it has fewer than three runs, or no question that all of them have."""
    both = [_curves(group, item, wanted, notes) for item in what]
    keys = [key for key in both[0] if key in both[1] and both[0][key][1].values and both[1][key][1].values]
    shared = set.intersection(*(set(curves[key][1].values) for curves in both for key in keys)) if keys else set()
    if len(keys) < FEWEST_RUNS or not shared:
        notes.append(f"{group.title}: {len(keys)} runs with {len(shared)} questions in common have no order")
        return None
    members = strata(shared)

    def column(curve: Curve, sign: int) -> Strata:
        return weighed([[sign * curve.values[s] for s in own] for own in members.values()], curve.weighting)

    found = [
        {key: column(curves[key][1], 1 if item.higher_is_better else -1) for key in keys}
        for curves, item in zip(both, what, strict=True)
    ]
    return _Values(
        labels={key: both[0][key][0] for key in keys},
        questions=[[question(group, s) for s in own] for own in members.values()],
        columns=(found[0], found[1]),
    )


def _ranking(title: str, what: tuple[Measure, Measure], parts: Sequence[_Values], cfg: DictConfig) -> Ranking | None:
    """The order over one group, or over the mean of several; None where they share fewer than three runs."""
    keys = [key for key in parts[0].labels if all(key in part.labels for part in parts)]
    if len(keys) < FEWEST_RUNS:
        return None
    questions, joined = [part.questions for part in parts], []
    for side in (0, 1):
        columns = [together(questions, [part.columns[side][key] for part in parts]) for key in keys]
        rows = zip(*(column.values for column in columns), strict=True)
        joined.append(Strata(tuple(np.stack(row, axis=1) for row in rows), columns[0].weights))
    means = [
        (1 if item.higher_is_better else -1) * np.asarray(side.mean()) for item, side in zip(what, joined, strict=True)
    ]
    return Ranking(
        title=title,
        labels=[parts[0].labels[key] for key in keys],
        measures=what,
        means=(means[0], means[1]),
        found=agreement(joined[0], joined[1], resamples=cfg.resamples, seed=cfg.seed),
        num_questions=joined[0].count,
    )


def rankings(groups: Sequence[Group], cfg: DictConfig) -> tuple[list[Ranking], list[str]]:
    """The orders of each group, and of the mean over the groups of each model and version of the code.

    Args:
        groups: The runs.
        cfg: The settings in conf/command/ranks.yaml.

    Returns:
        The orders, and a sentence for each thing left out.
    """
    names = patterns(cfg.metrics) or []
    wanted: Bytes = None
    if isinstance(cfg.at_bytes, int | float):
        wanted = float(cfg.at_bytes)
    elif cfg.at_bytes is not None:
        wanted = (float(cfg.at_bytes[0]), float(cfg.at_bytes[1]))
    found: list[Ranking] = []
    notes: list[str] = []
    kins: dict[tuple, list[tuple[_Values, tuple[Measure, Measure]]]] = {}
    for group in groups:
        if not group.runs:
            continue
        what = measure(names[0], group), measure(names[1], group)
        values = _values(group, what, wanted, notes)
        ranking = _ranking(group.title, what, [values], cfg) if values else None
        if values and ranking:
            found.append(ranking)
            kins.setdefault((group.model, version(group.runs[0])), []).append((values, what))
    for (model, _), members in kins.items():
        if len(members) > 1:
            title = f"mean over {len(members)} groups with {model}"
            ranking = _ranking(title, members[0][1], [values for values, _ in members], cfg)
            found += [ranking] if ranking else []
    return found, notes


def words(ranking: Ranking) -> list[str]:
    """What the correlation is, and how much of it the questions decide."""
    names = [what.title for what in ranking.measures]
    found = ranking.found
    if found.value is None:
        return [f"no rank correlation: one of {' and '.join(names)} is the same for all {len(ranking.labels)} runs"]
    ends = "[no interval]" if found.interval is None else "[{:+.2f}, {:+.2f}]".format(*found.interval)
    text = f"Spearman's rank correlation of {len(ranking.labels)} runs over {ranking.num_questions} questions: "
    lines = [f"{text}{found.value:+.2f} {ends}"]
    both = zip(names, found.halves, strict=True)
    halves = [f"{name} {'unknown' if half is None else f'{half:+.2f}'}" for name, half in both]
    return [*lines, f"each measure with itself, between two halves of the questions: {', '.join(halves)}"]


def _show(ranking: Ranking) -> None:
    console = terminal.console(120)
    table = terminal.plain_table(ranking.title)
    terminal.add_names(table, "run", ranking.labels)
    for what in ranking.measures:
        for heading in (f"{what.title}, {what.unit}", "rank"):
            table.add_column(heading, justify="right", no_wrap=True)
    ranks = ranking.ranks
    for index in np.argsort(ranks[0], kind="stable"):
        cells = []
        for what, means, places in zip(ranking.measures, ranking.means, ranks, strict=True):
            cells += [number(float(means[index]), what.scale), f"{places[index]:g}"]
        table.add_row(ranking.labels[index], *cells)
    console.print()
    console.print(table)
    for line in words(ranking):
        console.print(Text(line), soft_wrap=True)


def csv_of(found: Sequence[Ranking]) -> bytes:
    """Every run of every order, unrounded, with the correlation of its table."""
    headings = "group,n,run,metric,other,value,other_value,rank,other_rank".split(",")
    headings += "correlation,low,high,half,other_half".split(",")
    rows: list[list[Cell]] = []
    for ranking in found:
        of_all = [ranking.found.value, *(ranking.found.interval or (None, None)), *ranking.found.halves]
        for index, label in enumerate(ranking.labels):
            values = [float(part[index]) for part in (*ranking.means, *ranking.ranks)]
            names = [what.key for what in ranking.measures]
            rows.append([ranking.title, ranking.num_questions, label, *names, *values, *of_all])
    return csv_bytes(headings, rows)


def main(cfg: DictConfig) -> int:
    """Carry out `kvbench ranks`.

    Args:
        cfg: The settings in conf/command/ranks.yaml.

    Returns:
        0.

    Raises:
        ValueError: A setting is wrong, or no three runs share a question.
    """
    check(cfg)
    found, notes = rankings(load_groups(cfg), cfg)
    if not found:
        raise ValueError(f"nothing to rank. {' '.join(notes[:3])}")
    for ranking in found:
        _show(ranking)
    console = terminal.console(120)
    for note in notes:
        console.print(Text(f"! {note}"), soft_wrap=True)
    console.print(Text("\n[a, b]: 95 % percentile interval, questions resampled with all their answers.", style="dim"))
    if cfg.out is not None:
        write_file(Path(str(cfg.out)), csv_of(found))
        terminal.print_paths([Path(str(cfg.out))], console)
    return 0
