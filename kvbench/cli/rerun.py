"""The command `rerun`: a stored run once more, and whether it came out the same."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from rich.text import Text

from kvbench.errors import FileMissing, SettingMissing, SettingValue
from kvbench.results.identity import differences
from kvbench.results.lines import read_samples
from kvbench.results.record import RunRecord
from kvbench.results.sample import SampleRecord, key_of
from kvbench.runs import parts
from kvbench.runs.config import AUTO, FULL_ANSWER, NONE, read_stored
from kvbench.runs.cross_run_batch import RunRequest, run_one
from kvbench.runs.sessions import Origin
from kvbench.show import terminal
from kvbench.show.progress import note

SHOWN = 5  # differences that are printed


def main(cfg: DictConfig) -> int:
    """Run it and compare; 0 when hash and records are the same, else 1."""
    if not cfg.run:
        raise SettingMissing("rerun needs the folder of a stored run: python -m kvbench rerun FOLDER", setting="run")
    folder = Path(cfg.run)
    stored = RunRecord.load(folder)
    if stored is None or not (folder / "config.yaml").is_file():
        raise FileMissing(
            f"run={folder} holds no stored run; give the folder that has run.json and config.yaml", setting="run"
        )
    settings = read_stored(folder)
    if not cfg.trust:
        check_trust(settings, folder)
    # Where the full cache's answers are forced, it has to give them again.
    reference = AUTO if settings["fidelity"].get("on") == FULL_ANSWER else NONE
    settings |= {"results_dir": str(_target(folder, cfg.results_dir)), "reference": reference, "resume": True}
    # A folder that may be anybody's does not decide where results are sent.
    settings |= {"shard": None, "tracker": NONE}
    origin = Origin(command=["rerun", str(folder)], experiment=stored.experiment)
    repeated = run_one(RunRequest(cfg=settings, method=stored.method, say=note, origin=origin), parts.Loaders())
    before, damaged = read_samples(folder / "samples.jsonl", stored.hash, sealed=stored.sealed)
    if damaged:
        note(f"{damaged} damaged lines of {folder}/samples.jsonl do not count")
    return _report(stored, before, repeated.record, repeated.samples)


def _target(folder: Path, results_dir: str | None) -> Path:
    """Results folder of the new run: the user's, else a sibling of the one that has the stored run."""
    parents = folder.absolute().parents  # of RESULTS/TASK/MODEL/METHOD/HASH
    root = parents[3] if len(parents) > 3 else Path("/")
    if not results_dir and not root.name:
        raise SettingMissing(
            f"run={folder} does not lie in RESULTS/TASK/MODEL/METHOD/, so there is no place beside RESULTS; say where "
            "the new run goes with results_dir=DIR",
            setting="results_dir",
        )
    target = Path(results_dir) if results_dir else root.with_name(f"{root.name}-rerun")
    if target.absolute() == root:
        raise SettingValue(
            f"results_dir={target} is where the stored run lies; give another folder", setting="results_dir"
        )
    return target


def check_trust(settings: Mapping[str, Any], folder: Path, *, with_method: bool = True) -> None:
    """Refuse what would run code that kvbench does not bring along: a results folder may be anybody's."""
    method, task = settings["method"], settings["task"]
    problems = [
        f"method._target_={method.get('_target_')}"
        if with_method and not str(method.get("_target_", "")).startswith("kvbench.methods.")
        else "",
        f"task.include_path={task.get('include_path')}" if task.get("include_path") else "",
        "task.allow_code_execution=true" if task.get("allow_code_execution") else "",
    ]
    if any(problems):
        named = ", ".join(filter(None, problems))
        raise SettingMissing(
            f"{folder}/config.yaml has {named}, which runs code; if the folder is yours, add trust=true",
            setting="trust",
        )


def _report(
    stored: RunRecord, before: Mapping[Any, SampleRecord], repeated: RunRecord, samples: list[SampleRecord]
) -> int:
    """Print what is the same and what is not; returns the exit code."""
    lines = [f"{name}: {old} then, {new} now" for name, old, new in differences(stored.identity, repeated.identity)]
    heading = "the same hash" if stored.hash == repeated.hash else "another hash, since these differ"
    text = [f"{heading}: {repeated.hash[:12]}", *(f"  {line}" for line in lines)]
    after = {key_of(record): record for record in samples}
    keys = [key for key in before if key in after]
    added = {"gold", "prompt"} - set().union(*before.values())  # what journals of before do not have
    for record in after.values():
        for name in added:
            record.pop(name, None)  # type: ignore[misc]
    changed = [key for key in keys if _answer(before[key]) != _answer(after[key])]
    text.append(f"{len(keys) - len(changed)} of {len(before)} records are the same, times apart")
    for key in changed[:SHOWN]:
        difference = next(differences(_answer(before[key]), _answer(after[key])))
        text.append(f"  {key[0]} (answer {key[1]}): {difference[0]} was {difference[1]}, is {difference[2]}")
    if len(changed) > SHOWN:
        text.append(f"  and {len(changed) - SHOWN} more")
    if changed and repeated.machine:
        machines = [stored.machine, *(session.machine for session in stored.sessions)]
        causes = dict.fromkeys(line for machine in machines for line in repeated.machine.differences(machine))
        text += [f"  likely because of the machine: {'; '.join(causes)}"] if causes else []
    missing = len(set(before) ^ set(after))
    if missing:
        text.append(f"{missing} samples are in one of the two runs alone")
    console = terminal.console(100)
    for line in text:
        console.print(Text(line))
    return 0 if stored.hash == repeated.hash and not changed and not missing else 1


def _answer(record: SampleRecord) -> dict[str, Any]:
    """A record without what differs between two runs of the same thing; `read_samples` has no token ids."""
    return {key: value for key, value in record.items() if key not in ("timing", "token_ids", "answer", "seal")}
