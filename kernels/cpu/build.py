"""Compiles the C++ kernels with the system's compiler, once per source, flags, compiler and machine type."""

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCE_DIR = Path(__file__).parent / "csrc"
COMPILERS = ("c++", "g++", "clang++")
# No -ffast-math: a NaN among the inputs must come out as one. No contraction: multiply-adds are fused where the source
# says so, and nowhere else, because the bytes of a page may not depend on it. No -march=native: which instructions are
# used is chosen when the library is loaded (abi.py), so that a cache folder can be shared between machines.
FLAGS = ("-std=c++17", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fPIC", "-shared", "-w")


class BuildError(ValueError):
    """The C++ kernels cannot be built on this machine."""


def cache_dir() -> Path:
    """The folder of compiled kernels: kernels/ in KVBENCH_CACHE, XDG_CACHE_HOME/kvbench or ~/.cache/kvbench."""
    if os.environ.get("KVBENCH_CACHE"):
        return Path(os.environ["KVBENCH_CACHE"]).expanduser() / "kernels"
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "kvbench" / "kernels"


def find_compiler() -> str:
    """The path of a C++ compiler: the one CXX names, else the first of c++, g++, clang++.

    Raises:
        BuildError: There is none.
    """
    wanted = os.environ.get("CXX")
    for name in (wanted,) if wanted else COMPILERS:
        if path := shutil.which(name):
            return path
    named = f"CXX={wanted} is not there" if wanted else f"none of {', '.join(COMPILERS)} is on PATH"
    raise BuildError(f"no C++ compiler found ({named}); install g++ or clang++, or set CXX, or choose backend=torch")


def build_library(
    name: str, sources: tuple[str, ...], source_dir: Path = SOURCE_DIR, *, flags: tuple[str, ...] = ()
) -> Path:
    """The shared library of these sources, compiled now unless an equal build is cached.

    Args:
        name: What the file is called, before its hash.
        sources: File names in `source_dir`; the first one is compiled, the others are what it includes.
        source_dir: Where they are.
        flags: Compiler flags beside `FLAGS`.

    Returns:
        The library's path.

    Raises:
        BuildError: No compiler, it failed (with the end of its output), or the cache folder cannot be written.
    """
    compiler = find_compiler()
    parts = [(source_dir / source).read_text() for source in sources]
    parts += [" ".join((*FLAGS, *flags)), _version(compiler), platform.machine()]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
    target = cache_dir() / f"{name}-{digest}.so"
    if target.exists():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            built = Path(scratch) / target.name
            _compile(compiler, source_dir / sources[0], built, flags)
            os.replace(built, target)  # another process may have been as quick: both files are the same
    except OSError as error:
        raise BuildError(
            f"the compiled kernels cannot be stored: {error}; set KVBENCH_CACHE to a folder that can be written"
        ) from error
    return target


def _compile(compiler: str, source: Path, target: Path, flags: tuple[str, ...]) -> None:
    """Compiles with OpenMP, or without where the compiler has none (one thread then)."""
    output = ""
    for extra in (["-fopenmp"], []):
        command = [compiler, *FLAGS, *flags, *extra, str(source), "-o", str(target)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        if done.returncode == 0:
            return
        output = output or done.stderr
    raise BuildError(f"{compiler} cannot compile {source.name}: {output.strip()[-800:] or 'no message'}")


def _version(compiler: str) -> str:
    """The compiler's name and the version that it prints."""
    done = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=60)
    return f"{compiler} {done.stdout}"
