"""Answers of the command line about itself: to nothing at all, `list`, `--help`, `<command> --help`.

Nothing heavy is imported for it. `width` is always that of the reader's terminal; nothing is wider.
"""

import re
import textwrap
from typing import Any

from kvbench.cli.glossary import glossary
from kvbench.config import files
from kvbench.errors import NameUnknown, did_you_mean

# The commands that have no file in conf/command/: what each does, and how it is written.
COMMANDS = {
    "run": "one experiment, or several with -m, and its full-cache reference; `run` may be left out before settings",
    "list": "the methods, tasks, models, protocols, backends, suites and papers there are",
    "lm_eval": "lm-eval's own command line with kvbench among its models",
    "help": "explains a command, a method, a task, a model, ...",
}
USAGES = {
    "run": "kvbench run [key=value ...]",
    "list": "kvbench list [method | task | model | protocol | backend | experiment | suite ...]",
    "lm_eval": "kvbench lm_eval --model kvbench --model_args method=snapkv,method.budget=0.5 --tasks arc_easy",
    "help": "kvbench help [a command, a method, a task, a model, ...] [all=true]",
}
TAGLINE = "kvbench: what does a compressed KV cache cost, in quality, bytes and time?"
# Common needs by purpose; each begins with the command for it.
NEEDED = (
    ("run", "method=snapkv budget=0.25", "measure a method beside the full cache: minutes"),
    ("run", "method=snapkv,kivi limit=8", "several methods, 8 samples of each subset"),
    ("run", "model=FOLDER_OR_HUB_ID", "another model; task=NAME: another task"),
    ("compare", "compare", "what the stored results prove"),
    ("report", "report", "one page with tables and pictures"),
    ("advise", "advise gpu=L4 context=32k", "which method fits my card"),
    ("engine", 'engine "vllm serve ..."', "what my engine's flags save and cost"),
    ("status", "status", "what lies there; delete=, move=, tag="),
)
LOOKS = (
    ("list", "methods, tasks, models, ..."),
    ("help snapkv", "a method, task, model or command and its settings"),
    ("help glossary", "what list, tier, slack, forced, ... mean"),
    ("help columns", "what the columns of a table mean"),
    ("--help", "everything"),
)
EXAMPLES = (
    ("run", "diffkv beside the full cache, generated task, small model"),
    ("method=snapkv limit=8", "another method, 8 samples per subset"),
    ("method=snapkv,kivi,diffkv", "one run for each"),
    ("suite=quick", "a protocol of several tasks and methods, and one page"),
    ("-m 'method=glob(*)' seed=0,1", "every method, two seeds"),
    ("task=longbench task.data_dir=DIR", "data from a folder of jsonl files"),
    ("model=FOLDER_OR_HUB_ID", "another model"),
    ("-m method=h2o,kivi hydra/launcher=joblib", "two runs at once; also submitit_slurm, submitit_local, ray"),
    ("method=toy.py", "a method of your own in one file"),
    ("--cfg job method=kivi", "show the whole configuration and stop"),
)
FLAGS = (
    ("-m, --multirun", "take every combination of comma lists and glob(*), each with the settings that its method has"),
    ("--cfg job", "show the configuration instead of running (-p method shows one part)"),
    (
        "--config-dir DIR",
        "a folder of your own with method/, task/, ... files to add to the choices; any command takes it",
    ),
    ("--version", "version of kvbench"),
    ("--hydra-help", "flags of the configuration library underneath, tab completion among them"),
)


def commands() -> dict[str, str]:
    """Every command and what it does."""
    return {**COMMANDS, **files.command_files()}


def has_setting(command: str, name: str) -> bool:
    """True if a command's file lists a plain setting."""
    text = files.path_of("command", command).read_text(encoding="utf-8")
    return re.search(rf"^{re.escape(name)}:", text, re.MULTILINE) is not None


def moved() -> dict[str, str]:
    """Commands by the word that they had before they became `report view=...` and the like, as they are written now."""
    return {choice: files.spelled(choice) for command in files.dispatch_keys() for choice in files.subcommands(command)}


def rows(pairs: "tuple[tuple[str, str], ...]", width: int, lead: str = "") -> str:
    """Two columns; the second is wrapped."""
    indent = 4 + max(len(lead + left) for left, _ in pairs)
    lines = []
    for left, right in pairs:
        first = f"  {lead + left:<{indent - 4}}  "
        lines += textwrap.wrap(first + right, max(width, indent + 20), subsequent_indent=" " * indent, **_WHOLE)
    return "\n".join(lines)


def needed() -> tuple[tuple[str, str], ...]:
    """Common needs and the commands for them, as far as these are installed."""
    known = commands()
    return tuple((words, purpose) for command, words, purpose in NEEDED if command in known)


def overview(width: int = 80) -> str:
    """The answer to `kvbench` alone: what it can do, in one screen of 80 x 24."""
    names = textwrap.fill("  " + " ".join(commands()), width, subsequent_indent="  ")
    return (
        f"{TAGLINE}\n\nstart\n{rows(needed(), width, 'kvbench ')}\n\n"
        f"look around\n{rows(LOOKS, width, 'kvbench ')}\n\ncommands\n{names}"
    )


def list_text(wanted: list[str], width: int = 100) -> str:
    """Answer `kvbench list`."""
    names, known = [], files.all_groups()
    for word in wanted:
        name = word if word in known else word.removesuffix("s")
        if name not in known:
            hint = did_you_mean(word, [f"{group}s" for group in known])
            raise NameUnknown(f"{word} is none of the lists.{hint} There are: {', '.join(known)}.")
        names.append(name)
    lines = []
    for group in names or known:
        options = tuple(files.options(group).items())
        lines.append(f"{group}=  ({known[group]})")
        lines += rows(options, width).splitlines() if options else ["  none yet"]
        lines.append("")
    return "\n".join(lines).rstrip()


def help_text(width: int = 80) -> str:
    """The answer to `kvbench --help`."""
    groups = tuple((f"{group}=", " ".join(files.options(group)) or "(none yet)") for group in files.GROUPS)
    settings = settings_text((files.conf_folder() / "config.yaml").read_text(encoding="utf-8"), width)
    choices = "choices (group=name; a setting inside one: group.key=value, for example method.budget=0.5)"
    return f"""{TAGLINE}

usage: kvbench [command] [key=value ...]      (or python -m kvbench)

what people come for
{rows(needed(), width, "kvbench ")}

all commands
{rows(tuple(commands().items()), width)}

examples
{rows(EXAMPLES, width, "kvbench ")}

{textwrap.fill(choices, width)}
{rows(groups, width)}

settings (of a group without its name, where one group alone has it: budget=0.5)
{settings}

words
{glossary(width)}

flags
{rows(FLAGS, width)}

{textwrap.fill("A run that is stopped goes on where it was when the same command is given again.", width)}
KVBENCH_DEBUG=1 shows the traceback of an error."""


def command_help(name: str, width: int = 80) -> str:
    """The answer to `kvbench <command> --help`: its purpose and every setting with its meaning."""
    if name in USAGES:
        more = {"run": f"\n\n{help_text(width)}"}.get(name, "")
        usage = textwrap.fill(f"usage: {USAGES[name]}", width, subsequent_indent=" " * 7, **_WHOLE)
        return f"{usage}\n\n{textwrap.fill(f'{COMMANDS[name]}.', width)}{more}"
    text = files.path_of("command", name).read_text(encoding="utf-8")
    usage = f"usage: kvbench {files.spelled(name)} [key=value ...]"
    further = tuple(files.subcommands(name).items())
    if further:
        key = files.dispatch_keys()[name]
        text_of = f"further, each with settings that `kvbench {name} {key}=NAME --help` lists"
        more = f"\n\n{text_of}\n{rows(further, width, f'{key}=')}"
    else:
        more = ""
    return f"{usage}\n\n{purpose(text, width)}\n\n{settings_text(text, width)}{more}"


def purpose(text: str, width: int) -> str:
    """The leading comment of a YAML file; its examples and sources stand on lines of their own."""
    parts: list[str] = []
    for line in text.splitlines():
        if not line.startswith("#"):
            if line.strip():
                break
            continue
        words = line.lstrip("#").strip()
        if words.startswith("@package"):
            continue
        if not parts or re.match(r"(Example:|\w+: )", words):
            parts.append(words)
        else:
            parts[-1] += f" {words}"
    return "\n".join(textwrap.fill(part, width, **_WHOLE) for part in parts)


def settings_text(text: str, width: int, skipped: tuple[str, ...] = ("defaults:", "hydra:")) -> str:
    """The settings of a YAML file with their comments, without what belongs to the configuration library."""
    shown: list[str] = []
    skip, is_body = False, False
    for line in text.splitlines():
        is_body = is_body or bool(line.strip() and not line.startswith("#"))
        if not is_body or line.startswith("_"):  # keys of the command itself
            continue
        if line and not line.startswith((" ", "#", "-")):
            skip = line.startswith(skipped)
        if not skip:
            shown += fold(f"  {line}".rstrip(), width)
    return "\n".join(shown).strip("\n")


def fold(line: str, width: int) -> list[str]:
    """A line of YAML in no more than `width` columns: what does not fit of its comment goes on below it."""
    if len(line) <= width:
        return [line]
    setting, sign, comment = re.sub(r"\s+# ", " # ", line).partition(" # ")
    indent = " " * (len(line) - len(line.lstrip()) + 4)
    if not sign:
        return textwrap.wrap(line, width, subsequent_indent=indent, **_WHOLE)
    if len(setting) > width // 2:  # the comment stands below
        lines = textwrap.wrap(setting, width, subsequent_indent=indent, **_WHOLE)
        mark = f"{indent}# "
        return lines + textwrap.wrap(comment, width, initial_indent=mark, subsequent_indent=mark, **_WHOLE)
    mark = " " * (len(setting) + 1) + "# "
    return textwrap.wrap(comment, width, initial_indent=f"{setting} # ", subsequent_indent=mark, **_WHOLE)


_WHOLE: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
