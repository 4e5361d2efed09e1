"""Devices that a model is spread over (`model.device`), and the layers that each gets."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from kvbench.errors import SettingValue
from kvbench.models.names import check_device_name

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Devices:
    """One device, or several over which whole layers are spread in their order."""

    all: tuple[torch.device, ...]

    @property
    def first(self) -> torch.device:
        """The device that prompts go to, and on which plans are made."""
        return self.all[0]

    @property
    def builder(self) -> torch.device:
        """The place to put a model together that is not read from a folder: on the one device, or in main memory."""
        return self.first if len(set(self.all)) == 1 else torch.device("cpu")

    def spans(self, num_layers: int) -> tuple[tuple[torch.device, int], ...]:
        """Each device with its number of layers; empty for one device.

        The first ones have one more where the layers do not divide evenly.
        """
        if len(self.all) == 1:
            return ()
        least, more = divmod(num_layers, len(self.all))
        if not least:
            raise SettingValue(
                f"model.device={self} names {len(self.all)} devices for {num_layers} layers, and each gets whole ones; "
                "name fewer",
                setting="model.device",
            )
        return tuple((device, least + (index < more)) for index, device in enumerate(self.all))

    def module_map(self, model: "PreTrainedModel") -> dict[str, torch.device] | None:
        """Device of each module of a model, or of its outline on the meta device; None where all is on one.

        In the form of transformers and accelerate.
        """
        if len(set(self.all)) == 1:
            return None
        base, inner = model.base_model, model.base_model_prefix
        device_of: dict[str, torch.device] = {}
        last = self.first
        for name, child in base.named_children():
            if isinstance(child, torch.nn.ModuleList):
                order = [device for device, count in self.spans(len(child)) for _ in range(count)]
                device_of |= {f"{inner}.{name}.{index}": device for index, device in enumerate(order)}
                last = order[-1]
            else:  # what comes before the layers takes tokens, and the norm after them what the last layer gives
                device_of[f"{inner}.{name}"] = last if any(True for _ in child.parameters()) else self.first
        tied = bool(model.config.get_text_config().tie_word_embeddings)
        device_of |= {name: self.first if tied else last for name, child in model.named_children() if child is not base}
        return device_of

    def spread(self, model: "PreTrainedModel") -> "PreTrainedModel":
        """Moves a model that was put together by `builder` to its devices."""
        modules = self.module_map(model)
        if modules is None:
            return model.to(self.first)  # type: ignore[arg-type]  # its decorator hides `self`
        if getattr(model, "hf_device_map", None):
            return model  # it was read straight to them
        from accelerate import dispatch_model

        spread: Any = dispatch_model(model, device_map=modules)
        return spread

    def __str__(self) -> str:
        names = ",".join(map(str, self.all))
        return names if len(self.all) == 1 else f"[{names}]"


def read_devices(value: object) -> Devices:
    """Devices that exist here, from `model.device`.

    That is auto, cpu, cuda or cuda:N, or a list of such devices of one kind.
    """
    if isinstance(value, str) or not isinstance(value, Sequence):
        return Devices((_device(str(value)),))
    devices = tuple(_device(str(name), in_list=True) for name in value)
    if not devices:
        raise SettingValue(
            "model.device=[] names no device; use auto, or list those that share the layers", setting="model.device"
        )
    if len({device.type for device in devices}) > 1:
        raise SettingValue(
            f"model.device={Devices(devices)} mixes kinds of devices, and a part of a cache would wait for main "
            "memory; list GPUs alone",
            setting="model.device",
        )
    return Devices(devices)


def _device(name: str, in_list: bool = False) -> torch.device:
    """One device that exists here."""
    if name == "auto" and not in_list:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    check_device_name(name, in_list)
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise SettingValue(
            f"model.device={name}: torch {torch.__version__} sees {torch.cuda.device_count()} CUDA or ROCm devices "
            "here; use model.device=cpu or auto.",
            setting="model.device",
        )
    return torch.device("cuda", device.index or 0) if device.type == "cuda" and in_list else device
