"""Names that settings of a model may have, which are read without torch."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from kvbench.config.files import package_folder
from kvbench.errors import SettingValue, check_name, check_whole

AUTO = "auto"
PLAIN, PACKED, STREAMED, FUSED = "plain", "packed", "streamed", "fused"
LINEAR = (PLAIN, PACKED, STREAMED, FUSED)
DTYPES = ("float32", "bfloat16", "float16")
QUANTISATIONS = ("fp8", "int8", "int4")
KINDS = ("embedded", "hf", "gguf", "random")
_NAMES = {"kind": KINDS, "dtype": (AUTO, *DTYPES), "linear": (AUTO, *LINEAR), "quantisation": QUANTISATIONS}
_LEAST = {"max_tokens": 1, "num_layers": 1, "tensor_parallel": 1}  # of whole numbers that may be null


def listed_presets() -> dict[str, dict[str, Any]]:
    """Shapes of config/shapes.yaml that random weights can be made for, by name."""
    listed = yaml.safe_load((package_folder() / "config" / "shapes.yaml").read_text(encoding="utf-8"))
    return {name: shape for name, shape in listed.items() if "weights" in shape}


def check_device_name(name: str, in_list: bool = False) -> None:
    """Refuse text that names no device, `auto` in a list of devices too; whether the device exists is another question.

    Raises:
        SettingValue: Names the setting and the forms that it may have.
    """
    if not re.fullmatch(r"cpu|cuda(:\d+)?" + ("" if in_list else "|auto"), name):
        raise SettingValue(
            f"model.device={name} is no device; use auto, cpu, cuda or cuda:N, or a list such as [cuda:0,cuda:1].",
            setting="model.device",
        )


def check_values(group: Mapping[str, Any]) -> None:
    """Refuse names in the `model` group that do not exist, and numbers that are none.

    Raises:
        ValueError: Names the setting, its value and what it may be.
    """
    for setting, known in _NAMES.items():
        if group.get(setting) is not None:
            check_name(f"model.{setting}", group[setting], known)
    device = group.get("device")
    for name in device if isinstance(device, Sequence) and not isinstance(device, str) else [device]:
        if name is not None:
            check_device_name(str(name), in_list=name is not device)
    for setting, least in _LEAST.items():
        if group.get(setting) is not None:
            check_whole(f"model.{setting}", group[setting], least, ", or null")
    if group.get("preset") is not None:
        check_name("model.preset", group["preset"], listed_presets())
