"""Stored runs, sorted into groups that may be compared: same model, same questions, same code. What
fits no group is named, never mixed in.
"""

import fnmatch
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from omegaconf import DictConfig, ListConfig, OmegaConf

from kvbench.config.files import FULL
from kvbench.evidence.runs import CONDITIONS, Group, StoredRun
from kvbench.results.record import RunRecord
from kvbench.results.sample import read_samples
from kvbench.show.labels import differing
from kvbench.show.text import LINE_LENGTH, MESSAGE_LENGTH, NAME_LENGTH, safe


def patterns(value: object) -> list[str] | None:
    """Read a setting that is a name, a list of names or null as a list of glob patterns; null means all."""
    if value is None:
        return None
    return [str(item) for item in value] if isinstance(value, ListConfig | list | tuple) else [str(value)]


def _matches(name: str, wanted: Sequence[str] | None) -> bool:
    return wanted is None or any(fnmatch.fnmatchcase(name, pattern) for pattern in wanted)


def fits_settings(settings: Mapping[str, object], where: Mapping[str, object]) -> bool:
    """True when a run has the settings, or one of several allowed values of each."""
    for key, value in where.items():
        allowed = list(value) if isinstance(value, Sequence | ListConfig) and not isinstance(value, str) else [value]
        if key not in settings or settings[key] not in allowed:
            return False
    return True


def load_groups(cfg: DictConfig, also: Sequence[str] = ()) -> list[Group]:
    """Read every run under `results_dir` that the filters let through, in groups that may be compared.

    Args:
        cfg: `results_dir`; `tasks`, `models`, `methods` (a name, a pattern, a list, or null for all); `where` (settings
            and their values, or null); `code` (`newest`, or the first digits of the hash of a version).
        also: Methods that the filters on method and settings let through in any case, beside the full cache.

    Raises:
        ValueError: The folder does not exist, or nothing in it fits the filters.
    """
    root = Path(cfg.results_dir)
    if not root.is_dir():
        raise ValueError(f"results_dir={cfg.results_dir} is not a folder; run an experiment first, or give its folder")
    where = OmegaConf.to_container(cfg.where, resolve=True) if OmegaConf.is_config(cfg.where) else cfg.where or {}
    if not isinstance(where, dict):
        raise ValueError(f"where={cfg.where} is not a list of settings; write it like 'where={{budget:0.25}}'")
    wanted_settings = {str(key): value for key, value in where.items()}
    filters = [patterns(cfg.get(name)) for name in ("tasks", "models", "methods")]
    # The reference is always there: without it nothing can be said of the others.
    if filters[2] is not None:
        filters[2] = [*filters[2], FULL, *also]
    runs, unreadable, seen = [], [], []
    for path in sorted(root.glob("*/*/*/*/run.json")):
        name = path.parent.relative_to(root).as_posix()
        seen.append(name)
        if not all(_matches(part, wanted) for part, wanted in zip(name.split("/"), filters, strict=False)):
            continue
        try:
            record = RunRecord.load(path.parent)
            if record is None:  # somebody removes the folder right now
                continue
            samples, damaged = read_samples(path.parent / "samples.jsonl", record.hash)
        except (ValueError, OSError) as error:
            unreadable.append(f"{name} is left out: {error}")
            continue
        for part in ("task", "model", "method", "message"):  # from here on they are text to be shown
            setattr(record, part, safe(getattr(record, part), MESSAGE_LENGTH if part == "message" else NAME_LENGTH))
        run = StoredRun(name=name, record=record, samples=samples, total=record.counts.total or None)
        if damaged and record.status not in ("running", "stopped"):
            unreadable.append(
                f"{name}: {damaged} lines of samples.jsonl are no whole record of this run and do not count"
            )
        if record.method in (FULL, *also) or fits_settings(run.settings, wanted_settings):
            runs.append(run)
    groups = _sort(runs, str(cfg.code))
    if not groups:
        raise ValueError(_nothing(cfg, seen, unreadable))
    for group in groups:
        mine = f"{group.runs[0].name.split('/')[0]}/" if group.runs else ""
        group.notes += [note for note in unreadable if note.startswith(mine)]
    return groups


def _nothing(cfg: DictConfig, seen: Sequence[str], unreadable: Sequence[str]) -> str:
    if unreadable:
        return f"no run under {cfg.results_dir} can be read; the first: {unreadable[0]}"
    if not seen:
        return f"there is no run under results_dir={cfg.results_dir}; `kvbench` makes one"
    parts = [sorted({name.split("/")[place] for name in seen}) for place in range(3)]
    there = "; ".join(
        f"{what}: {', '.join(names)}" for what, names in zip(("tasks", "models", "methods"), parts, strict=True)
    )
    return f"no run under results_dir={cfg.results_dir} fits tasks, models, methods and where. There are {there}"


def _question(run: StoredRun) -> str:
    """What two runs must share to be comparable, as text that can be sorted."""
    identity = run.record.identity
    task = {key: value for key, value in identity.get("task", {}).items() if key != "limit"}
    # Not the store: how large pages are changes no answer, and a byte budget is lifted for the full cache.
    parts = [task, *(identity.get(name) for name in ("model", "generation", "seed", "fidelity"))]
    return json.dumps([run.record.task, run.record.model, *parts], sort_keys=True)


def version(run: StoredRun) -> str:
    """The version of the code that computed the run, the method's own code apart, as text."""
    code = run.record.identity.get("code", {})
    libraries = (f"{name} {found}" for name, found in code.items() if name not in ("harness", "method"))
    return " ".join([code.get("harness", "")[:8], *libraries])


def _sort(runs: Sequence[StoredRun], code: str) -> list[Group]:
    by_question: dict[str, list[StoredRun]] = {}
    for run in runs:
        by_question.setdefault(_question(run), []).append(run)
    groups = []
    for key in sorted(by_question):
        members = by_question[key]
        first = members[0].record
        group = Group(task=first.task, model=first.model, title=f"{first.task} with {first.model}")
        group.runs = _usable(_one_version(members, code, group.notes), group.notes)
        if group.runs or group.notes:
            groups.append(group)
    _tell_apart(groups)
    for group in groups:
        _name(group)
        group.runs.sort(key=lambda run: (run.method != FULL, run.label))
    return groups


def _one_version(members: list[StoredRun], code: str, notes: list[str]) -> list[StoredRun]:
    """The runs of one version of the code: the asked one, or the one that ran last."""
    versions: dict[str, list[StoredRun]] = {}
    for run in members:
        versions.setdefault(version(run), []).append(run)
    chosen: str | None
    if code == "newest":
        chosen = max(versions, key=lambda name: max(run.record.started for run in versions[name]))
    else:
        chosen = next((name for name in sorted(versions) if name.startswith(code)), None)
    for name, others in sorted(versions.items()):
        if name != chosen:
            methods = ", ".join(sorted({run.method for run in others}))
            notes.append(
                f"{len(others)} runs of another version of the code are left out ({methods}; code={name.split()[0]} "
                f"shows them instead): made with {name}" + (f", these with {chosen}" if chosen else "")
            )
    return [] if chosen is None else versions[chosen]


def _usable(members: list[StoredRun], notes: list[str]) -> list[StoredRun]:
    """The runs whose samples count; says why the others do not."""
    total = max((run.total for run in members if run.complete and run.total), default=None)
    kept: dict[str, StoredRun] = {}
    for run in members:
        run.total = run.total or total
        if run.record.status == "failed":
            notes.append(f"{run.name} FAILED and is left out: {run.record.message}")
        elif not run.samples:
            notes.append(f"{run.name} is left out: it has no finished sample yet")
        else:
            same = json.dumps(
                [run.method, run.record.identity.get("method"), run.record.identity.get("store"), run.conditions],
                sort_keys=True,
            )
            old = kept.get(same)
            if old is not None:
                run, old = sorted((run, old), key=lambda item: item.record.started, reverse=True)
                notes.append(f"{old.name} is left out: {run.name} has the same settings and newer code of the method")
            kept[same] = run
    result = sorted(kept.values(), key=lambda run: run.name)
    for run in result:
        if not run.complete:
            notes.append(f"{run.name} is incomplete: {run.progress}; giving its command again finishes it")
    return result


def _tell_apart(groups: Sequence[Group]) -> None:
    """Add to the titles what differs between groups of the same task and model."""
    for group in groups:
        twins = [other for other in groups if (other.task, other.model) == (group.task, group.model)]
        if len(twins) == 1 or not group.runs:
            continue
        mine = group.runs[0]
        others = [other.runs[0].settings for other in twins if other is not group and other.runs]
        skip = {*mine.record.identity.get("method", {}), *CONDITIONS}
        words = differing({key: value for key, value in mine.settings.items() if key not in skip}, others)
        if words:
            group.title += f" ({', '.join(words)})"
    several = {title for title, count in Counter(group.title for group in groups).items() if count > 1}
    for group in groups:
        if group.title in several and group.runs:
            identity = group.runs[0].record.identity
            data = identity.get("task", {}).get("fingerprint", "")[:6]
            group.title += f" data {data} code {version(group.runs[0])[:8]}"
        group.title = safe(group.title, LINE_LENGTH)


def _name(group: Group) -> None:
    """Give every run a label: its method, and what tells it from the group's other runs of that method."""
    usual = Counter(run.conditions for run in group.runs).most_common(1)[0][0] if group.runs else ()
    for run in group.runs:
        mine, same = run.record.identity, [o.record.identity for o in group.runs if o.method == run.method]
        words = differing(mine.get("method", {}), [other.get("method", {}) for other in same])
        words += differing(mine.get("store", {}), [other.get("store", {}) for other in same])
        words += [
            f"{name.removesuffix('_size')} {value}"
            for name, value, common in zip(CONDITIONS, run.conditions, usual, strict=True)
            if value != common
        ]
        run.label = safe(" ".join([run.method, *words]), LINE_LENGTH)
    labels = Counter(run.label for run in group.runs)
    for run in group.runs:
        if labels[run.label] > 1:  # what was cut out told them apart
            run.label += f" {run.record.hash[:6]}"
