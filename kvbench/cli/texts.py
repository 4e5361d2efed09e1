"""What the command line says when it is asked what there is: `list`, `--help` and `<command> --help`.

Nothing heavy is imported for it.
"""

import textwrap

from kvbench.config import files
from kvbench.errors import unknown_name

# The commands that have no file in conf/command/.
COMMANDS = {
    "run": "one experiment (or several with -m) and its full-cache reference; the default",
    "list": "the methods, tasks, models, protocols, backends and experiments there are",
    "lm_eval": "lm-eval's own command line with kvbench among its models (--model kvbench --tasks ...)",
    "help": "this text; `<command> --help` explains one command",
}


def commands() -> dict[str, str]:
    """Every command and what it does."""
    return {**COMMANDS, **files.command_files()}


def list_text(wanted: list[str], width: int = 100) -> str:
    """The answer to `kvbench list`.

    Args:
        wanted: Groups to show, in the singular or plural; all when empty.
        width: Columns of the terminal; longer descriptions are wrapped.

    Raises:
        ValueError: A name is no group.
    """
    names = []
    for word in wanted:
        name = word if word in files.GROUPS else word.removesuffix("s")
        if name not in files.GROUPS:
            raise unknown_name("list", word, files.GROUPS)
        names.append(name)
    lines = []
    for group in names or files.GROUPS:
        found = files.options(group)
        lines.append(f"{group}=  ({files.GROUPS[group]})")
        indent = max([len(name) for name in found], default=0)
        for name, text in found.items():
            lead = f"  {name:<{indent}}  "
            lines += textwrap.wrap(lead + text, width, subsequent_indent=" " * len(lead)) or [lead.rstrip()]
        if not found:
            lines.append("  none yet")
        lines.append("")
    return "\n".join(lines).rstrip()


def help_text() -> str:
    """The answer to `kvbench --help`."""
    lines = "\n".join(f"  {name:<10} {text}" for name, text in commands().items())
    groups = "\n".join(
        textwrap.fill(
            f"  {group + '=':<12} {' '.join(files.options(group)) or '(none yet)'}",
            120,
            subsequent_indent=" " * 15,
            break_long_words=False,
            break_on_hyphens=False,
        )
        for group in files.GROUPS
    )
    tree = (files.conf_folder() / "config.yaml").read_text(encoding="utf-8")
    keep, skip = [], False
    for line in tree.splitlines()[1:]:
        if line and not line.startswith(" "):
            skip = line.startswith(("defaults:", "hydra:"))
        if not skip:
            keep.append(f"  {line}".rstrip())
    settings = "\n".join(keep).strip("\n")
    return f"""kvbench: what does a compressed KV cache cost, in quality, bytes and time?

usage: python -m kvbench [command] [key=value ...]

commands
{lines}

examples
  python -m kvbench                                    diffkv beside the full cache, generated task, small model
  python -m kvbench method=snapkv limit=8              another method, 8 samples per subset
  python -m kvbench -m method=snapkv,kivi,diffkv       one run for each
  python -m kvbench -m 'method=glob(*)' seed=0,1       every method, two seeds
  python -m kvbench task=longbench task.data_dir=DIR   data from a folder of jsonl files
  python -m kvbench model=hf model.path=FOLDER_OR_ID   another model
  python -m kvbench --cfg job method=kivi              show the whole configuration and stop
  python -m kvbench list method                        what there is

choices (group=name; a setting inside one: group.key=value, for example method.{{key}}=...)
{groups}

settings
{settings}

flags
  -m, --multirun      take every combination of comma lists and glob(*)
  --cfg job           show the configuration instead of running (-p method shows one part)
  --config-dir DIR    a folder of your own with method/, task/, ... files to add to the choices
  --version           version of kvbench
  --hydra-help        flags of the configuration library underneath

A run that is stopped goes on where it was when the same command is given again.
KVBENCH_DEBUG=1 shows the traceback of an error."""


def command_help(name: str) -> str:
    """The answer to `kvbench <command> --help`: its purpose and every setting with its meaning."""
    lines = (files.conf_folder() / "command" / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    shown, skip = [], False
    for line in lines:
        if line.startswith(("# @package", "_")):
            continue
        if line and not line.startswith((" ", "#", "-")):
            skip = line.startswith(("defaults:", "hydra:"))
        if not skip:
            shown.append(line.removeprefix("# ") if line.startswith("# ") else f"  {line}".rstrip())
    body = "\n".join(shown).strip("\n")
    return f"usage: python -m kvbench {name} [key=value ...]\n\n{body}"
