"""Finds what the interpreter in the cage needs of the file system, and nothing else: asked of that interpreter."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

# Runs outside, in the interpreter that will run inside, as what it is: the paths that it imports from, and the files
# that it has mapped once every extension module of the standard library is loaded. No display, hence no _tkinter.
_ASK = """
import ctypes, glob, json, os, sys
held, names = [], []
for folder in sys.path:
    for path in sorted(glob.glob(glob.escape(folder) + "/*.so")):
        if "_tkinter" not in os.path.basename(path):
            try:
                held.append(ctypes.CDLL(path))
            except OSError:
                pass
try:
    held.append(ctypes.CDLL("libgcc_s.so.1"))  # the C library loads it when a thread is cancelled
except OSError:
    pass

class Info(ctypes.Structure):
    _fields_ = [("address", ctypes.c_void_p), ("name", ctypes.c_char_p)]

@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(Info), ctypes.c_size_t, ctypes.c_void_p)
def note(info, size, data):
    names.append(os.fsdecode(info.contents.name or b""))
    return 0

ctypes.CDLL(None).dl_iterate_phdr(note, None)
print(json.dumps([[path for path in sys.path if os.path.exists(path)], names]))
"""
# The loader's list of libraries, and the time zones that `zoneinfo` reads.
_SYSTEM = ("/etc/ld.so.cache", "/usr/share/zoneinfo")
_THIRD_PARTY = ("site-packages", "dist-packages")


@dataclass(frozen=True)
class Needs:
    """Paths that the cage shows.

    Args:
        readable: Files and folders, free of links.
        links: Links on the way to them: path -> target.
        hidden: Folders below the readable ones that stay empty in the cage.
    """

    readable: tuple[str, ...]
    links: dict[str, str]
    hidden: tuple[str, ...]


def bare_python() -> list[str]:
    """The command that runs a text in this interpreter, outside any virtual environment and without site-packages."""
    executable = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
    # Isolated, without site, no .pyc files; UTF-8 whatever the (empty) environment says.
    return [executable, "-I", "-S", "-B", "-X", "utf8", "-c"]


@cache
def interpreter_needs() -> Needs:
    """Find what must be visible for the interpreter to start and to import its whole standard library.

    Returns:
        The paths: the standard library without third-party packages, and the shared libraries that it loads.

    Raises:
        OSError: The interpreter does not run.
    """
    asked = subprocess.run([*bare_python(), _ASK], capture_output=True, env={}, cwd="/", check=False)
    if asked.returncode:
        said = asked.stderr.decode("utf-8", "replace").strip()[-300:]
        raise OSError(f"{bare_python()[0]} does not say what it needs: {said}")
    imported, loaded = json.loads(asked.stdout)
    return trace([bare_python()[0], *imported, *loaded, *_SYSTEM])


def trace(paths: Iterable[str]) -> Needs:
    """Follow paths to what they stand for, so that the same names lead to the same files in the cage.

    Args:
        paths: What is needed; a relative path is no file (the kernel's own library has such a name) and is left out.

    Returns:
        The files and folders, without those below a readable folder, and every link on the way.
    """
    links: dict[str, str] = {}
    real = {found for path in paths if path.startswith("/") and (found := _follow(path, links))}
    readable = [path for path in sorted(real) if not any(path.startswith(other + "/") for other in real)]
    folders = [f"{path}/{name}" for path in readable for name in _THIRD_PARTY]
    hidden = [path for path in folders if os.path.isdir(path) and not os.path.islink(path)]
    # A link inside a readable folder is there already.
    outside = {
        path: target for path, target in links.items() if not any(path.startswith(other + "/") for other in readable)
    }
    return Needs(tuple(readable), outside, tuple(hidden))


def _follow(path: str, links: dict[str, str]) -> str | None:
    """The file that a path leads to, with every link on the way noted; None when there is none."""
    at, rest = "", [part for part in path.split("/") if part not in ("", ".")]
    for _ in range(1000):
        if not rest:
            return at if os.path.exists(at) else None
        part = rest.pop(0)
        if part == "..":
            at = os.path.dirname(at).rstrip("/")
            continue
        at = f"{at}/{part}"
        if os.path.islink(at):
            links[at] = target = os.readlink(at)
            rest = [piece for piece in target.split("/") if piece not in ("", ".")] + rest
            at = "" if target.startswith("/") else os.path.dirname(at).rstrip("/")
    return None
