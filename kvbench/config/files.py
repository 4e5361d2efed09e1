"""What there is to choose from, read from the configuration files without importing anything heavy."""

import textwrap
from pathlib import Path

from kvbench.errors import unknown_name

FULL = "full"  # conf/method/full.yaml: the one method the harness knows by name, the reference of every other
GROUPS = {
    "method": "how the cache is compressed",
    "task": "what the model is asked",
    "model": "which model",
    "protocol": "how it is asked",
    "backend": "which kernels",
    "experiment": "several settings at once",
}
COMMANDS = {
    "run": "one experiment (or several with -m) and its full-cache reference; the default",
    "list": "the methods, tasks, models, protocols, backends and experiments there are",
    "lm_eval": "lm-eval's own command line with kvbench among its models (--model kvbench --tasks ...)",
    "help": "this text; `<command> --help` explains one command",
}


def package_folder() -> Path:
    """The folder of the `kvbench` package."""
    return Path(__file__).resolve().parent.parent


def sibling_folder(name: str) -> Path:
    """The folder `conf`, `methods` or `kernels`: beside the package in a source tree, inside it when installed.

    Raises:
        ValueError: Neither exists, so the installation is broken.
    """
    package = package_folder()
    for folder in (package.parent / name, package / name):
        # In site-packages a neighbour called `kernels` belongs to somebody else.
        if folder.is_dir() and (folder.parent == package or (package.parent / "pyproject.toml").exists()):
            return folder
    raise ValueError(f"the folder {name}/ is missing beside or inside {package}; install kvbench again")


def conf_folder() -> Path:
    """The folder with config.yaml and the groups."""
    return sibling_folder("conf")


def describe(path: Path) -> str:
    """The leading comment of a YAML file up to its first full stop, on one line."""
    words = []
    for line in path.read_text(encoding="utf-8").splitlines():
        text = line.strip()
        if not text.startswith("#"):
            if text and text != "---":
                break
            continue
        text = text.lstrip("#").strip()
        if text.startswith("@package") or (text.startswith("source:") and not words):
            continue
        if text.startswith("source:"):
            break
        words.append(text)
    sentence, stop, _ = " ".join(words).partition(". ")
    return sentence + ("." if stop else "")


def command_files() -> dict[str, str]:
    """The commands that have a file in conf/command/, and what each does."""
    return options("command")


def commands() -> dict[str, str]:
    """Every command and what it does."""
    return {**COMMANDS, **command_files()}


def options(group: str, conf: Path | None = None) -> dict[str, str]:
    """Names of a group's configurations and what each is.

    Args:
        group: Folder under conf/, for example `method`.
        conf: The configuration folder; kvbench's own by default.
    """
    folder = (conf or conf_folder()) / group
    return {str(path.relative_to(folder).with_suffix("")): describe(path) for path in sorted(folder.rglob("*.yaml"))}


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
        name = word if word in GROUPS else word.removesuffix("s")
        if name not in GROUPS:
            raise unknown_name("list", word, GROUPS)
        names.append(name)
    lines = []
    for group in names or GROUPS:
        found = options(group)
        lines.append(f"{group}=  ({GROUPS[group]})")
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
            f"  {group + '=':<12} {' '.join(options(group)) or '(none yet)'}",
            120,
            subsequent_indent=" " * 15,
            break_long_words=False,
            break_on_hyphens=False,
        )
        for group in GROUPS
    )
    tree = (conf_folder() / "config.yaml").read_text(encoding="utf-8")
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
