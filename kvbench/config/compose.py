"""Composes configurations from conf/, and explains why one could not be composed.

The message has the request, the existing names and the nearest one.
"""

import re
import shlex
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Integral, Real
from pathlib import Path

import hydra
from hydra import initialize_config_dir
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, open_dict
from omegaconf.errors import OmegaConfBaseException

from kvbench.config import files, methods, sources
from kvbench.config.shorthand import every_setting, long_form
from kvbench.errors import CommandLine, SettingMissing, SettingUnknown, SettingValue, unknown_name, unknown_setting

_LIBRARY = {"hydra", "omegaconf", "antlr4"}  # packages of the configuration library
JOB = "jobs"  # hydra.job.name, which launchers show where they list what runs


def compose(overrides: Sequence[str], *, name: str = "config", with_choices: bool = False) -> DictConfig:
    """Compose a configuration without Hydra's command line.

    Args:
        overrides: Hydra's `key=value` words.
        name: The file in conf/ to start from, without its suffix.
        with_choices: Add `_choices_`, the name taken of every group, such as `method: diffkv`, where there are any.

    Raises:
        ValueError: A group, a choice or a setting does not exist, or a word cannot be read.
    """
    overrides = long_form(overrides, name)
    check_choices(overrides)
    overrides = with_shared_settings(overrides)
    with explained(overrides):
        composed = _compose(name, overrides, return_hydra_config=with_choices)
    if with_choices:
        with open_dict(composed):
            chosen = composed.pop("hydra").runtime.choices
            if named := {group: chosen[group] for group in files.GROUPS if group in chosen}:
                composed._choices_ = named
    return composed


def _compose(name: str, overrides: Sequence[str], *, return_hydra_config: bool = False) -> DictConfig:
    """`compose` with the configuration library's own errors."""
    with started():
        return hydra.compose(name, [*overrides], return_hydra_config=return_hydra_config)


@contextmanager
def started(root: Path | None = None) -> Iterator[ConfigLoader]:
    """Start Hydra for as long as the block lasts; one that was started before is back afterwards.

    Args:
        root: Folder with config.yaml and the groups; kvbench's own by default.
    """
    before = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()  # Hydra refuses to start twice
    root = root or files.conf_folder()
    try:
        with sources.searched(root), initialize_config_dir(str(root), job_name=JOB, version_base="1.3"):
            yield GlobalHydra.instance().config_loader()
    finally:
        GlobalHydra.instance().hydra = before


def hydra_value(key: str, value: object) -> str:
    """A Python value as Hydra's command line writes it; text is quoted, so that it stays text.

    Raises:
        ValueError: It is something else than None, a truth value, a number, text, a path, or lists and mappings of
            these.
    """
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Integral):  # numpy's too
        return str(int(value))
    if isinstance(value, Real):
        return repr(float(value))
    if isinstance(value, str | Path):
        # Backslashes mean themselves, except those before a quote, of which every one is doubled.
        doubled = re.sub(r"(\\*)'", lambda match: 2 * match[1] + "\\'", str(value))
        return "'" + re.sub(r"(\\+)$", r"\1\1", doubled) + "'"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{name}:{hydra_value(key, item)}" for name, item in value.items()) + "}"
    if isinstance(value, Sequence):
        return "[" + ",".join(hydra_value(key, item) for item in value) + "]"
    raise SettingValue(
        f"{key}={value!r} is a {type(value).__name__}, which no setting can be; give None, a truth value, a number, "
        "text, or lists and mappings of these",
        setting=key,
    )


def words_of(settings: Mapping[str, object], prefix: str = "") -> list[str]:
    """Settings as `key=value` words; `prefix` stands before each key."""
    return [f"{prefix}{key}={hydra_value(prefix + key, value)}" for key, value in settings.items()]


@contextmanager
def explained(words: Sequence[str]) -> Iterator[None]:
    """Re-raise an error of the configuration library as one message for the user.

    Args:
        words: Words of the command line.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, HydraException | OmegaConfBaseException) or _is_librarys(error):
            raise explain(error, words) from error
        raise


def _is_librarys(error: Exception) -> bool:
    """True for an error that the configuration library did not mean to raise, as one of its assertions."""
    path = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    return not isinstance(error, OSError) and bool(_LIBRARY.intersection(path.parts))


def explain(error: Exception, arguments: Sequence[str]) -> ValueError:
    """Turn an error of the configuration library into one message for the user."""
    parsed = list(_parse(arguments))
    lost = re.search(r"Could not find '(\w+)/([^']+)'", str(error))
    if lost and lost[1] in files.GROUPS:
        return unknown_name(lost[1], lost[2], files.options(lost[1]))
    if several := re.search(r"Ambiguous value for argument '(.+?)'\s", str(error)):
        return SettingValue(
            f"{several[1]} has several values, and this takes one; give one, or a list as key=[a,b]",
            setting=several[1].partition("=")[0],
        )
    if twice := re.search(r"Multiple values for (\w+)", str(error)):
        return SettingValue(
            f"{twice[1]} is chosen twice; choose it once, or several as {twice[1]}=a,b", setting=twice[1]
        )
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, name = str(error.missing_cfg_file).removesuffix(".yaml").rpartition("/")
        if group in files.GROUPS:
            return unknown_name(group, name, files.options(group))
    if isinstance(error, OverrideParseException):
        return CommandLine(
            f"{error.override} cannot be read as key=value; quote special characters for the shell and for Hydra, "
            f"for example 'key=\"a b\"'. `kvbench --help` shows the grammar"
        )
    match = re.search(r"Could not (?:override|append|delete)[^']*'([^'@]+)", str(error))
    if match:
        key = re.split(r"[=\s]", match.group(1).lstrip("+~"))[0]
        return _unknown_key(key, parsed, arguments) or CommandLine(_first_lines(error))
    if not isinstance(error, HydraException | OmegaConfBaseException):
        hydra_words = [word for word in arguments if word.lstrip("+~").startswith("hydra")] or arguments
        return CommandLine(f"{shlex.join(hydra_words)} cannot be applied to the configuration; leave out what you can")
    return CommandLine(_first_lines(error))


def check_choices(arguments: Sequence[str]) -> None:
    """Refuse a choice of a group by another name than its own, and a group that is taken away.

    Hydra takes `method=../method/full` for a file; its row, its folder and its reference would then not have the name
    `full`.

    Raises:
        ValueError: Names the group, the requested choice and the existing ones.
    """
    for override in _parse(arguments):
        group = override.key_or_group
        if group not in files.GROUPS:
            continue
        if override.is_delete():
            raise SettingMissing(
                f"{override.input_line} takes away the group {group}, which every run needs; leave it out",
                setting=group,
            )
        for name in _choices([override], group):
            if name.startswith(("/", "~", ".")) or "\\" in name or {"", ".", ".."} & set(name.split("/")):
                raise unknown_name(group, name, files.options(group))


def with_shared_settings(arguments: Sequence[str]) -> list[str]:
    """Let `method.allocation=ada` set what the method's YAML does not list.

    A setting that the method lacks is refused by its class.
    """
    shared = {f"method.{name}" for name in files.SHARED}
    return [f"++{word}" if word.partition("=")[0] in shared else word for word in arguments]


def with_swept_groups(arguments: Sequence[str]) -> list[str]:
    """Make `-m method=snapkv,h2o method.budget=0.5` mean what it says.

    Hydra applies the settings that are not swept to the default method first, which may not have them. A sweep of
    one value is applied to each job's own method instead.
    """
    arguments = with_shared_settings(arguments)
    parsed = {override.input_line: override for override in _parse(arguments)}
    swept = {item.key_or_group for item in parsed.values() if item.is_sweep_override()} & set(files.GROUPS)
    changed = []
    for argument in arguments:
        item = parsed.get(argument)
        inside = False
        if item is not None and not item.is_sweep_override():
            group, dot, _ = item.key_or_group.partition(".")
            inside = bool(dot) and group in swept
        key, _, value = argument.partition("=")
        # Hydra's choice() takes no null; jobs that are alike become one (`for_their_methods`).
        alone = "null,null" if value == "null" else f"choice({value})"
        changed.append(f"{key}={alone}" if inside else argument)
    return changed


def for_their_methods(jobs: Sequence[Sequence[str]]) -> tuple[list[list[str]], list[str]]:
    """Leave out of a sweep's jobs what their methods do not have and another method of the sweep has.

    Returns:
        The words of each job, of jobs that are now alike one; and a sentence for each word that was left out.
    """
    chosen = [next((word[7:] for word in job if word.startswith("method=")), "") for job in jobs]
    method_keys = {
        word: word[7:].partition("=")[0].split(".")[0] for job in jobs for word in job if word[:7] == "method."
    }
    names = set(chosen) & set(files.options("method")) if method_keys else set()
    has = {name: set(methods.method_settings(name)) for name in names}
    somewhere = set().union(*has.values())
    left: dict[str, list[str]] = {}
    kept: dict[tuple[str, ...], None] = {}
    for name, job in zip(chosen, jobs, strict=True):
        drop = [
            word
            for word in job
            if method_keys.get(word) in somewhere and method_keys[word] not in has.get(name, somewhere)
        ]
        for word in drop:
            left.setdefault(word, []).append(name)
        kept[tuple(word for word in job if word not in drop)] = None
    said = [f"{word} is not for {', '.join(dict.fromkeys(left[word]))}: no such setting" for word in left]
    return [list(job) for job in kept], said


def _first_lines(error: Exception) -> str:
    text = str(error).partition("Config search path:")[0].strip()
    cause = error.__cause__
    if isinstance(cause, OmegaConfBaseException | HydraException) and str(cause) not in text:
        text = f"{text} {cause}"
    return re.sub(r"\s*\n\s*", " ", text)


def _parse(arguments: Sequence[str]) -> Iterator[Override]:
    parser = OverridesParser.create()
    for argument in arguments:
        if not argument.startswith("-") and "=" in argument:
            try:
                yield parser.parse_override(argument)
            except (HydraException, OmegaConfBaseException):
                continue


def sweeps_over(word: str) -> bool:
    """True for a word with several values, as `method=a,b`."""
    return any(override.is_sweep_override() for override in _parse([word]))


def choices(arguments: Sequence[str], group: str) -> list[str]:
    """Every configuration of a group that words name, as `method=a,b` or `method=[a,b]`; empty without one."""
    return _choices(list(_parse(arguments)), group)


def _choices(parsed: list[Override], group: str) -> list[str]:
    """Every configuration of a group that the command line names; empty when it leaves the default."""
    for override in parsed:
        if override.key_or_group == group:
            if override.is_sweep_override() and override.is_discrete_sweep():
                try:
                    return [str(item) for item in override.sweep_string_iterator()]
                except (HydraException, AssertionError):  # a glob needs Hydra's own list of what there is
                    return list(files.options(group))
            value = override.value()
            return [str(item) for item in value] if isinstance(value, list) else [str(value)]
    return []


def _composed(choices: Mapping[str, str]) -> DictConfig | None:
    """The configuration with these choices; None when there is none."""
    try:
        return _compose("config", [f"{group}={name}" for group, name in choices.items()])
    except (HydraException, OmegaConfBaseException):
        return None


def _unknown_key(key: str, parsed: list[Override], words: Sequence[str]) -> ValueError | None:
    """Error for a key that the chosen configuration lacks, with its keys; None when it has it."""
    top = key.split(".")[0]
    fixed = {group: names[0] for group in files.GROUPS if group != top and (names := _choices(parsed, group))}
    for name in _choices(parsed, top) or [""]:
        cfg = _composed(fixed | ({top: name} if name and top in files.GROUPS else {}))
        if cfg is None:
            continue
        node: DictConfig = cfg
        where: list[str] = []
        for part in key.split("."):
            if not isinstance(node, DictConfig):
                return SettingUnknown(f"{'.'.join(where)} has no keys of its own, so {key} cannot be set", setting=key)
            if part not in node:
                known = [".".join([*where, str(item)]) for item in node if not str(item).startswith("_")]
                if not where:
                    known += [group for group in files.GROUPS if group not in known]
                inner = [] if where else every_setting(words)
                error = unknown_setting(".".join([*where, part]), known, inner)
                chosen = f" ({top}={name})" if name and where else ""
                return SettingUnknown(f"{error}{chosen}", setting=error.setting)
            where.append(part)
            node = node[part]
    return None
