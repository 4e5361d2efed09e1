"""Model shapes for a projection.

A preset of config/shapes.yaml, or a run's reading of a config.json or of the header of a GGUF file.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from kvbench.config.files import package_folder
from kvbench.errors import NameUnknown, SettingValue, UnsupportedModel, check_name, unknown_name
from kvbench.rules import Number, Whole
from kvbench.rules.sizes import read_size

if TYPE_CHECKING:  # what a preset is called, and its sizes, are known without torch
    from kvbench.cache.layout import ModelShape

HEADLINE = ("llama3-8b", 32768)  # the model and the length that byte counts of small models are projected to
SIZES = ("layers", "q_heads", "kv_heads", "head_dim")
DTYPES = {"float16": 2, "bfloat16": 2, "float32": 4}  # bytes of a number


@dataclass(frozen=True, kw_only=True)
class NamedShape:
    """The attention of a model, for counting bytes, and where the numbers are from."""

    name: str
    source: str
    context: int | None
    """Most tokens the model was made for; None when unknown."""
    layers: int
    """Layers on which a method acts."""
    q_heads: int
    head_dim: int
    is_plain: bool
    """Every layer holds keys and values of the whole text."""
    itemsize: int
    """Bytes of a weight."""
    make: "Callable[[], ModelShape]" = field(repr=False, compare=False)
    """Makes `store_shape`."""
    parameters: int | None = None
    """Number of its weights; None when unknown."""
    state_layers: int = 0
    """Layers that hold a state, in place of keys and values or with them."""

    @cached_property
    def store_shape(self) -> "ModelShape":
        """Its layers as the store takes them, in the dtype of its weights, which a `native` tier takes."""
        return self.make()

    @property
    def path(self) -> str:
        """Value for `model.path` of a run: the file, the folder, or the name of the page."""
        return self.source.removesuffix(", the header").removesuffix("/config.json")

    def is_called(self, name: str) -> bool:
        """True for a name of this model, as a run or its owner writes it."""
        return name == self.name or preset_of(name) is self

    @property
    def weights_bytes(self) -> int | None:
        """Bytes of its weights in their dtype; None when unknown."""
        return None if self.parameters is None else self.parameters * self.itemsize


def sized(
    name: str,
    *,
    source: str,
    layers: int,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    context: int | None,
    dtype: str,
    parameters: int | None = None,
    windows: Mapping[str, int] | None = None,
    states: Mapping[str, int] | None = None,
    latent: bool = False,
    plain_rope: bool = True,
) -> NamedShape:
    """Make the shape of a model of which the sizes are listed, as config/shapes.yaml and the documents of a bench do.

    Args:
        layers: Layers that see everything.
        windows: `layers` more that keep their last `tokens`, or those of their last chunk of so many (`in_chunks`: 1).
        states: `layers` more that hold a state, and its `bytes` in each.
        latent: One vector per token and layer is key and value of all heads, and held once.
        plain_rope: Keys of the layers that see everything can be rotated (`ModelShape.inv_freq`).

    Raises:
        ValueError: A size is none, or they do not go together.
    """
    sizes = {"layers": layers, "q_heads": q_heads, "kv_heads": kv_heads, "head_dim": head_dim}
    for size in SIZES:
        Whole(1, 2**16).check(f"{size} of {name}", sizes[size])
    if q_heads % kv_heads:
        raise UnsupportedModel(f"{name}: {q_heads} query heads cannot share {kv_heads} KV heads evenly")
    itemsize = DTYPES[check_name(f"dtype of {name}", dtype, DTYPES)]

    def make() -> "ModelShape":
        import torch

        from kvbench.cache.layout import ModelShape
        from kvbench.kernels.operands import Window

        shape = ModelShape(
            num_layers=layers,
            num_q_heads=q_heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            dtype=getattr(torch, dtype),
            device=torch.device("cpu"),
            inv_freq=torch.zeros(head_dim // 2) if plain_rope and not latent else None,
            keys_only=latent,
        )
        if not (windows or states):
            return shape
        other_kinds: tuple[ModelShape, ...] = ()
        if windows:
            numbers = tuple(range(layers, layers + windows["layers"]))
            window = Window(windows["tokens"], bool(windows.get("in_chunks")))
            other_kinds = (replace(shape, num_layers=len(numbers), numbers=numbers, window=window, inv_freq=None),)
        state_bytes = states["layers"] * states["bytes"] if states else 0
        return replace(shape, numbers=tuple(range(layers)), other_kinds=other_kinds, state_bytes=state_bytes)

    return NamedShape(
        name=name,
        source=source,
        context=context,
        layers=layers,
        q_heads=q_heads,
        head_dim=head_dim,
        is_plain=not (windows or states or latent),
        itemsize=itemsize,
        make=make,
        parameters=parameters,
        state_layers=states["layers"] if states else 0,
    )


def size_of_weights(key: str, value: object) -> float:
    """Read a setting that is the bytes of weights: a number, or text such as 4.5GiB; ValueError for others."""
    size = read_size(value) if isinstance(value, str) else value
    if not Number(0, above=True).fits(size):
        raise SettingValue(
            f"{key}={value!r} is no number of bytes; write one, or text such as 4.5GiB", setting=key.partition(" ")[0]
        )
    return float(size)  # type: ignore[arg-type]  # a number fits


@cache
def presets() -> dict[str, NamedShape]:
    """The shapes of known models by name."""
    text = (package_folder() / "config" / "shapes.yaml").read_bytes()
    listed = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # ten times as fast, where it is there
    known = {name: {key: x for key, x in shape.items() if key != "weights"} for name, shape in listed.items()}
    return {name: sized(name, **shape) for name, shape in known.items() if shape["source"]}


def preset_of(name: str) -> NamedShape | None:
    """The shape of a known model, whatever the case, hyphens, owner or ending (`-Instruct`) of its name, or None."""
    return presets().get(name) or {_letters(each): shape for each, shape in presets().items()}.get(_letters(name))


def _letters(name: str) -> str:
    letters = re.sub("[-_]", " ", name.lower().rpartition("/")[2])
    return re.sub(" (instruct|it|chat)$", "", letters).replace(" ", "")


def find_shape(model: object) -> NamedShape:
    """Find the shape that `model=` of the command `bytes` names: a preset, a config.json, its folder, or a .gguf file.

    Raises:
        ValueError: None exists, or the file makes no model.
        UnsupportedModel: kvbench does not run the model.
    """
    name = str(model)
    if name in presets():
        return presets()[name]
    path = Path(name).expanduser()
    if path.name == "config.json":
        path = path.parent
    file = path if path.suffix.lower() == ".gguf" else path / "config.json"
    if not file.is_file():
        if known := preset_of(name):
            return known
        error = unknown_name("model", name, presets())
        raise NameUnknown(
            f"{error} A config.json, a folder that holds one, and a .gguf file are taken too.", setting="model"
        )
    from kvbench.engine.supported import REMEDY

    try:
        return _as_run(path, file)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{file}: kvbench does not run this model: {error}") from error
    except ValueError:
        raise
    except Exception as error:  # of the model's code, or of a configuration unlike all that are known
        what = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise UnsupportedModel(f"{file}: kvbench cannot tell what its layers hold ({what}); {REMEDY}") from error


def _as_run(path: Path, file: Path) -> NamedShape:
    """The shape that a run of the model would have, by the code that a run goes through before there are weights."""
    from kvbench.cache.options import StoreOptions
    from kvbench.engine.hf import check_pass
    from kvbench.engine.states import States
    from kvbench.engine.supported import check_supported, layer_kinds, model_shape, small_store
    from kvbench.methods.full import Full
    from kvbench.models.load import outline_alone
    from kvbench.models.rotary import context_length

    with _silent_transformers():
        model = outline_alone(path)
        model.set_experts_implementation("batched_mm")  # others need numbers, or 16 bits, where there are none
        context, kinds = context_length(model.config, None), layer_kinds(model.config)
        check_supported(model)
        shape = model_shape(model)
        check_pass(model, small_store(Full(), shape, StoreOptions()))
        state_bytes = States(model, kinds.states).row_bytes
        store_shape = replace(shape.on_host(), output_projections=None, state_bytes=state_bytes)
    return NamedShape(
        name=path.stem if file is path else path.absolute().name,
        source=f"{file}, the header" if file is path else str(file),
        context=context,
        layers=store_shape.num_layers,
        q_heads=store_shape.num_q_heads,
        head_dim=store_shape.head_dim,
        is_plain=store_shape.is_uniform
        and not (store_shape.other_kinds or store_shape.shared or store_shape.keys_only),
        itemsize=store_shape.dtype.itemsize,
        make=lambda: store_shape,
        parameters=sum(weights.numel() for weights in model.parameters()),
        state_layers=len(kinds.states),
    )


@contextmanager
def _silent_transformers() -> Iterator[None]:
    """Hides the advice of transformers for a model that is going to compute."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
