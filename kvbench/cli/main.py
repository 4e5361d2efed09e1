"""The command line: `python -m kvbench [command] [key=value ...]`.

The first bare word is the command, everything else is Hydra's. A mistake of the user's is answered with one message
that names what exists; a traceback means a fault of kvbench. Nothing heavy is imported before a run starts.
"""

import difflib
import os
import shlex
import shutil
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import kvbench
from kvbench.cli import endings, texts
from kvbench.config import files
from kvbench.show.progress import note

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from kvbench.results.record import RunRecord
    from kvbench.runs.parts import Parts
    from kvbench.runs.run import Run

EXIT_FAILED, EXIT_USAGE = 1, 2
KEEPING = ("run", "calibrate")  # the commands whose finished samples stay when they are stopped
FLAGS_WITH_VALUE = {"--cfg", "-c", "--package", "-p", "--config-path", "-cp", "--config-name", "-cn"}
FLAGS_WITH_VALUE |= {"--config-dir", "-cd", "--experimental-rerun"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: Arguments without the program's name; those of the process by default.

    Returns:
        Exit code: 0 done, 1 the run failed, 2 the command cannot be carried out, 128 + n stopped by signal n.
    """
    # Two processes that share cores otherwise spin for each other's threads; it must be set before torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if os.environ.get("HYDRA_FULL_ERROR"):
        os.environ.setdefault("KVBENCH_DEBUG", "1")
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        with endings.stoppable():
            return _carry_out(arguments)
    except KeyboardInterrupt as stop:
        kept = "every finished sample is kept. To go on" if _keeps(arguments) else "to start again"
        again = shlex.join(["python", "-m", "kvbench", *arguments])
        endings.say(f"\nstopped by {str(stop) or 'SIGINT'}; {kept}: {again}")
        return endings.exit_code(stop)
    except Exception as error:
        return report(error)


def _carry_out(arguments: list[str]) -> int:
    """Find the command and carry it out; returns its exit code."""
    if arguments[:1] == ["lm_eval"]:
        from kvbench.cli import lm_eval as lm_eval_cli

        return lm_eval_cli.main(arguments[1:])
    if "--version" in arguments:
        print(f"kvbench {kvbench.__version__}")
        return 0
    wants_help = bool({"-h", "--help"} & set(arguments))
    command, rest = split_command([word for word in arguments if word not in ("-h", "--help")])
    if command in files.command_files():
        if wants_help:
            print(texts.command_help(command))
            return 0
        from kvbench.cli import commands

        return commands.run(command, rest)
    if wants_help or command == "help":
        print(texts.help_text())
        return 0
    if command == "list":
        print(texts.list_text(rest, shutil.get_terminal_size((100, 24)).columns))
        return 0
    return run_command(rest)


def _keeps(arguments: list[str]) -> bool:
    """True for a command that goes on where it was when it is given again; one that is not named is `run`."""
    return not arguments or arguments[0] in KEEPING or arguments[0] not in texts.commands()


def split_command(arguments: list[str]) -> tuple[str, list[str]]:
    """Take the command off the front.

    Args:
        arguments: All arguments.

    Returns:
        The command (`run` when none is given) and the other arguments.

    Raises:
        ValueError: The first word is no command; lists the commands and the nearest.
    """
    if not arguments or "=" in arguments[0] or not arguments[0][:1].isalpha():
        return "run", arguments
    word = arguments[0]
    known = texts.commands()
    if word in known:
        return word, arguments[1:]
    hints = [f"{group}={word}" for group in files.GROUPS if word in files.options(group)]
    hints = hints or difflib.get_close_matches(word, known, n=1, cutoff=0.4)
    hint = f" Did you mean {hints[0]}?" if hints else ""
    raise ValueError(f"{word} is no command.{hint} Commands: {', '.join(known)}; settings are key=value.")


def flags_first(arguments: list[str]) -> list[str]:
    """Put flags and their values before the settings; Hydra does not take settings on both sides of a flag."""
    flags, settings = [], []
    rest = iter(arguments)
    for word in rest:
        if not word.startswith("-"):
            settings.append(word)
            continue
        flags.append(word)
        if word in FLAGS_WITH_VALUE:
            flags += [value for value in [next(rest, None)] if value is not None]
    return flags + settings


def report(error: Exception) -> int:
    """Print an error the way its reader needs it.

    Args:
        error: A user's error becomes one message; anything else is a fault of kvbench and shows its traceback.

    Returns:
        The exit code.
    """
    from kvbench.results.writing import JournalError, is_full, write_error

    if isinstance(error, OSError) and is_full(error):  # raised where a library writes, or where the output is a file
        cause, error = error, write_error(error.filename or "a file or the output", error)
        error.__cause__ = cause
    is_fault = not isinstance(error, ValueError | OSError)
    if is_fault or os.environ.get("KVBENCH_DEBUG", "") not in ("", "0"):
        traceback.print_exception(error)
    if is_fault:
        note("this is a fault of kvbench; please report it with the lines above")
        return EXIT_FAILED
    note(f"error: {error}")
    if not _is_ours(error):
        kind = type(error).__name__
        note(f"({kind} from outside kvbench; KVBENCH_DEBUG=1 shows where)")
    return EXIT_FAILED if isinstance(error, JournalError) else EXIT_USAGE


def _is_ours(error: Exception) -> bool:
    """True when kvbench itself raised it, so that its message was written for the user."""
    last = traceback.extract_tb(error.__traceback__)[-1:]
    roots = {files.package_folder(), files.sibling_folder("methods"), files.sibling_folder("kernels")}
    return not last or bool(roots & set(Path(last[0].filename).resolve().parents))


def run_command(overrides: list[str]) -> int:
    """Compose the configuration and run one experiment, or a sweep.

    Args:
        overrides: Hydra's arguments.

    Returns:
        The exit code; the worst one of a sweep.

    Raises:
        ValueError: The configuration cannot be composed.
    """
    import hydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from kvbench.config.compose import check_choices, explain, with_swept_groups
    from kvbench.results.writing import check_writable, is_full, write_error

    check_choices(overrides)
    refuse_stored_config(overrides)
    jobs = Jobs(_flag_value(overrides, "--config-dir", "-cd"))
    before, full_error = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = ["kvbench", *flags_first(with_swept_groups(overrides))]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises its errors instead of printing them and leaving
    try:
        hydra.main(version_base="1.3", config_path=str(files.conf_folder()), config_name="config")(jobs.run)()
    except (HydraException, OmegaConfBaseException) as error:
        raise explain(error, overrides) from error
    except OSError as error:
        if not is_full(error):
            check_writable(_sweep_folder(overrides).parent, "results_dir")  # names the setting, where that is the cause
            raise
        raise write_error(_sweep_folder(overrides) / "multirun.yaml", error) from error  # Hydra's own file of a sweep
    finally:
        sys.argv = before
        if full_error is None:
            del os.environ["HYDRA_FULL_ERROR"]
    if len(jobs.codes) > 1:
        jobs.show_sweep()
    return max(jobs.codes, default=0)


def refuse_stored_config(arguments: list[str]) -> None:
    """Refuse a folder of choices that has a config.yaml: Hydra would read kvbench's own in its place, without a word.

    Args:
        arguments: Hydra's arguments.

    Raises:
        ValueError: Says how a stored run is run again.
    """
    for flags in (("--config-dir", "-cd"), ("--config-path", "-cp")):
        folder = _flag_value(arguments, *flags)
        if not folder or not (Path(folder) / "config.yaml").is_file():
            continue
        if (Path(folder) / "run.json").is_file():
            raise ValueError(
                f"{flags[0]} {folder} is a stored run, whose settings would be ignored; `python -m kvbench rerun "
                f"{shlex.quote(folder)}` runs it again"
            )
        raise ValueError(
            f"{flags[0]} {folder} has a config.yaml, which would be ignored; a folder of your own holds method/, "
            "task/, ... alone, and experiment/ sets several settings at once"
        )


def _flag_value(arguments: list[str], *names: str) -> str:
    """What the last of some flags is set to; empty without one."""
    found = ""
    for word, following in zip(arguments, [*arguments[1:], ""], strict=True):
        flag, has_value, value = word.partition("=")
        if flag in names:
            found = value if has_value else following
    return found


def _sweep_folder(overrides: list[str]) -> Path:
    """Where Hydra puts its own file of a sweep (hydra.sweep.dir in conf/config.yaml)."""
    given = [word.partition("=")[2].strip("'\"") for word in overrides if word.startswith("results_dir=")]
    return Path(["results", *given][-1]) / ".multirun"


class Jobs:
    """The experiments of one command: what they share, and what became of them. Hydra has no way to hand it back from a
    sweep."""

    def __init__(self, config_dir: str = "") -> None:
        self._config_dir = config_dir
        self.codes: list[int] = []
        """Exit code of every job that ran here."""
        self._parts: Parts | None = None
        self._records: dict[Path, list[RunRecord]] = {}  # folder of a task and model -> its runs and their references

    def run(self, cfg: "DictConfig") -> None:
        """One experiment; called by Hydra."""
        from hydra.core.hydra_config import HydraConfig
        from hydra.types import RunMode

        from kvbench.runs import parts
        from kvbench.runs.run import Origin, run_experiment

        settings = HydraConfig.get()
        is_here = settings.launcher._target_.endswith("BasicLauncher")
        is_sweep = settings.mode is RunMode.MULTIRUN and is_here
        try:
            self._parts = self._parts or parts.default_parts()
            choices, words = settings.runtime.choices, list(settings.overrides.task)
            origin = Origin(command=self._command(words), experiment=choices.get("experiment") or "")
            finished = run_experiment(cfg, method=choices["method"], parts=self._parts, origin=origin)
            self._records.setdefault(finished.folder.parent.parent, []).extend(_records(finished))
            _show(finished, with_table=not is_sweep)
            self.codes.append(EXIT_FAILED if finished.record.status == "failed" else 0)
        except Exception as error:
            if not is_here:  # on another machine the launcher must learn of it
                raise
            # A sweep goes on: the other experiments do not depend on this one.
            if is_sweep:
                note(f"in {' '.join(settings.overrides.task)}:")
            self.codes.append(report(error))

    def _command(self, words: list[str]) -> list[str]:
        """The words of this one job: of a sweep its own values, with the folder of the user's choices."""
        return [*(["--config-dir", self._config_dir] if self._config_dir else []), *words]

    def show_sweep(self) -> None:
        """The table of all experiments, and one picture for each task and model."""
        from kvbench.show import figure, table

        pictures = [
            figure.draw(sorted(records, key=lambda record: record.method != files.FULL), folder / "sweep.png")
            for folder, records in self._records.items()
        ]
        table.show([record for records in self._records.values() for record in records], pictures)


def _records(finished: "Run") -> "list[RunRecord]":
    """The full-cache run, where there is one, and the run."""
    return [item for item in (finished.reference, finished.record) if item is not None]


def _show(finished: "Run", with_table: bool) -> None:
    from kvbench.show import figure, table

    records = _records(finished)
    picture = figure.draw(records, finished.folder / "result.png")
    if with_table:
        table.show(records, [finished.folder / "run.json", finished.folder / "samples.jsonl", picture])
    else:
        state = finished.record.status
        note(f"{finished.record.method} on {finished.record.task}: {state}, {finished.folder}")
    if finished.record.status == "failed":
        note(f"error: the run failed: {finished.record.message}")
