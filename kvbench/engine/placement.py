"""Devices of a model's weights: one for all, several layer by layer, or several processes by heads."""

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from kvbench.cache.layout import DeviceSpan
from kvbench.cache.ranks import ALONE, ProcessRanks, Ranks
from kvbench.engine.calls import attention_modules
from kvbench.errors import UnsupportedModel
from kvbench.models.processes import too_few_heads

OFFLOADED = {"meta", "disk"}


def spans_of(model: PreTrainedModel) -> tuple[DeviceSpan, ...]:
    """Runs of layers that share a device, in layer order; empty where the whole model is on one.

    Refuses a layer that is on more than one device.
    """
    devices = {weight.device for weight in model.parameters()}
    if len(devices) < 2:
        return ()
    spans: list[DeviceSpan] = []
    for index, layer in enumerate(_layers(model)):
        layer_devices = {weight.device for weight in layer.parameters()}
        if len(layer_devices) != 1:
            raise UnsupportedModel(
                f"layer {index} lies on {' and '.join(sorted(map(str, layer_devices)))}, and its part of the cache on "
                "one; give whole layers to each device (model.device=[cuda:0,cuda:1] does)",
                setting="model.device",
            )
        (device,) = layer_devices
        last = spans[-1] if spans else None
        if last is not None and last.device == device:
            spans[-1] = DeviceSpan(device, last.num_layers + 1)
        else:
            spans.append(DeviceSpan(device, 1))
    return tuple(spans)


def of_layers(spans: Sequence[DeviceSpan], numbers: Sequence[int]) -> tuple[DeviceSpan, ...]:
    """Device spans of some of the layers, by their numbers."""
    parts, first = [], 0
    for span in spans:
        count = sum(first <= number < first + span.num_layers for number in numbers)
        parts += [DeviceSpan(span.device, count)] if count else []
        first += span.num_layers
    return tuple(parts)


def _layers(model: PreTrainedModel) -> list[torch.nn.Module]:
    """Layers in their order: parents of the attention modules."""
    attentions = attention_modules(model)
    return [module for module in model.modules() if any(child in attentions for child in module.children())]


def ranks_of(model: PreTrainedModel) -> Ranks:
    """The processes over which the model's heads are cut."""
    return ProcessRanks(model.device) if _is_cut(model) else ALONE


def _is_cut(model: PreTrainedModel) -> bool:
    cut = any(hasattr(weight, "device_mesh") for weight in model.parameters())
    return cut or (getattr(model, "_tp_size", None) or 1) > 1


def check(model: PreTrainedModel, name: str) -> None:
    """Refuses weights with which a cache could not share their devices (`UnsupportedModel`).

    The message has the reason and a remedy; `name` is the model's name in messages.
    """
    devices = sorted({str(weight.device) for weight in model.parameters()})
    spread = len(devices) > 1 or getattr(model, "hf_device_map", None)  # else it is an outline, which nobody offloaded
    if (spread and OFFLOADED & set(devices)) or {device.partition(":")[0] for device in devices} == {"cpu", "cuda"}:
        raise UnsupportedModel(
            f"{name}: its weights lie on {' and '.join(devices)}, some of them outside of the devices that compute; "
            "load it onto GPUs alone, without offload (model.device=cuda:0, or [cuda:0,cuda:1] for several)",
            setting="model.device",
        )
    if len(devices) > 1:
        spans_of(model)
    if not _is_cut(model):
        return
    if len(devices) > 1:
        raise UnsupportedModel(
            f"{name}: its weights are cut over processes and lie on {' and '.join(devices)} besides; choose "
            "model.tensor_parallel or a list for model.device",
            setting="model.device",
        )
    config, size = model.config.get_text_config(), ranks_of(model).size
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    if reason := too_few_heads(name, heads, size):
        raise UnsupportedModel(reason)
