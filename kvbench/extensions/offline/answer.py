"""Answers requests of a file with torch and transformers alone: `python -m kvbench.extensions.offline.answer FILE`.

Each run's answers go into a journal, as a run's samples do, without scores: what was finished is kept, whatever ends
the process. The journal's seal is over the identity of the answers, which has the digest of the requests instead of
the task's fingerprint, so that it is never taken for a run's.
"""

import argparse
import fnmatch
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.config.files import FULL
from kvbench.engine.requests import Outcome, Request
from kvbench.errors import no_sys_exit, unknown_name
from kvbench.extensions.offline import requests_file, weights
from kvbench.extensions.offline.requests_file import Head, OfflineRun, answers_folder, folder_of, tokenizer_hash
from kvbench.results import identity
from kvbench.results.journal import run_lock
from kvbench.results.refusals import OtherRun
from kvbench.results.sample import SampleRecord
from kvbench.results.shards import Shard
from kvbench.runs.answers import finish
from kvbench.runs.config import FULL_ANSWER, RunConfig
from kvbench.runs.experiment import NAMES_OF_FILES, Experiment, answering, load_method
from kvbench.runs.parts import Loaders
from kvbench.runs.portions import compute_portion
from kvbench.runs.sessions import Origin
from kvbench.show.progress import note
from kvbench.tasks.task import Limit
from kvbench.tasks.taskset import TaskSet

COMMON = ("dtype", "device", "max_tokens", "linear", "quantisation", "tensor_parallel")  # settings of any model
ALL = Shard(1, 1)


@dataclass(kw_only=True)
class Ungraded(TaskSet):
    """A task whose answers are graded elsewhere."""

    def score_outcome(self, request: Request, outcome: Outcome) -> dict[str, float]:
        """No scores."""
        return {}

    def score_choices(self, request: Request, choices: list[dict]) -> dict[str, float]:
        """No scores."""
        return {}


class OfflineLoaders(Loaders):
    """Loaders where a task's data and libraries need not be."""

    def check_task(self, config: Any) -> None:
        """Do nothing: checked when the requests were written."""

    def check_chat(self, config: Any) -> None:
        """Do nothing: checked when the requests were written."""


@no_sys_exit()
def answer(
    file: Path, answers: Path, *, folder: Path | None = None, methods: Sequence[str] | None = None, shard: Shard = ALL
) -> None:
    """Answer what is not answered yet.

    Args:
        file: The requests.
        answers: Folder that the answers go into.
        folder: The model's, instead of what the file names.
        methods: Patterns of methods or labels; None = all. The full cache joins them where its answers are forced.
        shard: The portion of the requests.

    Raises:
        ValueError: The file or the weights are damaged, the tokenizer is another one, or a setting does not fit.
        RunLocked: Another process works on the same portion.
    """
    head, requests = requests_file.read(file)
    runs = _chosen(head, methods)
    if folder is not None:
        weights.join(folder)
    parts, full = OfflineLoaders(), dict[str, list[SampleRecord]]()
    origin = Origin(command=["offline", "what=answer", f"file={file}"])
    for number, run in enumerate(runs, 1):
        note(f"{number} of {len(runs)}: {run.label}")
        experiment = _prepare(head, run, requests, parts, folder, answers)
        if experiment.config.forces_full_answer and run.reference is not None:
            experiment = experiment.forcing(full[run.reference])
        portion = shard.part(experiment.task.requests, experiment.engine.group or 1)
        part = experiment.folder / f"{shard.number}-of-{shard.of}"
        with run_lock(part):
            _, samples = finish(compute_portion(experiment, part, portion, done=(), say=note, origin=origin))
        if run.method == FULL:
            full[run.key] = list(samples.values())


def _chosen(head: Head, methods: Sequence[str] | None) -> list[OfflineRun]:
    """Requested runs, in order."""
    if methods is None:
        return head.runs
    wanted = set[str]()
    for pattern in methods:
        fits = [run for run in head.runs if any(fnmatch.fnmatchcase(name, pattern) for name in (run.method, run.label))]
        if not fits:
            raise unknown_name("methods", pattern, [run.label for run in head.runs])
        wanted |= {run.key for run in fits}
        wanted |= {run.reference for run in fits if run.reference and run.settings["fidelity"]["on"] == FULL_ANSWER}
    return [run for run in head.runs if run.key in wanted]


def _prepare(
    head: Head, run: OfflineRun, requests: list[Request], parts: Loaders, folder: Path | None, answers: Path
) -> Experiment:
    """Load what a run needs, and work out what its answers are of."""
    settings = run.settings | {"results_dir": str(answers)}
    if folder is not None:
        kept = {name: value for name, value in settings["model"].items() if name in COMMON}
        settings["model"] = kept | {"kind": "hf", "path": str(folder), "name": head.model}
    config, policy, model = load_method(RunConfig.read(settings), parts, note)
    if (tokenizer_digest := tokenizer_hash(model.tokenizer)) != head.tokenizer:
        raise OtherRun(
            f"the tokenizer of model {model.name} ({tokenizer_digest[:12]}) is another one than that of the requests "
            f"({head.tokenizer[:12]}), so that their token ids stand for other words; give the same model, or "
            "ask again",
            setting="model",
        )
    engine = parts.make_engine(config, model, policy)
    task = Ungraded(
        name=head.task,
        protocol=run.protocol,
        fingerprint=head.requests,
        requests=requests,
        metrics={},
        primary="",
        scorer=lambda sample_id, text: {},
    )
    ingredients = answering(config, policy, model, engine) | {"task": _task_identity(task, config.limit)}
    ingredients = {name: identity.canonical(ingredients[name]) for name in sorted(ingredients)}
    digest = identity.hash_identity(ingredients)
    return Experiment(
        config=config,
        method=run.method,
        policy=policy,
        engine=engine,
        task=task,
        model=model,
        identity=ingredients,
        hash=digest,
        folder=folder_of(answers, run) / digest[: identity.HASH_DIGITS],
    )


def _task_identity(task: TaskSet, limit: int | str | None) -> dict[str, Any]:
    """The part of an identity that is about the task."""
    protocol = {key: value for key, value in task.protocol.items() if key not in NAMES_OF_FILES}
    read = Limit.read(limit)
    return {"name": task.name, "fingerprint": task.fingerprint, "protocol": protocol, "limit": read and read.setting}


def main(argv: Sequence[str] | None = None) -> int:
    """Carry out `python -m kvbench.extensions.offline.answer`."""
    from kvbench.cli import endings

    parser = argparse.ArgumentParser(prog="python -m kvbench.extensions.offline.answer", description=__doc__)
    parser.add_argument("file", type=Path, help="requests, as `kvbench offline what=ask` writes them")
    parser.add_argument("answers", type=Path, nargs="?", help="folder for the answers; FILE-answers by default")
    parser.add_argument("--weights", type=Path, help="the model's folder, in place of what the file names")
    parser.add_argument("--methods", nargs="+", help="names or patterns; all by default")
    parser.add_argument("--shard", default="1/1", help="i/n: every n-th batch of the requests")
    words = parser.parse_args(argv)
    try:
        with endings.stoppable():
            answer(
                words.file,
                answers_folder(words.file, words.answers),
                folder=words.weights,
                methods=words.methods,
                shard=Shard.read(words.shard) or ALL,
            )
    except KeyboardInterrupt as stop:
        note("every finished answer is kept; give the same command again to go on")
        return endings.exit_code(stop)
    except Exception as error:
        return endings.report(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
