"""Compiled kernels in the cache: built once, checked before they are loaded, and done without where they cannot be."""

import ctypes
import errno
import fcntl
import json
import os
import shutil
import stat
import subprocess
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvbench.kernels import dispatch
from kvbench.kernels.cpu import abi as cpu_abi
from kvbench.kernels.cpu import backend as cpu_backend
from kvbench.kernels.cpu import build
from kvbench.kernels.cpu.build import BuildError, build_library, load_library

needs_compiler = pytest.mark.skipif(
    not any(shutil.which(name) for name in build.COMPILERS), reason="no C++ compiler is on PATH"
)
TINY = ("tiny.cpp",)
SOURCE = 'extern "C" int answer() { return 42; }\n'


def fake_compiler(folder: Path, body: str) -> Path:
    """A `c++` that runs a shell script."""
    path = folder / "c++"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and the compiler that PATH has."""
    monkeypatch.setenv("KVBENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    return tmp_path / "cache" / "kernels"


@pytest.fixture
def small_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a C++ file that compiles at once."""
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "tiny.cpp").write_text(SOURCE)
    return folder


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder that holds the small library."""
    folder = tmp_path_factory.mktemp("built")
    (folder / "tiny.cpp").write_text(SOURCE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVBENCH_CACHE", str(folder / "cache"))
        patch.delenv("CXX", raising=False)
        build_library("tiny", TINY, folder)
    return folder / "cache"


@pytest.fixture
def nothing_loaded() -> Iterator[None]:
    """No library is loaded and no warning was given, before and after."""

    def forget() -> None:
        cpu_abi.library_for.cache_clear()
        cpu_abi.best_isa.cache_clear()
        cpu_backend.warn_absent.cache_clear()

    forget()
    yield
    forget()


def load_tiny(folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """What the small library answers."""
    real = build.build_library
    monkeypatch.setattr(build, "build_library", lambda *a, **kw: real(*a, folder, **kw))
    try:
        return load_library(ctypes.CDLL, "tiny", TINY).answer()
    finally:
        monkeypatch.setattr(build, "build_library", real)


def counting(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The sources that are compiled from here on."""
    compiled, real = [], build._compile
    monkeypatch.setattr(build, "_compile", lambda *a: (compiled.append(a[1]), real(*a)))
    return compiled


@needs_compiler
def test_a_build_is_cached_until_its_source_changes(small_source: Path, monkeypatch: pytest.MonkeyPatch):
    """The second call compiles nothing; another source is another file; nothing but libraries and records stays."""
    compiled = counting(monkeypatch)
    first = build_library("tiny", TINY, small_source)
    assert build_library("tiny", TINY, small_source) == first and len(compiled) == 1
    (small_source / "tiny.cpp").write_text('extern "C" int answer() { return 43; }\n')
    second = build_library("tiny", TINY, small_source)
    assert second != first and len(compiled) == 2
    records = [path.with_name(path.name.rpartition("-")[0] + ".json") for path in (first, second)]
    assert sorted(first.parent.iterdir()) == sorted([first, second, *records])
    assert json.loads(records[0].read_text())["compiler"].startswith(build.find_compiler())


@needs_compiler
@pytest.mark.parametrize("damage", ["cut", "empty", "flipped", "gone", "no record", "bad record", "list"])
def test_a_damaged_build_is_never_loaded(
    small_source: Path, built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
):
    """A library or a record that is not as it was written leads to one more build, and to the right answer."""
    shutil.copytree(built, tmp_path / "cache")
    compiled = counting(monkeypatch)
    path = build_library("tiny", TINY, small_source)
    assert not compiled, "the copy is as good as a build"
    record = path.with_name(path.name.rpartition("-")[0] + ".json")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    damages = {
        "cut": lambda: os.truncate(path, len(content) // 3),
        "empty": lambda: os.truncate(path, 0),
        "flipped": lambda: path.write_bytes(content),
        "gone": path.unlink,
        "no record": record.unlink,
        "bad record": lambda: record.write_bytes(b"\x00\xff"),
        "list": lambda: record.write_text("[1]"),
    }
    damages[damage]()
    assert load_tiny(small_source, monkeypatch) == 42
    assert len(compiled) == 1
    assert build_library("tiny", TINY, small_source) == path and len(compiled) == 1


@needs_compiler
def test_a_cached_build_needs_no_compiler(small_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Where the cache holds the library, no process is started, and none could be."""
    path = build_library("tiny", TINY, small_source)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **kw: pytest.fail(f"{a} was started"))
    assert build_library("tiny", TINY, small_source) == path
    monkeypatch.setenv("CXX", "another")
    with pytest.raises(BuildError, match="CXX=another is not there"):
        build_library("tiny", TINY, small_source)


@needs_compiler
def test_a_library_of_another_machine_is_built_again(small_source: Path, monkeypatch: pytest.MonkeyPatch):
    """A file that is as it was built, and that this system cannot load, is replaced; the second failure is named."""
    good = build_library("tiny", TINY, small_source)
    (foreign := good.parent / "built").write_bytes(b"\x7fELF of a newer system")
    with monkeypatch.context() as patched:
        patched.setattr(build, "_compile", lambda compiler, source, target, flags: shutil.copy(foreign, target))
        bad = build_library("tiny", TINY, small_source, rebuild=True)
        with pytest.raises(BuildError, match=r"cannot be loaded: .*set KVBENCH_CACHE .* or choose backend=torch"):
            load_tiny(small_source, patched)
    assert bad != good
    compiled = counting(monkeypatch)
    assert load_tiny(small_source, monkeypatch) == 42 and len(compiled) == 1


@needs_compiler
def test_library_and_record_are_synced_before_they_get_their_names(small_source: Path, monkeypatch: pytest.MonkeyPatch):
    """Content first, then the name, then the folder; the library before the record that names it."""
    done = []
    sync, replace = build._sync, os.replace
    monkeypatch.setattr(build, "_sync", lambda path: (done.append(("sync", path.suffix)), sync(path)))
    monkeypatch.setattr(os, "replace", lambda a, b: (done.append(("name", Path(b).suffix)), replace(a, b)))
    build_library("tiny", TINY, small_source)
    each = [[("sync", suffix), ("name", suffix), ("sync", "")] for suffix in (".so", ".json")]
    assert done == [("sync", "")] * 2 + each[0] + each[1]  # two folders were made


@needs_compiler
def test_a_source_that_does_not_compile_says_why(small_source: Path, cache: Path):
    """The error ends with the compiler's own words and a remedy, and no half library is left."""
    (small_source / "tiny.cpp").write_text("int main( {\n")
    with pytest.raises(BuildError, match=r"(?s)cannot compile tiny\.cpp: .*error.*or choose backend=torch"):
        build_library("tiny", TINY, small_source)
    assert not list(cache.iterdir())


@needs_compiler
def test_sources_of_several_files_are_compiled_side_by_side(small_source: Path, monkeypatch: pytest.MonkeyPatch):
    """Every .cpp file is a compiler's work of its own, begun before any other ends, and one library holds them all."""
    (small_source / "tiny.cpp").write_text('#include "other.h"\nextern "C" int answer() { return 2 * half(); }\n')
    (small_source / "other.cpp").write_text('#include "other.h"\nint half() { return 21; }\n')
    (small_source / "other.h").write_text("int half();\n")
    ends, start = [], build._start
    running: list[subprocess.Popen] = []

    def noted(command: list[str]) -> subprocess.Popen:
        ends.append((Path(command[-1]).name, sum(process.poll() is None for process in running)))
        running.append(start(command))
        return running[-1]

    monkeypatch.setattr(build, "_start", noted)
    path = build_library("tiny", ("tiny.cpp", "other.h", "other.cpp"), small_source)
    assert ctypes.CDLL(str(path)).answer() == 42
    assert ends == [("tiny.o", 0), ("other.o", 1), ("library.so", 0), ("--version", 0)]


def test_processes_that_need_the_same_library_build_it_once(
    small_source: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
):
    """Whoever comes while another one builds waits for it and takes what it built; the lock leaves no file behind."""
    script = f'case "$*" in *--version*) exit 0;; esac\necho . >> {tmp_path}/calls\n/bin/sleep 0.3\n'
    monkeypatch.setenv("CXX", str(fake_compiler(tmp_path, script + 'for last; do :; done\necho ok > "$last"')))
    with ThreadPoolExecutor(3) as pool:
        paths = set(pool.map(lambda _: build_library("tiny", TINY, small_source), range(3)))
    assert len(paths) == 1 and (tmp_path / "calls").read_text() == ".\n" * 2  # compiled, and linked
    assert sorted(path.suffix for path in cache.iterdir()) == [".json", ".so"]


def test_a_disk_without_locks_builds_all_the_same(small_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Some network disks refuse to lock a folder: nobody waits then."""
    script = 'case "$*" in *--version*) exit 0;; esac\nfor last; do :; done\necho ok > "$last"'
    monkeypatch.setenv("CXX", str(fake_compiler(tmp_path, script)))

    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.EBADF, "Bad file descriptor")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert build_library("tiny", TINY, small_source).read_text() == "ok\n"


def test_a_compiler_without_openmp_still_builds(small_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Where -fopenmp is refused, the same source is compiled for one thread."""
    refuse = 'case "$*" in *--version*) exit 0;; *-fopenmp*) echo no openmp >&2; exit 1;; esac'
    script = refuse + '\nfor last; do :; done\necho ok > "$last"'
    monkeypatch.setenv("CXX", str(fake_compiler(tmp_path, script)))
    assert build_library("tiny", TINY, small_source).read_text() == "ok\n"


def test_a_compiler_that_does_not_end_is_ended(
    small_source: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
):
    """The time limit is a BuildError, and what the compiler had started ends with it."""
    monkeypatch.setattr(build, "COMPILE_LIMIT_S", 0.5)
    pid = tmp_path / "pid"
    monkeypatch.setenv("CXX", str(fake_compiler(tmp_path, f"/bin/sleep 60 & echo $! > {pid}\nwait")))
    start_s = time.monotonic()
    with pytest.raises(BuildError, match=r"c\+\+ did not finish within 0.5 s; set CXX .* or choose backend=torch"):
        build_library("tiny", TINY, small_source)
    assert time.monotonic() - start_s < 30
    assert not list(cache.iterdir())
    state = Path(f"/proc/{pid.read_text().strip()}/stat")
    if Path("/proc/self/stat").exists():
        while state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z":
            assert time.monotonic() - start_s < 30  # killed, but not yet told where the machine is busy


def test_a_compiler_that_cannot_be_started_is_named(
    small_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A file that is no program is a BuildError with a remedy."""
    path = fake_compiler(tmp_path, "")
    path.write_bytes(b"\x00\x01\x02")
    monkeypatch.setenv("CXX", str(path))
    with pytest.raises(BuildError, match=r"c\+\+ cannot be started: .*; set CXX"):
        build_library("tiny", TINY, small_source)


def test_what_killed_builds_left_behind_is_removed(small_source: Path, tmp_path: Path, cache: Path, monkeypatch):
    """A folder that is older than any build goes; one of a build that may be at work stays."""
    for name in (".build-old", ".build-new"):
        (cache / name).mkdir(parents=True)
    os.utime(cache / ".build-old", (0, 0))
    script = 'case "$*" in *--version*) exit 0;; esac\nfor last; do :; done\necho ok > "$last"'
    monkeypatch.setenv("CXX", str(fake_compiler(tmp_path, script)))
    build_library("tiny", TINY, small_source)
    assert [path.name for path in cache.iterdir() if path.is_dir()] == [".build-new"]


def test_without_a_compiler_auto_warns_once_and_takes_the_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nothing_loaded: None
):
    """One warning with the reason and the stand-in; asking for the backend by name is an error with a remedy."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.warns(UserWarning, match=r"no C\+\+ compiler found.*backend=torch, the plain reference") as caught:
        assert dispatch.get_backend("auto").name == "torch"
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert dispatch.get_backend("auto").name == "torch"
    with pytest.raises(ValueError, match=r"no C\+\+ compiler found .*; install g\+\+ or clang\+\+"):
        dispatch.get_backend("cpu")
    monkeypatch.setenv("CXX", "nosuchcompiler")
    with pytest.raises(ValueError, match="CXX=nosuchcompiler is not there"):
        dispatch.get_backend("cpu")


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("exec /bin/sleep 60", r"did not finish within 0.5 s"),
        ('for last; do :; done\necho "no library" > "$last"', r"cannot be loaded: .*invalid ELF|cannot be loaded: "),
        ('for last; do :; done\n: > "$last"', r"cannot be loaded: .*file too short|cannot be loaded: "),
        ("exit 0", r"cannot compile isa.cpp: no message"),
    ],
)
def test_whatever_a_compiler_does_auto_falls_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nothing_loaded: None, script: str, message: str
):
    """Too slow, no library, an empty library, none at all: a warning under auto, a ValueError under backend=cpu."""
    monkeypatch.setattr(build, "COMPILE_LIMIT_S", 0.5)
    monkeypatch.setattr(build, "VERSION_LIMIT_S", 5.0)
    version = 'case "$*" in *--version*) echo fake; exit 0;; esac\n'
    monkeypatch.setenv("CXX", str(fake_compiler(tmp_path, version + script)))
    with pytest.warns(UserWarning, match=message):
        assert dispatch.get_backend("auto").name == "torch"
    with pytest.raises(ValueError, match=message):
        dispatch.get_backend("cpu")


def test_a_cache_that_cannot_be_written_is_named(small_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The error names the folder's setting; a file where the folder should be stops even root."""
    (tmp_path / "cache").write_text("")
    monkeypatch.setenv("CXX", str(fake_compiler(tmp_path, "exit 0")))
    with pytest.raises(BuildError, match="set KVBENCH_CACHE"):
        build_library("tiny", TINY, small_source)
