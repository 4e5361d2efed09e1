"""`tracker=mlflow|wandb|tensorboard`: a finished run is passed to a tracker from its stored files.

A tracker gets nothing while the model works, changes no answer, and cannot lose one: when it fails, the run is already
stored, and the same command tries again. Its environment variables decide where the numbers go. It is imported only
where the setting names it.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvbench.errors import PackageMissing, unknown_name
from kvbench.results.measures import FIDELITY, RESIDENT
from kvbench.results.record import RunRecord
from kvbench.results.sample import SampleRecord
from kvbench.results.summary import flat, flatten
from kvbench.runs.config import NONE

PROJECT = "kvbench"
Numbers = dict[str, float]
Steps = list[Numbers]
NOT_SETTINGS = ("results_dir", "resume", "tracker", "shard")


def check(tracker: object) -> None:
    """Refuse a tracker that is not known or not installed, before anything runs."""
    if tracker not in TRACKERS:
        raise unknown_name("tracker", tracker, (NONE, *TRACKERS))
    if str(tracker) not in sys.modules and find_spec(str(tracker)) is None:
        raise PackageMissing(
            f"tracker={tracker} needs the library {tracker}: pip install {tracker}, or set tracker=none",
            setting="tracker",
        )


def track(
    tracker: str,
    settings: Mapping[str, Any],
    record: RunRecord,
    samples: Sequence[SampleRecord],
    folder: Path,
    say: Callable[[str], None],
) -> None:
    """Pass a run and its nested settings to a tracker; a repeated call replaces it."""
    name = f"{record.method} on {record.task} with {record.model}"
    try:
        config = {key: value for key, value in flat(settings).items() if key not in NOT_SETTINGS}
        TRACKERS[tracker](name, record, folder, config, numbers_of(record), steps_of(record, samples))
    except Exception as error:  # whatever a network or a server does, the run is done
        say(f"tracker={tracker} failed ({type(error).__name__}: {error}); the run is kept in {folder}")


def numbers_of(record: RunRecord) -> Numbers:
    """The numbers of a whole run: scores and their ends, the difference to the full cache, fidelity, bytes, times."""
    numbers: dict[str, Any] = {}
    for name, metric in record.metrics.items():
        numbers[f"metrics.{name}"] = metric.value
        numbers |= {f"metrics.{name}.low": metric.low, f"metrics.{name}.high": metric.high}
    if record.comparison is not None:
        difference = record.comparison.difference
        numbers |= {
            "difference": difference.value,
            "difference.low": difference.low,
            "difference.high": difference.high,
        }
    numbers |= {f"fidelity.{name}": measure.of_run(record) for name, measure in FIDELITY.items()}
    numbers |= flatten({"ledger": record.ledger, "kept": record.kept, "timing": vars(record.timing)})
    return {key: float(value) for key, value in numbers.items() if value is not None}


def steps_of(record: RunRecord, samples: Sequence[SampleRecord]) -> Steps:
    """The numbers of each answer, in the order of the journal."""
    steps: Steps = []
    for sample in samples:
        ledger, fidelity = sample["ledger"], sample["fidelity"] or {}
        values = {
            "sample.score": sample["scores"].get(record.primary),
            **{f"sample.{name}": fidelity.get(measure.key) for name, measure in FIDELITY.items()},
            f"sample.{RESIDENT.name}_bytes": ledger.get(RESIDENT.key),
            "sample.ok": float(sample["status"] == "ok"),
        }
        steps.append({key: float(value) for key, value in values.items() if value is not None})
    return steps


def _mlflow(name: str, record: RunRecord, folder: Path, settings: dict, numbers: Numbers, steps: Steps) -> None:
    import mlflow

    mlflow.set_experiment(PROJECT)
    before = mlflow.search_runs(filter_string=f"tags.kvbench_hash = '{record.hash}'", output_format="list")
    known = {"run_id": before[0].info.run_id} if before else {"run_name": name}
    with mlflow.start_run(**known, tags={"kvbench_hash": record.hash, "status": record.status}):
        if not before:  # a setting is written once
            mlflow.log_params(settings)
        mlflow.log_metrics(numbers)
        for step, values in enumerate(steps):
            mlflow.log_metrics(values, step=step)
        mlflow.log_artifact(str(folder / "run.json"))


def _wandb(name: str, record: RunRecord, folder: Path, settings: dict, numbers: Numbers, steps: Steps) -> None:
    import wandb

    run = wandb.init(
        project=PROJECT, id=record.hash[:32], resume="allow", name=name, config=settings, dir=str(folder), reinit=True
    )
    try:
        for values in steps:
            run.log(values)
        run.summary.update({**numbers, "status": record.status, "hash": record.hash})
    finally:
        run.finish()


def _tensorboard(name: str, record: RunRecord, folder: Path, settings: dict, numbers: Numbers, steps: Steps) -> None:
    from torch.utils.tensorboard import SummaryWriter

    target = folder / "tensorboard"
    for old in target.glob("events.out.tfevents.*"):
        old.unlink()
    with SummaryWriter(str(target)) as writer:
        writer.add_text("run", f"{name}, {record.status}, {record.hash}")
        writer.add_text("settings", "\n".join(f"    {key}: {value}" for key, value in settings.items()))
        for step, values in [(None, numbers), *enumerate(steps)]:
            for key, value in values.items():
                writer.add_scalar(key.replace(".", "/"), value, step)


TRACKERS = {"mlflow": _mlflow, "wandb": _wandb, "tensorboard": _tensorboard}
