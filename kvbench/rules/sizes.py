"""Settings in bytes: whole numbers, and texts such as 512MiB."""

import re

from kvbench.errors import SettingValue
from kvbench.rules import MAX_BYTES, shown

NUMBER = r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)"


def read_size(text: str) -> float | None:
    """Bytes of a text such as `8MiB`; None when it is none."""
    match = re.fullmatch(rf"\s*{NUMBER}\s*(B|KiB|MiB|GiB)\s*", text)
    return float(match[1]) * {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}[match[2]] if match else None


def read_bytes(key: str, value: object) -> int:
    """Read a setting in bytes: a whole number, or text such as 512MiB or 8GiB."""
    num_bytes = read_size(value) if isinstance(value, str) else value
    if (
        isinstance(num_bytes, bool)
        or not isinstance(num_bytes, int | float)
        or (num_bytes is value and isinstance(num_bytes, float))
    ):
        num_bytes = -1
    if not 0 <= num_bytes <= MAX_BYTES:
        raise SettingValue(
            f"{key}={shown(value)} is no number of bytes; write a whole number up to {MAX_BYTES}, or text such as "
            "512MiB or 8GiB",
            setting=key,
        )
    return int(num_bytes)
