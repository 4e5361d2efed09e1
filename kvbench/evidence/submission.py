"""A folder that an author hands to a board, and what does not fit in one.

FOLDER/
    submission.json                     `Submission` below: the author's methods and the hash of every other file
    <task>/<model>/<method>/<hash>/     run.json, config.yaml and samples.jsonl of each run
    code/                               the methods' source and YAML, as `--config-dir` takes them

Seals and hashes find accidents and careless edits, and name the place. They are no signature: who makes every hash anew
hands in another folder, and only the same runs once more (`kvbench rerun`) can tell.
"""

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from kvbench.config import files
from kvbench.config.code import hash_files
from kvbench.config.files import FULL
from kvbench.config.settings import read_data
from kvbench.evidence.load import find_runs
from kvbench.results import summary
from kvbench.results.identity import run_folder
from kvbench.results.lines import journal_lines
from kvbench.results.record import RunRecord
from kvbench.results.sample import Key, SampleRecord, key_of
from kvbench.results.typed import parse, read_json
from kvbench.rules.files import read_regular

NAME = "submission.json"
CODE = "code"
RANDOM = "random"  # what every board has beside a method: the same tokens kept by chance
KEPT = ("run.json", "config.yaml", "samples.jsonl", "samples.jsonl.xz")  # files of a run; not its picture and its lock
MAX_BYTES = 1 << 24  # of submission.json
MOST_BYTES = 1 << 30  # of any file
MOST_NAMED = 3  # lines of one journal, and files, that are named one by one
ROUNDING = 1e-9  # relative; the same sums in the same order, of another numpy


@dataclass(kw_only=True)
class Submission:
    """The content of `submission.json`."""

    form: Literal[1] = 1
    """Rises when a field changes its meaning."""
    suite: str = ""
    """Name of the protocol that was run."""
    methods: list[str] = field(default_factory=list)
    """The author's own methods."""
    modules: dict[str, dict[str, str]] = field(default_factory=dict)
    """Method -> module -> its file in this folder: all that the method's part of a run's identity is a hash of."""
    sha256: dict[str, str] = field(default_factory=dict)
    """File in this folder -> its hash."""


@dataclass(kw_only=True)
class Checked:
    """A folder and what does not fit in it."""

    submission: Submission = field(default_factory=Submission)
    digest: str = ""
    """SHA-256 of `submission.json`, which stands for the whole folder: an author may publish it elsewhere."""
    faults: list[str] = field(default_factory=list)
    """One sentence each; empty where everything fits."""
    asked: dict[str, dict[Key, str]] = field(default_factory=dict)
    """Question, as text -> the samples that its full cache answered, with the hash of each prompt."""


def write(
    suite: str, methods: Sequence[str], modules: Mapping[str, Mapping[str, str]], sha256: dict[str, str]
) -> bytes:
    """The content of `submission.json`."""
    made = Submission(suite=suite, methods=list(methods), modules={k: dict(v) for k, v in modules.items()})
    made.sha256 = dict(sorted(sha256.items()))
    return json.dumps(asdict(made), indent=2).encode("ascii") + b"\n"


def digest_of_bytes(content: bytes) -> str:
    """SHA-256 of what a file will hold."""
    return hashlib.sha256(content).hexdigest()


def digest_of(path: Path) -> str:
    """SHA-256 of a regular file; raises OSError for anything else, and for one that is too long for a board."""
    return digest_of_bytes(read_regular(path, MOST_BYTES))


def check(root: Path) -> Checked:
    """Read a folder, and name everything in it that does not fit: files that are not those of `submission.json`, lines
    without the seal of their run, runs in a wrong place, numbers that do not follow from the samples, samples that are
    missing, and methods without `full` and `random` beside them."""
    found = Checked()
    try:
        content = read_regular(root / NAME, MAX_BYTES)
        found.submission, found.digest = parse(read_json(content), Submission), digest_of(root / NAME)
    except FileNotFoundError:
        found.faults.append(f"has no {NAME}; `kvbench submit` writes it")
    except (OSError, ValueError) as error:
        found.faults.append(f"{NAME} cannot be read: {error}")
    if found.faults:
        return found
    found.faults += _file_faults(root, found.submission.sha256)
    unreadable: dict[str, str] = {}
    runs: list[tuple[RunRecord, dict[Key, SampleRecord]]] = []
    for folder, record in find_runs(root, unreadable):
        faults, samples = _run_faults(root, folder, record, found.submission)
        name = folder.relative_to(root).as_posix()
        found.faults += [f"{name}: {fault}" for fault in faults]
        runs.append((record, samples))
    found.faults += [f"{name}: {reason.replace(f'{root}/', '')}" for name, reason in unreadable.items()]
    _check_questions(runs, found)
    return found


def _file_faults(root: Path, listed: Mapping[str, str]) -> list[str]:
    """What is wrong with the files of a folder. No name that `submission.json` gives is opened."""
    there: dict[str, str | None] = {}
    for place, folders, names in os.walk(root):
        for name in [*names, *(one for one in folders if os.path.islink(os.path.join(place, one)))]:
            path = Path(place, name)
            try:
                is_link = path.is_symlink()
                there[path.relative_to(root).as_posix()] = None if is_link else digest_of(path)
            except OSError:
                there[path.relative_to(root).as_posix()] = None
    there.pop(NAME, None)
    faults = {
        "is missing": [name for name in listed if name not in there],
        f"is not in {NAME}": [name for name in there if name not in listed],
        f"is not the file that {NAME} has the hash of": [
            name for name, digest in there.items() if name in listed and digest != listed[name]
        ],
    }
    said = []
    for what, names in faults.items():
        said += [f"{name} {what}" for name in sorted(names)[:MOST_NAMED]]
        said += [f"and {len(names) - MOST_NAMED} more: each {what}"] if len(names) > MOST_NAMED else []
    return said


def _run_faults(
    root: Path, folder: Path, record: RunRecord, own: Submission
) -> tuple[list[str], dict[Key, SampleRecord]]:
    """What is wrong with one run, and its samples that count."""
    faults = []
    place = run_folder(root, record.task, record.model, record.method, record.hash)
    if not record.hash or place != folder:
        faults.append(f"run.json is of another run, which belongs into {place.relative_to(root).as_posix()}")
    if record.task != record.identity.get("task", {}).get("name"):
        faults.append(f"run.json calls its task {record.task!r}, and its identity has another one")
    faults += _method_faults(root, record, own)
    if not record.sealed:
        faults.append("run.json says that its lines have no seals; a board takes sealed ones alone")
    samples: dict[Key, SampleRecord] = {}
    broken = []
    try:
        for number, line in enumerate(journal_lines(folder / "samples.jsonl", record.hash), 1):
            if line.record is None:
                broken.append(f"line {number} of samples.jsonl: {line.fault.rstrip(', ')}")
            elif key_of(line.record) in samples:
                broken.append(f"line {number} of samples.jsonl: a sample that is there already")
            else:
                samples[key_of(line.record)] = line.record
    except OSError as error:
        broken.append(str(error).replace(f"{root}/", ""))
    faults += broken[:MOST_NAMED]
    faults += [f"and {len(broken) - MOST_NAMED} more lines that do not count"] if len(broken) > MOST_NAMED else []
    if record.status != "complete":
        faults.append(f"the run is {record.status}, and not complete")
    if len(samples) != record.counts.total:
        faults.append(f"samples.jsonl has {len(samples)} of the {record.counts.total} answers of its run")
    faults += [f"{what} of run.json is not what its samples give" for what in _wrong_numbers(record, samples)]
    return faults, samples


def _method_faults(root: Path, record: RunRecord, own: Submission) -> list[str]:
    """The name of a method is no part of a run's identity; its class and its code are."""
    name, path = record.method, files.conf_folder() / "method" / f"{record.method}.yaml"
    if name in own.methods:
        path = root / CODE / "method" / f"{name}.yaml"
    elif name not in files.options("method", files.conf_folder()):
        return [f"the method {name} is neither kvbench's nor one of those that {NAME} names"]
    try:
        target = read_data(path, name=f"the file of method {name}").get("_target_")
    except ValueError as error:
        return [str(error)]
    if record.identity.get("method", {}).get("_target_") != target:
        return [f"run.json calls its method {name}, and its identity has another class than {target}"]
    if name in own.methods:
        code = {module: root / file for module, file in own.modules.get(name, {}).items()}
        if any(not path.resolve().is_relative_to((root / CODE).resolve()) for path in code.values()):
            return [f"{NAME} names files of {name} that are not below {CODE}/"]
        try:
            digest = hash_files(code)
        except (OSError, SyntaxError, ValueError, RecursionError) as error:
            return [f"the code of {name} cannot be read: {error}"]
        if digest != record.identity.get("code", {}).get("method"):
            return [f"the files in {CODE}/ are not the code of {name} that ran"]
    return []


def _wrong_numbers(record: RunRecord, samples: Mapping[Key, SampleRecord]) -> list[str]:
    """The numbers of `run.json` that a board shows or that a reader sees first, and that its samples do not give."""
    records = list(samples.values())
    made = summary.metrics(records, record.metrics, record.primary, record.weighting)
    wrong = [
        f"the metric {name}"
        for name, metric in record.metrics.items()
        if metric.num_samples != made[name].num_samples or not _same(metric.value, made[name].value)
    ]
    held = summary.ledger(records)
    if held.keys() != record.ledger.keys() or not all(_same(held[key], record.ledger[key]) for key in held):
        wrong.append("the ledger")
    wrong += [] if record.metrics else ["the lack of any metric"]
    return wrong


def _same(mine: float | None, theirs: float | None) -> bool:
    if mine is None or theirs is None:
        return mine is theirs
    return math.isclose(mine, theirs, rel_tol=ROUNDING, abs_tol=ROUNDING)


def question_of(record: RunRecord) -> str:
    """Everything that decides which samples a run is asked, as text; two folders with the same have the same."""
    parts = [record.task, record.model, record.identity.get("task"), record.seed]
    return json.dumps([*parts, record.identity.get("model", {}).get("fingerprint")], sort_keys=True)


def _check_questions(runs: Sequence[tuple[RunRecord, dict[Key, SampleRecord]]], found: Checked) -> None:
    """Name the runs whose samples are not those of the full cache beside them, and questions without `full` or `random`
    or without a method of the author's."""
    by_question: dict[str, list[tuple[RunRecord, dict[Key, SampleRecord]]]] = {}
    for record, samples in runs:
        by_question.setdefault(question_of(record), []).append((record, samples))
    if not runs:
        found.faults.append("holds no run that can be read")
    for question, members in sorted(by_question.items()):
        title = f"{members[0][0].task} with {members[0][0].model}"
        names = {record.method for record, _ in members}
        found.faults += [f"{title}: no run of {name} is beside" for name in (FULL, RANDOM) if name not in names]
        if not names & set(found.submission.methods):
            found.faults.append(f"{title}: none of the methods that {NAME} names was run")
        full = next((samples for record, samples in members if record.method == FULL), None)
        if full is None:
            continue
        found.asked[question] = whole = {key: _prompt(record) for key, record in full.items()}
        for record, samples in members:
            mine = {key: _prompt(sample) for key, sample in samples.items()}
            if mine != whole:
                same = sum(whole.get(key) == prompt for key, prompt in mine.items())
                found.faults.append(
                    f"{title}: {record.method} {record.hash[:6]} has {len(mine)} answers and full has {len(whole)}; "
                    f"{same} are to the same prompts"
                )


def _prompt(sample: SampleRecord) -> str:
    return sample["prompt"]["sha256"] if "prompt" in sample else ""
