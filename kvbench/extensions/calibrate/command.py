"""`kvbench calibrate` runs a model to find a method's thresholds or budget: chosen on some samples, proven on others.

`rule=cheapest` takes the fewest bytes within a margin; `rule=paper` takes the highest score.

Source: DiffKV (SOSP'25) section 7.2: on MATH's training problems alpha_h of 1 to 5, the one with the highest accuracy,
then alpha_l of five equally spaced values up to 0.1 at that alpha_h, again the highest; a model that reaches the full
cache's accuracy at no alpha_h (Qwen2.5-7B) has no low tier. The released scripts of its param_tuning/ folder sweep in
this order, with alpha_l = 0 first, and give that model equal thresholds.
Differs: `rule=paper`: the section has five values in [0, 0.1] and later of 0.02 to 0.1 in steps of 0.02, and has
chosen 0; here 0 and those five. It states no rule for ties (the smaller threshold here), and not how near the full
cache's accuracy is near enough for a low tier (`margin.score` in the mean here). A held-out verdict and intervals come
on top. `rule=cheapest` is not the paper's.
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
from kvbench.config.calibrated import AUTO, KEY
from kvbench.config.settings import as_dict
from kvbench.engine.prompt_cache import PromptCache
from kvbench.engine.supported import model_shape
from kvbench.errors import SettingsConflict, unknown_name
from kvbench.extensions.calibrate import show, write
from kvbench.extensions.calibrate.choose import Measured, choose, evaluate, false_confirmations, is_out_of_reach, why
from kvbench.extensions.calibrate.layers import read_layer_plan
from kvbench.extensions.calibrate.layers import search as search_layers
from kvbench.extensions.calibrate.measure import Sweep, Trial
from kvbench.extensions.calibrate.plan import RULES, Number, Plan, describe_data, read_plan, split
from kvbench.extensions.calibrate.write import Choice, Result, StageResult
from kvbench.models.load import LoadedModel
from kvbench.results import identity
from kvbench.results.journal import run_lock
from kvbench.results.writing import remove_litter
from kvbench.rules.sizes import read_bytes
from kvbench.runs.config import RunConfig
from kvbench.runs.experiment import load_task
from kvbench.runs.parts import Loaders
from kvbench.show.progress import note
from kvbench.tasks.task import Limit
from kvbench.tasks.taskset import TaskSet

WHAT = ("settings", "layers")


def main(cfg: DictConfig, parts: Loaders | None = None) -> int:
    """Calibrates one method on one model, by the settings of conf/command/calibrate.yaml and of an experiment.

    Returns:
        0 when the choice was confirmed on the held-out samples, 1 when it was not, or when no setting was good enough.

    Raises:
        ValueError: A setting is out of range, or data or weights are missing.
    """
    experiment, wanted, method, what, rule = _parted(cfg)
    parts = parts or Loaders()
    policy = parts.make_policy(experiment.method)  # first: a bad setting should not cost a model load
    layers = read_layer_plan(wanted.layers, method, policy) if what == "layers" else None
    plan = read_plan(wanted, method, policy, None if layers is None else (), rule)
    limit = read_bytes("prompt_cache_bytes", experiment.prompt_cache_bytes)
    parts.check_task(experiment)
    model = parts.load_model(experiment.model)
    task = load_samples(experiment, plan, parts, model)
    tuning, held_out = split(task, plan, wanted.split_seed)
    data = describe_data(task, experiment.limit, plan.rule)
    note(f"{method}: rule={rule}, {len(tuning.requests)} + {len(held_out.requests)} samples: {data['said']}")
    root = Path(experiment.results_dir) / "calibration"
    folder = identity.run_folder(root, task.name, model.name, method, "x").parent
    sweep = Sweep(experiment, method, parts, folder=folder / "points", prompts=PromptCache(limit))
    default = sweep.trial({}, held_out)
    decides = {"plan": plan, "layers": layers, "held_out": default.experiment.identity, "tuning": tuning.fingerprint}
    with opened(folder, sweep, decides) as (result_folder, digest):
        result = Result(
            plan=plan, method=method, default=default.experiment, hash=digest, folder=result_folder, data=data
        )
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


def _parted(cfg: DictConfig) -> tuple[DictConfig, DictConfig, str, str, str]:
    """The experiment's settings, the command's, the name of the method, what is calibrated, and the rule."""
    settings = as_dict(cfg)
    if (what := settings.pop("what")) not in WHAT:
        raise unknown_name("what", what, [*WHAT, *files.subcommands("calibrate")])
    if (rule := settings.pop("rule")) not in RULES:
        raise unknown_name("rule", rule, RULES)
    wanted, choices = settings.pop("calibrate"), settings.pop("_choices_")
    experiment = read_experiment(settings, "calibrate")
    if experiment.method.get(KEY) is not None:
        raise SettingsConflict(
            "method.calibration is what this command writes; leave it out", setting="method.calibration"
        )
    return experiment, OmegaConf.create(wanted), choices["method"], what, rule


def read_experiment(settings: dict, command: str) -> DictConfig:
    """Experiment settings of a command that selects its samples itself, without a shipped calibration."""
    experiment = OmegaConf.create(settings)
    if experiment.method.get(KEY) == AUTO:
        experiment.method[KEY] = None
    RunConfig.read(experiment)
    limit = Limit.read(experiment.limit)
    for name in ("limit", "shard"):
        if experiment[name] is not None and not (name == "limit" and limit and (limit.first or limit.after)):
            raise SettingsConflict(
                f"{name}={experiment[name]} has no meaning here; leave it out: {command}.tuning_samples and "
                f"{command}.held_out_samples say how many samples of each subset, and limit=first:100 or after:100 "
                "which they are drawn from",
                setting=name,
            )
    return experiment


@contextmanager
def opened(folder: Path, sweep: Sweep, decides: dict[str, Any]) -> Iterator[tuple[Path, str]]:
    """Lock a folder and its subfolder for the deciding settings, without temporary files of either.

    Yields the subfolder and its full hash.
    """
    digest = identity.hash_identity({name: identity.canonical(value) for name, value in decides.items()})
    result_folder = folder / digest[: identity.HASH_DIGITS]
    with run_lock(folder, say=note):
        durable.make_folder(result_folder)
        for locked in (result_folder, sweep.folder):  # the lock is on all three folders
            remove_litter(locked)
        yield result_folder, digest


def load_samples(cfg: DictConfig, plan: Plan, parts: Loaders, model: LoadedModel, prefix: str = "calibrate") -> TaskSet:
    """Load as many samples of each subset as both sets of the plan need, or all within a limit.

    Raises:
        ValueError: The task has no gold answers, and the criterion needs them.
    """
    count = plan.tuning_samples + plan.held_out_samples
    if "items" in cfg.task:
        cfg.task["items"] = count
    task = load_task(RunConfig.read(cfg), model, parts, count if cfg.limit is None else cfg.limit)
    if plan.rule.criterion == "score":
        return task
    said = f"{prefix}.criterion={plan.rule.criterion} needs gold answers"
    if cfg.fidelity.max_tokens == 0:
        raise SettingsConflict(
            f"{said}; fidelity.max_tokens=0 means none, so raise it, or use {prefix}.criterion=score",
            setting="fidelity.max_tokens",
        )
    if without := [request.sample_id for request in task.requests if len(request.gold) < 2]:
        raise SettingsConflict(
            f"{said} of at least two tokens, and {len(without)} of {len(task.requests)} samples of task {task.name} "
            f"have none (for example {without[0]}); use {prefix}.criterion=score",
            setting=f"{prefix}.criterion",
        )
    return task


def _tune(sweep: Sweep, plan: Plan, task: TaskSet, result: Result) -> Measured | None:
    """Choose the settings one after the other; returns the choice of the last stage.

    None as soon as no value of a grid is good enough. The stages are appended to `result`.
    """
    full = sweep.full(task)
    chosen: dict[str, Number] = {}
    tuned = None
    for index, stage in enumerate(plan.stages):
        stage_result = _stage(sweep, plan, index, stage.values, chosen, task, full)
        off = plan.off.get(stage.parameter)
        if off is not None and off not in stage.values and is_out_of_reach(stage_result.points, plan.rule):
            note(f"{result.method}: no {stage.parameter} is within the margin of the full cache; {off:g} joins them")
            stage_result = _stage(sweep, plan, index, (off, *stage.values), chosen, task, full)
        result.stages.append(stage_result)
        note(f"{result.method}: {plan.rule.name}: {stage_result.why}")
        if stage_result.chosen is None:
            return None
        tuned = stage_result.points[stage_result.chosen]
        chosen = {done.parameter: tuned.settings[done.parameter] for done in plan.stages[: index + 1]}
    return tuned


def _stage(
    sweep: Sweep,
    plan: Plan,
    index: int,
    values: tuple[Number, ...],
    chosen: dict[str, Number],
    task: TaskSet,
    full: Trial,
) -> StageResult:
    """Measures values of one setting, with the earlier ones at what was `chosen`, and chooses one."""
    stage = replace(plan.stages[index], values=values)
    trials = [sweep.trial(plan.settings(index, value, chosen), task) for value in values]
    sweep.measure([*_distinct(trials), full], f"{sweep.method}: {stage.parameter}")
    known = {trial.experiment.hash: trial for trial in trials if trial.records}
    points = [evaluate(replace(known[t.experiment.hash], settings=t.settings), full, plan.rule) for t in trials]
    best = choose(points, plan.rule)
    return StageResult(
        stage=stage,
        points=points,
        full=evaluate(full, full, plan.rule),
        chosen=best,
        why=why(stage.parameter, values, points, best, plan.rule),
    )


def _judged(sweep: Sweep, plan: Plan, task: TaskSet, default: Trial, tuned: Measured) -> Choice:
    """Measure the chosen settings on held-out samples, against the full cache and the uncalibrated method."""
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
    """Count the other calibrations of the method judged on the same held-out samples.

    With another margin, grid or rule: repeated looks find a passing setting by chance.
    """
    count = 0
    for path in folder.glob("*/calibration.json"):
        try:
            content = json.loads(path.read_bytes())
        except (OSError, ValueError):
            continue
        if not isinstance(content, dict) or content.get("hash") == digest or content.get("chosen") is None:
            continue
        count += content.get("sets", {}).get("held_out", {}).get("fingerprint") == held_out
    return count


def _distinct(trials: list[Trial]) -> list[Trial]:
    """One trial for each run: two values of a grid can be the same run, and a run has one journal."""
    return list({trial.experiment.hash: trial for trial in reversed(trials)}.values())[::-1]


def _described(task: TaskSet) -> dict:
    names: dict[str, list[str]] = {}
    for request in task.requests:
        names.setdefault(request.subset, []).append(request.sample_id)
    return {"fingerprint": task.fingerprint, "num_samples": len(task.requests), "samples": names}
