"""Names that settings of a model may have, which are read without torch."""

from collections.abc import Mapping
from typing import Any

from kvbench.errors import check_name

AUTO = "auto"
PLAIN, PACKED, STREAMED, FUSED = "plain", "packed", "streamed", "fused"
LINEAR = (PLAIN, PACKED, STREAMED, FUSED)
DTYPES = ("float32", "bfloat16", "float16")
QUANTISATIONS = ("fp8", "int8", "int4")
KINDS = ("embedded", "hf", "gguf", "random")
_NAMES = {"kind": KINDS, "dtype": (AUTO, *DTYPES), "linear": (AUTO, *LINEAR), "quantisation": QUANTISATIONS}


def check_names(group: Mapping[str, Any]) -> None:
    """Refuse a name in the `model` group that does not exist.

    Raises:
        NameUnknown: Names the setting, its value and those that exist.
    """
    for setting, known in _NAMES.items():
        if group.get(setting) is not None:
            check_name(f"model.{setting}", group[setting], known)
