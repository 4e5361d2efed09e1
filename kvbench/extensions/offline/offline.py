"""`kvbench offline`: requests to a file, answers to them, and records of the answers."""

import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbench.cli import commands, sweeping
from kvbench.config import calibrated, files
from kvbench.config.compose import compose
from kvbench.config.files import FULL
from kvbench.config.settings import as_dict, read_config
from kvbench.errors import SettingMissing, SettingsConflict, check_name
from kvbench.evidence.load import patterns
from kvbench.extensions.offline import requests_file
from kvbench.extensions.offline.requests_file import Head, OfflineRun, answers_folder, tokenizer_hash
from kvbench.results.shards import Shard
from kvbench.results.writing import plain
from kvbench.runs import calibration
from kvbench.runs.config import AUTO, FULL_ANSWER, RunConfig
from kvbench.runs.experiment import load_task
from kvbench.runs.parts import Loaders
from kvbench.show.progress import note

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from kvbench.models.load import LoadedModel
    from kvbench.tasks.taskset import TaskSet


def main(arguments: Sequence[str], sweep: Callable[..., int] | None = None) -> int:
    """Carry out `kvbench offline`; returns the exit code."""
    listed, words, others = read_config(files.path_of("command", "offline")), list[str](), list[str]()
    for word in arguments:
        key, sign, _ = word.partition("=")
        (words if key in listed or not (sign or word.startswith("-")) else others).append(word)
    cfg = commands.compose_command("offline", words)
    what = check_name("what", cfg.what, ("ask", "answer", "grade"))
    if not cfg.file:
        raise SettingMissing(
            f"offline what={what} needs file=, the file of requests, for example file=requests.jsonl", setting="file"
        )
    if what == "ask":
        ask(cfg, others)
        return 0
    if others:
        raise SettingsConflict(f"what={what} takes the settings of runs from the file, so {others[0]} is for what=ask")
    file, answers = Path(str(cfg.file)), answers_folder(Path(str(cfg.file)), cfg.answers)
    if what == "grade":
        from kvbench.extensions.offline import grade

        return grade.grade(file, answers, Path(str(cfg.results_dir)))
    from kvbench.extensions.offline import answer

    answer.answer(
        file,
        answers,
        folder=Path(str(cfg.weights)) if cfg.weights else None,
        methods=patterns(cfg.methods),
        shard=Shard.read(cfg.shard) or answer.ALL,
    )
    return 0


def ask(cfg: "DictConfig", words: Sequence[str]) -> Head:
    """Write the file of requests; `words` are those of a run or a sweep over methods.

    Raises:
        ValueError: The runs have unlike requests, or a setting cannot travel.
    """
    parts, runs = Loaders(), dict[str, OfflineRun]()
    lines, known = b"", dict[str, tuple[str, "LoadedModel"]]()
    jobs = _jobs(cfg, words)
    for label, job in zip(sweeping.job_labels(jobs), jobs, strict=True):
        composed = compose(job, with_choices=True)
        calibrated.resolve(composed, job)
        settings = as_dict(composed)
        settings["method"] = calibrated.settled(settings["method"])  # what answers has no file to read
        method = settings.pop("_choices_")["method"]
        config = RunConfig.read(settings)
        _check_travels(config)
        model = _outline(config, parts)
        task = load_task(config, model, parts, config.limit)
        parts.check_fit(config, parts.make_policy(config.method))
        request_lines = requests_file.request_lines(task.requests)
        if lines and request_lines != lines:
            raise SettingsConflict(
                f"{label}: its requests differ from those before; one file has one task, model and seed"
            )
        lines, known[task.name] = request_lines, (Path(model.name).name.removesuffix(".gguf"), model)
        for run in _with_full(label, method, config, task):
            runs.setdefault(run.key, run)
    (task_name, (name, model)), *others = known.items()
    if others:
        raise SettingsConflict(
            f"one file has one task, and these are {', '.join(known)}; give the command once for each", setting="task"
        )
    head = Head(
        format=requests_file.FORMAT,
        task=task_name,
        model=name,
        tokenizer=tokenizer_hash(model.tokenizer),
        requests=requests_file.digest_of(lines),
        runs=sorted(runs.values(), key=lambda run: run.method != FULL),
    )
    requests_file.write(Path(str(cfg.file)), head, lines)
    count = lines.count(b"\n")
    note(
        f"{cfg.file}: {count} requests of {task_name} for {len(runs)} runs: {', '.join(run.label for run in head.runs)}"
    )
    return head


def _jobs(cfg: "DictConfig", words: Sequence[str]) -> list[list[str]]:
    """The words of each run."""
    jobs: list[list[str]] = []
    for line in patterns(cfg.methods) or [""]:
        chosen = shlex.split(line if "=" in line or not line else f"method={line}")
        jobs += sweeping.combinations([*words, *chosen])
    return jobs


def _check_travels(config: RunConfig) -> None:
    """Refuse settings that mean something here alone."""
    if config.shard:
        raise SettingsConflict(f"shard={config.shard} is for what=answer; ask for all requests", setting="shard")
    if config.method.get(calibration.KEY):
        raise SettingsConflict(
            f"method.calibration={config.method[calibration.KEY]} names a file that was made for one model, and what "
            "answers cannot check it; give its settings by hand",
            setting="method.calibration",
        )


def _outline(config: RunConfig, parts: Loaders) -> "LoadedModel":
    """The model without its weights, where its prompts can be made without."""
    from kvbench.models.load import load_outline

    parts.check_task(config)
    parts.check_chat(config)
    return load_outline(config.model)


def _with_full(label: str, method: str, config: RunConfig, task: "TaskSet") -> list[OfflineRun]:
    """A run, after that of the full cache which it is compared with."""

    def run(label: str, method: str, config: RunConfig, full: OfflineRun | None = None) -> OfflineRun:
        settings: Any = plain(replace(config, results_dir="results").settings())
        reference = full.key if full else None
        return OfflineRun(label=label, method=method, protocol=task.protocol, settings=settings, reference=reference)

    if method == FULL or config.reference != AUTO:
        if method != FULL and config.forces_full_answer:
            raise SettingsConflict(
                f"fidelity.on={FULL_ANSWER} forces the full cache's answers; set reference={AUTO}",
                setting="fidelity.on",
            )
        return [run(label, method, config)]
    full = run(FULL, FULL, config.of_full())
    return [full, run(label, method, config, full)]
