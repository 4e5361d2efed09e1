"""Composed settings as plain Python values."""

from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf


def plain(cfg: Mapping[str, Any]) -> dict[str, Any]:
    """A group of settings as a dict, its interpolations resolved.

    Args:
        cfg: A DictConfig, or any mapping with text keys, which is copied as it is.
    """
    if not isinstance(cfg, DictConfig):
        return dict(cfg)
    values = OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(values, dict), "a DictConfig that is there gives a dict"
    return {str(key): value for key, value in values.items()}
