"""How a sweep begins: what is known of its jobs, its folder, and Hydra's launcher."""

import shlex
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from kvbench.cli import words
from kvbench.cli.jobs import Jobs, check_data
from kvbench.config import files
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
LAUNCHER = "hydra/launcher"


def check_launcher(arguments: Sequence[str]) -> None:
    """Refuse a launcher that does not exist, is not installed, or has nothing to launch.

    Args:
        arguments: The command line without the command.

    Raises:
        ValueError: Names the launcher and the remedy.
    """
    for word in arguments:
        key, sign, name = word.partition("=")
        if key != LAUNCHER or not sign:
            continue
        known = {"basic", *PLUGINS, *files.options(LAUNCHER)}
        if name not in known:
            raise unknown_name(LAUNCHER, name, known)
        package, distribution = PLUGINS.get(name, ("", ""))
        if package and (find_spec("hydra_plugins") is None or find_spec(f"hydra_plugins.{package}") is None):
            raise ValueError(
                f"{LAUNCHER}={name} needs the package {distribution}, which is not installed; "
                f"pip install {distribution}, or pip install 'kvbench[cluster]' for all launchers"
            )
        if not is_sweep(arguments):
            raise ValueError(f"{LAUNCHER}={name} launches the jobs of a sweep, and this is one run; add -m")


def is_sweep(arguments: Sequence[str]) -> bool:
    """True for a command line that runs a sweep: it says so, and does not ask for something to be shown instead."""
    shows = any(word.partition("=")[0] in words.SHOWING for word in arguments)
    return not shows and bool({"-m", "--multirun", "hydra.mode=MULTIRUN"} & set(arguments))


def hydra_folder(arguments: Sequence[str]) -> Path:
    """Where Hydra puts its own file of a sweep (hydra.sweep.dir in conf/config.yaml)."""
    given = [word.partition("=")[2].strip("'\"") for word in arguments if word.startswith("results_dir=")]
    return Path(["results", *given][-1]) / FOLDER


@contextmanager
def begin(arguments: list[str]) -> Iterator[Jobs]:
    """Plan a sweep and make its folder; look before whether the data of all jobs are there.

    What a launcher raises after jobs were begun is said and does not get out of here: the jobs have written down what
    became of them.

    Args:
        arguments: The command line without the command.

    Raises:
        ValueError: A setting is wrong, or data is missing.
    """
    if not is_sweep(arguments):
        yield Jobs()
        return
    from kvbench.config.compose import compose, with_swept_groups
    from kvbench.config.sweeps import planned

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
