"""Settings as plain values and as copies: what the configuration library makes of them, with a type that is known.

The library is imported where its own types are at hand: a machine with torch alone loads models from plain dicts.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_origin

from kvbench.errors import FileContent, FileMissing, SettingMissing, check_keys
from kvbench.rules import declared
from kvbench.rules.files import read_regular

if TYPE_CHECKING:
    from omegaconf import DictConfig

Kind = TypeVar("Kind")
MAX_DATA_BYTES = 1_000_000  # of a YAML file that may be anybody's; kvbench's own have a hundredth
MAX_DEPTH = 20  # its nested lists and groups; kvbench's own have 5


def as_dict(cfg: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a group as a plain dict, nested groups included, interpolations resolved."""
    plain: Any = cfg
    if not isinstance(cfg, dict):
        from omegaconf import DictConfig, OmegaConf

        plain = OmegaConf.to_container(cfg, resolve=True) if isinstance(cfg, DictConfig) else cfg
    assert isinstance(plain, Mapping)  # only a list would become a list
    return {str(key): value for key, value in plain.items()}


def copy_config(cfg: Mapping[str, Any]) -> "DictConfig":
    """A configuration of its own with the same settings, interpolations resolved."""
    from omegaconf import OmegaConf

    return OmegaConf.create(as_dict(cfg))


def read_config(path: Path) -> "DictConfig":
    """The settings of a YAML file.

    Raises:
        ValueError: It holds something else, or is no YAML.
    """
    from omegaconf import DictConfig, OmegaConf

    with faults_of(path):
        config = OmegaConf.load(path)
    if not isinstance(config, DictConfig):
        raise FileContent(f"{path} holds a list; a configuration file holds key: value")
    return config


@contextmanager
def faults_of(path: Path) -> Iterator[None]:
    """Raises ValueError, with the file and the place in it, for what is read there and is no YAML."""
    import yaml
    from omegaconf.errors import OmegaConfBaseException

    try:
        yield
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, OmegaConfBaseException) as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        reason = " ".join(str(getattr(error, "problem", None) or error).split())
        raise FileContent(
            f"{path}{where} cannot be read as YAML: {reason}; a configuration file holds key: value"
        ) from error


def read_data(path: Path, name: str = "") -> dict[str, Any]:
    """Read a YAML file from an untrusted source: plain values only.

    An alias could expand a few bytes to gigabytes, and `${...}` would read the environment.

    Args:
        name: Name of the file in messages, as `setting=path`; its path by default.

    Raises:
        ValueError: It cannot be read, is too long or too deep, or holds something else than keys with values.
    """
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    setting, name = name.partition("=")[0] if "=" in name else None, name or str(path)
    try:
        text = read_regular(path, MAX_DATA_BYTES).decode()
        depth = 0
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_DEPTH:
                raise ValueError(f"its line {event.start_mark.line + 1} is nested too deeply")
            if getattr(event, "anchor", None) or "${" in getattr(event, "value", ""):
                what = "an alias" if getattr(event, "anchor", None) else "an interpolation, ${...}"
                raise ValueError(f"its line {event.start_mark.line + 1} has {what}; write the value itself")
        data = OmegaConf.to_container(OmegaConf.create(text))
    except OSError as error:
        raise FileMissing(f"{name} cannot be read: {error.strerror}", setting=setting) from error
    except (yaml.YAMLError, OmegaConfBaseException, ValueError) as error:
        reason = " ".join(str(error).split())
        raise FileContent(f"{name} cannot be read as YAML: {reason}", setting=setting) from error
    if not isinstance(data, dict):
        raise FileContent(f"{name} holds a list and not keys with values", setting=setting)
    return {str(key): value for key, value in data.items()}


def read_settings(kind: type[Kind], mapping: Mapping[str, Any], prefix: str = "", what: str | None = None) -> Kind:
    """Make the settings object of a group of the configuration; missing keys take their defaults.

    It reads every dataclass whose fields say in their annotations what they may be (`kvbench.rules`): a run, the store,
    a task, a protocol, a policy. The object checks its values when it is made. It holds them as they count, so that two
    ways to write one setting are one run.

    Args:
        kind: The dataclass.
        mapping: The group; a list stands for a tuple, `???` for a value that is still to be given.
        prefix: Prefix of the names as the user writes them, for example `store.`.
        what: Noun for an unknown key in the message; a setting by default.

    Raises:
        ValueError: Names a setting that does not exist, that is wrong, or that is missing and has no default.
    """
    values, known = {key: value for key, value in as_dict(mapping).items() if value != "???"}, declared(kind)
    check_keys(values, known, what=what, prefix="" if what else prefix)
    for item in fields(kind):  # type: ignore[arg-type]
        if item.init and item.name not in values and item.default is MISSING and item.default_factory is MISSING:
            text = known[item.name].text
            raise SettingMissing(
                f"{prefix}{item.name} is missing and has no default; give {text}", setting=f"{prefix}{item.name}"
            )
        if isinstance(values.get(item.name), list) and tuple in map(get_origin, known[item.name].kinds):
            values[item.name] = tuple(values[item.name])
    return kind(**{name: known[name].read(value) for name, value in values.items()})
