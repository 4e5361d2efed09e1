"""Words of a command line before Hydra reads them.

The command, flags, and the spellings of other tools.
"""

import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

from kvbench.cli import texts
from kvbench.config import extensions, files
from kvbench.config.one_file import SUFFIX
from kvbench.errors import CommandLine, SettingUnknown, did_you_mean, unknown_name

# Flags of Hydra by their short names.
SHORT = {
    "-c": "--cfg",
    "-p": "--package",
    "-cp": "--config-path",
    "-cn": "--config-name",
    "-cd": "--config-dir",
    "-i": "--info",
    "-m": "--multirun",
    "-r": "--run",
    "-h": "--help",
    "-sc": "--shell-completion",
}
LONG_WITH_VALUE = {"--cfg", "--package", "--config-path", "--config-name", "--config-dir", "--info"}
FLAGS_WITH_VALUE = LONG_WITH_VALUE | {short for short, flag in SHORT.items() if flag in LONG_WITH_VALUE}
FLAGS = {*SHORT, *SHORT.values(), "--hydra-help", "--version", "--resolve"}
SHOWING = {"--cfg", "--info", "--hydra-help", "--shell-completion"}  # flags that show something and run nothing

# Name of a setting in lm-eval, kvpress and others -> name here.
HABITS = {
    "press": "method",
    "press_name": "method",
    "policy": "method",
    "tasks": "task",
    "dataset": "task",
    "budget": "method.budget",
    "kv_budget": "method.budget",
    "pretrained": "model.path",
    "model_path": "model.path",
    "model_name_or_path": "model.path",
    "dtype": "model.dtype",
    "device": "model.device",
    "device_map": "model.device",
    "tensor_parallel_size": "model.tensor_parallel",
    "quantization": "model.quantisation",
    "data_dir": "task.data_dir",
    "num_fewshot": "task.num_fewshot",
    "max_new_tokens": "protocol.max_new_tokens",
    "temperature": "protocol.temperature",
    "num_samples": "limit",
    "max_samples": "limit",
    "output_path": "results_dir",
    "output_dir": "results_dir",
    "out_dir": "results_dir",
}


def split_command(arguments: list[str]) -> tuple[str, list[str]]:
    """Split the command off the front; without one it is `run`, or the command of a group that is chosen (suite=)."""
    if not arguments or "=" in arguments[0] or not arguments[0][:1].isalpha():
        chosen = {word.partition("=")[0] for word in arguments if "=" in word} & extensions.groups().keys()
        return (min(chosen) if chosen else "run"), arguments
    word, known = arguments[0], texts.commands()
    if word in known:
        return _dispatched(word, arguments[1:])
    if now := texts.moved().get(word):
        print(f"kvbench: {word} is `kvbench {now}` now", file=sys.stderr)
        return files.full_command(word), arguments[1:]
    if reason := extensions.lacking(word):
        raise CommandLine(reason)
    meant = _settings_meant(arguments)
    hint = f" Did you mean {meant[0]}?" if meant else did_you_mean(word, known)
    raise CommandLine(f"{word} is no command.{hint} Commands: {', '.join(known)}; settings are key=value.")


def _dispatched(command: str, words: list[str]) -> tuple[str, list[str]]:
    """The command that a word such as `view=ranks` chooses, and the other words."""
    key, further = files.dispatch_keys().get(command), files.subcommands(command)
    for word in words if key else ():
        name, _, choice = word.partition("=")
        if name == key and choice in further:
            return f"{command}/{choice}", [other for other in words if other is not word]
        if name == key and not texts.has_setting(command, name):
            raise unknown_name(name, choice, further)
    return command, words


def _settings_meant(words: list[str]) -> list[str]:
    """Guesses at words such as `method snapkv`, `snapkv` or `delete` at the front, the likeliest first.

    A guess is key=value, or a command with its setting.
    """
    word, after = words[0], words[1] if len(words) > 1 and "=" not in words[1] else ""
    group = word if word in files.GROUPS else word.removesuffix("s")
    if group in files.GROUPS:
        return [f"{group}={after or 'NAME'}"]
    chosen = [f"{group}={word}" for group in files.GROUPS if word in files.options(group)]
    return chosen or [f"{each} {word}=" for each in files.command_files() if texts.has_setting(each, word)]


def take_config_dir(arguments: list[str]) -> tuple[list[Path], list[str]]:
    """Take `--config-dir DIR` and the file in `method=FILE.py` out of the words.

    Returns the last folder named, if any, the files, and the other words, in which a file's method has its name.
    """
    folders, method_files, others = [], list[Path](), []
    rest = iter(arguments)
    for word in rest:
        flag, sign, value = word.partition("=")
        if flag == "method" and SUFFIX in value:
            word, paths = with_names(word)
            method_files += paths
        if flag not in ("--config-dir", "-cd"):
            others.append(word)
            continue
        value = value if sign else next(rest, "")
        if not value:
            raise CommandLine(f"{flag} needs a folder: {flag} DIR", setting=flag)
        if value.endswith(SUFFIX):
            method_files.append(Path(value).expanduser())
        else:
            folders = [Path(value).expanduser()]
    return [*folders, *dict.fromkeys(method_files)], others


def with_names(word: str) -> tuple[str, list[Path]]:
    """`method=FILE.py,snapkv` with the names of methods instead of their files; and these files."""
    group, _, value = word.partition("=")
    parts = value.strip("[]'\"").split(",")
    paths = [Path(part).expanduser() for part in parts if part.endswith(SUFFIX)]
    names = [Path(part).stem if part.endswith(SUFFIX) else part for part in parts]
    return f"{group}={','.join(names)}", paths


@contextmanager
def config_dir_choices(folders: Sequence[Path]) -> Iterator[None]:
    """Add the choices of `--config-dir` folders to kvbench's inside the block."""
    # Modules of the user's methods lie next to their YAMLs; at the end of the path they shadow no other.
    with files.with_config_dirs(folders):
        sys.path += [folder for folder in files.import_folders(folders) if folder not in sys.path]
        yield


def config_dir_flags(folders: Sequence[Path]) -> list[str]:
    """Command-line flags that name the `--config-dir` folders."""
    return [word for folder in folders for word in ("--config-dir", str(folder))]


def refuse_stored_config(config_dirs: Sequence[Path], arguments: Sequence[str]) -> None:
    """Refuse a folder of choices that has a config.yaml, which Hydra would silently replace by kvbench's.

    The words may name one with `--config-path`.
    """
    folders = [("--config-dir", folder) for folder in config_dirs]
    for word, next_word in pairwise([*arguments, ""]):
        flag, sign, value = word.partition("=")
        if flag in ("--config-path", "-cp"):
            folders.append((flag, Path(value if sign else next_word)))
    for flag, folder in folders:
        if (folder / "config.yaml").is_file() and (folder / "run.json").is_file():
            command = shlex.join(["kvbench", "rerun", str(folder)])
            raise CommandLine(
                f"{flag} {folder} is a stored run, whose settings would be ignored; `{command}` runs it again",
                setting=flag,
            )
        if (folder / "config.yaml").is_file():
            raise CommandLine(
                f"{flag} {folder} has a config.yaml, which would be ignored; a folder of your own holds method/, "
                "task/, ... alone, and experiment/ sets several settings at once",
                setting=flag,
            )


def parted(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Flags with their values, and settings."""
    flags: list[str] = []
    settings: list[str] = []
    for before, word in pairwise(["", *arguments]):
        (flags if word.startswith("-") or before in FLAGS_WITH_VALUE else settings).append(word)
    return flags, settings


def read_flags(words: Sequence[str]) -> dict[str, str]:
    """Flags by their long names, with their values.

    Raises:
        ValueError: A value is missing, or two flags contradict.
    """
    flags, rest = dict[str, str](), iter(words)
    for word in rest:
        flag, sign, value = word.partition("=")
        flag = SHORT.get(flag, flag)
        if flag in FLAGS_WITH_VALUE and not sign:
            value = next(rest, "all" if flag == "--info" else "")
            if not value:
                raise CommandLine(f"{word} needs a value: {word} VALUE", setting=word)
        flags[flag] = value
    if len(both := sorted(flags.keys() & {"--run", "--multirun", *SHOWING})) > 1:
        raise CommandLine(f"{' and '.join(both)} exclude one another; give one")
    if "--resolve" in flags and "--cfg" not in flags:
        raise CommandLine("--resolve is for what --cfg shows; add --cfg job, or leave it out", setting="--resolve")
    return flags


def check_flags(arguments: Sequence[str]) -> None:
    """Refuse a flag that kvbench does not have, with the settings that are probably meant."""
    wrong, meant = [], []
    for word, next_word in pairwise([*arguments, ""]):
        flag, sign, value = word.partition("=")
        if not word.startswith("-") or re.match(r"-[0-9.]", word) or flag in FLAGS:
            continue
        wrong.append(flag)
        key = flag.lstrip("-").replace("-", "_")
        if key in HABITS or _is_setting(key):
            meant.append(f"{HABITS.get(key, key)}={value if sign else next_word}")
    if not wrong:
        return
    text = f"{' and '.join(wrong)} {'is no flag' if len(wrong) == 1 else 'are no flags'} of kvbench"
    if meant:
        raise CommandLine(f"{text}; settings are key=value. Did you mean `{shlex.join(meant)}`?")
    shown = ", ".join(sorted(flag for flag in FLAGS if flag.startswith("--")))
    near = did_you_mean(wrong[0], FLAGS)
    raise CommandLine(f"{text}.{near} Settings are key=value, without dashes; flags are {shown}.")


def from_habits(arguments: Sequence[str]) -> list[str]:
    """The arguments with the group before a setting that has the same name elsewhere, as `budget`.

    Raises:
        ValueError: A setting has another name elsewhere; says its name here.
    """
    result = []
    for word in arguments:
        key, sign, value = word.partition("=")
        here = HABITS.get(key, key) if sign else key
        if here.rpartition(".")[2] != key.rpartition(".")[2]:
            raise SettingUnknown(
                f"there is no setting {key}. Did you mean `{shlex.join([f'{here}={value}'])}`?", setting=key
            )
        result.append(f"{here}={value}" if sign else word)
    return result


def _is_setting(name: str) -> bool:
    """True for a setting of conf/config.yaml, a group, or a setting inside a group."""
    top = name.split(".")[0]
    lines = (files.conf_folder() / "config.yaml").read_text(encoding="utf-8").splitlines()
    return top in files.GROUPS or (name == top and any(re.match(rf"{re.escape(name)}:", line) for line in lines))
