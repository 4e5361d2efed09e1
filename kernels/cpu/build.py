"""Compiles the C++ kernels with the system's compiler, and checks a cached build before it is loaded.

There is one build per source, flags, CXX and machine type.
"""

import contextlib
import hashlib
import json
import os
import platform
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

Loaded = TypeVar("Loaded")

SOURCE_DIR = Path(__file__).parent / "csrc"
COMPILERS = ("c++", "g++", "clang++")
# No -ffast-math: a NaN among the inputs must come out as one. No contraction: multiply-adds are fused where the source
# says so, and nowhere else, because the bytes of a page may not depend on it. No -march=native: which instructions are
# used is chosen when the library is loaded (abi.py), so that a cache folder can be shared between machines.
FLAGS = ("-std=c++17", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fPIC", "-shared", "-w")

COMPILE_LIMIT_S = 600.0
VERSION_LIMIT_S = 60.0


class BuildError(ValueError):
    """The C++ kernels cannot be built on this machine."""


def cache_dir() -> Path:
    """The folder of compiled kernels: kernels/ in KVBENCH_CACHE, XDG_CACHE_HOME/kvbench or ~/.cache/kvbench."""
    if os.environ.get("KVBENCH_CACHE"):
        return Path(os.environ["KVBENCH_CACHE"]).expanduser() / "kernels"
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "kvbench" / "kernels"


def find_compiler() -> str:
    """Path of a C++ compiler: that of CXX, else the first of c++, g++, clang++; raises BuildError without one."""
    wanted = os.environ.get("CXX")
    for name in (wanted,) if wanted else COMPILERS:
        if path := shutil.which(name):
            return path
    named = f"CXX={wanted} is not there" if wanted else f"none of {', '.join(COMPILERS)} is on PATH"
    raise BuildError(f"no C++ compiler found ({named}); install g++ or clang++, or set CXX, or choose backend=torch")


def load_library(
    kind: Callable[[str], Loaded], name: str, sources: tuple[str, ...], *, flags: tuple[str, ...] = ()
) -> Loaded:
    """Loads the shared library of these sources; one that this machine cannot load is built again, once.

    Args:
        kind: Loads the file of a path, as `ctypes.CDLL` does; it raises OSError where that fails.
        name: See `build_library`.
        sources: See `build_library`, in `SOURCE_DIR`.
        flags: See `build_library`.

    Raises:
        BuildError: See `build_library`; or what was built here cannot be loaded here.
    """
    try:
        return kind(str(build_library(name, sources, flags=flags)))
    except OSError:  # built on a machine with newer libraries, for example
        path = build_library(name, sources, flags=flags, rebuild=True)
    try:
        return kind(str(path))
    except OSError as error:
        raise BuildError(
            f"the compiled kernels cannot be loaded: {error}; set KVBENCH_CACHE to a folder on a disk that may hold "
            "programs, or choose backend=torch"
        ) from error


def build_library(
    name: str,
    sources: tuple[str, ...],
    source_dir: Path = SOURCE_DIR,
    *,
    flags: tuple[str, ...] = (),
    rebuild: bool = False,
) -> Path:
    """The shared library of these sources, compiled now unless an equal build is cached.

    A library's record says which file it is, its digest, and which compiler made it. The compiler is no part of its
    name, unless CXX chooses one: so a machine without a compiler can use what another has built.

    Args:
        name: Stem of the file name, before its hash.
        sources: File names in `source_dir`; those that end in .cpp are compiled, side by side, the others are what they
            include.
        source_dir: Their folder.
        flags: Compiler flags in addition to `FLAGS`.
        rebuild: True compiles although an equal build is cached.

    Returns:
        The library's path; its content was checked against the digest in the record.

    Raises:
        BuildError: No compiler, it failed (with the end of its output), or the cache folder cannot be written.
    """
    try:
        parts = [(source_dir / source).read_text() for source in sources]
        parts += [" ".join((*FLAGS, *flags)), os.environ.get("CXX") or "", platform.machine()]
        key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
        record = cache_dir() / f"{name}-{key}.json"
        cached = None if rebuild else _cached(record)
        if cached is not None:
            return cached
        compiler = find_compiler()
        _make_folder(record.parent)
        with _alone(record.parent):
            cached = None if rebuild else _cached(record)  # another process may have built it meanwhile
            if cached is not None:
                return cached
            _remove_left_overs(record.parent)
            with tempfile.TemporaryDirectory(prefix=".build-", dir=record.parent) as scratch:
                built = Path(scratch) / "library.so"
                units = [source_dir / source for source in sources if source.endswith(".cpp")]
                _compile(compiler, units, built, flags)
                return _store(built, record, compiler)
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home folder
        raise BuildError(
            f"the compiled kernels cannot be stored: {error}; set KVBENCH_CACHE to a folder that can be written"
        ) from error


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Waits until no other process builds into a folder; where its disk or system has no locks, there is no wait.

    Without it, every process of a sweep that begins with an empty cache would compile the same sources at once. The
    lock ends with its process, however that ends, and the compilers that the process started do not have it.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(ImportError, OSError):
            import fcntl

            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _cached(record: Path) -> Path | None:
    """The library that a record names, when it is there and is the one that was built."""
    try:
        known = json.loads(record.read_bytes())
        path = record.with_name(_library_name(record, known["sha256"]))
        return path if hashlib.sha256(path.read_bytes()).hexdigest() == known["sha256"] else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _store(built: Path, record: Path, compiler: str) -> Path:
    """Puts a library and its record into the cache, each whole or not at all, the library first.

    The library is called by its content, so that processes that build at once, and machines that share the folder, do
    not change what another one is about to load.
    """
    digest = hashlib.sha256(built.read_bytes()).hexdigest()
    target = record.with_name(_library_name(record, digest))
    written = built.with_suffix(".json")
    written.write_text(json.dumps({"sha256": digest, "compiler": _version(compiler)}, indent=1))
    for source, path in ((built, target), (written, record)):
        _sync(source)
        os.replace(source, path)
        _sync(path.parent)
    return target


def _remove_left_overs(folder: Path) -> None:
    """Removes leftovers of killed builds: files older than a build may take."""
    for scratch in folder.glob(".build-*"):
        try:
            if time.time() - scratch.stat().st_mtime > 4 * COMPILE_LIMIT_S:
                shutil.rmtree(scratch, ignore_errors=True)
        except FileNotFoundError:
            pass  # its builder is done


def _library_name(record: Path, digest: str) -> str:
    return f"{record.stem}-{str(digest)[:12]}.so"


def _make_folder(folder: Path) -> None:
    """Makes a folder and those above it, so that after a power cut they are still there."""
    made = []
    while not folder.is_dir():
        made.append(folder)
        folder = folder.parent
    for each in reversed(made):
        each.mkdir(exist_ok=True)
        _sync(each.parent)


def _sync(path: Path) -> None:
    """Brings a file's content, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _compile(compiler: str, sources: list[Path], target: Path, flags: tuple[str, ...]) -> None:
    """Compiles with OpenMP, or without where the compiler has none (one thread then)."""
    output = ""
    objects = [target.with_name(f"{source.stem}.o") for source in sources]
    names = ", ".join(source.name for source in sources)
    for extra in (["-fopenmp"], []):
        start = [compiler, *FLAGS, *flags, *extra]
        for step in (
            [[*start, "-c", str(source), "-o", str(made)] for source, made in zip(sources, objects, strict=True)],
            [[*start, *map(str, objects), "-o", str(target)]],
        ):
            ended = _run_parallel(step, COMPILE_LIMIT_S)
            output = output or "".join(said for status, said in ended if status)
            if any(status for status, _ in ended):
                break
        else:
            if target.is_file():
                return
    raise BuildError(
        f"{compiler} cannot compile {names}: {output.strip()[-800:] or 'no message'}; set CXX to another "
        "compiler, or choose backend=torch"
    )


def _version(compiler: str) -> str:
    """The compiler's path and the first line that it prints of its version, for people reading the cache."""
    ((_, said),) = _run_parallel([[compiler, "--version"]], VERSION_LIMIT_S)
    return " ".join([compiler, *said.splitlines()[:1]])


def _run_parallel(commands: list[list[str]], limit_s: float) -> list[tuple[int, str]]:
    """Runs commands in parallel; returns the exit status and output of each.

    Raises BuildError where one cannot be started or the time limit is exceeded; then all of them, with their children,
    were ended.
    """
    deadline_s = time.monotonic() + limit_s
    running: list[subprocess.Popen[str]] = []
    try:
        for command in commands:
            running.append(_start(command))
        ended = []
        for process in running:
            said, _ = process.communicate(timeout=max(0.0, deadline_s - time.monotonic()))
            ended.append((process.returncode, said))
    except BaseException as error:  # an interrupted compiler leaves nothing that goes on working either
        for process in running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        raise BuildError(
            f"{commands[0][0]} did not finish within {limit_s:g} s; set CXX to another compiler, or choose "
            "backend=torch"
        ) from error
    return ended


def _start(command: list[str]) -> subprocess.Popen[str]:
    """A command that has a session of its own; a BuildError where it cannot be started."""
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        raise BuildError(f"{command[0]} cannot be started: {error}; set CXX to another compiler") from error
