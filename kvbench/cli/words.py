"""The words of a command line before Hydra reads them: the command, flags, and the habits that people bring from other
tools."""

import difflib
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvbench.cli import texts
from kvbench.config import files

FLAGS_WITH_VALUE = {"--cfg", "-c", "--package", "-p", "--config-path", "-cp", "--config-name", "-cn", "--info", "-i"}
FLAGS_WITH_VALUE |= {"--config-dir", "-cd", "--experimental-rerun"}
FLAGS = FLAGS_WITH_VALUE | {"-m", "--multirun", "-r", "--run", "-h", "--help", "--hydra-help", "--version", "--resolve"}
FLAGS |= {"--shell-completion", "-sc"}
# Flags that show something and run nothing.
SHOWING = {"--cfg", "-c", "--info", "-i", "--hydra-help", "--shell-completion", "-sc"}

# What lm-eval, kvpress and others call a setting -> what it is here; a task, a model and a ratio need more than a name.
HABITS = {
    "press": "method",
    "press_name": "method",
    "policy": "method",
    "task": "task",
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
    """Take the command off the front: it (`run` when none is given), and the other arguments."""
    if not arguments or "=" in arguments[0] or not arguments[0][:1].isalpha():
        return "run", arguments
    word, known = arguments[0], texts.commands()
    if word in known:
        return word, arguments[1:]
    hints = _settings_meant(arguments) or difflib.get_close_matches(word, known, n=1, cutoff=0.4)
    hint = f" Did you mean {hints[0]}?" if hints else ""
    raise ValueError(f"{word} is no command.{hint} Commands: {', '.join(known)}; settings are key=value.")


def _settings_meant(words: list[str]) -> list[str]:
    """Guess what `method snapkv`, `snapkv` and `metod` at the front mean, as key=value; the likeliest first."""
    word, after = words[0], words[1] if len(words) > 1 and "=" not in words[1] else ""
    group = word if word in files.GROUPS else word.removesuffix("s")
    if group in files.GROUPS:
        return [f"{group}={after or 'NAME'}"]
    return [f"{group}={word}" for group in files.GROUPS if word in files.options(group)]


def take_config_dir(arguments: list[str]) -> tuple[list[Path], list[str]]:
    """Take `--config-dir DIR` out of the words: the folder that is named last, if there is one; and the other words."""
    folders, others = [], []
    rest = iter(arguments)
    for word in rest:
        flag, sign, value = word.partition("=")
        if flag not in ("--config-dir", "-cd"):
            others.append(word)
            continue
        value = value if sign else next(rest, "")
        if not value:
            raise ValueError(f"{flag} needs a folder: {flag} DIR")
        folders = [Path(value).expanduser()]
    return folders, others


def config_dir_flags(folders: Sequence[Path]) -> list[str]:
    """The words that name the user's own folders again."""
    return [word for folder in folders for word in ("--config-dir", str(folder))]


def refuse_stored_config(own: Sequence[Path], arguments: Sequence[str]) -> None:
    """Refuse a folder of choices that has a config.yaml: Hydra would read kvbench's own in its place, without a word.
    The words may name one with `--config-path`."""
    given = [("--config-dir", folder) for folder in own]
    for word, following in zip(arguments, [*arguments, ""][1:], strict=True):
        flag, sign, value = word.partition("=")
        if flag in ("--config-path", "-cp"):
            given.append((flag, Path(value if sign else following)))
    for flag, folder in given:
        if not (folder / "config.yaml").is_file():
            continue
        if (folder / "run.json").is_file():
            raise ValueError(
                f"{flag} {folder} is a stored run, whose settings would be ignored; `kvbench rerun "
                f"{shlex.quote(str(folder))}` runs it again"
            )
        raise ValueError(
            f"{flag} {folder} has a config.yaml, which would be ignored; a folder of your own holds method/, task/, "
            "... alone, and experiment/ sets several settings at once"
        )


def flags_first(arguments: list[str]) -> list[str]:
    """Put flags and their values before the settings; Hydra does not take settings on both sides of a flag."""
    flags, settings = parted(arguments)
    return flags + settings


def parted(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Flags with their values, and settings."""
    flags, settings = [], []
    rest = iter(arguments)
    for word in rest:
        if not word.startswith("-"):
            settings.append(word)
            continue
        flags.append(word)
        if word in FLAGS_WITH_VALUE:
            flags += [value for value in [next(rest, None)] if value is not None]
    return flags, settings


def check_flags(arguments: list[str], command: str = "run") -> None:
    """Refuse a flag that kvbench does not have, with the whole command as kvbench writes it where that can be told."""
    wrong: list[str] = []
    meant: list[str] = []
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        flag, sign, value = word.partition("=")
        if not _is_flag(word) or flag in FLAGS:
            meant.append(word)
            if word in FLAGS_WITH_VALUE and rest:
                meant.append(rest.pop(0))
            continue
        wrong.append(flag)
        if not sign and rest and not _is_flag(rest[0]) and ("=" not in rest[0] or flag == "--model_args"):
            value = rest.pop(0)
        found = list(_translated(flag.lstrip("-"), value)) if value else []
        meant += found or [f"?{flag}"]
    if not wrong:
        return
    text = f"{' and '.join(wrong)} {'is no flag' if len(wrong) == 1 else 'are no flags'} of kvbench"
    if any(word.startswith("?") for word in meant):
        near = difflib.get_close_matches(wrong[0], FLAGS, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        shown = ", ".join(sorted(flag for flag in FLAGS if flag.startswith("--")))
        raise ValueError(f"{text}.{hint} Settings are key=value, without dashes; flags are {shown}.")
    again = shlex.join(["kvbench", *([command] if command != "run" else []), *meant])
    raise ValueError(f"{text}; settings are key=value. Did you mean `{again}`?")


def _is_flag(word: str) -> bool:
    return word.startswith("-") and not re.fullmatch(r"-[0-9.].*", word)


def _translated(name: str, value: str) -> Iterator[str]:
    """A setting of another tool as ours; nothing where it is not known."""
    key = name.replace("-", "_")
    if key == "model_args":
        for part in value.split(","):
            inner, sign, given = part.partition("=")
            yield from _translated(inner, given) if sign else ()
    elif key == "model":
        yield from [f"model={value}"] if value in files.options("model") else ["model=hf", f"model.path={value}"]
    elif key == "compression_ratio":
        yield from _kept(value)
    elif HABITS.get(key) == "task":
        yield from _task(value)
    elif key in HABITS or _is_setting(key):
        yield f"{HABITS.get(key, key)}={value}"


def _kept(ratio: str) -> Iterator[str]:
    """kvpress's ratio says what is dropped; a budget says what is kept."""
    try:
        yield f"method.budget={1 - float(ratio):g}"
    except ValueError:
        return


def _task(value: str) -> Iterator[str]:
    names, known = value.split(","), files.options("task")
    if all(name in known for name in names):
        yield from (["-m"] if len(names) > 1 else [])
        yield f"task={value}"
    elif len(names) == 1:
        yield from ("task=lm_eval", f"task.name={value}")


def _is_setting(name: str) -> bool:
    """True for a setting of conf/config.yaml, a group, or a setting inside a group."""
    top = name.split(".")[0]
    lines = (files.conf_folder() / "config.yaml").read_text(encoding="utf-8").splitlines()
    return top in files.GROUPS or (name == top and any(re.match(rf"{re.escape(name)}:", line) for line in lines))
