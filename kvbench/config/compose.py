"""Says in plain words why a configuration could not be composed: what was asked, what exists, what is nearest."""

import re
from collections.abc import Iterator

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from kvbench.config import files as listing
from kvbench.errors import unknown_name


def explain(error: Exception, arguments: list[str]) -> ValueError:
    """Turn an error of the configuration library into one message for the user.

    Args:
        error: What Hydra or OmegaConf raised while composing.
        arguments: The command line without the command.

    Returns:
        The error, for the caller to raise.
    """
    parsed = list(_parse(arguments))
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, name = str(error.missing_cfg_file).removesuffix(".yaml").rpartition("/")
        if group in listing.GROUPS:
            return unknown_name(group, name, listing.options(group))
    if isinstance(error, OverrideParseException):
        return ValueError(
            f"{error.override} cannot be read as key=value; quote special characters for the shell and for Hydra, "
            f"for example 'key=\"a b\"'. `python -m kvbench --help` shows the grammar"
        )
    found = re.search(r"Could not (?:override|append|delete)[^']*'([^'@]+)", str(error))
    if found:
        key = re.split(r"[=\s]", found.group(1).lstrip("+~"))[0]
        return _unknown_key(key, parsed) or ValueError(_first_lines(error))
    return ValueError(_first_lines(error))


def with_swept_groups(arguments: list[str]) -> list[str]:
    """Make `-m method=snapkv,h2o method.budget=0.5` mean what it says.

    Hydra applies the settings that are not swept to the default method first, which may not have them. A sweep of
    one value is applied to each job's own method instead.

    Args:
        arguments: The command line without the command.
    """
    parsed = {override.input_line: override for override in _parse(arguments)}
    swept = {item.key_or_group for item in parsed.values() if item.is_sweep_override()} & set(listing.GROUPS)
    changed = []
    for argument in arguments:
        item = parsed.get(argument)
        group, dot, _ = (item.key_or_group or "").partition(".") if item else ("", "", "")
        inside = dot and group in swept and not item.is_sweep_override() and "=" in argument
        key, _, value = argument.partition("=")
        changed.append(f"{key}=choice({value})" if inside else argument)
    return changed


def _first_lines(error: Exception) -> str:
    text = str(error).strip()
    cause = error.__cause__
    if isinstance(cause, OmegaConfBaseException | HydraException) and str(cause) not in text:
        text = f"{text} {cause}"
    return re.sub(r"\s*\n\s*", " ", text)


def _parse(arguments: list[str]) -> Iterator[Override]:
    parser = OverridesParser.create()
    for argument in arguments:
        if not argument.startswith("-") and "=" in argument:
            try:
                yield parser.parse_override(argument)
            except (HydraException, OmegaConfBaseException):
                continue


def _choices(parsed: list[Override], group: str) -> list[str]:
    """Every configuration of a group that the command line names; empty when it leaves the default."""
    for override in parsed:
        if override.key_or_group == group:
            if override.is_sweep_override() and override.is_discrete_sweep():
                try:
                    return [str(item) for item in override.sweep_string_iterator()]
                except (HydraException, AssertionError):  # a glob needs Hydra's own list of what there is
                    return list(listing.options(group))
            return [str(override.value())]
    return []


def _composed(choices: dict[str, str]) -> DictConfig | None:
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(listing.conf_folder()), version_base="1.3"):
            return compose("config", [f"{group}={name}" for group, name in choices.items()])
    except (HydraException, OmegaConfBaseException):
        return None


def _unknown_key(key: str, parsed: list[Override]) -> ValueError | None:
    """The error for a key that the chosen configuration does not have, with the keys it does have; None when it has
    it."""
    top = key.split(".")[0]
    fixed = {group: names[0] for group in listing.GROUPS if group != top and (names := _choices(parsed, group))}
    for name in _choices(parsed, top) or [""]:
        cfg = _composed(fixed | ({top: name} if name and top in listing.GROUPS else {}))
        if cfg is None:
            continue
        node, where = cfg, []
        for part in key.split("."):
            if not OmegaConf.is_dict(node):
                return ValueError(f"{'.'.join(where)} has no keys of its own, so {key} cannot be set")
            if part not in node:
                known = [".".join([*where, str(item)]) for item in node if not str(item).startswith("_")]
                if not where:
                    known += [group for group in listing.GROUPS if group not in known]
                error = unknown_name("key", ".".join([*where, part]), known)
                chosen = f" ({top}={name})" if name and where else ""
                return ValueError(f"{error}{chosen}")
            where.append(part)
            node = node[part]
    return None
