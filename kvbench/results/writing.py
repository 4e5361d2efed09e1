"""Files reach the disk as strict JSON, whole or not at all, and with an error that says what to do."""

import contextlib
import dataclasses
import errno
import fcntl
import json
import math
import os
import re
import secrets
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvbench.config import durable
from kvbench.errors import FileMissing, KvbenchError
from kvbench.results.typed import Misfit, parse

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]


class JournalError(KvbenchError, code="write-failed"):
    """A result could not be written; what is on disk stays valid."""


def plain(value: Any) -> Json:
    """Turn nested dicts, lists, tuples, scalars (also numpy's and torch's) and None into strict JSON types.

    With str keys, and None for NaN and infinity, which JSON lacks.

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


def write_record(path: Path, record: Any, read: Callable[[Any], object] | None = None) -> None:
    """Write a dataclass as JSON in one atomic step.

    Args:
        read: Reads the JSON as the loader of the file does; by its declared types where None.

    Raises:
        RuntimeError: No reader would accept it; the file is unchanged.
    """
    content = plain(dataclasses.asdict(record))
    try:
        parse(content, type(record)) if read is None else read(content)
    except Misfit as error:
        raise RuntimeError(f"{path} could not be read again: {error}") from error
    write_atomic(path, json.dumps(content, indent=2, allow_nan=False).encode("ascii") + b"\n")


def encode_line(content: Json) -> bytes:
    """Encode the result of `plain` as one line of ASCII JSON with its keys in the order given, newline included."""
    return json.dumps(content, allow_nan=False, separators=(",", ":")).encode("ascii") + b"\n"


def check_writable(folder: Path, setting: str) -> None:
    """Refuse a folder that nothing can be written to, by its setting, before anything is computed; makes nothing."""
    why, path = "", folder
    while not why:
        try:
            is_folder = stat.S_ISDIR(os.stat(path).st_mode)
        except FileNotFoundError:
            if os.path.islink(path):
                why = f"{path} is a link to nothing"
            path = path.parent
            continue
        except (OSError, ValueError) as error:
            why = f"{getattr(error, 'strerror', None) or error}"
            break
        if not is_folder:
            why = f"{path} is no folder"
        elif not os.access(path, os.W_OK | os.X_OK):
            why = f"{path} is not writable"
        break
    if why:
        raise FileMissing(f"{setting}={folder} cannot be written: {why}; give another folder", setting=setting)


# A temporary file is `.NAME.PID-TOKEN.tmp`, and locked as long as its writer lives.
LITTER = re.compile(r"\.(?P<name>.+)\.[0-9]+-[0-9a-f]{8}\.tmp")
NAME_LENGTH = 100  # characters of a file's own name in its temporary one, which must not grow too long


def remove_litter(folder: Path, name: str | None = None) -> None:
    """Remove the temporary files of writers that were killed, of all files or of one; those of living writers stay."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            match = LITTER.fullmatch(entry.name)
            if match and name in (None, match["name"]) and entry.is_file(follow_symlinks=False):
                _remove_if_dead(Path(entry.path))


def _remove_if_dead(path: Path) -> None:
    """Remove a temporary file without a lock; the kernel releases a lock when its process dies."""
    with contextlib.suppress(OSError):  # held, gone, or a file system without locks: leave it
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
        finally:
            os.close(descriptor)


def _open_temporary(path: Path, mode: int | None) -> tuple[int, Path]:
    """Make a new, empty, locked file next to `path`, never an existing one."""
    while True:
        temporary = path.with_name(f".{path.name[:NAME_LENGTH]}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            descriptor = os.open(temporary, flags, 0o666 if mode is None else 0o600)
        except FileExistsError:
            continue
        with contextlib.suppress(OSError):  # without locks, no process removes it either
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return descriptor, temporary
        os.close(descriptor)  # taken for litter in the moment before it was locked


def write_atomic(path: Path, data: bytes, *, mode: int | None = None) -> None:
    """Replace a file so that a reader, or a crash, sees the old content or the new one and never a mixture.

    Temporary files of killed writers of the same file are removed.

    Args:
        path: File to write; its folder must exist. A link is replaced, not followed: see `write_file`.
        mode: Permissions of the file; None leaves them to the process's own mask.

    Raises:
        JournalError: The disk is full or the folder cannot be written; the old file is untouched.
    """
    remove_litter(path.parent, path.name[:NAME_LENGTH])
    try:
        descriptor, temporary = _open_temporary(path, mode)
    except OSError as error:
        raise write_error(path, error) from error
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
            os.replace(temporary, path)  # while it is open: its lock says that its writer lives
        durable.sync(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise write_error(path, error) from error


def write_file(path: Path, data: bytes) -> None:
    """Write a file that the user named, in one atomic step, and its folder when absent.

    A link is followed to the file that it names. A file that is there keeps its permissions.

    Raises:
        ValueError: It is a pipe, a device or a folder, or its folder cannot be made or written.
    """
    try:
        target = Path(os.path.realpath(path))
        durable.make_folder(target.parent)
        status = os.stat(target) if os.path.lexists(target) else None
    except OSError as error:
        raise FileMissing(f"cannot write {path}: {error.strerror}; give another path") from error
    if status is not None and not stat.S_ISREG(status.st_mode):
        kind = "a folder" if stat.S_ISDIR(status.st_mode) else "no regular file"
        raise FileMissing(f"cannot write {path}: it is {kind}; give another path")
    write_atomic(target, data, mode=None if status is None else stat.S_IMODE(status.st_mode))


def write_files(root: Path, contents: Mapping[Path, bytes]) -> list[Path]:
    """Write files into a folder that the user named; returns their paths.

    Their names may contain stored strings, and the folder may contain foreign links: all paths must lie below it, or
    nothing is written.

    Args:
        contents: Path of each file, which begins with `root`, and its content.

    Raises:
        ValueError: A file would lie elsewhere, or cannot be written.
    """
    base = Path(os.path.realpath(root))
    for path in contents:
        if base not in (target := Path(os.path.realpath(path))).parents:
            raise FileMissing(f"cannot write {path}: it is {target}, which is not below {root}; give another folder")
    for path, content in contents.items():
        write_file(path, content)
    return list(contents)


def write_error(path: Path | str, error: OSError) -> JournalError:
    """Error for a file that cannot be written, with its remedy."""
    if is_full(error):
        why = "the disk is full; free some space"
    else:
        why = f"{error.strerror or error}; check that the folder can be written"
    return JournalError(f"cannot write {path}: {why}, then give the same command again: every finished sample is kept")


def is_full(error: BaseException) -> bool:
    """True when the system refused to write because the disk, or the user's share of it, is full."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
