"""Reads a checkpoint with transformers: nothing in it runs, and what it lacks is not made up."""

import importlib.util
import logging
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from kvbench.errors import FileContent, Unsupported, UnsupportedModel
from kvbench.models import quantised
from kvbench.models.devices import Devices
from kvbench.models.processes import parallel_arguments, too_few_heads

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

# For whatever reads a model's folder: no question to the hub, and no code of the folder.
SAFELY = {"local_files_only": True, "trust_remote_code": False}


@dataclass(frozen=True)
class How:
    """Form in which a model is held.

    GPUs get the weights tensor by tensor, so that main memory need not hold the model; that takes the package
    accelerate. `quantisation` is a key of `quantised.KINDS`, or None; the heads are divided over `processes` by
    transformers' plan for the model.
    """

    dtype: torch.dtype
    devices: Devices = Devices((torch.device("cpu"),))
    quantisation: str | None = None
    processes: int = 1


def read_weights(
    folder: Path, how: How, gguf_file: str | None = None
) -> tuple["PreTrainedModel", Mapping[str, Collection]]:
    """Reads a model from a folder, or from a GGUF file in it.

    Pickled weights are read by torch's reader for tensors alone.

    Returns:
        The model, on its devices or in main memory, and what `check_complete` takes. Until it was checked, tensors may
        be random.
    """
    more: dict[str, Any] = {"device_map": None}
    if how.processes > 1:
        config = config_of(folder).get_text_config()
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        if reason := too_few_heads(folder.name, heads, how.processes):
            raise UnsupportedModel(reason)
        more |= parallel_arguments(how.processes)
    elif how.devices.first.type != "cpu" and importlib.util.find_spec("accelerate") is not None:
        more["device_map"] = _module_map(folder, how.devices)
    if how.quantisation is not None:
        more["quantization_config"] = quantised.config_of(how.quantisation)
    config = config_of(folder, gguf_file)
    reader = cast(Any, _auto_class(config))
    with _without_load_report():
        return reader.from_pretrained(
            folder,
            config=config,
            gguf_file=gguf_file,
            dtype=how.dtype,
            weights_only=True,
            ignore_mismatched_sizes=True,  # check_complete refuses them by name
            output_loading_info=True,
            **SAFELY,
            **more,
        )


def _auto_class(config: "PretrainedConfig") -> Any:
    """Class that builds a model: a decoder, or a decoder that can also take pictures, of which it gets none here."""
    import transformers

    sees = (
        type(config) in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
        and type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    )
    return transformers.AutoModelForImageTextToText if sees else transformers.AutoModelForCausalLM


def config_of(folder: Path, gguf_file: str | None = None) -> "PretrainedConfig":
    """Reads a model's configuration, with transformers' attention whatever a config.json names.

    That can be code from the hub, and transformers prefers it over an argument.
    """
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder, gguf_file=gguf_file, **SAFELY)
    config._attn_implementation = native_attention(config)
    return config


def native_attention(config: "PretrainedConfig") -> str:
    """The attention of transformers that a model is loaded with: `sdpa`, or `eager` where its class has no other."""
    import transformers

    mappings = transformers.MODEL_FOR_CAUSAL_LM_MAPPING, transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    kind = next((mapping[type(config)] for mapping in mappings if type(config) in mapping), None)
    return "sdpa" if getattr(kind, "_supports_sdpa", True) else "eager"


def _module_map(folder: Path, devices: Devices) -> dict[str, torch.device]:

    if len(devices.all) == 1:
        return {"": devices.first}
    return devices.module_map(outline_of(config_of(folder))) or {"": devices.first}


def outline_of(config: "PretrainedConfig", dtype: torch.dtype | None = None) -> "PreTrainedModel":
    """Builds a model of a configuration on the meta device, without weights."""
    with torch.device("meta"):
        model: PreTrainedModel = _auto_class(config).from_config(
            config, dtype=dtype, attn_implementation=native_attention(config)
        )
    torch.nn.Module.to(model, "meta")  # some draw numbers in a way that no context of a device reaches
    return model


def check_complete(loaded: Mapping[str, Collection], what: str) -> None:
    """Refuses a checkpoint with missing or unexpected tensors.

    By the report of `from_pretrained(..., output_loading_info=True)`. Tied tensors, which are stored once, and buffers
    that the configuration decides are not among those. `what` says where the weights are.
    """
    shapes = [f"{name} {list(there)} instead of {list(wanted)}" for name, there, wanted in loaded["mismatched_keys"]]
    faults = {
        "lack": sorted(loaded["missing_keys"]),
        "have in another shape": sorted(shapes),
        "have beyond the model": sorted(loaded["unexpected_keys"]),
        "could not be read": sorted(loaded["error_msgs"]),
    }
    said = [f"{fault} {_first(names)}" for fault, names in faults.items() if names]
    if said:
        raise FileContent(
            f"The weights of {what} do not fit its configuration: they {'; they '.join(said)}. Fetch or save the model "
            "again, whole."
        )


def is_fault(error: BaseException) -> bool:
    """True for what a reader of weights or tokenizers raises over a damaged file, and False for an interrupt.

    The tokenizers library is written in Rust, whose panics are no `Exception`.
    """
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


@contextmanager
def _without_load_report() -> Iterator[None]:
    """Hides transformers' load report, which `check_complete` summarises, and its advice on packed weights.

    Weights of a GGUF file are de-quantised here.
    """
    logs = [logging.getLogger(f"transformers.{name}") for name in ("modeling_utils", "quantizers.quantizer_gguf")]

    def keep(record: logging.LogRecord) -> bool:
        return not any(words in record.getMessage() for words in ("LOAD REPORT", "with its weights packed"))

    for log in logs:
        log.addFilter(keep)
    try:
        yield
    finally:
        for log in logs:
            log.removeFilter(keep)


def _first(names: list[str], most: int = 4) -> str:
    """The first names, and how many there are."""
    return ", ".join(names[:most]) + (f", ... ({len(names)} in all)" if len(names) > most else "")


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Makes a ValueError about a model of whatever transformers raises over a broken or unknown one."""
    import transformers

    try:
        yield
    except UnsupportedModel:
        raise
    except BaseException as error:
        if not is_fault(error):
            raise
        if "trust_remote_code" in str(error):
            raise Unsupported(
                f"{what[0].upper()}{what[1:]} needs Python code of its own (trust_remote_code), which kvbench does not "
                "run; choose a model whose architecture transformers has."
            ) from error
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise FileContent(
            f"transformers {transformers.__version__} cannot load {what} ({reason}). Fetch it again if a file is "
            "damaged."
        ) from error
