"""Settings as plain values and as copies: what the configuration library makes of them, with a type that is known.

The library is imported where its own types are at hand: a machine with torch alone loads models from plain dicts.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from omegaconf import DictConfig


def as_dict(cfg: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a group as a plain dict, nested groups included, interpolations resolved.

    Args:
        cfg: A DictConfig or any other mapping.
    """
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

    Args:
        path: A file whose top level is a mapping.

    Raises:
        ValueError: It holds something else.
    """
    from omegaconf import DictConfig, OmegaConf

    found = OmegaConf.load(path)
    if not isinstance(found, DictConfig):
        raise ValueError(f"{path} holds a list; a configuration file holds key: value")
    return found
