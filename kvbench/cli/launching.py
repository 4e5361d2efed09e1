"""Runs and sweeps through the interfaces that Hydra has for plugins.

`hydra.main` reads `sys.argv` and takes no words, so it cannot run a command line that a preset, a suite or another
method's setting has changed.
"""

import itertools
import warnings
from collections.abc import Sequence
from functools import partialmethod
from pathlib import Path
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.core.utils import configure_log, run_job
from hydra.errors import HydraException
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, RunMode, TaskFunction
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf


def compose_job(loader: ConfigLoader, name: str, words: Sequence[str], mode: RunMode) -> DictConfig:
    """Compose the configuration `name` with Hydra's own settings in it, for a run or a whole sweep."""
    cfg = loader.load_configuration(name, [*words, f"hydra.mode={mode.name}"], mode)
    configure_log(cfg.hydra.hydra_logging, cfg.hydra.verbose)
    return cfg


def run_alone(loader: ConfigLoader, cfg: DictConfig, task: TaskFunction) -> None:
    """Run one experiment in this process."""
    callbacks, name = Callbacks(cfg), cfg.hydra.job.config_name
    callbacks.on_run_start(config=cfg, config_name=name)
    ended = run_job(task, cfg, "hydra.run.dir", None, HydraContext(loader, callbacks))  # type: ignore[arg-type]
    callbacks.on_run_end(config=cfg, config_name=name, job_return=ended)
    _ = ended.return_value  # raises what the task raised


def planned(loader: ConfigLoader, cfg: DictConfig) -> list[list[str]] | None:
    """The words of each job of a sweep; None where a third-party sweeper determines them as it runs."""
    if not str(cfg.hydra.sweeper._target_).endswith(".BasicSweeper"):
        return None
    words = [f"{key}={value}" for key, value in (cfg.hydra.sweeper.params or {}).items()]
    return combinations(OverridesParser.create(loader).parse_overrides([*words, *cfg.hydra.overrides.task]))


def combinations(overrides: Sequence[Override]) -> list[list[str]]:
    """Every combination of the values that words sweep over; of two words with one key, the last counts.

    Raises:
        HydraException: A word has infinitely many values.
    """
    values: dict[str, list[str]] = {}
    for word in overrides:
        key = word.get_key_element()
        if not word.is_sweep_override():
            values[key] = [f"{key}={word.get_value_element_as_str()}"]
        elif word.is_discrete_sweep():
            values[key] = [f"{key}={value}" for value in word.sweep_string_iterator()]
        else:
            raise HydraException(f"{word.input_line} has no values that can be counted; list them, or use range(a,b)")
    return [list(job) for job in itertools.product(*values.values())]


def sweep(loader: ConfigLoader, cfg: DictConfig, jobs: list[list[str]] | None, task: TaskFunction) -> None:
    """Run a sweep with the launcher that its configuration names.

    Args:
        loader: Composed the sweep, and composes its jobs.
        cfg: Configuration of the sweep.
        jobs: Words of each job; None where the sweeper in `cfg` finds them.
        task: Runs the job of a configuration.
    """
    callbacks, name = Callbacks(cfg), cfg.hydra.job.config_name
    context = HydraContext(loader, callbacks)  # type: ignore[arg-type]
    callbacks.on_multirun_start(config=cfg, config_name=name)
    if jobs is None:
        sweeper = Plugins.instance().instantiate_sweeper(hydra_context=context, task_function=task, config=cfg)
    else:
        sweeper = ListSweeper(jobs)
        sweeper.setup(hydra_context=context, task_function=task, config=cfg)
    sweeper.sweep(list(cfg.hydra.overrides.task))
    callbacks.on_multirun_end(config=cfg, config_name=name)


class ListSweeper(Sweeper):
    """Hydra sweeper that launches listed jobs, `hydra.sweeper.max_batch_size` at once.

    Hydra makes the sweepers that configurations name, and only in its own namespace of plugins, from settings. Jobs are
    no setting, so this one is made here.
    """

    config: DictConfig
    launcher: Launcher

    def __init__(self, jobs: list[list[str]]) -> None:
        self.jobs = jobs

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Make the launcher."""
        self.hydra_context, self.config = hydra_context, config
        self.launcher = Plugins.instance().instantiate_launcher(hydra_context, task_function, config)

    def sweep(self, arguments: list[str]) -> None:
        """Launch all jobs; raises the error of the first that failed."""
        folder = Path(self.config.hydra.sweep.dir)
        folder.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(self.config, folder / "multirun.yaml")
        size = self.config.hydra.sweeper.max_batch_size or len(self.jobs)
        for start in range(0, len(self.jobs), size or 1):
            batch = self.jobs[start : start + size]
            self.validate_batch_is_legal(batch)
            for ended in self.launcher.launch(batch, initial_job_idx=start):
                _ = ended.return_value


class Callbacks:
    """Callbacks that `hydra.callbacks` names. An error in one becomes a warning, as under `hydra.main`."""

    def __init__(self, cfg: DictConfig) -> None:
        self.each = [instantiate(one) for one in (cfg.hydra.callbacks or {}).values()]

    def _notify(self, event: str, config: DictConfig, **named: Any) -> None:
        for one in self.each if event.endswith("_start") else reversed(self.each):
            try:
                getattr(one, event)(config=config, **named)
            except Exception as error:
                kind = type(one).__name__
                warnings.warn(f"Callback {kind}.{event} raised {type(error).__name__}: {error}", stacklevel=2)

    on_run_start = partialmethod(_notify, "on_run_start")
    on_run_end = partialmethod(_notify, "on_run_end")
    on_multirun_start = partialmethod(_notify, "on_multirun_start")
    on_multirun_end = partialmethod(_notify, "on_multirun_end")
    on_job_start = partialmethod(_notify, "on_job_start")
    on_job_end = partialmethod(_notify, "on_job_end")
