"""Settings as plain values and as copies: what the configuration library makes of them, with a type that is known."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf


def as_dict(cfg: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a group as a plain dict, nested groups included, interpolations resolved.

    Args:
        cfg: A DictConfig or any other mapping.
    """
    plain = OmegaConf.to_container(cfg, resolve=True) if isinstance(cfg, DictConfig) else cfg
    assert isinstance(plain, Mapping)  # only a list would become a list
    return {str(key): value for key, value in plain.items()}


def copy_config(cfg: Mapping[str, Any]) -> DictConfig:
    """A configuration of its own with the same settings, interpolations resolved."""
    return OmegaConf.create(as_dict(cfg))


def read_config(path: Path) -> DictConfig:
    """The settings of a YAML file.

    Args:
        path: A file whose top level is a mapping.

    Raises:
        ValueError: It holds something else.
    """
    found = OmegaConf.load(path)
    if not isinstance(found, DictConfig):
        raise ValueError(f"{path} holds a list; a configuration file holds key: value")
    return found
