"""`kvbench calibrate what=search`: Optuna searches for settings that hold fewer bytes and lose less.

Over method, budget, precision and allocation at once; the best are judged on samples that took no part in the search.

Every setting that is tried has a journal of its own, named by the hash of the run that it is, and the study is a file
next to them. A search that was stopped goes on; nothing that was measured is measured again.
"""

import warnings
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from kvbench.config.settings import as_dict
from kvbench.engine.prompt_cache import PromptCache
from kvbench.errors import PackageMissing, SettingValue, check_whole, unknown_name
from kvbench.evidence.settings import check_margin
from kvbench.extensions.calibrate.choose import evaluate
from kvbench.extensions.calibrate.command import load_samples, opened, read_experiment
from kvbench.extensions.calibrate.measure import Sweep, Trial
from kvbench.extensions.calibrate.plan import Plan, Rule, split
from kvbench.extensions.search import verdict as search_verdict
from kvbench.extensions.search.space import Tried, Wanted, by_hand, read_space, winners, words
from kvbench.extensions.search.verdict import Judged, judge
from kvbench.results import identity
from kvbench.results.measures import LOSSES
from kvbench.results.refusals import NotMeasured
from kvbench.rules import Number
from kvbench.rules.sizes import read_bytes
from kvbench.runs.calibration import KEY
from kvbench.runs.parts import Loaders
from kvbench.show.progress import note
from kvbench.tasks.taskset import TaskSet

if TYPE_CHECKING:
    import optuna

SAMPLERS = ("tpe", "nsga2")
MOST = 10.0  # margins: a setting that loses more is of no use
REFUSED = 5  # times the requested number of settings may be refused by their methods


def main(cfg: DictConfig, parts: Loaders | None = None) -> int:
    """Searches by the settings of conf/command/search.yaml and of an experiment, with kvbench's own loaders by default.

    Returns:
        0, be there a point beyond the settings made by hand or none.

    Raises:
        ValueError: A setting is out of range, data or weights are missing, or Optuna is not installed.
    """
    settings = as_dict(cfg)
    wanted = _wanted(OmegaConf.create(settings.pop("search")))
    settings.pop("_choices_", None)
    experiment = read_experiment(settings, "search")
    experiment.method[KEY] = None
    parts = parts or Loaders()
    parts.check_task(experiment)
    model = parts.load_model(experiment.model)
    task = load_samples(experiment, wanted.plan, parts, model, prefix="search")
    tuning, held_out = split(task, wanted.plan, wanted.plan.rule.seed)
    root = Path(experiment.results_dir)
    folder = identity.run_folder(root / "search", task.name, model.name, "x", "x").parent.parent
    prompts = PromptCache(read_bytes("prompt_cache_bytes", experiment.prompt_cache_bytes))
    sweep = Sweep(experiment, "search", parts, folder=folder / "points", prompts=prompts)
    full = sweep.full(tuning)
    decides = {"full": full.experiment.identity, "search": as_dict(wanted.cfg) | {"trials": 0, "winners": 0}}
    with opened(folder, sweep, decides) as (result_folder, _):
        tried = _search(sweep, wanted, tuning, full, result_folder)
        chosen = winners(tried, wanted)
        hand, origin = by_hand(root, task.name, model.name, wanted)
        judged = _held_out(sweep, wanted, held_out, chosen, hand)
        paths = search_verdict.write(result_folder, wanted, tried, judged, origin)
    search_verdict.show(wanted, tried, judged, origin, task.name, model.name, paths)
    return 0


def _wanted(cfg: DictConfig) -> Wanted:
    """Check the settings of the command."""
    if find_spec("optuna") is None:
        raise PackageMissing("search needs the package optuna, which is not installed; pip install -e '.[search]'")
    for least, names in enumerate(("seed split_seed", "trials winners by_hand", "tuning_samples held_out_samples")):
        for name in names.split():
            check_whole(f"search.{name}", cfg[name], least)
    check_whole("search.resamples", cfg.resamples, 2)
    for name, known in (("sampler", SAMPLERS), ("criterion", tuple(LOSSES))):
        if cfg[name] not in known:
            raise unknown_name(f"search.{name}", cfg[name], known)
    check_margin(cfg.margin)
    margin = LOSSES[cfg.criterion].measure.margin if cfg.margin is None else float(cfg.margin)
    if cfg.most is not None and not Number(margin, above=True).fits(cfg.most):
        raise SettingValue(
            f"search.most={cfg.most} must be a loss above the margin of {margin:g}", setting="search.most"
        )
    same = {name: cfg[name] for name in ("criterion", "resamples")}
    rule = Rule(**same, margin=margin, proof="interval", tie=0.01, seed=cfg.split_seed)
    sizes = {name: cfg[name] for name in ("tuning_samples", "held_out_samples")}
    plan = Plan(stages=(), raised={}, rule=rule, **sizes)
    return Wanted(cfg=cfg, space=read_space(cfg), plan=plan, most=float(cfg.most or MOST * margin))


def _search(sweep: Sweep, wanted: Wanted, task: TaskSet, full: Trial, result_folder: Path) -> list[Tried]:
    """Try settings up to the requested number; earlier trials count."""
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    if not sweep.cfg.resume:
        (result_folder / "study.log").unlink(missing_ok=True)
    storage = JournalStorage(JournalFileBackend(str(result_folder / "study.log")))
    goals = [optuna.study.StudyDirection.MINIMIZE] * 2
    study = optuna.create_study(storage=storage, study_name="search", directions=goals, load_if_exists=True)
    states = optuna.trial.TrialState
    for old in study.get_trials(deepcopy=False, states=(states.RUNNING,)):  # of a process that was killed
        study.tell(old.number, state=states.FAIL)
    begun = len(study.get_trials(deepcopy=False))
    study.sampler = _sampler(wanted.cfg, begun)
    sweep.measure([full], "full: search")
    criterion, by_key = wanted.plan.rule.criterion, dict[str, Tried]()

    def measured(method: str, settings: dict[str, Any], label: str) -> Tried:
        """A setting's numbers, from its journal as far as that goes."""
        key = f"{method} {settings}"
        if key not in by_key:
            trial = sweep.of(method).trial(settings, task)
            sweep.measure([trial], label)
            by_key[key] = Tried(method=method, settings=settings, measured=evaluate(trial, full, wanted.plan.rule))
        return by_key[key]

    def objective(trial: "optuna.Trial") -> tuple[float, float]:
        """Bytes and loss of the proposed setting."""
        method = trial.suggest_categorical("method", [item.method for item in wanted.space])
        settings = next(item for item in wanted.space if item.method == method).suggest(trial)
        trial.set_user_attr("method", method)
        trial.set_user_attr("settings", settings)
        tried = measured(method, settings, f"{done() + 1} of {wanted.cfg.trials}: {method} {words(settings)}")
        assert tried.measured is not None
        if tried.measured.num_failed or criterion not in tried.measured.losses:
            note(f"left out: {method} {words(settings)}: {tried.measured.num_failed} answers did not end well")
            raise ValueError("answers did not end well; look at the notes above")
        return tried.bytes_ratio, tried.loss(criterion)

    def done() -> int:
        return len(study.get_trials(deepcopy=False, states=(states.COMPLETE,)))

    def stop(study: "optuna.Study", last: "optuna.trial.FrozenTrial") -> None:
        """Ends the search when enough is tried, or when the methods refuse too much."""
        refused = [trial for trial in study.get_trials(deepcopy=False)[begun:] if trial.state == states.FAIL]
        if len(refused) > REFUSED * wanted.cfg.trials:
            raise NotMeasured(f"{len(refused)} settings could not be measured; the last: {last.params}")
        if done() >= wanted.cfg.trials:
            study.stop()

    if done() < wanted.cfg.trials:
        study.optimize(objective, catch=(ValueError,), callbacks=[stop])
    complete = [trial.user_attrs for trial in study.get_trials(deepcopy=False, states=(states.COMPLETE,))]
    tried = [measured(each["method"], each["settings"], f"{each['method']}: was tried") for each in complete]
    return list({f"{item.method} {item.settings}": item for item in tried}.values())


def _sampler(cfg: DictConfig, begun: int) -> "optuna.samplers.BaseSampler":
    """The sampler, with other random numbers each time that the search goes on."""
    import optuna

    seed = cfg.seed * 100_003 + begun
    if cfg.sampler == "nsga2":
        return optuna.samplers.NSGAIISampler(seed=seed, population_size=max(4, min(50, cfg.trials // 4)))
    first = max(4, cfg.trials // 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that groups of parameters are an experiment of Optuna's
        return optuna.samplers.TPESampler(seed=seed, multivariate=True, group=True, n_startup_trials=first)


def _held_out(sweep: Sweep, wanted: Wanted, task: TaskSet, chosen: Sequence[Tried], hand: Sequence[Tried]) -> Judged:
    """Judge the winners against the settings made by hand, on held-out samples."""
    trials: dict[str, tuple[str, Trial, bool]] = {}
    # A setting made by hand counts as such, also where the search tries it.
    for item, is_searched in [*((item, True) for item in chosen), *((item, False) for item in hand)]:
        label = f"{item.method} {words(item.settings)}".strip()
        try:
            trial = sweep.of(item.method).trial(item.settings, task)
        except ValueError as error:
            note(f"left out: {label}: {error}")
            continue
        trials[trial.experiment.hash] = label, trial, is_searched
    full = sweep.full(task)
    sweep.measure([*(trial for _, trial, _ in trials.values()), full], "held-out")
    return judge(full, list(trials.values()), wanted.plan.rule)
