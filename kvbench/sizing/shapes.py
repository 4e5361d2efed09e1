"""The shape that a projection must know of a model: a preset of config/shapes.yaml, or the config.json of a folder."""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from kvbench.cache.layout import ModelShape
from kvbench.config.files import package_folder
from kvbench.config.settings import as_dict, read_config
from kvbench.errors import unknown_name
from kvbench.rules import Whole

HEADLINE = ("llama3-8b", 32768)  # the model and the length that byte counts of small models are projected to
SIZES = ("layers", "q_heads", "kv_heads", "head_dim")
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True, kw_only=True)
class NamedShape:
    """The attention of a model, for counting bytes, and where the numbers are from."""

    name: str
    source: str
    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    context: int | None
    """Most tokens the model was made for; None when unknown."""
    dtype: str
    """Dtype of its weights, which a `native` tier takes."""

    def __post_init__(self) -> None:
        for name in SIZES:
            Whole(1, 2**16).check(f"{name} of {self.name}", getattr(self, name))
        if self.q_heads % self.kv_heads:
            raise ValueError(f"{self.name}: {self.q_heads} query heads cannot share {self.kv_heads} KV heads evenly")
        if self.dtype not in DTYPES:
            raise unknown_name(f"dtype of {self.name}", self.dtype, DTYPES)

    @property
    def store_shape(self) -> ModelShape:
        """As the store takes it; its keys can be rotated."""
        return ModelShape(
            num_layers=self.layers,
            num_q_heads=self.q_heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            dtype=DTYPES[self.dtype],
            device=torch.device("cpu"),
            inv_freq=torch.zeros(self.head_dim // 2),
        )


@cache
def presets() -> dict[str, NamedShape]:
    """The shapes of known models by name."""
    listed = as_dict(read_config(package_folder() / "config" / "shapes.yaml"))
    known = {name: {key: x for key, x in shape.items() if key != "weights"} for name, shape in listed.items()}
    return {name: NamedShape(name=name, **shape) for name, shape in known.items() if shape["source"]}


def find_shape(model: object) -> NamedShape:
    """The shape that `model=` of the command `bytes` names: a preset, or a folder with a config.json; ValueError where
    neither exists, or the file does not say what is needed."""
    name = str(model)
    if name in presets():
        return presets()[name]
    file = Path(name).expanduser() / "config.json"
    if not file.is_file():
        error = unknown_name("model", name, presets())
        raise ValueError(f"{error} A folder with a config.json is taken too.")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        return _of_config(file.parent.name, str(file), config.get("text_config") or config)
    except (OSError, ValueError, AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{file} does not say how many layers and heads the model has: {error}") from error


def _of_config(name: str, source: str, config: dict[str, Any]) -> NamedShape:
    heads = config["num_attention_heads"]
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    return NamedShape(
        name=name,
        source=source,
        layers=config["num_hidden_layers"],
        q_heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        context=config.get("max_position_embeddings"),
        dtype=dtype,
    )
