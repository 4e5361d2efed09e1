"""The command line: `kvbench [command] [key=value ...]`, or `python -m kvbench ...`.

The first bare word is the command, everything else is Hydra's. A user's error ends with one message that
names what exists; a traceback means a fault of kvbench, or of the method that the last line names. Nothing
heavy is imported before a run starts.
"""

import os
import shlex
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import kvbench
from kvbench.cli import endings, texts, words
from kvbench.config import extensions, files, garbage
from kvbench.errors import no_sys_exit

if TYPE_CHECKING:
    from kvbench.cli.sweeping import Listed

WIDEST = 100  # columns of help; longer lines are hard to read


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns:
        Exit code: 0 done, 1 the run failed, 2 the command cannot be carried out, 128 + n stopped by signal n.
    """
    # Two processes that share cores otherwise spin for each other's threads; it must be set before torch is loaded. The
    # few turns that libgomp itself waits where threads share cores bridge most gaps between the operations of a step.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    if os.environ.get("HYDRA_FULL_ERROR"):
        os.environ.setdefault("KVBENCH_DEBUG", "1")
    arguments = list(sys.argv[1:] if argv is None else argv)
    if "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ.get("WORLD_SIZE", 1)) > 1 and not is_rank_zero():
        return 0
    try:
        with endings.stoppable(), garbage.seldom():
            return _carry_out(arguments)
    except KeyboardInterrupt as stop:
        part = _keeps(arguments)
        kept = f"every finished {part} is kept. To go on" if part else "to start again"
        resume_command = shlex.join([*program(), *arguments])
        endings.say(f"\nstopped by {str(stop) or 'SIGINT'}; {kept}: {resume_command}")
        return endings.exit_code(stop)
    except BrokenPipeError:  # the reader closed the pipe, as in `kvbench list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more on its way out
        return 128 + signal.SIGPIPE
    except Exception as error:
        return endings.report(error)


def is_rank_zero() -> bool:
    """True on rank 0, which runs the command; other ranks of torchrun follow it and return False at its end."""
    from kvbench.engine.tensor_parallel import follow
    from kvbench.models import processes

    if processes.started()[0] == 0:
        processes.connect()
        return True
    follow()
    return False


def program() -> list[str]:
    """The words that started this process, for commands that the user may repeat."""
    return ["kvbench"] if Path(sys.argv[0]).stem == "kvbench" else ["python", "-m", "kvbench"]


def _carry_out(arguments: list[str]) -> int:
    """Find the command and carry it out; returns its exit code."""
    if arguments[:1] == ["lm_eval"] and arguments[1:] not in (["--help"], ["-h"]):
        from kvbench.cli import lm_eval as lm_eval_cli

        return lm_eval_cli.main(arguments[1:])
    if "--version" in arguments:
        print(f"kvbench {kvbench.__version__}")
        return 0
    config_dirs, arguments = words.take_config_dir(arguments)
    words.refuse_stored_config(config_dirs, arguments)
    with words.config_dir_choices(config_dirs):
        code = _command(arguments)
        sys.stdout.flush()  # here, where a reader that has gone can be told from a fault
    return code


@no_sys_exit()  # lm-eval's own command line, which is none of these, may
def _command(arguments: list[str]) -> int:
    width = min(shutil.get_terminal_size((WIDEST, 24)).columns, WIDEST)
    if not arguments:
        print(texts.overview(min(width, 80)))
        return 0
    wants_help = bool({"-h", "--help"} & set(arguments))
    command, rest = words.split_command([word for word in arguments if word not in ("-h", "--help")])
    if wants_help or command == "help":
        print(_help(command, rest, width))
        return 0
    words.check_flags(rest)
    if "/" in command or command in files.command_files():
        from kvbench.cli import commands

        return commands.run(command, rest, run_command)
    if command == "list":
        print(texts.list_text(rest, width))
        return 0
    return run_command(rest)


def _help(command: str, rest: list[str], width: int) -> str:
    """Help text: of the command, of the topic after `help`, or of the choices given with `--help`."""
    if command not in ("help", "run"):
        return texts.command_help(command, width)
    chosen = [word for word in rest if command == "help" or word.partition("=")[0] in files.GROUPS]
    if not chosen:
        return texts.help_text(width)
    from kvbench.cli.choice_help import help_for

    return help_for(chosen, width)


def _keeps(arguments: list[str]) -> str:
    """Unit of work that a stopped command keeps and resumes after; empty where it starts again."""
    command = words.split_command(arguments)[0]
    if command == "run":
        return "sample"
    return extensions.kept_by(command)


def run_command(overrides: list[str], listed: "Listed | None" = None) -> int:
    """Compose the configuration and run one experiment or a sweep; returns the worst exit code.

    The jobs of a sweep may be listed.
    """
    from kvbench.cli import showing, sweeping
    from kvbench.config.compose import check_choices, explained, with_swept_groups
    from kvbench.config.shorthand import long_form
    from kvbench.results.writing import check_writable, is_full, write_error

    overrides = sweeping.with_multirun(words.from_habits(long_form(overrides)))
    check_choices(overrides)
    sweeping.check_launcher(overrides)
    overrides = sweeping.with_preset(overrides)
    dashed, settings = words.parted(with_swept_groups(overrides))
    flags = words.read_flags(dashed)
    name, root = flags.get("--config-name", "config"), Path(flags.get("--config-path", files.conf_folder())).absolute()
    try:
        with explained(overrides):
            if words.SHOWING & flags.keys():
                return showing.show(flags, settings, name, root)
            if sweeping.is_sweep(overrides):
                return sweeping.run(overrides, settings, name, root, listed)
            return sweeping.run_one(settings, name, root)
    except OSError as error:
        folder = sweeping.hydra_folder(overrides)
        if not is_full(error):
            check_writable(folder.parent, "results_dir")  # names the setting, where that is the cause
            raise
        raise write_error(folder / "multirun.yaml", error) from error  # Hydra's own file of a sweep
