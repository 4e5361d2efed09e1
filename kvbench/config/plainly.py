"""Composes the settings of a command from words that need no grammar, without Hydra.

Its import takes as long as an answer from stored results.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf

from kvbench.config import files, methods
from kvbench.config.settings import read_config

_INT = re.compile(r"0|-?[1-9][0-9]{0,15}")
_FLOAT = re.compile(r"-?(0|[1-9][0-9]*)\.[0-9]+")
_TEXT = re.compile(r"[A-Za-z0-9_./][A-Za-z0-9_./-]*")
_CONSTANTS: Mapping[str, Any] = {"null": None, "true": True, "false": False}
_GROUP = "method"  # the group of which such a command takes a choice


class NeedsGrammar(Exception):
    """Words that only Hydra reads."""


def plain_value(text: str) -> Any:
    """The value of a number, a constant, a name, a path, or a list of these, as Hydra reads it.

    Raises:
        NeedsGrammar: It is something else.
    """
    if text[:1] == "[" and text[-1:] == "]" and len(text) > 2:
        return [plain_value(item.strip(" ")) for item in text[1:-1].split(",")]
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    if _INT.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    if not _TEXT.fullmatch(text) or text.lower() in _CONSTANTS:
        raise NeedsGrammar
    try:
        float(text)  # and whatever else Python has numbers for, such as 1e-3, 1_000 and nan
    except ValueError:
        return text
    raise NeedsGrammar


def plain_choices(words: Sequence[str], group: str) -> list[str] | None:
    """Every choice of a group that words make, as `method=a,b` or `method=[a,b]`; None where Hydra must say."""
    values = [value for key, _, value in (word.partition("=") for word in words) if key == group]
    if not values:
        return [] if all(re.match(r"[\w.]+=", word) for word in words) else None
    try:
        choices = [plain_value(item) for item in values[0].removeprefix("[").removesuffix("]").split(",")]
    except NeedsGrammar:
        return None
    return choices if len(values) == 1 and all(isinstance(item, str) for item in choices) else None


def compose_plainly(name: str, words: Sequence[str]) -> DictConfig | None:
    """Compose a command's settings, as `kvbench.config.compose.compose` does with its choices.

    None where its file or a word needs Hydra, whose messages an error then has.

    Args:
        name: Name of the command's file in `conf/command/`.
        words: `key=value` words of settings and choices.
    """
    try:
        return _composed(read_config(files.path_of("command", name)), words)
    except NeedsGrammar:
        return None


def _composed(config: DictConfig, words: Sequence[str]) -> DictConfig:
    defaults = OmegaConf.to_container(config.pop("defaults", OmegaConf.create([])))
    from_words = dict(word.partition("=")[::2] for word in words)
    if len(from_words) < len(words) or not all("=" in word for word in words):
        raise NeedsGrammar  # a word twice, and one without a value
    if defaults:
        group, choice = _choice(defaults, from_words.pop(_GROUP, None))
        method = methods.method_settings(choice)
        config[group], config._choices_ = method, {group: choice}
    for key, value in from_words.items():
        _set(config, key, plain_value(value))
    return config


def _choice(defaults: Any, word: str | None) -> tuple[str, str]:
    """The group of a command that takes one, and its choice."""
    match defaults:
        case [{**named}, "_self_"] if list(named) == [f"/{_GROUP}"]:
            choice = named[f"/{_GROUP}"] if word is None else plain_value(word)
            if isinstance(choice, str) and choice in files.options(_GROUP) and not files.config_dirs():
                return _GROUP, choice
    raise NeedsGrammar


def _set(config: DictConfig, key: str, value: Any) -> None:
    """Set what there is already; a setting of the method needs no group before it."""
    *above, last = key.split(".")
    if not above and key not in config:
        holders = [name for name, node in config.items() if isinstance(node, DictConfig) and key in node]
        above = [str(name) for name in holders if name != "_choices_"]
    node = config
    for part in above[:1]:
        node = node[part] if isinstance(node.get(part), DictConfig) else DictConfig({})
    if len(above) > 1 or last not in node or last.startswith("_") or isinstance(node[last], DictConfig):
        raise NeedsGrammar
    node[last] = value
