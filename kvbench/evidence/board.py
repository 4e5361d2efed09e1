"""`kvbench board`: one page of many submitted folders. Each method is compared with the full cache of its own folder; a
folder in which anything does not fit is named, and ranks nowhere."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import fmean

from omegaconf import DictConfig, OmegaConf
from rich.text import Text

from kvbench.evidence import across
from kvbench.evidence.compare import compare_group, correct, legend
from kvbench.evidence.compared import ComparedRun, count
from kvbench.evidence.load import Group, StoredRun, load_groups, patterns
from kvbench.evidence.report import environment, fill
from kvbench.evidence.settings import check as check_settings
from kvbench.evidence.submission import NAME, RANDOM, Checked, check, question_of
from kvbench.results import summary
from kvbench.results.identity import HASH_DIGITS
from kvbench.results.measures import RESIDENT
from kvbench.results.sample import Key
from kvbench.results.writing import write_file
from kvbench.show import terminal
from kvbench.show.labels import label_runs
from kvbench.show.progress import format_bytes
from kvbench.show.terminal import number
from kvbench.show.text import MESSAGE_LENGTH, safe

TIE = 1e-9  # means and shares within this of each other are the same
MOST_FAULTS = 20  # of a folder that are shown


@dataclass(kw_only=True)
class Entry:
    """One submitted folder."""

    name: str
    checked: Checked
    groups: list[Group] = field(default_factory=list)
    rows: list[list[ComparedRun]] = field(default_factory=list)
    """Of each group."""
    notes: list[str] = field(default_factory=list)

    @property
    def faults(self) -> list[str]:
        """What does not fit; with any it ranks nowhere."""
        return self.checked.faults

    @property
    def runs(self) -> list[StoredRun]:
        """All that are shown."""
        return [run for group in self.groups for run in group.runs]


@dataclass(kw_only=True)
class Row:
    """A method on a board: one run for each task."""

    entry: Entry
    own: bool
    """The author's, and none of kvbench's."""
    runs: list[ComparedRun]
    folders: list[str]
    """All that have it."""

    @cached_property
    def mean(self) -> float:
        """The mean over tasks of the difference to the full cache, as a share; larger is better."""
        return fmean(row.value * (1 if row.what.higher_is_better else -1) for row in self.runs)

    @cached_property
    def held(self) -> float | None:
        """Resident bytes as a share of an FP16 full cache, the mean over tasks; None where a run says nothing of it."""
        found = [summary.ledger(list(row.run.samples.values())) for row in self.runs if row.run]
        shares = [ledger.get(f"{RESIDENT.name}_ratio") for ledger in found]
        known = [share for share in shares if share is not None]
        return fmean(known) if known and len(known) == len(self.runs) else None

    def beats(self, other: "Row") -> bool:
        """It holds no more bytes, and is better by its estimate."""
        mine, theirs = self.held, other.held
        return mine is not None and theirs is not None and mine <= theirs + TIE and self.mean > other.mean + TIE


def folders_of(given: Iterable[str]) -> list[Path]:
    """The submitted folders that words name: each itself, or those that lie in it."""
    found: list[Path] = []
    for word in given:
        root = Path(word).expanduser()
        if not root.is_dir():
            raise ValueError(
                f"folders={word} is no folder; give those that `kvbench submit` made, or one that has them"
            )
        inside = [path for path in sorted(root.iterdir()) if path.is_dir() and not path.name.startswith(".")]
        is_one = (root / NAME).exists() or not any((path / NAME).exists() for path in inside)
        found += [root] if is_one else inside
    if not found:
        raise ValueError("board needs folders that `kvbench submit` made: kvbench board FOLDER ...")
    return found


def read(roots: Sequence[Path], cfg: DictConfig) -> list[Entry]:
    """Check the folders, each by itself and beside the others, and compare the runs of those in which all fits."""
    names = Counter(root.resolve().name for root in roots)
    entries = []
    for root in roots:
        name = root.resolve().name
        entries.append(Entry(name=safe(name if names[name] == 1 else root), checked=check(root)))
    _check_together(entries)
    for root, entry in zip(roots, entries, strict=True):
        if not entry.faults:
            entry.groups = load_groups(OmegaConf.merge(cfg, {"results_dir": str(root), "code": "newest"}))  # type: ignore[arg-type]
            _check_version(entry, cfg.version)
    for entry in entries:
        for group in entry.groups:
            rows, notes = compare_group(group, cfg)
            entry.rows.append(rows)
            entry.notes += [f"{group.title}: {note}" for note in (*group.notes, *notes)]
        if any(run.record.git.dirty for run in entry.runs):
            entry.notes.append("kvbench had uncommitted changes when these runs were made")
    correct([row for entry in entries for rows in entry.rows for row in rows])
    return entries


def _check_together(entries: Sequence[Entry]) -> None:
    """Name the folders that are there twice, and those that answered other samples than the others did to the same
    question."""
    first: dict[str, Entry] = {}
    for entry in entries:
        if entry.checked.digest and first.setdefault(entry.checked.digest, entry) is not entry:
            entry.faults.append(f"is a copy of {first[entry.checked.digest].name}")
    good = [entry for entry in entries if not entry.faults]
    for question in {question: None for entry in good for question in entry.checked.asked}:
        asked = [(entry, frozenset(entry.checked.asked.get(question, {}).items())) for entry in good]
        asked = [(entry, samples) for entry, samples in asked if samples]
        counts = Counter(samples for _, samples in asked)
        usual = max(counts, key=lambda samples: (counts[samples], len(samples)))
        for entry, samples in asked:
            if samples != usual:
                same = f"{len(samples & usual)} of the {len(usual)} samples"
                entry.faults.append(
                    f"answers {same} that {counts[usual]} other folders were asked by the same settings"
                )


def _check_version(entry: Entry, wanted: object) -> None:
    """Name a folder whose runs are not of the code that the board is for."""
    found = {(run.record.git.commit, run.record.identity.get("code", {}).get("harness", "")) for run in entry.runs}
    if wanted is not None and not all(any(one.startswith(str(wanted)) for one in pair) for pair in found):
        codes = ", ".join(sorted(f"{commit[:HASH_DIGITS] or 'no commit'} / {own[:8]}" for commit, own in found))
        entry.faults.append(f"is of another version of the code than version={wanted}: commit / harness {codes}")
        entry.groups = []


def boards(entries: Sequence[Entry]) -> list[dict]:
    """A table of methods for each model and set of questions, as the page shows it."""
    by_asked: dict[tuple[str, ...], list[tuple[Entry, list[int]]]] = {}
    for entry in entries:
        models = dict.fromkeys(group.model for group in entry.groups)
        for model in models:
            places = [number for number, group in enumerate(entry.groups) if group.model == model]
            key = tuple(question_of(entry.groups[number].runs[0].record) for number in places)
            by_asked.setdefault(key, []).append((entry, places))
    return [_board(members) for members in by_asked.values()]


def _board(members: Sequence[tuple[Entry, list[int]]]) -> dict:
    rows: dict[str, Row] = {}
    for entry, places in members:
        by_key = [{row.run.method_key: row for row in entry.rows[number] if row.run} for number in places]
        for key in by_key[0]:
            runs = [own[key] for own in by_key if key in own]
            first = runs[0].run
            if first is None or len(runs) < len(places):
                continue
            code = first.record.identity.get("code", {}).get("method", "")
            own = first.method in entry.checked.submission.methods
            row = rows.setdefault(f"{key} {code}", Row(entry=entry, own=own, runs=runs, folders=[]))
            row.folders.append(entry.name)
    found = list(rows.values())
    beaten = {id(row): sum(other.beats(row) for other in found) for row in found}
    found.sort(key=lambda row: (beaten[id(row)], row.held or 0.0, row.runs[0].label))
    groups = [members[0][0].groups[number] for number in members[0][1]]
    unfit = [row.pairs.unfit for each in found for row in each.runs if row.pairs.unfit]
    shown = []
    labels = label_runs([each.run.record for row in found if (each := row.runs[0]).run])
    for row, label in zip(found, labels, strict=True):
        place = "-" if any(each.pairs.unfit for each in row.runs) else str(1 + beaten[id(row)])
        several = f", in {len(row.folders)} folders" if len(row.folders) > 1 else ""
        whose = ", ".join(row.folders) if row.own else f"kvbench's own{several}"
        cells = [{"text": place, "style": ""}, {"text": whose, "style": "left wrap"}]
        cells += [across.cell_of(each) for each in row.runs]
        chance = _chance(row)
        texts = [number(row.mean, row.runs[0].what.scale, True), *across.costs_of(row.runs)]
        texts += [chance, " + ".join(count(each) for each in row.runs)]
        shown.append({"label": label, "cells": cells + [{"text": text, "style": ""} for text in texts]})
    tasks = [group.title.removesuffix(f" with {group.model}") for group in groups]
    unit = found[0].runs[0].what.unit if found else ""
    return {
        "title": f"{' + '.join(group.task for group in groups)} with {groups[0].model}",
        "headings": ["method", "place", "from", *tasks, f"mean, {unit}", f"{RESIDENT.short} %", "ms / token"]
        + ["random: mean at %", "n"],
        "rows": shown,
        "unfit": list(dict.fromkeys(unfit)),
        "apart": True,
        "note": "Difference to the full cache of the same folder, on the same samples, with its 95 % interval, in the "
        "colour of the verdict. The place is 1, and one more for every row that holds no more bytes and loses less on "
        "the mean: an estimate, and no test.",
    }


def _chance(row: Row) -> str:
    """The mean of the same folder's `random` with the nearest bytes on the first task, and these bytes."""
    entry, held = row.entry, row.held
    wanted = {question_of(each.run.record) for each in row.runs if each.run}
    by_key: dict[str, list[ComparedRun]] = {}
    for own in (each for rows in entry.rows for each in rows if each.run and each.run.method == RANDOM):
        if own.run and question_of(own.run.record) in wanted:
            by_key.setdefault(own.run.method_key, []).append(own)
    found = [Row(entry=entry, own=False, runs=runs, folders=[]) for runs in by_key.values()]
    found = [one for one in found if len(one.runs) == len(row.runs) and one.held is not None]
    if held is None or not found:
        return "-"
    nearest = min(found, key=lambda one: abs((one.held or 0.0) - held))
    at = f"{RESIDENT.scale * (nearest.held or 0.0):.1f}"
    return f"{number(nearest.mean, nearest.runs[0].what.scale, True)} at {at}"


def folders_table(entries: Sequence[Entry]) -> dict:
    """A row for each folder: what was found, and what its runs are of."""
    first: dict[str, dict[Key, str]] = {}  # question -> the full cache's answers in the first folder that has it
    rows = []
    for entry in entries:
        same = total = 0
        scores = []
        for group in entry.groups:
            reference = group.reference
            if reference is None:
                continue
            said = {key: sample["text"] for key, sample in reference.samples.items()}
            theirs = first.setdefault(question_of(reference.record), said)
            same, total = same + sum(theirs.get(key) == text for key, text in said.items()), total + len(said)
            metric = reference.record.metrics.get(reference.record.primary)
            scores.append(f"{group.task} {number(metric.value if metric else None, 100.0)}")
        facts = dict(environment(entry.groups[0])) if entry.groups else {}
        state, style = ("fits", "better") if not entry.faults else (f"{len(entry.faults)} things do not fit", "worse")
        texts = [", ".join(safe(name) for name in entry.checked.submission.methods) or "-", str(len(entry.runs) or "-")]
        texts += ["; ".join(scores) or "-", f"{same} of {total}" if total else "-"]
        texts += [facts.get(name, "-") for name in ("device", "kvbench", "git", "torch")]
        texts.append(entry.checked.digest[:16] or "-")
        cells = [{"text": state, "style": style}, *({"text": text, "style": "left wrap"} for text in texts)]
        rows.append({"label": entry.name, "cells": cells})
    return {
        "headings": ["folder", "checks", "methods", "runs", "full", "full as in the first folder", "device", "kvbench"]
        + ["git", "torch", "hash of submission.json"],
        "rows": rows,
        "apart": True,
        "note": "Checked in each: the hash of every file, the seal of every line, the hash of every run's settings, "
        "its place, its numbers against its samples, the samples of all runs against those of full, and that full and "
        "random are there. Device, versions and commit are what the author's machine said.",
    }


def _shown(faults: Sequence[str]) -> list[str]:
    """The first faults of a folder, which may hold any text."""
    first = [safe(fault, MESSAGE_LENGTH) for fault in faults[:MOST_FAULTS]]
    return first + [f"and {len(faults) - MOST_FAULTS} more"] * (len(faults) > MOST_FAULTS)


def main(cfg: DictConfig) -> int:
    """Carry out `kvbench board`."""
    check_settings(cfg)
    wanted = {"tasks": None, "models": None, "methods": None, "where": None, "against": "full"}
    cfg = OmegaConf.create({**OmegaConf.to_container(cfg), **wanted})  # type: ignore[dict-item]
    entries = read(folders_of(patterns(cfg.folders) or ()), cfg)
    family = sum(len(rows) for entry in entries for rows in entry.rows)
    made = fill(
        "board.html.jinja",
        title=str(cfg.title),
        entries=entries,
        faulty=[{"name": entry.name, "faults": _shown(entry.faults)} for entry in entries if entry.faults],
        boards=boards([entry for entry in entries if not entry.faults]),
        folders=folders_table(entries),
        legend=legend(family)[:1] + legend(family)[2:4],
    )
    write_file(out := Path(str(cfg.out)), made)
    console = terminal.console()
    for entry in entries:
        what = f"{len(entry.faults)} things do not fit" if entry.faults else f"fits, {len(entry.runs)} runs"
        console.print(Text(f"{entry.name}: {what}"), soft_wrap=True)
        terminal.print_notes(_shown(entry.faults), console)
    console.print(Text(f"{out} ({format_bytes(len(made))})", overflow="fold"), soft_wrap=True)
    return 0
