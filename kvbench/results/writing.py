"""How files reach the disk: as strict JSON, whole or not at all, and with an error that says what to do."""

import contextlib
import errno
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]


class JournalError(ValueError):
    """A result could not be written; what is on disk stays valid."""


def plain(value: Any) -> Json:
    """Turn a value into what strict JSON can hold.

    Args:
        value: Nested dicts, lists, tuples, numbers, strings, booleans and None; numpy and torch scalars count as
            numbers.

    Returns:
        The same structure with str keys; NaN and infinity become None, because strict JSON has no word for them.

    Raises:
        TypeError: Any other type; the caller must say how it is to be written.
    """
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if getattr(value, "ndim", None) == 0:
        value = value.item()
    if isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    raise TypeError(
        f"cannot write {type(value).__name__} to JSON: {value!r}; turn it into numbers, strings, lists or dicts first"
    )


def dump_line(record: Mapping[str, Any]) -> bytes:
    """One record as one line of ASCII JSON with its keys in the order given, newline included."""
    return json.dumps(plain(record), allow_nan=False, separators=(",", ":")).encode("ascii") + b"\n"


def fsync_folder(folder: Path) -> None:
    """Make the names in a folder durable, not only the contents of its files."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomic(path: Path, data: bytes) -> None:
    """Replace a file so that a reader, or a crash, sees the old content or the new one and never a mixture.

    Args:
        path: File to write; its folder must exist.
        data: The whole new content.

    Raises:
        JournalError: The disk is full or the folder cannot be written; the old file is untouched.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        fsync_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise write_error(path, error) from error


def write_file(path: Path, data: bytes) -> None:
    """Write a file in one atomic step and make its folder first.

    Args:
        path: File to write.
        data: The whole new content.

    Raises:
        ValueError: The folder cannot be made or written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"cannot make the folder of {path}: {error.strerror}; give another path") from error
    write_atomic(path, data)


def write_error(path: Path | str, error: OSError) -> JournalError:
    """Say why a file cannot be written and what to do.

    Args:
        path: The file or folder.
        error: What the system answered.

    Returns:
        The error, for the caller to raise.
    """
    if is_full(error):
        why = "the disk is full; free some space"
    else:
        why = f"{error.strerror or error}; check that the folder can be written"
    return JournalError(f"cannot write {path}: {why}, then give the same command again: every finished sample is kept")


def is_full(error: BaseException) -> bool:
    """True when the system refused to write because the disk, or the user's share of it, is full."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
