"""Stored runs with their samples, sorted into groups that may be compared.

A group has the same model, questions and code. A run that fits no group is reported, never mixed in.
"""

import fnmatch
import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from omegaconf import DictConfig, ListConfig, OmegaConf

from kvbench.config.files import FULL, GROUPS
from kvbench.errors import FileMissing, SettingValue, unknown_name
from kvbench.evidence.group import CONDITIONS, OF_TASK, Group, StoredRun
from kvbench.results.claims import direction, unchecked
from kvbench.results.faults import Read
from kvbench.results.faults import notes as notes_of
from kvbench.results.identity import differences
from kvbench.results.lines import read_samples
from kvbench.results.record import RunRecord
from kvbench.results.refusals import NoResults
from kvbench.show.labels import differing
from kvbench.show.text import LINE_LENGTH, MESSAGE_LENGTH, NAME_LENGTH, safe
from kvbench.show.unfit import flag_notes

# Below a folder of results. The last part is a pattern too: of a plain name, glob checks that it exists, and would
# silently skip a dangling link.
RUNS = "*/*/*/*/run[.]json"


def patterns(value: object) -> list[str] | None:
    """Read a setting that is a name, a list of names or null as a list of glob patterns; null means all."""
    if value is None:
        return None
    return [str(item) for item in value] if isinstance(value, ListConfig | list | tuple) else [str(value)]


def lets_through(wanted: Sequence[str] | None, name: str) -> bool:
    """True where one of some patterns is that of a name; None lets all through."""
    return wanted is None or any(fnmatch.fnmatchcase(name, one) for one in wanted)


def _short(key: str) -> str:
    """The name of a setting without that of its group."""
    group, _, name = key.partition(".")
    return name if name and group in GROUPS else key


def fits_settings(settings: Mapping[str, object], where: Mapping[str, object]) -> bool:
    """True when a run has the settings, or one of several allowed values of each.

    A null among them allows for runs that have no such setting.
    """
    for key, value in where.items():
        if isinstance(value, Sequence | ListConfig) and not isinstance(value, str):
            if settings.get(key) not in list(value):
                return False
        elif key not in settings or settings[key] != value:
            return False
    return True


def results_root(results_dir: object) -> Path:
    """The folder of results; raises ValueError where it is none."""
    root = Path(str(results_dir))
    if not root.is_dir():
        raise FileMissing(
            f"results_dir={results_dir} is not a folder; run an experiment first, or give its folder",
            setting="results_dir",
        )
    return root


def find_runs(
    root: Path, left_out: dict[str, str], filters: Sequence[Sequence[str] | None] = ()
) -> Iterator[tuple[Path, RunRecord]]:
    """Runs below a folder of results, sorted by name.

    `left_out` gets the name of each unreadable one with the reason; `filters` are patterns of task, model and method,
    where None passes all.
    """
    for path in sorted(root.glob(RUNS)):
        name = path.parent.relative_to(root).as_posix()
        wanted = zip(name.split("/"), filters, strict=False)
        if not all(lets_through(pattern, part) for part, pattern in wanted):
            continue
        try:
            record = RunRecord.load(path.parent)
        except (ValueError, OSError) as error:
            left_out[name] = str(error)
            continue
        if record is not None:  # else another process removes the folder right now
            yield path.parent, record


def load_groups(cfg: DictConfig, also: Sequence[str] = ()) -> list[Group]:
    """Read every run under `results_dir` that the filters let through, in groups that may be compared.

    Args:
        cfg: `results_dir`; `tasks`, `models`, `methods`, `where` and `code`, as in conf/command/compare.yaml.
        also: Methods that pass the filters on method and settings in any case, as the full cache does.

    Raises:
        ValueError: The folder does not exist, or nothing in it fits the filters.
    """
    root = results_root(cfg.results_dir)
    where = OmegaConf.to_container(cfg.where, resolve=True) if OmegaConf.is_config(cfg.where) else cfg.where or {}
    if not isinstance(where, dict):
        raise SettingValue(
            f"where={cfg.where} is not a list of settings; write it like 'where={{budget:0.25}}'", setting="where"
        )
    wanted_settings = {_short(str(key)): value for key, value in where.items()}
    filters = [patterns(cfg.get(name)) for name in ("tasks", "models", "methods")]
    # The reference is always there: without it nothing can be said of the others.
    if filters[2] is not None:
        filters[2] = [*filters[2], FULL, *also]
    runs, seen = list[StoredRun](), list[StoredRun]()
    reasons: dict[str, str] = {}
    damages: dict[str, int] = {}
    for folder, record in find_runs(root, reasons, filters):
        name = folder.relative_to(root).as_posix()
        try:
            samples, damaged = read_samples(folder / "samples.jsonl", record.hash, sealed=record.sealed)
        except (ValueError, OSError) as error:
            reasons[name] = str(error)
            continue
        for part in ("task", "model", "method", "message"):  # from here on they are text to be shown
            setattr(record, part, safe(getattr(record, part), MESSAGE_LENGTH if part == "message" else NAME_LENGTH))
        run = StoredRun(name=name, record=record, samples=samples, total=record.counts.total or None)
        if damaged and record.status not in ("running", "stopped"):
            if not samples:
                kind = "whole and sealed" if record.sealed else "whole"
                reasons[name] = f"none of the {damaged} lines of samples.jsonl is a {kind} record of this run"
                continue
            reasons[name], damages[name] = "", damaged
        seen.append(run)
        if record.method in (FULL, *also) or fits_settings(run.settings, wanted_settings):
            runs.append(run)
    known = {key for run in seen for key in run.settings}
    for key in wanted_settings if seen else ():
        if key not in known:
            raise unknown_name("where", key, known)
    unreadable = [
        f"{name}: {damages[name]} lines of samples.jsonl are no whole record of this run and do not count"
        if name in damages
        else f"{name} is left out: {reason}"
        for name, reason in reasons.items()
    ]
    groups, notes = _sort(runs, str(cfg.code))
    if not groups:
        raise NoResults(f"nothing can be shown. {sentences(notes)}" if notes else _nothing(cfg, root, unreadable))
    groups[0].notes += notes
    for note in unreadable:
        same_task = [group for group in groups if note.startswith(f"{group.runs[0].name.split('/')[0]}/")]
        for group in same_task or groups[:1]:
            group.notes.append(note)
    for group in groups:
        group.notes += _claimed(group)
        group.notes += notes_of([Read(label=r.label, record=r.record, samples=r.samples.values()) for r in group.runs])
        group.notes += flag_notes({run.label: run.samples.values() for run in group.runs})
    return groups


def _claimed(group: Group) -> list[str]:
    """Notes on claims of the runs on their metrics that are not checked."""
    claims = [{name: metric.higher_is_better for name, metric in run.record.metrics.items()} for run in group.runs]
    return list(dict.fromkeys(filter(None, (unchecked(group.task, one) for one in claims))))


def sentences(notes: Iterable[str]) -> str:
    """The first three of some notes, for the message of an error."""
    return " ".join(f"{note}." for note in list(notes)[:3])


def _nothing(cfg: DictConfig, root: Path, unreadable: Sequence[str]) -> str:
    if unreadable:
        return f"no run under {cfg.results_dir} can be read; the first: {unreadable[0]}"
    seen = [path.relative_to(root).parts for path in root.glob(RUNS)]
    if not seen:
        return f"there is no run under results_dir={cfg.results_dir}; `kvbench` makes one"
    parts = zip(("tasks", "models", "methods"), zip(*seen, strict=True), strict=False)
    there = "; ".join(f"{what}: {', '.join(sorted(set(names)))}" for what, names in parts)
    return f"no run under results_dir={cfg.results_dir} fits tasks, models, methods and where. There are {there}"


def _question(run: StoredRun) -> str:
    """Sortable key that two runs must share to be comparable."""
    identity = run.record.identity
    task = {key: value for key, value in identity.get("task", {}).items() if key != "limit"}
    # Not the store: how large pages are changes no answer, and a byte budget is lifted for the full cache.
    parts = [task, _grader(run), *(identity.get(name) for name in ("model", "generation", "seed", "fidelity"))]
    return json.dumps([run.record.task, run.record.model, *parts], sort_keys=True)


def _grader(run: StoredRun) -> dict[str, str]:
    """Entries of a run's code hashes for prompts and scoring."""
    code = run.record.identity.get("code", {})
    return {key: value for key, value in code.items() if key.partition(":")[0] in OF_TASK}


def _sort(runs: Sequence[StoredRun], code: str) -> tuple[list[Group], list[str]]:
    """The groups that have a run to show, and the notes of those that have none."""
    by_question: dict[str, list[StoredRun]] = {}
    for run in runs:
        by_question.setdefault(_question(run), []).append(run)
    groups: list[Group] = []
    orphaned: list[str] = []
    for _, members in sorted(by_question.items()):
        first = members[0].record
        group = Group(task=first.task, model=first.model, title=f"{first.task} with {first.model}")
        usable = _agreed(_usable(members, group.notes), group.notes)
        group.runs = _latest(_one_version(usable, code, group.notes), group.notes)
        if group.runs:
            groups.append(group)
        else:
            orphaned += group.notes
    _tell_apart(groups)
    for group in groups:
        _name(group)
        group.runs.sort(key=lambda run: (run.method != FULL, run.label))
    return groups, orphaned


def _usable(members: Sequence[StoredRun], notes: list[str]) -> list[StoredRun]:
    """Runs whose samples count; notes the reasons of the others, so that none hides an older run."""
    for run in members:
        if run.record.status == "failed":
            notes.append(f"{run.name} FAILED and is left out: {run.record.message}")
        elif not run.samples:
            notes.append(f"{run.name} is left out: it has no finished sample yet")
    return [run for run in members if run.samples and run.record.status != "failed"]


def _agreed(members: Sequence[StoredRun], notes: list[str]) -> list[StoredRun]:
    """Runs whose records claim of their metrics what most of those of the same question do; notes the others' claims.

    A task has one direction of each metric, one primary metric and one weighting.
    """

    def claims(run: StoredRun) -> str:
        metrics = run.record.metrics.items()
        said = [
            f"{name} {direction(metric.higher_is_better)}{', primary' * metric.primary}" for name, metric in metrics
        ]
        return f"{'; '.join(said)}; each {run.record.weighting} weighs the same" if said else ""

    usual = Counter(filter(None, map(claims, members))).most_common(1)
    odd = [run for run in members if claims(run) not in ("", *(claim for claim, _ in usual))]
    notes += [f"{run.name} is left out: it claims {claims(run)}; the others, {usual[0][0]}" for run in odd]
    return [run for run in members if run not in odd]


def _one_version(members: Sequence[StoredRun], code: str, notes: list[str]) -> list[StoredRun]:
    """The runs of one version of the code: of the requested ones, or of all, the one that ran last."""
    versions: dict[str, list[StoredRun]] = {}
    for run in members:
        versions.setdefault(run.version, []).append(run)
    matching = [name for name in versions if code == "newest" or name.startswith(code)]
    # Scores first: a version whose runs have none yet, or ran out of memory in every answer, hides no other.
    newest = {name: max((run.has_scores, run.record.started) for run in versions[name]) for name in matching}
    chosen = max(newest, key=newest.__getitem__, default="")
    for name, others in sorted(versions.items()):
        if name != chosen:
            methods = ", ".join(sorted({run.method for run in others}))
            notes.append(
                f"{len(others)} runs of another version of the code are left out ({methods}; code={name.split()[0]} "
                f"shows them instead): made with {name}" + (f", these with {chosen}" if chosen else "")
            )
    return versions.get(chosen, [])


def _latest(members: Sequence[StoredRun], notes: list[str]) -> list[StoredRun]:
    """Newest run of each method, setting and condition.

    Notes those that are incomplete, or have lost answers since.
    """
    total = max((run.total for run in members if run.complete and run.total), default=None)
    kept: dict[str, StoredRun] = {}
    for run in members:
        run.total = run.total or total
        if (old := kept.setdefault(run.key, run)) is not run:
            old, kept[run.key] = sorted((old, run), key=lambda item: item.record.started)
            new = kept[run.key]
            notes.append(f"{old.name} is left out: {new.name} {_newer(old, new)}")
    result = sorted(kept.values(), key=lambda run: run.name)
    open_runs = [run for run in result if not run.complete]
    if len(open_runs) == 1:
        (run,) = open_runs
        notes.append(f"{run.name} is incomplete: {run.progress}; giving its command again finishes it")
    elif open_runs:
        each = ", ".join(f"{run.name.split('/', 2)[-1]} {run.progress}" for run in open_runs)
        notes.append(f"{len(open_runs)} runs are incomplete; giving their commands again finishes them: {each}")
    for run in result:
        if run.complete and len(run.samples) < (run.total or 0):  # lines were taken out, or do not count
            notes.append(f"{run.name} was complete and has {run.progress}; giving its command again finishes it")
    return result


def _newer(old: StoredRun, new: StoredRun) -> str:
    """Note on the differences of a run to an older one of the same method, setting and condition."""
    differing = list(differences(old.record.identity, new.record.identity))
    others = "; ".join(f"{name} was {was} and is {now}" for name, was, now in differing if not name.startswith("code."))
    if others:
        return f"ran later with the same settings of the method ({safe(others, LINE_LENGTH)})"
    return "has the same settings and newer code of the method, or of the libraries that the method alone imports"


def _tell_apart(groups: Sequence[Group]) -> None:
    """Add the differing settings to the titles of groups of the same task and model."""
    for group in groups:
        twins = [other for other in groups if (other.task, other.model) == (group.task, group.model)]
        if len(twins) == 1:
            continue
        mine = group.runs[0]
        others = [other.runs[0].settings for other in twins if other is not group]
        skip = {*mine.record.identity.get("method", {}), *CONDITIONS}
        words = differing({key: value for key, value in mine.settings.items() if key not in skip}, others)
        if words:
            group.title += f" ({', '.join(words)})"
    several = {title for title, count in Counter(group.title for group in groups).items() if count > 1}
    for group in groups:
        if group.title in several:
            data = group.runs[0].record.identity.get("task", {}).get("fingerprint", "")[:6]
            group.title += f" data {data} code {group.runs[0].version[:8]}"
            if grader := _grader(group.runs[0]):
                group.title += f" grader {hashlib.sha256(json.dumps(grader).encode()).hexdigest()[:6]}"
        group.title = safe(group.title, LINE_LENGTH)


def _name(group: Group) -> None:
    """Label every run with its method and the settings that distinguish it from the group's other runs of it."""
    usual = Counter(run.conditions for run in group.runs).most_common(1)[0][0]
    for run in group.runs:
        mine, same = run.record.identity, [o.record.identity for o in group.runs if o.method == run.method]
        words = []
        for part in ("method", "store"):
            words += differing(mine.get(part, {}), [other.get(part, {}) for other in same])
        for name, value, common in zip(CONDITIONS, run.conditions, usual, strict=True):
            words += [f"{name.removesuffix('_size')} {value}"] if value != common else []
        run.label = safe(" ".join([run.method, *words]), LINE_LENGTH)
    labels = Counter(run.label for run in group.runs)
    for run in group.runs:
        if labels[run.label] > 1:  # what was cut out told them apart
            run.label += f" {run.record.hash[:6]}"
