"""Weights that torchao quantises as transformers reads them; activations stay as they are."""

import importlib
import importlib.util
from importlib.metadata import version
from typing import Any

import torch

from kvbench.errors import PackageMissing, SettingsConflict, check_name

# Value of `model.quantisation` -> torchao's configuration with its settings. The packing of int4 is the one that
# torch itself has kernels for, on GPUs and in bfloat16.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "fp8": ("Float8WeightOnlyConfig", {}),
    "int8": ("Int8WeightOnlyConfig", {}),
    "int4": ("Int4WeightOnlyConfig", {"group_size": 128, "int4_packing_format": "tile_packed_to_4d"}),
}


def read_kind(value: object, model_kind: str, device: torch.device, dtype: torch.dtype, processes: int) -> str | None:
    """Kind of a validated `model.quantisation`; None for unquantised weights.

    Refuses it, with the remedy, where the model is not read from a folder, or torchao is missing.
    """
    if value is None:
        return None
    value = check_name("model.quantisation", value, KINDS)
    if model_kind != "hf":
        raise SettingsConflict(
            f"model.quantisation={value} is for models that are read from a folder or the hub (model.kind=hf), and "
            f"model.kind={model_kind} makes its weights itself; set model.quantisation=null",
            setting="model.quantisation",
        )
    if value == "int4" and (device.type == "cpu" or dtype != torch.bfloat16):
        raise SettingsConflict(
            f"model.quantisation=int4 has kernels for GPUs in bfloat16, and this model is on {device} in "
            f"{str(dtype).removeprefix('torch.')}; set model.dtype=bfloat16 on a GPU, or model.quantisation=int8",
            setting="model.quantisation",
        )
    if processes > 1:
        raise SettingsConflict(
            f"model.quantisation={value} with model.tensor_parallel={processes} was never tried; set one of the two, "
            "or spread the layers (model.device=[cuda:0,cuda:1])",
            setting="model.quantisation",
        )
    if importlib.util.find_spec("torchao") is None:
        raise PackageMissing(
            f"model.quantisation={value} needs the package torchao; run pip install torchao, or set "
            "model.quantisation=null",
            setting="model.quantisation",
        )
    return str(value)


def in_words(kind: str | None) -> str:
    """The quantisation and the version that makes it, for records; empty = none."""
    return f"{kind} weights (torchao {version('torchao')})" if kind else ""


def config_of(kind: str) -> Any:
    """The `quantization_config` that transformers takes."""
    from transformers import TorchAoConfig

    name, settings = KINDS[kind]
    made = getattr(importlib.import_module("torchao.quantization"), name, None)
    if made is None:
        raise PackageMissing(
            f"model.quantisation={kind} needs torchao.quantization.{name}, which torchao {version('torchao')} lacks; "
            "run pip install -U torchao",
            setting="model.quantisation",
        )
    return TorchAoConfig(made(**settings))
