"""The shape that a projection must know of a model: a preset of config/shapes.yaml, the config.json of a folder, or the
header of a GGUF file."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from kvbench.cache.layout import ModelShape
from kvbench.config.files import package_folder
from kvbench.config.settings import as_dict, read_config
from kvbench.errors import unknown_name
from kvbench.kernels.operands import Window
from kvbench.models.gguf_header import read_header
from kvbench.policy.budget import read_size
from kvbench.rules import Number, Whole

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
    parameters: int | None = None
    """Number of its weights; None when unknown."""
    windows: Mapping[str, int] = field(default_factory=dict)
    """`layers` beside these that keep their last `tokens`, or those of their last chunk of so many (`in_chunks`: 1)."""
    states: Mapping[str, int] = field(default_factory=dict)
    """Layers beside these that hold a state, and its bytes."""
    latent: bool = False
    """One vector per token and layer is key and value of all heads, and held once."""

    def __post_init__(self) -> None:
        for name in SIZES:
            Whole(1, 2**16).check(f"{name} of {self.name}", getattr(self, name))
        if self.q_heads % self.kv_heads:
            raise ValueError(f"{self.name}: {self.q_heads} query heads cannot share {self.kv_heads} KV heads evenly")
        if self.dtype not in DTYPES:
            raise unknown_name(f"dtype of {self.name}", self.dtype, DTYPES)

    @property
    def place(self) -> str:
        """What `model.path` of a run takes: the file, the folder, or the name of the page."""
        return self.source.removesuffix(", the header").removesuffix("/config.json")

    @property
    def weights_bytes(self) -> int | None:
        """Bytes of its weights in their dtype; None when unknown."""
        return None if self.parameters is None else self.parameters * DTYPES[self.dtype].itemsize

    @property
    def store_shape(self) -> ModelShape:
        """Its layers as the store takes them; only keys of those that see everything can be rotated."""
        shape = ModelShape(
            num_layers=self.layers,
            num_q_heads=self.q_heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            dtype=DTYPES[self.dtype],
            device=torch.device("cpu"),
            inv_freq=None if self.latent else torch.zeros(self.head_dim // 2),
            keys_only=self.latent,
        )
        if not self.windows and not self.states:
            return shape
        beside: tuple[ModelShape, ...] = ()
        if self.windows:
            last = self.layers + self.windows["layers"]
            window = Window(self.windows["tokens"], bool(self.windows.get("in_chunks")))
            numbers = tuple(range(self.layers, last))
            beside = (replace(shape, num_layers=len(numbers), numbers=numbers, window=window, inv_freq=None),)
        state_bytes = self.states["layers"] * self.states["bytes"] if self.states else 0
        return replace(shape, numbers=tuple(range(self.layers)), beside=beside, state_bytes=state_bytes)


def size_of_weights(key: str, value: object) -> float:
    """Read a setting that is the bytes of weights: a number, or text such as 4.5GiB; ValueError for others."""
    found = read_size(value) if isinstance(value, str) else value
    if not Number(0, above=True).fits(found):
        raise ValueError(f"{key}={value!r} is no number of bytes; write one, or text such as 4.5GiB")
    return float(found)  # type: ignore[arg-type]  # a number fits


@cache
def presets() -> dict[str, NamedShape]:
    """The shapes of known models by name."""
    listed = as_dict(read_config(package_folder() / "config" / "shapes.yaml"))
    known = {name: {key: x for key, x in shape.items() if key != "weights"} for name, shape in listed.items()}
    return {name: NamedShape(name=name, **shape) for name, shape in known.items() if shape["source"]}


def find_shape(model: object) -> NamedShape:
    """The shape that `model=` of the command `bytes` names: a preset, a folder with a config.json, or a .gguf file;
    ValueError where none exists, or the file does not say what is needed."""
    name = str(model)
    if name in presets():
        return presets()[name]
    path = Path(name).expanduser()
    file = path if path.suffix == ".gguf" else path / "config.json"
    if not file.is_file():
        error = unknown_name("model", name, presets())
        raise ValueError(f"{error} A folder with a config.json and a .gguf file are taken too.")
    try:
        if file is path:
            return _of_header(path)
        config = json.loads(file.read_text(encoding="utf-8"))
        return _of_config(path, str(file), config.get("text_config") or config)
    except (OSError, ValueError, AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{file} does not say how many layers and heads the model has: {error}") from error


def _of_config(folder: Path, source: str, config: dict[str, Any]) -> NamedShape:
    heads, (layers, windows), latent = config["num_attention_heads"], _kinds(config), config.get("kv_lora_rank")
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    weights_bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    return NamedShape(
        name=folder.name,
        source=source,
        layers=layers,
        windows=windows,
        q_heads=heads,
        kv_heads=1 if latent else config.get("num_key_value_heads") or heads,
        head_dim=latent + config["qk_rope_head_dim"] if latent else head_dim,
        latent=bool(latent),
        context=config.get("max_position_embeddings"),
        dtype=dtype,
        parameters=weights_bytes // DTYPES[dtype].itemsize if weights_bytes and dtype in DTYPES else None,
    )


def _kinds(config: dict[str, Any]) -> tuple[int, dict[str, int]]:
    """The layers that see everything, and those with windows; refuses what cannot be counted from this file alone."""
    kinds = config.get("layer_types") or ["full_attention"] * config["num_hidden_layers"]
    sizes = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
    if others := sorted({*kinds} - {"full_attention", *sizes}):
        raise ValueError(f"what layers of type {others} hold is counted for presets alone, such as qwen3-next-80b")
    found = [config[sizes[kind]] for kind in kinds if kind in sizes]
    if not found:
        return len(kinds), {}
    in_chunks = int("chunked_attention" in kinds)
    return len(kinds) - len(found), {"layers": len(found), "tokens": found[0], "in_chunks": in_chunks}


def _of_header(file: Path) -> NamedShape:
    """The shape in a GGUF file, whose weights kvbench unpacks to 16 bits."""
    header = read_header(file)
    kind, heads = header.fields["general.architecture"], header.of_model("attention.head_count")
    kv_heads = header.of_model("attention.head_count_kv") or heads
    if isinstance(kv_heads, list):
        if len(set(kv_heads)) != 1:
            raise ValueError(f"its layers have {sorted(set(kv_heads))} KV heads, and one number for all is needed")
        kv_heads = kv_heads[0]
    return NamedShape(
        name=file.stem,
        source=f"{file}, the header",
        layers=header.fields[f"{kind}.block_count"],
        q_heads=heads,
        kv_heads=kv_heads,
        head_dim=header.of_model("attention.key_length") or header.fields[f"{kind}.embedding_length"] // heads,
        context=header.of_model("context_length"),
        dtype="bfloat16",
        parameters=header.parameters,
    )
