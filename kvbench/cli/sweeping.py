"""The beginning of a sweep: its jobs, its folder, and Hydra's launcher."""

import json
import shlex
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from kvbench.cli import words
from kvbench.cli.jobs import Jobs, check_files
from kvbench.config import files
from kvbench.config.settings import as_dict, read_config
from kvbench.errors import PackageMissing, SettingsConflict, unknown_name
from kvbench.results.summary import flat
from kvbench.results.sweep import FOLDER, Sweep
from kvbench.results.writing import check_writable
from kvbench.show.progress import note

# Launchers of other distributions: the distribution that has it; its package has underscores instead of dashes.
PLUGINS = {
    "joblib": "hydra-joblib-launcher",
    "submitit_local": "hydra-submitit-launcher",
    "submitit_slurm": "hydra-submitit-launcher",
    "ray": "hydra-ray-launcher",
}
LAUNCHER = "hydra/launcher"  # Hydra's group
PRESETS = "launcher"  # ours


def check_launcher(arguments: Sequence[str]) -> None:
    """Refuse a launcher that does not exist, is not installed, or has nothing to launch."""
    for name in [word.removeprefix(f"{LAUNCHER}=") for word in arguments if word.startswith(f"{LAUNCHER}=")]:
        known = {"basic", *PLUGINS}
        if name not in known and not _has_plugin(name):
            raise unknown_name(LAUNCHER, name, known)
        if name in PLUGINS and not is_installed(name):
            raise PackageMissing(
                f"{LAUNCHER}={name} needs the package {PLUGINS[name]}, which is not installed; "
                f"pip install {PLUGINS[name]}, or pip install -e '.[cluster]' for all launchers",
                setting=LAUNCHER,
            )
        if not is_sweep(arguments):
            raise SettingsConflict(
                f"{LAUNCHER}={name} launches the jobs of a sweep, and this is one run; add -m", setting=LAUNCHER
            )


def is_installed(launcher: str) -> bool:
    """True where the package of a launcher is at hand."""
    module = f"hydra_plugins.{PLUGINS[launcher].replace('-', '_')}"
    return find_spec("hydra_plugins") is not None and find_spec(module) is not None


def _has_plugin(name: str) -> bool:
    """True for a launcher of a third-party plugin."""
    from hydra.core.config_store import ConfigStore
    from hydra.core.plugins import Plugins

    Plugins.instance()  # finds all and lets them register their files
    return f"{name}.yaml" in ConfigStore.instance().list(LAUNCHER)


def with_preset(arguments: Sequence[str]) -> list[str]:
    """The arguments with kvbench's own settings of their launcher (conf/launcher/), where they name none themselves.

    They are no files of Hydra's group of launchers: the plugins have files of the same names there.
    """
    keys = {word.partition("=")[0].lstrip("+") for word in arguments}
    name = next((word.partition("=")[2] for word in arguments if word.startswith(f"{LAUNCHER}=")), "")
    if name not in files.options(PRESETS):
        return list(arguments)
    preset = flat(as_dict(read_config(files.path_of(PRESETS, name))))
    # Some plugins take any word of their engine's, which Hydra calls new; a word that no plugin takes is refused still.
    words = [f"++{word}" if word.startswith("hydra.launcher.") else word for word in arguments]
    return [*words, *(f"++{key}={json.dumps(value)}" for key, value in preset.items() if key not in keys)]


def with_multirun(arguments: Sequence[str]) -> list[str]:
    """The arguments with `-m` where a word has several values, as `method=snapkv,kivi`."""
    from kvbench.config.compose import sweeps_over

    several = not _is_declared(arguments) and any(sweeps_over(word) for word in arguments)
    return ["-m", *arguments] if several and not _shows(arguments) else list(arguments)


def is_sweep(arguments: Sequence[str]) -> bool:
    """True for a command line that runs a sweep and does not only print something."""
    return not _shows(arguments) and _is_declared(arguments)


def _is_declared(arguments: Sequence[str]) -> bool:
    return bool({"-m", "--multirun", "hydra.mode=MULTIRUN"} & set(arguments))


def _shows(arguments: Sequence[str]) -> bool:
    """True where a flag prints something instead of a run."""
    return any(words.SHORT.get(flag, flag) in words.SHOWING for flag in (word.partition("=")[0] for word in arguments))


def hydra_folder(arguments: Sequence[str]) -> Path:
    """Folder of Hydra's file of a sweep (hydra.sweep.dir in conf/config.yaml)."""
    folders = [word.partition("=")[2].strip("'\"") for word in arguments if word.startswith("results_dir=")]
    return Path(["results", *folders][-1]) / FOLDER


@dataclass(frozen=True)
class Listed:
    """A sweep whose jobs are listed, and are not the combinations of its words."""

    command: list[str]
    """Words after `kvbench` that resume it."""
    jobs: list[list[str]]
    """The words of each job."""
    announce: "Callable[[Jobs], None]"
    """Is told the jobs once they are composed, before the first begins, where they run in this process."""


def combinations(words: Sequence[str]) -> list[list[str]]:
    """The words of each job that a sweep's words mean, every combination of their values.

    Raises:
        ValueError: A word cannot be read.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    from kvbench.cli import launching
    from kvbench.config.compose import explain

    try:
        return launching.combinations(OverridesParser.create().parse_overrides(list(words)))
    except (HydraException, AssertionError) as error:
        raise explain(error, words) from error


def job_labels(jobs: Sequence[Sequence[str]]) -> list[str]:
    """Label each job by the words that differ, such as `snapkv budget=0.25`.

    The method is always named; of words that always occur with one task the task alone.
    """
    common = Counter(word for job in jobs for word in set(job))
    holders = {word: {number for number, job in enumerate(jobs) if word in job} for word in common}
    labels = []
    for number, job in enumerate(jobs, 1):
        tasks = [word for word in job if word.startswith("task=")]
        with_task = {word for task in tasks for word in job if word != task and holders[word] == holders[task]}
        special = [
            word for word in job if word.startswith("method=") or (common[word] < len(jobs) and word not in with_task)
        ]
        shown = " ".join(word.removeprefix("method=").removeprefix("method.") for word in special)
        labels.append(shown or f"job {number}")
    return labels


def run_one(settings: Sequence[str], name: str, root: Path) -> int:
    """Run one experiment of the configuration `name` in a folder; returns its exit code."""
    from hydra.types import RunMode

    from kvbench.cli import launching
    from kvbench.config.compose import started

    jobs = Jobs()
    with started(root) as loader:
        launching.run_alone(loader, launching.compose_job(loader, name, settings, RunMode.RUN), jobs.run)
    return jobs.finish()


def run(arguments: list[str], settings: Sequence[str], name: str, root: Path, listed: Listed | None = None) -> int:
    """Run a sweep.

    Args:
        arguments: Words of the command line.
        settings: The settings in it, as Hydra reads them.
        name: The configuration to start from.
        root: Folder that has it.
        listed: Its jobs, where they are not the combinations of its words.

    Returns:
        The worst exit code.
    """
    from hydra.types import RunMode

    from kvbench.cli import launching
    from kvbench.config.compose import for_their_methods, started
    from kvbench.config.shorthand import long_form

    with started(root) as loader:
        cfg = launching.compose_job(loader, name, settings, RunMode.MULTIRUN)
        words = listed.jobs if listed else launching.planned(loader, cfg)
        if words is not None:
            words = [long_form(job) for job in words]
        if words is not None and not listed:
            words, said = for_their_methods(words)
            for sentence in said:
                note(sentence)
        launcher = str(cfg.hydra.runtime.choices[LAUNCHER])
        with begin(arguments, launcher, words or [], listed.command if listed else arguments) as jobs:
            launching.sweep(loader, cfg, words, jobs.run)
            if listed and jobs.pending:
                listed.announce(jobs)
            jobs.carry_out()
    return jobs.finish()


@contextmanager
def begin(arguments: list[str], launcher: str, words: list[list[str]], command: list[str]) -> Iterator[Jobs]:
    """Make a sweep's folder; check first that the data and the models of all jobs are there.

    An error of a launcher after jobs were begun is printed and not raised: the jobs have recorded their outcomes.
    """
    results_dir = check_files(words) or hydra_folder(arguments).parent
    check_writable(results_dir, "results_dir")
    labels = job_labels(words)
    sweep = Sweep.start(results_dir, shlex.join(["kvbench", *command]), launcher, labels)
    try:
        by_pattern = any(word.startswith("method=glob(") for word in arguments)
        waits = launcher == "basic" and bool(words)  # launchers to other machines, and samplers, wait for each job
        yield Jobs(sweep=sweep.folder, labels=labels, skip=by_pattern, waits=waits)
    except Exception as error:
        if not sweep.jobs():
            shutil.rmtree(sweep.folder, ignore_errors=True)
            raise
        if launcher == "basic":
            raise
        text = str(error).strip().splitlines() or [type(error).__name__]
        note(f"error: {LAUNCHER}={launcher} gave up: {text[-1]}")
