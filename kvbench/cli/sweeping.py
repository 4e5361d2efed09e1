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
from typing import Any

from kvbench.cli import words
from kvbench.cli.jobs import Jobs, check_files
from kvbench.config import files
from kvbench.config.settings import as_dict, read_config
from kvbench.errors import unknown_name
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
            raise ValueError(
                f"{LAUNCHER}={name} needs the package {PLUGINS[name]}, which is not installed; "
                f"pip install {PLUGINS[name]}, or pip install 'kvbench[cluster]' for all launchers"
            )
        if not is_sweep(arguments):
            raise ValueError(f"{LAUNCHER}={name} launches the jobs of a sweep, and this is one run; add -m")


def is_installed(launcher: str) -> bool:
    """True where the package of a launcher is at hand."""
    module = f"hydra_plugins.{PLUGINS[launcher].replace('-', '_')}"
    return find_spec("hydra_plugins") is not None and find_spec(module) is not None


def _has_plugin(name: str) -> bool:
    """True for a launcher of a plugin that kvbench does not know."""
    from hydra.core.config_store import ConfigStore
    from hydra.core.plugins import Plugins

    Plugins.instance()  # finds all and lets them register their files
    return f"{name}.yaml" in ConfigStore.instance().list(LAUNCHER)


def with_preset(arguments: Sequence[str]) -> list[str]:
    """The arguments with kvbench's own settings of their launcher (conf/launcher/), where they name none themselves.

    They are no files of Hydra's group of launchers: the plugins have files of the same names there.
    """
    given = {word.partition("=")[0].lstrip("+") for word in arguments}
    name = next((word.partition("=")[2] for word in arguments if word.startswith(f"{LAUNCHER}=")), "")
    if name not in files.options(PRESETS):
        return list(arguments)
    preset = flat(as_dict(read_config(files.path_of(PRESETS, name))))
    # Some plugins take any word of their engine's, which Hydra calls new; a word that no plugin takes is refused still.
    own = [f"++{word}" if word.startswith("hydra.launcher.") else word for word in arguments]
    return [*own, *(f"++{key}={json.dumps(value)}" for key, value in preset.items() if key not in given)]


def is_sweep(arguments: Sequence[str]) -> bool:
    """True for a command line that runs a sweep: it says so, and does not ask for something to be shown instead."""
    shows = any(word.partition("=")[0] in words.SHOWING for word in arguments)
    return not shows and bool({"-m", "--multirun", "hydra.mode=MULTIRUN"} & set(arguments))


def hydra_folder(arguments: Sequence[str]) -> Path:
    """Find where Hydra puts its own file of a sweep (hydra.sweep.dir in conf/config.yaml)."""
    given = [word.partition("=")[2].strip("'\"") for word in arguments if word.startswith("results_dir=")]
    return Path(["results", *given][-1]) / FOLDER


def planned(arguments: Sequence[str]) -> tuple[str, list[list[str]]]:
    """Plan a sweep as Hydra will.

    Returns:
        The launcher, and the words of each job; none where the sweeper finds them on the way, or where Hydra has
        something to say against the words, which it then says itself.
    """
    from hydra import initialize_config_dir
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException
    from hydra.types import RunMode
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from kvbench.config.compose import own_words

    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(files.conf_folder()), version_base="1.3"):
            loader = GlobalHydra.instance().config_loader()
            hydra = loader.load_configuration("config", [*arguments, *own_words()], RunMode.MULTIRUN).hydra
            launcher = str(OmegaConf.select(hydra, "runtime.choices")[LAUNCHER])
            if not str(hydra.sweeper._target_).endswith(".BasicSweeper"):
                return launcher, []
            params = [f"{key}={value}" for key, value in (hydra.sweeper.get("params") or {}).items()]
            overrides = OverridesParser.create(config_loader=loader).parse_overrides([*params, *arguments])
            own = [item for item in overrides if not item.get_key_element().lstrip("+~").startswith("hydra")]
            return launcher, BasicSweeper.split_arguments(own, None)[0]
    except (HydraException, OmegaConfBaseException, AssertionError):
        return "basic", []
    finally:
        GlobalHydra.instance().clear()


@dataclass(frozen=True)
class Listed:
    """A sweep whose jobs are listed, and are not the combinations of its words."""

    command: list[str]
    """What the user wrote behind `kvbench`, which goes on with it."""
    jobs: list[list[str]]
    """The words of each job."""
    announce: "Callable[[Jobs], None]"
    """Is told the jobs once they are composed, before the first begins, where they run in this process."""


def combinations(words: Sequence[str]) -> list[list[str]]:
    """The words of each job that a sweep's words mean, every combination of their values.

    Raises:
        ValueError: A word cannot be read.
    """
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    from kvbench.config.compose import explain

    try:
        return BasicSweeper.split_arguments(OverridesParser.create().parse_overrides(list(words)), None)[0]
    except (HydraException, AssertionError) as error:
        raise explain(error, words) from error


@contextmanager
def settings_where_they_exist(listed: Listed | None = None) -> Iterator[list[str]]:
    """Let Hydra's sweeper leave out of a job what its method does not have and another's has, as long as the block
    lasts; gives sentences that say what, once the sweeper has run. Of a sweep with listed jobs, it gives those."""
    from hydra.core.plugins import Plugins

    Plugins.instance()  # makes the sweeper's class anew when it looks for plugins
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper

    from kvbench.config.compose import for_their_methods

    plain, said = BasicSweeper.split_arguments, list[str]()

    def split(overrides: list[Any], size: int | None) -> list[list[list[str]]]:
        jobs, said[:] = (listed.jobs, []) if listed else for_their_methods(plain(overrides, None)[0])
        size = size or max(1, len(jobs))
        return [jobs[start : start + size] for start in range(0, len(jobs), size)]

    BasicSweeper.split_arguments = staticmethod(split)  # type: ignore[method-assign, assignment]
    try:
        yield said
    finally:
        BasicSweeper.split_arguments = staticmethod(plain)  # type: ignore[method-assign]


def job_labels(jobs: Sequence[Sequence[str]]) -> list[str]:
    """Name what sets each job apart, such as `snapkv budget=0.25`; its method in any case, and of words that always go
    with one task the task alone."""
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


@contextmanager
def begin(arguments: list[str], listed: Listed | None = None) -> Iterator[Jobs]:
    """Plan a sweep and make its folder; look before whether the data and the models of all jobs are there.

    What a launcher raises after jobs were begun is said and does not get out of here: the jobs have written down what
    became of them.
    """
    if not is_sweep(arguments):
        yield Jobs()
        return
    with settings_where_they_exist(listed) as said:
        yield from _begin(arguments, said, listed.command if listed else arguments)


def _begin(arguments: list[str], said: list[str], command: list[str]) -> Iterator[Jobs]:
    from kvbench.config.compose import with_swept_groups

    launcher, jobs = planned(words.parted(with_swept_groups(arguments))[1])
    for sentence in said:
        note(sentence)
    results_dir = check_files(jobs) or hydra_folder(arguments).parent
    check_writable(results_dir, "results_dir")
    labels = job_labels(jobs)
    sweep = Sweep.start(results_dir, shlex.join(["kvbench", *command]), launcher, labels)
    try:
        by_pattern = any(word.startswith("method=glob(") for word in arguments)
        waits = launcher == "basic" and bool(jobs)  # who launches elsewhere, or chooses on the way, waits for each
        yield Jobs(sweep=sweep.folder, labels=labels, skip=by_pattern, waits=waits)
    except Exception as error:
        if not sweep.jobs():
            shutil.rmtree(sweep.folder, ignore_errors=True)
            raise
        if launcher == "basic":
            raise
        text = str(error).strip().splitlines() or [type(error).__name__]
        note(f"error: {LAUNCHER}={launcher} gave up: {text[-1]}")
