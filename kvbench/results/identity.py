"""The identity of a run: the hash over everything that can change an answer, and the folder that it names."""

import dataclasses
import enum
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

HASH_DIGITS = 12


def canonical(value: object) -> object:
    """Turn settings into JSON types that are equal exactly when the settings are.

    Args:
        value: Nested dataclasses, mappings, sequences, sets, enums, paths, scalars, torch dtypes and devices.

    Raises:
        TypeError: A type whose text may differ between two runs of the same thing (an object that shows its address).
    """
    if value is None or isinstance(value, bool | int | str | float):
        # 1 and 1.0 stay different: a budget of 1 is one token, a budget of 1.0 the whole cache. A setting that is a
        # float has become one when its rule read it.
        return value
    if isinstance(value, enum.Enum):
        return [type(value).__name__, value.name]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = sorted(item.name for item in dataclasses.fields(value) if item.init)
        return {name: canonical(getattr(value, name)) for name in names}
    if isinstance(value, Mapping):
        return {str(key): canonical(value[key]) for key in sorted(value, key=str)}
    if isinstance(value, set | frozenset):
        return sorted((canonical(item) for item in value), key=json.dumps)
    if isinstance(value, Sequence):
        return [canonical(item) for item in value]
    if isinstance(value, PurePath) or (
        type(value).__module__ == "torch" and type(value).__name__ in ("dtype", "device")
    ):
        return str(value)
    raise TypeError(f"cannot tell whether two settings of type {type(value).__name__} are the same: {value!r}")


def hash_identity(identity: dict) -> str:
    """Hash everything that changes an answer; 64 hexadecimal digits."""
    text = json.dumps(identity, sort_keys=True, separators=(",", ":"), allow_nan=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def folder_name(name: str) -> str:
    """Make a name one part of a path: what is none of letters, digits and ._+=- becomes a dash."""
    safe = re.sub(r"[^A-Za-z0-9._+=-]+", "-", name).strip(".-")
    return safe[:80] or "unnamed"


def run_folder(results_dir: Path, task: str, model: str, method: str, digest: str) -> Path:
    """The folder of a run: `results/<task>/<model>/<method>/<hash>`."""
    return results_dir / folder_name(task) / folder_name(model) / folder_name(method) / digest[:HASH_DIGITS]


def differences(before: Any, after: Any, name: str = "") -> Iterator[tuple[str, str, str]]:
    """List where two nested dicts differ: dotted name, and the two values in short."""
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for key in sorted({*before, *after}, key=str):
            inner = f"{name}.{key}" if name else str(key)
            yield from differences(before.get(key), after.get(key), inner)
    elif before != after:
        yield name, str(before)[:60], str(after)[:60]
