"""`kvbench suite`: a protocol of several tasks and methods as one sweep, and the page at its end."""

import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from omegaconf import DictConfig

from kvbench.cli import commands, endings, sweeping
from kvbench.config import extensions, files
from kvbench.config.files import AGREED
from kvbench.config.settings import as_dict, read_config, read_settings
from kvbench.errors import FileContent, SettingMissing, SettingsConflict, Unsupported, check_name, unknown_name
from kvbench.evidence.load import lets_through, patterns
from kvbench.rules import Form, check_settings
from kvbench.show.progress import note

if TYPE_CHECKING:
    from kvbench.cli.jobs import Jobs

Sweeping = Callable[[list[str], sweeping.Listed], int]
GROUP = "suite"
PLAIN_PATH = re.compile(r"[\w./~-]+", re.ASCII)
Lines = Annotated[
    tuple[str, ...],
    Form("a list of lines of words", lambda x: isinstance(x, tuple) and bool(x) and all(isinstance(y, str) for y in x)),
]


@dataclass(frozen=True, kw_only=True)
class Suite:
    """A protocol: every line of `tasks` is run with every line of `methods`.

    The words of a line mean the same as after `kvbench -m`.

    Args:
        every: Words of every job.
        tasks: Lines, in their order.
        methods: Lines; the full cache goes first wherever it stands.
    """

    every: str
    tasks: Lines
    methods: Lines

    def __post_init__(self) -> None:
        check_settings(self, f"{GROUP}.")


def find(name: object) -> Suite:
    """The suite of a name."""
    known = files.options(GROUP)
    path = files.path_of(GROUP, check_name(GROUP, name, known))
    return read_settings(Suite, as_dict(read_config(path)), f"{path.name}: ")


def main(arguments: Sequence[str], sweep: Sweeping) -> int:
    """Carry out `kvbench suite`; `sweep` runs words of a sweep with these jobs. Returns the exit code."""
    cfg, others = split_words(GROUP, arguments)
    what = check_name("what", cfg.what, ("run", "status", "plan"))
    suite = find(cfg.suite)
    cfg.results_dir = cfg.results_dir or f"results/{cfg.suite}"
    if what == "status":
        return commands.run("status", [f"results_dir={cfg.results_dir}", *others])
    if what == "plan":
        return plan(cfg, others)
    command, shared = [GROUP, *arguments], [name for name in ("manifest", "selection", "ray") if cfg[name]]
    if not shared:
        return run(suite, cfg, others, command, sweep)
    if len(shared) > 1 or any(word.startswith("hydra") for word in others):
        raise SettingsConflict(
            f"{shared[0]}= is one way to share the work, and {', '.join(shared[1:]) or 'a launcher'} another; give one",
            setting=shared[0],
        )
    from kvbench.extensions.suite import shared as suite_shared

    work = jobs(suite, cfg, others)
    if not cfg.ray:
        return suite_shared.write_manifest(cfg, work) if cfg.manifest else suite_shared.take(cfg, work)
    carry_out = next(extensions.hooks("suite.ray"), None)
    if carry_out is None:
        raise Unsupported(f"ray={cfg.ray} needs the extension cluster, which is missing; leave ray out", setting="ray")
    check = carry_out(cfg, work, command)
    return endings.EXIT_FAILED if check is None else run(suite, cfg, others, command, sweep, check)


def split_words(command: str, arguments: Sequence[str]) -> tuple[DictConfig, list[str]]:
    """The settings of a command that runs a suite, and the words that go to every run."""
    listed = read_config(files.path_of("command", command))
    words, others = list[str](), list[str]()
    for word in arguments:
        key, sign, _ = word.partition("=")
        (words if key in listed or not (sign or word.startswith("-")) else others).append(word)
    return commands.compose_command(command, words), others


def run(
    suite: Suite,
    cfg: DictConfig,
    others: Sequence[str],
    command: list[str],
    sweep: Sweeping,
    announce: "Callable[[Jobs], None] | None" = None,
) -> int:
    """Run all jobs, and write the page; `command` is the user's command, which resumes it.

    `announce` is called with the jobs first; by default it prints their preflight.
    """
    from kvbench.extensions.suite import preview

    announce = announce or preview.announce
    root = f"results_dir={cfg.results_dir}"
    listed = sweeping.Listed(command=command, jobs=jobs(suite, cfg, others), announce=announce)
    launcher = [word for word in others if word.startswith("hydra")]
    code = sweep(["-m", root, *launcher], listed)
    page = cfg.out or str(Path(cfg.results_dir) / f"{cfg.suite}.html")
    commands.run("report", [root, f"title='{cfg.suite}: {files.options(GROUP)[cfg.suite]}'", f"out='{page}'"])
    return code


def jobs(suite: Suite, cfg: DictConfig, others: Sequence[str]) -> list[list[str]]:
    """The words of each job; of a word that is there twice the last counts, so the user's own."""
    return [words for _, words in by_method(suite, cfg, others)]


def by_method(suite: Suite, cfg: DictConfig, others: Sequence[str]) -> list[tuple[list[str], list[str]]]:
    """The words of each job, after those of its line of methods."""
    every, mine = shlex.split(suite.every), [word for word in others if not word.startswith("hydra")]
    jobs = []
    for task in _tasks(suite, cfg):
        for method in _methods(suite, cfg):
            words = [*every, *task, *method, *mine, f"results_dir={cfg.results_dir}"]
            jobs += [(method, job) for job in sweeping.combinations(words)]
    return jobs


def choice(words: Sequence[str], group: str) -> str:
    """The name that a line gives a group."""
    for word in words:
        if word.startswith(f"{group}="):
            return word.partition("=")[2]
    raise FileContent(f"a line of a suite says {group}=NAME, and this one does not: {shlex.join(words)}")


def data_words(cfg: DictConfig) -> list[str]:
    """The word of a run for the folder of data that the command was given, in quotes where a path needs them."""
    folder = str(cfg.data_dir or "")
    return [f"task.data_dir={folder if PLAIN_PATH.fullmatch(folder) else repr(folder)}"] if folder else []


def _tasks(suite: Suite, cfg: DictConfig) -> list[list[str]]:
    """The selected lines of tasks, with the user's settings of data and code for those that take them."""
    lines = [shlex.split(line) for line in suite.tasks]
    wanted = patterns(cfg.tasks)
    names = [choice(line, "task") for line in lines]
    for one in wanted or ():
        if not any(lets_through([one], name) for name in names):
            raise unknown_name("tasks", one, names)
    task_lines = []
    for name, line in zip(names, lines, strict=True):
        if not lets_through(wanted or None, name):
            continue
        takes = read_config(files.path_of("task", check_name("task", name, files.options("task"))))
        if AGREED in takes and not cfg[AGREED]:
            raise SettingMissing(
                f"the protocol asks {name}, which runs code that the model wrote; add {AGREED}=true if you agree "
                "that it runs on this machine, in the sandbox, or choose others with tasks=",
                setting=AGREED,
            )
        line += [f"task.{AGREED}=true"] if AGREED in takes else []
        words = data_words(cfg) if "data_dir" in takes else []
        if words and not _reads_folder(takes, str(cfg.data_dir)):
            note(f"data_dir={cfg.data_dir} has nothing for task={name}, which makes its own text")
            words = []
        line += words
        task_lines.append(line)
    return task_lines


def _reads_folder(task_cfg: DictConfig, folder: str) -> bool:
    """True where a task takes the suite's folder of data; for an optional one, where the folder has data for it."""
    from kvbench.tasks import settings_class

    # A task without a name is refused where its job is composed.
    return "name" not in task_cfg or settings_class(as_dict(task_cfg)).reads_folder(folder)


def _methods(suite: Suite, cfg: DictConfig) -> list[list[str]]:
    """Lines of the requested methods, each of one choice.

    The suite's, others by their name alone, and the user's.
    """
    known = [words for line in suite.methods for words in sweeping.combinations(shlex.split(line))]
    wanted = patterns(cfg.methods)
    if wanted is None:
        return known
    combinations: list[list[str]] = []
    for one in wanted:
        if "=" in one:
            combinations += sweeping.combinations(shlex.split(one))
            continue
        fits = [words for words in known if lets_through([one], choice(words, "method"))]
        combinations += fits or [[f"method={check_name('methods', one, files.options('method'))}"]]
    return [words for index, words in enumerate(combinations) if words not in combinations[:index]]


def plan(cfg: DictConfig, others: Sequence[str]) -> int:
    """Print the number of samples that a verdict needs."""
    from kvbench.extensions.suite import power

    words = [f"{name}=[{','.join(names)}]" for name in ("tasks", "methods") if (names := patterns(cfg[name]))]
    words += [f"results_dir={cfg.results_dir}", f"margin={cfg.margin}", *others]
    return power.main(commands.compose_command("compare", words))
