"""Tables of numbers that a setting names or holds."""

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path

from kvbench.errors import FileContent, FileMissing, SettingValue
from kvbench.rules.files import read_regular

Table = tuple[tuple[float, ...], ...]
MAX_TABLE_BYTES = 1 << 27  # of a file; the mean queries of the largest models have a quarter


def read_table(table: str | Sequence[Sequence[float]], setting: str = "table") -> Table:
    """Numbers per layer and KV head, from a file or from nested sequences.

    Args:
        table: Path of a file with one line per layer and one number per KV head, parted by tabs, commas or blanks, or
            of a .json file with a list of lists; or the list of lists itself.
        setting: Its name, for messages; without a group, it is the method's.

    Raises:
        ValueError: There is no such file, it is too long, or it is not a table of numbers with equally many in every
            line.
    """
    setting = setting if "." in setting else f"method.{setting}"
    rows: Sequence[Sequence[float | str]]
    if isinstance(table, str):
        path = Path(table).expanduser()
        try:
            text = read_regular(path, MAX_TABLE_BYTES).decode()
        except FileNotFoundError:
            raise FileMissing(
                f"{setting}={table} is no file; give a table of numbers, one line per layer", setting=setting
            ) from None
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or "it is no text"
            raise FileMissing(
                f"{setting}={table} cannot be read: {reason}; give a table of numbers, one line per layer",
                setting=setting,
            ) from None
        lines = [re.split(r"\s*,\s*|\s+", line.strip()) for line in text.splitlines() if line.strip()]
        try:
            rows = json.loads(text) if path.suffix == ".json" else lines
        except (ValueError, RecursionError) as error:
            raise FileContent(
                f"{setting}={table} is no JSON ({error}); write a list of lists of numbers", setting=setting
            ) from None
    else:
        rows = table
    try:
        parsed = tuple(tuple(float(value) for value in row) for row in rows)
    except (TypeError, ValueError, OverflowError):
        parsed = ()
    whole = parsed and parsed[0] and len({len(row) for row in parsed}) == 1
    if not whole or not all(math.isfinite(value) for row in parsed for value in row):
        name = table if isinstance(table, str) else "the list"
        raise SettingValue(
            f"{setting}: {name} is not one line per layer with one number per KV head in each; NaN and infinity "
            "are no numbers",
            setting=setting,
        )
    return parsed
