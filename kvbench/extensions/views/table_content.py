"""Numbers of a paper's table, and the best of each column.

Rows are runs, columns are subsets, categories, lengths, or whole and cut prompts.

Groups that differ in nothing but their subsets (or, by length, in their length) make one table, so that subsets may be
run one by one.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby

from kvbench.config.files import FULL
from kvbench.evidence.frontier import Interval, score_interval
from kvbench.evidence.load import Group, StoredRun, sentences
from kvbench.evidence.samples import ENOUGH, SampleName, curve_of, measure, strata_of
from kvbench.results.measures import BENCHMARKS, Measure, plain_subset
from kvbench.results.refusals import NoResults
from kvbench.results.sample import SampleRecord
from kvbench.results.summary import sums
from kvbench.stats.paired import ALPHA, difference, holm
from kvbench.stats.strata import Strata

WHOLE, CUT = "whole", "cut"  # prompts as the task has them, and those that lost their middle
AVERAGE = "\0average"  # no subset is called so
Sample = tuple[str, str, int]  # subset, sample id, group


@dataclass(kw_only=True)
class Cell:
    """One number."""

    value: float
    interval: Interval | None
    """95 % interval; None where there are too few samples for one."""
    num_samples: int
    is_best: bool = False
    """The best of its column, or not to be told from it."""


@dataclass(kw_only=True)
class Row:
    """One method with its settings: runs of several groups."""

    label: str
    method: str
    runs: list[StoredRun] = field(default_factory=list)
    values: dict[str, dict[Sample, float]] = field(default_factory=dict)
    """Column -> sample -> value."""
    cells: dict[str, Cell] = field(default_factory=dict)
    """Column -> number; what is missing has none."""

    def held(self, what: Measure) -> float | None:
        """Memory of all samples: resident bytes as a share of an FP16 full cache of the same, or another measure."""
        above, below = sums([record for run in self.runs for record in run.samples.values()], what)
        return above / below if above and below else None


@dataclass(kw_only=True)
class PaperTable:
    """A table of one task and model."""

    title: str
    what: Measure
    held: Measure
    """Text next to the name of a run: its bytes."""
    columns: dict[str, str]
    """Key -> heading; the last is the average."""
    spans: list[tuple[str, int]]
    """Categories above the columns, with how many columns each has; empty without any."""
    rows: list[Row]
    notes: list[str]
    unfit: list[str]
    """Reasons why a column has no best: sentences printed before the table."""


def tables_of(groups: Sequence[Group], cfg: Mapping) -> list[PaperTable]:
    """Make the tables of some groups; raises ValueError where the metric does not exist, or nothing can be shown."""
    tables = (_table(members, cfg) for members in _merged(groups, cfg["by"]))
    filled = [table for table in tables if table.rows]
    if not filled:
        reasons = [note for group in groups for note in group.notes]
        raise NoResults(f"no table can be made. {sentences(reasons)}")
    return filled


def _merged(groups: Sequence[Group], by: str) -> list[list[Group]]:
    """Groups that make one table: no two of them have the same column."""
    result: dict[str, list[tuple[set[str], list[Group]]]] = {}
    for group in groups:
        first = group.runs[0]
        identity = first.record.identity
        protocol = dict(identity.get("task", {}).get("protocol", {}))
        protocol.pop("rules", None)  # of each subset by itself
        if by == "length":
            protocol.pop("length", None)
        parts = [identity.get(name) for name in ("model", "generation", "seed", "fidelity")]
        key = json.dumps([group.task, group.model, first.version, protocol, *parts], sort_keys=True)
        column = _column_of(group, by)
        mine = {column(record) for run in group.runs for record in run.samples.values()}
        for columns, members in result.setdefault(key, []):
            if not mine & columns:
                columns |= mine
                members.append(group)
                break
        else:
            result[key].append((mine, [group]))
    return [members for lists in result.values() for _, members in lists]


def _column_of(group: Group, by: str) -> Callable[[SampleRecord], str]:
    """Function from a sample to its column."""
    if by == "category":
        return lambda record: category_of(group.task, record["subset"])
    if by == "cut":
        return lambda record: CUT if record["truncated"] else WHOLE
    if by != "length":
        return lambda record: record["subset"]
    records = [record for run in group.runs for record in run.samples.values()]
    if all(record["meta"].get("length_bucket") for record in records):
        return lambda record: str(record["meta"]["length_bucket"])
    if all(record["subset"].endswith(f"/{record['meta'].get('length')}") for record in records):
        return lambda record: str(record["meta"]["length"])  # a task of several lengths, each with its subsets
    length = group.runs[0].record.protocol.get("length")
    if isinstance(length, int):
        return lambda record: str(length)
    return lambda record: _bucket(record["num_prompt_tokens_untruncated"])


def _bucket(tokens: int) -> str:
    """Power of two that a prompt fits in.

    `4k` has those of more than 2,048 and at most 4,096 tokens, `128` those of more than 64 and at most 128.
    """
    size = 1
    while size < tokens:
        size *= 2
    return f"{size // 1024}k" if size >= 1024 else str(size)


def _length_order(name: str) -> tuple[float, str]:
    digits = name.split("-")[0].rstrip("k+")
    return (float(digits) * (1024 if "k" in name else 1) if digits.isdigit() else 0.0, name)


def _table(groups: Sequence[Group], cfg: Mapping) -> PaperTable:
    first, by = groups[0], cfg["by"]
    what = measure(str(cfg["metric"]), first)
    notes = list(dict.fromkeys(note for group in groups for note in group.notes))
    why = [group.unfit(what) for group in groups]
    rows = _rows(groups, by, what, cfg["incomplete"], notes)
    there = sorted({key for row in rows for key in row.values})
    columns, spans = _headings(first.task, by, there)
    shared: dict[str, list[Sample]] = {}
    for key in columns:
        having = [row for row in rows if key in row.values]
        if having:
            shared[key] = sorted(set.intersection(*(set(row.values[key]) for row in having)))
            _fill(having, key, shared[key], first, what, cfg, is_fit=not any(why[index] for _, _, index in shared[key]))
            most = max(len(row.values[key]) for row in having)
            if len(shared[key]) < most:
                notes.append(f"{columns[key]}: over the {len(shared[key])} of {most} samples that all its rows have")
    whole = [row for row in rows if all(key in row.values for key in shared)]
    samples = [sample for members in shared.values() for sample in members]
    for row in whole:
        row.values[AVERAGE] = {sample: value for values in row.values.values() for sample, value in values.items()}
    if whole:
        _fill(whole, AVERAGE, samples, first, what, cfg, is_fit=not any(why))
    missing = [columns[key] for key in columns if key not in shared]
    count = len(columns) - len(missing)
    columns[AVERAGE] = f"Avg ({count} of {len(columns)})" if missing else "Avg"
    if missing:
        notes.append(f"missing, and not in the average: {', '.join(missing)}")
    for row in rows:
        lacks = [columns[key] for key in shared if key not in row.values]
        if lacks:
            notes.append(f"{row.label} has no average: it lacks {', '.join(lacks)}")
    if by == "category" and spans == [] and any(category_of(first.task, s[0]) != s[0] for s in samples):
        notes.append("the average is over subsets, not over categories, as in every other table")
    title = first.title if len(groups) == 1 else f"{first.task} with {first.model}"
    rows.sort(key=lambda row: (row.method != FULL, row.method, _natural(row.label)))
    named = [f"{group.title}: {reason}" for group, reason in zip(groups, why, strict=True) if reason]
    return PaperTable(
        title=title,
        what=what,
        held=next(iter(first.axes.values())),
        columns=columns,
        spans=spans,
        rows=rows,
        notes=notes,
        unfit=named,
    )


def _natural(label: str) -> list[tuple[float, str]]:
    """Sorts numbers in a label by size."""
    return [(float(v), "") if v.replace(".", "", 1).isdigit() else (-1.0, v) for v in label.replace("=", " ").split()]


def _headings(task: str, by: str, there: list[str]) -> tuple[dict[str, str], list[tuple[str, int]]]:
    """The columns with their headings, and the categories above them."""
    if by == "length":
        return {key: key for key in sorted(there, key=_length_order)}, []
    if by == "category":
        known = list(BENCHMARKS.get(task, {}))
        return {name: name for name in (known if set(there) <= set(known) else there)}, []
    if by == "cut":
        return {name: name for name in (WHOLE, CUT) if name in there}, []
    names = _subsets_of(task, there)
    spans = [(part, len(list(members))) for part, members in groupby(names, partial(category_of, task))]
    is_known = any(category_of(task, name) != name for name in names)
    return {name: _title_of(task, name) for name in names}, spans if is_known else []


def _rows(groups: Sequence[Group], by: str, what: Measure, incomplete: bool, notes: list[str]) -> list[Row]:
    """The rows before anything is computed: the same method, settings and conditions in all groups."""
    rows: dict[str, Row] = {}
    for index, group in enumerate(groups):
        column = _column_of(group, by)
        repeats = {run.name for run in group.repeats}
        whole = [_by_column(run, column) for run in group.runs if run.complete]
        sizes = {name: max(len(held.get(name, ())) for held in whole) for name in set().union(*whole)}
        for run in group.runs:
            if run.name in repeats:
                continue
            if not run.complete and not incomplete:
                notes.append(f"{run.label} is not shown: it is incomplete ({run.progress})")
                continue
            key = run.key if run.method != FULL else run.method_key
            row = rows.setdefault(key, Row(label=run.label, method=run.method))
            row.runs.append(run)
            values = curve_of(run, what).values
            for name, members in _by_column(run, column).items():
                ok = {(*sample, index): values[sample] for sample in members if sample in values}
                if run.complete and len(ok) < ENOUGH * sizes[name]:
                    notes.append(
                        f"{run.label} has no {name}: only {len(ok)} of {sizes[name]} samples ended well with a value"
                    )
                elif ok:
                    row.values.setdefault(name, {}).update(ok)
    return [row for row in rows.values() if row.values]


def _by_column(run: StoredRun, column: Callable[[SampleRecord], str]) -> dict[str, set[SampleName]]:
    result: dict[str, set[SampleName]] = {}
    for record in run.samples.values():
        result.setdefault(column(record), set()).add((record["subset"], record["sample_id"]))
    return result


def _fill(
    rows: Sequence[Row], key: str, samples: Sequence[Sample], group: Group, what: Measure, cfg: Mapping, *, is_fit: bool
) -> None:
    """Put one column into the rows that have it, and mark what is best where anything can be judged by it."""
    if not samples:
        return
    by_subset: dict[tuple[str, int], list[Sample]] = {}
    for sample in samples:
        by_subset.setdefault((sample[0], sample[2]), []).append(sample)
    weighting = group.runs[0].record.weighting
    known: list[tuple[Cell, Strata]] = []  # of all but the full cache
    for row in rows:
        strata = strata_of(row.values[key], by_subset.values(), weighting)
        interval = score_interval(strata, what)
        row.cells[key] = Cell(value=float(strata.mean()), interval=interval, num_samples=len(samples))
        if row.method != FULL:
            known.append((row.cells[key], strata))
    if len(known) < 2 or not is_fit:
        return
    sign = 1 if what.higher_is_better else -1
    best = max(known, key=lambda one: sign * one[0].value)
    best[0].is_best = True
    rivals = [one for one in known if one is not best]
    how = {"bounded": what.bounded, "resamples": cfg["resamples"], "seed": cfg["seed"]}
    p_values = [difference(best[1], strata, **how).p for _, strata in rivals]
    for (cell, _), p in zip(rivals, holm(p_values), strict=True):
        cell.is_best = p is None or p >= ALPHA


def category_of(task: str, subset: str) -> str:
    """The category that the benchmark's paper puts a subset in; the subset itself where there is none."""
    return next((name for name, part in BENCHMARKS.get(task, {}).items() if plain_subset(subset) in part), subset)


def _subsets_of(task: str, there: list[str]) -> list[str]:
    """Columns of a task: all subsets of a known benchmark, in its order, else those that some run has."""
    known = [name for part in BENCHMARKS.get(task, {}).values() for name in part]
    if there and {plain_subset(name) for name in there} <= set(known):
        extended = all(name.endswith("_e") for name in there)
        # LongBench-E has no narrativeqa, musique and qmsum, and its columns are not LongBench's.
        return known if not extended else [f"{name}_e" for name in known if f"{name}_e" in there]
    return there


def _title_of(task: str, subset: str) -> str:
    """The short name that papers give a subset, or its own."""
    known = {name: title for part in BENCHMARKS.get(task, {}).values() for name, title in part.items()}
    if plain_subset(subset) not in known:
        return subset
    return known[plain_subset(subset)] + ("-E" if subset.endswith("_e") else "")
