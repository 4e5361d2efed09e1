"""`kvbench calibrate` runs a model to find a method's thresholds or budget: chosen on some samples, proven on others.

Source: DiffKV (SOSP'25), the calibration of alpha_h and alpha_l on a training split; the released scripts of its
param_tuning/ folder sweep alpha_h with alpha_l = 0, then alpha_l at the alpha_h chosen, and give a model without a low
tier (Qwen2.5-7B) equal thresholds.
Differs: the paper states no rule for the choice beyond near-lossless accuracy; the rule here is in the written file.
The paper has no held-out verdict and no intervals.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig, OmegaConf

from kvbench.config import durable, files
from kvbench.config.settings import as_dict
from kvbench.engine.prompt_cache import PromptCache
from kvbench.engine.supported import model_shape
from kvbench.errors import unknown_name
from kvbench.extensions.calibrate import show, write
from kvbench.extensions.calibrate.choose import Measured, choose, evaluate, false_confirmations
from kvbench.extensions.calibrate.layers import read_layer_plan
from kvbench.extensions.calibrate.layers import search as search_layers
from kvbench.extensions.calibrate.measure import Sweep, Trial
from kvbench.extensions.calibrate.plan import Number, Plan, read_plan, split
from kvbench.extensions.calibrate.write import Choice, Result, StageResult
from kvbench.models.load import LoadedModel
from kvbench.results import identity
from kvbench.results.journal import run_lock
from kvbench.results.writing import remove_litter
from kvbench.runs.calibration import KEY
from kvbench.runs.config import RunConfig, read_bytes
from kvbench.runs.experiment import load_task
from kvbench.runs.parts import Loaders
from kvbench.show.progress import note
from kvbench.tasks.taskset import TaskSet

WHAT = ("settings", "layers")


def main(cfg: DictConfig, parts: Loaders | None = None) -> int:
    """Calibrates one method on one model, by the settings of conf/command/calibrate.yaml and of an experiment.

    Returns:
        0 when the choice was confirmed on the held-out samples, 1 when it was not, or when no setting was good enough.

    Raises:
        ValueError: A setting is out of range, or data or weights are missing.
    """
    experiment, wanted, method, what = _parted(cfg)
    parts = parts or Loaders()
    policy = parts.make_policy(experiment.method)  # first: a bad setting should not cost a model load
    layers = read_layer_plan(wanted.layers, method, policy) if what == "layers" else None
    plan = read_plan(wanted, method, policy, None if layers is None else ())
    limit = read_bytes("prompt_cache_bytes", experiment.prompt_cache_bytes)
    parts.check_task(experiment)
    model = parts.load_model(experiment.model)
    task = load_samples(experiment, plan, parts, model)
    tuning, held_out = split(task, plan, wanted.split_seed)
    root = Path(experiment.results_dir) / "calibration"
    folder = identity.run_folder(root, task.name, model.name, method, "x").parent
    sweep = Sweep(experiment, method, parts, folder=folder / "points", prompts=PromptCache(limit))
    default = sweep.trial({}, held_out)
    decides = {"plan": plan, "layers": layers, "held_out": default.experiment.identity, "tuning": tuning.fingerprint}
    with opened(folder, sweep, decides) as (own, digest):
        result = Result(plan=plan, method=method, default=default.experiment, hash=digest, folder=own)
        if layers is not None:
            num_layers = model_shape(model.model).num_layers
            result.layers, stage = search_layers(sweep, layers, plan.rule, tuning, num_layers)
            plan = result.plan = replace(plan, stages=(stage,))
        tuned = _tune(sweep, plan, tuning, result)
        if tuned is not None:
            result.choice = _judged(sweep, plan, held_out, default, tuned)
            result.false_confirmations = false_confirmations(
                np.asarray(tuned.lost),
                plan.rule,
                num_points=sum(len(stage.points) for stage in result.stages),
                num_tuning=tuned.num_samples,
                num_held_out=result.choice.held_out.num_samples,
            )
            result.looks = 1 + _earlier_looks(folder, digest, held_out.fingerprint)
        result.prompts_read, result.prompts_reused = sweep.prompts.num_read, sweep.prompts.num_reused
        result.sets = {"tuning": _described(tuning), "held_out": _described(held_out)}
        files = [*write.write(result, out=wanted.out), *show.draw(result)]
    show.show(result, files)
    return int(result.choice is None or not result.choice.confirmed)


def _parted(cfg: DictConfig) -> tuple[DictConfig, DictConfig, str, str]:
    """The experiment's settings, the command's, the name of the method, and what is calibrated."""
    settings = as_dict(cfg)
    if (what := settings.pop("what")) not in WHAT:
        raise unknown_name("what", what, [*WHAT, *files.subcommands("calibrate")])
    wanted, choices = settings.pop("calibrate"), settings.pop("_choices_")
    experiment = read_experiment(settings, "calibrate")
    if experiment.method.get(KEY) is not None:
        raise ValueError("method.calibration is what this command writes; leave it out")
    return experiment, OmegaConf.create(wanted), choices["method"], what


def read_experiment(settings: dict, command: str) -> DictConfig:
    """The experiment's own settings of a command that says by itself which samples there are."""
    experiment = OmegaConf.create(settings)
    RunConfig.read(experiment)
    for name in ("limit", "shard"):
        if experiment[name] is not None:
            raise ValueError(
                f"{name}={experiment[name]} has no meaning here; leave it out: {command}.tuning_samples and "
                f"{command}.held_out_samples say how many samples of each subset"
            )
    return experiment


@contextmanager
def opened(folder: Path, sweep: Sweep, decides: dict[str, Any]) -> Iterator[tuple[Path, str]]:
    """Locks a folder and gives the one in it that belongs to what decides, both without litter, and its full hash."""
    digest = identity.hash_identity({name: identity.canonical(value) for name, value in decides.items()})
    own = folder / digest[: identity.HASH_DIGITS]
    with run_lock(folder, say=note):
        durable.make_folder(own)
        for place in (own, sweep.folder):  # the lock is on all three folders
            remove_litter(place)
        yield own, digest


def load_samples(cfg: DictConfig, plan: Plan, parts: Loaders, model: LoadedModel, prefix: str = "calibrate") -> TaskSet:
    """As many samples of each subset as both sets of the plan need; generated tasks make them.

    Raises:
        ValueError: The task has no gold answers, and the criterion needs them.
    """
    count = plan.tuning_samples + plan.held_out_samples
    if "items" in cfg.task:
        cfg.task["items"] = count
    task = load_task(RunConfig.read(cfg), model, parts, count)
    if plan.rule.criterion == "score":
        return task
    said = f"{prefix}.criterion={plan.rule.criterion} needs gold answers"
    if cfg.fidelity.max_tokens == 0:
        raise ValueError(f"{said}; fidelity.max_tokens=0 means none, so raise it, or use {prefix}.criterion=score")
    if without := [request.sample_id for request in task.requests if len(request.gold) < 2]:
        raise ValueError(
            f"{said} of at least two tokens, and {len(without)} of {len(task.requests)} samples of task {task.name} "
            f"have none (for example {without[0]}); use {prefix}.criterion=score"
        )
    return task


def _tune(sweep: Sweep, plan: Plan, task: TaskSet, result: Result) -> Measured | None:
    """Chooses the settings one after the other: the choice of the last stage, or None at once when no value of a grid
    is good enough. `result` takes the stages."""
    full = sweep.full(task)
    chosen: dict[str, Number] = {}
    tuned = None
    for index, stage in enumerate(plan.stages):
        settings = [plan.settings(index, value, chosen) for value in stage.values]
        trials = [sweep.trial(item, task) for item in settings]
        sweep.measure([*_distinct(trials), full], f"{result.method}: {stage.parameter}")
        known = {trial.experiment.hash: trial for trial in trials if trial.records}
        measured = [evaluate(replace(known[t.experiment.hash], settings=t.settings), full, plan.rule) for t in trials]
        best = choose(measured, plan.rule)
        result.stages.append(StageResult(stage=stage, points=measured, chosen=best))
        if best is None:
            return None
        chosen = {done.parameter: settings[best][done.parameter] for done in plan.stages[: index + 1]}
        tuned = measured[best]
    return tuned


def _judged(sweep: Sweep, plan: Plan, task: TaskSet, default: Trial, tuned: Measured) -> Choice:
    """The chosen settings on samples that took no part in the choice, beside the full cache and the uncalibrated
    method."""
    full, best = sweep.full(task), sweep.trial(tuned.settings, task)
    sweep.measure(_distinct([best, default, full]), f"{sweep.method}: held-out")
    if not default.records:  # the calibrated settings are the uncalibrated ones
        default.records = best.records
    return Choice(
        tuned=tuned,
        held_out=evaluate(best, full, plan.rule),
        held_out_full=evaluate(full, full, plan.rule),
        held_out_default=evaluate(default, full, plan.rule),
        against_default=evaluate(best, default, plan.rule),
    )


def _earlier_looks(folder: Path, digest: str, held_out: str) -> int:
    """Counts the other calibrations of the method, with another margin, grid or rule, that the same held-out samples
    judged: who asks often enough is told yes by chance."""
    count = 0
    for path in folder.glob("*/calibration.json"):
        try:
            found = json.loads(path.read_bytes())
        except (OSError, ValueError):
            continue
        if not isinstance(found, dict) or found.get("hash") == digest or found.get("chosen") is None:
            continue
        count += found.get("sets", {}).get("held_out", {}).get("fingerprint") == held_out
    return count


def _distinct(trials: list[Trial]) -> list[Trial]:
    """One trial for each run: two values of a grid can be the same run, and a run has one journal."""
    return list({trial.experiment.hash: trial for trial in reversed(trials)}.values())[::-1]


def _described(task: TaskSet) -> dict:
    names: dict[str, list[str]] = {}
    for request in task.requests:
        names.setdefault(request.subset, []).append(request.sample_id)
    return {"fingerprint": task.fingerprint, "num_samples": len(task.requests), "samples": names}
