"""How a sweep begins: what is known of its jobs, its folder, and Hydra's launcher."""

import json
import shlex
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvbench.cli import words
from kvbench.cli.jobs import Jobs, check_data
from kvbench.config import files
from kvbench.config.settings import as_dict, read_config
from kvbench.errors import unknown_name
from kvbench.results.sweep import FOLDER, Sweep
from kvbench.results.writing import check_writable
from kvbench.show.progress import note

# Launchers of other packages: the package that has it, and its distribution.
PLUGINS = {
    "joblib": ("hydra_joblib_launcher", "hydra-joblib-launcher"),
    "submitit_local": ("hydra_submitit_launcher", "hydra-submitit-launcher"),
    "submitit_slurm": ("hydra_submitit_launcher", "hydra-submitit-launcher"),
    "ray": ("hydra_ray_launcher", "hydra-ray-launcher"),
}
LAUNCHER = "hydra/launcher"  # Hydra's group
PRESETS = "launcher"  # ours


def check_launcher(arguments: Sequence[str]) -> None:
    """Refuse a launcher that does not exist, is not installed, or has nothing to launch."""
    for word in arguments:
        key, sign, name = word.partition("=")
        if key != LAUNCHER or not sign:
            continue
        known = {"basic", *PLUGINS}
        if name not in known and not _has_plugin(name):
            raise unknown_name(LAUNCHER, name, known)
        package, distribution = PLUGINS.get(name, ("", ""))
        if package and (find_spec("hydra_plugins") is None or find_spec(f"hydra_plugins.{package}") is None):
            raise ValueError(
                f"{LAUNCHER}={name} needs the package {distribution}, which is not installed; "
                f"pip install {distribution}, or pip install 'kvbench[cluster]' for all launchers"
            )
        if not is_sweep(arguments):
            raise ValueError(f"{LAUNCHER}={name} launches the jobs of a sweep, and this is one run; add -m")


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
    preset = _flat(as_dict(read_config(files.path_of(PRESETS, name))))
    # Some plugins take any word of their engine's, which Hydra calls new; a word that no plugin takes is refused still.
    own = [f"++{word}" if word.startswith("hydra.launcher.") else word for word in arguments]
    return [*own, *(f"++{key}={value}" for key, value in preset.items() if key not in given)]


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested settings as `a.b.c` and the value as Hydra's command line writes it."""
    found: dict[str, str] = {}
    for key, value in settings.items():
        inner = isinstance(value, Mapping)
        found |= _flat(value, f"{prefix}{key}.") if inner else {f"{prefix}{key}": json.dumps(value)}
    return found


def is_sweep(arguments: Sequence[str]) -> bool:
    """True for a command line that runs a sweep: it says so, and does not ask for something to be shown instead."""
    shows = any(word.partition("=")[0] in words.SHOWING for word in arguments)
    return not shows and bool({"-m", "--multirun", "hydra.mode=MULTIRUN"} & set(arguments))


def hydra_folder(arguments: Sequence[str]) -> Path:
    """Find where Hydra puts its own file of a sweep (hydra.sweep.dir in conf/config.yaml)."""
    given = [word.partition("=")[2].strip("'\"") for word in arguments if word.startswith("results_dir=")]
    return Path(["results", *given][-1]) / FOLDER


@dataclass(frozen=True, kw_only=True)
class Planned:
    """What a sweep will do."""

    launcher: str
    """Name of the launcher: `basic`, `joblib`, ..."""
    jobs: list[list[str]]
    """The words of each job; empty where the sweeper finds them on the way."""

    def labels(self) -> list[str]:
        """What is special about each job, such as `snapkv budget=0.25`; its method in any case."""
        common = Counter(word for job in self.jobs for word in set(job))
        return [
            " ".join(
                word.removeprefix("method=").removeprefix("method.")
                for word in job
                if word.startswith("method=") or common[word] < len(self.jobs)
            )
            or f"job {number}"
            for number, job in enumerate(self.jobs, 1)
        ]


def planned(arguments: Sequence[str]) -> Planned | None:
    """Plan a sweep as Hydra will; None where Hydra has something to say against it, which it then says itself."""
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
            words = [*arguments, *own_words()]
            hydra = loader.load_configuration("config", words, RunMode.MULTIRUN).hydra
            launcher = str(OmegaConf.select(hydra, "runtime.choices")["hydra/launcher"])
            if not str(hydra.sweeper._target_).endswith(".BasicSweeper"):
                return Planned(launcher=launcher, jobs=[])
            params = [f"{key}={value}" for key, value in (hydra.sweeper.get("params") or {}).items()]
            overrides = OverridesParser.create(config_loader=loader).parse_overrides([*params, *arguments])
            batches = BasicSweeper.split_arguments(
                [item for item in overrides if not item.get_key_element().lstrip("+~").startswith("hydra")], None
            )
            return Planned(launcher=launcher, jobs=batches[0])
    except (HydraException, OmegaConfBaseException, AssertionError):
        return None
    finally:
        GlobalHydra.instance().clear()


@contextmanager
def begin(arguments: list[str]) -> Iterator[Jobs]:
    """Plan a sweep and make its folder; look before whether the data of all jobs are there.

    What a launcher raises after jobs were begun is said and does not get out of here: the jobs have written down what
    became of them.
    """
    if not is_sweep(arguments):
        yield Jobs()
        return
    from kvbench.config.compose import compose, with_swept_groups

    plan = planned(words.parted(with_swept_groups(arguments))[1])
    jobs = plan.jobs if plan else []
    check_data(jobs)
    results_dir = Path(compose(jobs[0]).results_dir) if jobs else hydra_folder(arguments).parent
    check_writable(results_dir, "results_dir")
    launcher = plan.launcher if plan else "basic"
    command = shlex.join(["kvbench", *arguments])
    sweep = Sweep.start(results_dir, command, launcher, plan.labels() if plan else [])
    by_pattern = any(word.startswith("method=glob(") for word in arguments)
    try:
        yield Jobs(sweep=sweep.folder, labels=sweep.record().jobs, skip=by_pattern)
    except Exception as error:
        if not sweep.jobs():
            shutil.rmtree(sweep.folder, ignore_errors=True)
            raise
        if launcher == "basic":
            raise
        text = str(error).strip().splitlines() or [type(error).__name__]
        note(f"error: {LAUNCHER}={launcher} gave up: {text[-1]}")
