"""Configurations that are copied or read from a file, with a type that is known."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from kvbench.config.plain import plain


def copy_config(cfg: Mapping[str, Any]) -> DictConfig:
    """A configuration of its own with the same settings, interpolations resolved."""
    return OmegaConf.create(plain(cfg))


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
