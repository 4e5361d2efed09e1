"""Weights that torchao quantises as transformers reads them; activations stay as they are."""

import importlib
import importlib.util
from importlib.metadata import version
from typing import Any

from kvbench.errors import unknown_name

# What `model.quantisation` may be -> torchao's configuration with its settings.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "fp8": ("Float8WeightOnlyConfig", {}),
    "int8": ("Int8WeightOnlyConfig", {}),
    "int4": ("Int4WeightOnlyConfig", {"group_size": 128}),
}


def read_kind(value: object, model_kind: str) -> str | None:
    """`model.quantisation`, once it is known that it can be done.

    Args:
        value: fp8, int8, int4, or None for weights as they are.
        model_kind: `model.kind`.

    Raises:
        ValueError: It is something else, the model is not read from a folder, or torchao is missing; with the remedy.
    """
    if value is None:
        return None
    if value not in KINDS:
        raise unknown_name("model.quantisation", value, KINDS)
    if model_kind != "hf":
        raise ValueError(
            f"model.quantisation={value} is for models that are read from a folder or the hub (model.kind=hf), and "
            f"model.kind={model_kind} makes its weights itself; set model.quantisation=null"
        )
    if importlib.util.find_spec("torchao") is None:
        raise ValueError(
            f"model.quantisation={value} needs the package torchao; run pip install torchao, or set "
            "model.quantisation=null"
        )
    return str(value)


def in_words(kind: str | None) -> str:
    """What the weights become and by which version, for records; empty = nothing."""
    return f"{kind} weights (torchao {version('torchao')})" if kind else ""


def config_of(kind: str) -> Any:
    """What transformers takes as `quantization_config`.

    Raises:
        ValueError: This torchao lacks the configuration.
    """
    from transformers import TorchAoConfig

    name, settings = KINDS[kind]
    made = getattr(importlib.import_module("torchao.quantization"), name, None)
    if made is None:
        raise ValueError(
            f"model.quantisation={kind} needs torchao.quantization.{name}, which torchao {version('torchao')} lacks; "
            "run pip install -U torchao"
        )
    return TorchAoConfig(made(**settings))
