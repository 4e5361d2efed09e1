"""The child in which hostile input is read: bounded, watched, and unable to write where it should not."""

import contextlib
import multiprocessing.util  # noqa: F401  # what a fork of the child registers, before anything is bounded
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

SECRET = "hunter2-of-the-environment"
LIMIT_S = 20  # of a processor, or of waiting for nothing
MEMORY_BYTES = 3 << 30  # beyond what the libraries take
FILE_BYTES = 1 << 28
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
CHANGES = {"os.mkdir", "os.remove", "os.rmdir", "os.truncate", "os.chmod", "os.chown", "os.utime"}
CHANGES_TWO = {"os.rename", "os.link", "os.symlink"}
STOPPED = 70  # exit code of a child that wanted to write elsewhere


def _guard(folder: Path) -> None:
    """End this process where it is about to write outside of a folder; a real machine is at stake."""

    def check(path: object) -> None:
        if isinstance(path, str | bytes | os.PathLike):
            whole = os.path.realpath(os.fsdecode(path))
            if not whole.startswith(f"{folder}/") and whole not in (os.devnull, "/dev/tty"):
                traceback.print_stack()
                sys.stderr.flush()
                os.write(2, f"\nwants to write {whole!r}\n".encode(errors="replace"))
                os._exit(STOPPED)

    def hook(event: str, given: tuple) -> None:
        if event == "open":
            if isinstance(given[2], int) and given[2] & WRITES:
                check(given[0])
        elif event in CHANGES:
            check(given[0])
        elif event in CHANGES_TWO:
            check(given[1])
            if event == "os.rename":
                check(given[0])

    sys.addaudithook(hook)


def command(*words: str) -> Callable[[], object]:
    """A kvbench command, to be carried out later."""
    from kvbench.cli.main import main

    return partial(main, list(words))


def _be_child(folder: Path, jobs: list[Callable[[], object]], said: Path) -> None:
    """Do the jobs in this process; what each says, and its exit code, goes to files beside `said`."""
    os.setsid()
    os.environ |= {"HOME": str(folder / "home"), "TMPDIR": str(folder / "tmp"), "SECRET": SECRET, "COLUMNS": "200"}
    os.environ |= {"KVBENCH_CACHE": str(folder / "home" / "cache"), "XDG_CACHE_HOME": str(folder / "home" / "cache")}
    os.environ |= {"MPLCONFIGDIR": str(folder / "home" / "cache"), "HF_HUB_OFFLINE": "1"}
    os.environ["PYTHONDONTWRITEBYTECODE"], sys.dont_write_bytecode = "1", True  # that would be outside
    import datasets.config  # which has asked for the home of the process before

    for name in ("HF_DATASETS_CACHE", "DOWNLOADED_DATASETS_PATH", "EXTRACTED_DATASETS_PATH", "HF_MODULES_CACHE"):
        setattr(datasets.config, name, folder / "home" / "cache")
    tempfile.tempdir = None
    os.chdir(folder / "in")
    sys.path[:] = [path for path in sys.path if path]
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, used + MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    outputs = [os.open(f"{said}.{place}", os.O_RDWR | os.O_CREAT) for place in range(len(jobs))]
    codes = os.open(f"{said}.codes", os.O_RDWR | os.O_CREAT | os.O_APPEND)
    _guard(folder)
    for job, output in zip(jobs, outputs, strict=True):
        os.dup2(output, 1)
        os.dup2(output, 2)
        code: object = None
        try:
            code = job()
        except BaseException as error:  # a command ends in an exit code, whatever happens
            traceback.print_exc()
            code = f"raised {type(error).__name__}"
        sys.stdout.flush()
        sys.stderr.flush()
        os.write(codes, f"{code}\n".encode())


def _processor_s(process: int) -> float:
    """Processor seconds of a process and of its children that ended."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def _ended(child: int, said: Path) -> str:
    """Wait for a child; how it ended where that was not by itself."""
    command, begun, last, moved = -1, 0.0, 0.0, time.monotonic()
    pause_s = 0.005
    while True:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            code = os.waitstatus_to_exitcode(status)
            return "" if code == 0 else "wrote outside" if code == STOPPED else f"process ended with {code}"
        time.sleep(pause_s)
        pause_s = min(0.1, pause_s * 1.5)
        codes = Path(f"{said}.codes")
        place = codes.read_bytes().count(b"\n") if codes.exists() else 0
        with contextlib.suppress(OSError):
            spent = _processor_s(child)
            if place != command:
                command, begun = place, spent
            if spent > last:
                last, moved = spent, time.monotonic()
            if spent - begun > LIMIT_S or time.monotonic() - moved > LIMIT_S:
                os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return f"hung: {spent - begun:.0f} s of a processor, then none for {time.monotonic() - moved:.0f} s"


@cache
def _compiled() -> None:
    """Load the kernels into this process, whose children have them then: a child's own cache would have none."""
    from kvbench.kernels.cpu import abi, build

    with contextlib.suppress(build.BuildError):
        abi.load()


def carry_out(folder: Path, jobs: list[Callable[[], object]]) -> tuple[str, list[tuple[str, str]]]:
    """Do jobs in a child in the folder `in`: how the child ended where that was not by itself, and of each job its exit
    code (`none` where it was not reached) and what it said."""
    _compiled()
    with tempfile.TemporaryDirectory() as place:
        said = Path(place) / "said"
        child = os.fork()
        if not child:
            code = 9
            try:
                _be_child(folder.resolve(), jobs, said)
                code = 0
            except BaseException:  # the child must never come back
                traceback.print_exc()
            finally:
                os._exit(code)
        how = _ended(child, said)
        codes = Path(f"{said}.codes").read_text().split("\n") if Path(f"{said}.codes").exists() else []
        texts = [Path(f"{said}.{at}") for at in range(len(jobs))]
        said_by = [path.read_text(encoding="utf-8", errors="replace") if path.exists() else "" for path in texts]
    codes = [code for code in codes if code] + ["none"] * len(jobs)
    return how, list(zip(codes, said_by, strict=False))


def shared(base: Path, name: str, make: Callable[[], object]) -> Path:
    """What cases share: the folder of this name, which a job makes in a child when the first case asks."""
    path = base / name
    if not path.exists():
        base.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=base) as place:
            how, [(code, said)] = carry_out(new_place(Path(place)), [make])
            assert not how and code in ("0", "None"), said
            with contextlib.suppress(OSError):  # another process was faster
                (Path(place) / "in" / name).rename(path)
    return path


def new_place(folder: Path) -> Path:
    """A folder in which a child may work: with its own current folder, home, and room for temporary files."""
    for name in ("in", "home", "tmp"):
        (folder / name).mkdir()
    return folder
