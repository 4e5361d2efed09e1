"""Commands other than `run`: each is one YAML in conf/command/ that names its function and lists its settings.

A command's YAML is its whole documentation: `kvbench <command> --help` prints it.
"""

import os
import re
from collections.abc import Callable
from importlib import import_module
from typing import Any

from omegaconf import DictConfig, OmegaConf

from kvbench.config import files
from kvbench.config.plainly import compose_plainly, plain_choices
from kvbench.config.settings import read_config
from kvbench.errors import CommandLine, SettingUnknown, SettingValue, unknown_setting

# In a command's file: the setting, or the settings in order, that words without a key set; one with * at its end takes
# all that are left.
BARE = "_bare_"
EACH = "_each_"  # the group of which the command takes several choices; its function finds all of them here, by name


WORDS = "_words_"  # true: the command's function takes the words themselves, and a function that runs words of a sweep
Sweep = Callable[..., int]


def run(name: str, arguments: list[str], sweep: Sweep | None = None) -> int:
    """Run a command.

    Args:
        name: Name of its file in `conf/command/`.
        arguments: Its words.
        sweep: Runs words of a sweep; for commands with `_words_`.

    Returns:
        Exit code.
    """
    if _command_file(name).get(WORDS):
        return function_of(name)(arguments, sweep)
    cfg = compose_command(name, arguments)
    settings = OmegaConf.create({key: value for key, value in cfg.items() if key not in ("_target_", BARE)})
    OmegaConf.set_struct(settings, True)
    return function_of(name)(settings)


def function_of(name: str) -> Callable[..., int]:
    """Function that a command's file names; anything composed with it cannot name another."""
    module, _, function = str(_command_file(name)["_target_"]).rpartition(".")
    return getattr(import_module(module), function)


def _command_file(name: str) -> DictConfig:
    """Content of a command's file."""
    return read_config(files.path_of("command", name))


def compose_command(name: str, arguments: list[str]) -> DictConfig:
    """Compose the settings of a command, with what the command line changes.

    Where the command's file names a group as `_each_`, `method=a,b` and `method=[a,b]` are both of them: `_each_` then
    holds the settings of every choice by its name, and the rest is as the first choice has it.
    """
    listed, plain = _command_file(name), dict[str, Any]()
    each = listed.get(EACH)
    for group in files.GROUPS if "defaults" in listed else ():
        chosen = plain_choices(arguments, group)
        if chosen is None:
            from kvbench.config.compose import choices

            chosen = choices(arguments, group)
        if len(chosen) < 2 or group in listed:
            continue
        if group != each:
            raise SettingValue(
                f"{name} takes one {group}, not {len(chosen)}; give the command once for each", setting=group
            )
        others = [word for word in arguments if word.partition("=")[0] != group]
        parts = {choice: compose_command(name, [f"{group}={choice}", *others]) for choice in chosen}
        composed = parts[chosen[0]]
        composed[EACH] = {choice: part[group] for choice, part in parts.items()}
        return composed
    bare = listed.get(BARE, [])
    places, named = [bare] if isinstance(bare, str) else list(bare), list[tuple[list[str], str]]()
    for word in list(arguments):
        key, has_value, value = word.partition("=")
        sentence = " " in word and key.partition(".")[0] not in {*listed, *files.GROUPS}  # a command of an engine
        if places and not word.startswith("-") and (not has_value or sentence or os.path.exists(word)):
            if places[0].endswith("*"):
                key = places[0].removesuffix("*")
                plain[key] = [*plain.get(key, []), word]
                arguments = [other for other in arguments if other is not word]
                continue
            key, value = places.pop(0), word
        elif not has_value:
            raise CommandLine(
                f"{word} is no setting of {name}; settings are key=value. `kvbench {files.spelled(name)} --help` lists "
                "them"
            )
        elif word.lstrip("+~").startswith("_"):
            raise SettingUnknown(
                f"{word}: names that begin with an underscore are not settings of {name}",
                setting=word.partition("=")[0],
            )
        elif _names_freely(listed, key):  # a name of the user's own and any text, for which Hydra has no place
            named.append((key.split(".", 1), value.strip("'\"")))
            arguments = [other for other in arguments if other is not word]
            continue
        elif key in listed and value[:1].isalpha() and re.search(" .*=|=.* ", value):
            pass  # words of settings, which Hydra's grammar has no place for
        # Hydra takes the name of a group for the group, also where a command has a plain setting of that name.
        elif key not in files.all_groups() or key not in listed or isinstance(listed[key], DictConfig):
            continue
        plain[key] = value
        arguments = [other for other in arguments if other is not word]
    composed = compose_plainly(name, arguments) or _composed_by_hydra(name, arguments)
    composed.update(plain)
    for (mapping, key), value in named:
        composed[mapping] = {**composed[mapping], key: value}
    if each:
        composed[EACH] = {composed._choices_[each]: composed[each]}
    return composed


def _composed_by_hydra(name: str, arguments: list[str]) -> DictConfig:
    """Settings of words that need Hydra's grammar, or its files; raises what is wrong with them."""
    from kvbench.config.compose import compose

    try:
        return compose(arguments, name=f"command/{files.full_command(name)}", with_choices=True)
    except ValueError:
        _check_keys(name, arguments)  # it checks the command's settings, so its error is plainer
        raise


def _names_freely(listed: DictConfig, key: str) -> bool:
    """True for a key in a mapping that is empty in the command's file, as `labels.NAME`."""
    mapping, dot, name = key.partition(".")
    return bool(dot and name) and isinstance(listed.get(mapping), DictConfig) and not listed[mapping]


def _check_keys(name: str, arguments: list[str]) -> None:
    """Name the first word whose key the command does not have; silent when all keys exist."""
    config = _command_file(name)
    for word in arguments:
        node: DictConfig | None = config
        prefix = ""
        top = word.lstrip("+~").partition("=")[0].partition(".")[0]
        if "defaults" in config and top not in config:  # experiments' settings are explained
            continue
        for part in word.partition("=")[0].lstrip("+~").split("."):
            known = [prefix + str(item) for item in node if not str(item).startswith("_")] if node else []
            if prefix + part not in known:
                raise unknown_setting(prefix + part, known)
            inner = node[part] if node else None
            node, prefix = (inner if isinstance(inner, DictConfig) else None), f"{prefix}{part}."
