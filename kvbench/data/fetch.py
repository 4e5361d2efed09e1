"""Gets the files of a benchmark once, for machines without a network, and notes what it got."""

import gzip
import hashlib
import json
import shutil
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from kvbench.data.catalogue import DataFile
from kvbench.data.check import MANIFEST, read_manifest, sha256_of
from kvbench.results.writing import write_atomic
from kvbench.tasks.problem_source import LINES
from kvbench.tasks.source import is_network_error

_TIMEOUT_S = 30


@dataclass(frozen=True)
class Fetched:
    """A file that came from the hub.

    Args:
        path: Where it is on this machine.
        source: Repository, path and commit, for the note.
    """

    path: Path
    source: str


def fetch_files(task: str, files: list[DataFile], folder: Path, say: Callable[[str], None]) -> None:
    """Get what is not there yet, and note hashes and sources.

    Args:
        task: Name of the benchmark, for messages.
        files: What it consists of.
        folder: Where the files go; made when it is missing.
        say: Takes one-line notes.

    Raises:
        ValueError: The network or the file cannot be had, or what came is not what the hub says it is.
    """
    folder.mkdir(parents=True, exist_ok=True)
    manifest = read_manifest(folder)
    todo = [file for file in files if not _is_there(file, folder, manifest)]
    for file in files:
        if file not in todo:
            say(f"already there: {folder / file.name}.jsonl")
    if any(file.hub for file in todo):
        _require_hub(task, todo[0])
    for file in todo:
        target = folder / f"{file.name}.jsonl"
        content, source = _from_hub(file) if file.hub else _from_url(file)
        write_atomic(target, content)
        manifest[target.name] = {"sha256": sha256_of(target), "rows": content.count(b"\n"), "source": source}
        _note(folder, manifest)
        say(f"{target} from {source}")


def fetch_copy(task: str, repo: str, folder: Path, say: Callable[[str], None]) -> None:
    """Copy a whole data-set repository of the hub, and note the hashes of its files.

    Args:
        task: Name of the benchmark, for messages.
        repo: Its id.
        folder: Where the copy goes.
        say: Takes one-line notes.

    Raises:
        ValueError: The hub does not answer or does not give it.
    """
    from huggingface_hub import HfApi, snapshot_download

    _require_hub(task, None)
    try:
        commit = HfApi().repo_info(repo, repo_type="dataset", timeout=_TIMEOUT_S).sha
        snapshot_download(repo, repo_type="dataset", revision=commit, local_dir=folder)
    except Exception as error:
        if not is_network_error(error):
            raise
        raise ValueError(
            f"the data set {repo} cannot be fetched ({_first_line(error)}); gated data needs the consent of its page "
            "and `hf auth login`"
        ) from error
    shutil.rmtree(folder / ".cache", ignore_errors=True)
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    source = f"{repo} at {commit}"
    _note(folder, {name: {"sha256": sha256_of(folder / name), "source": source} for name in names if name != MANIFEST})
    say(f"{len(names)} files of {source} in {folder}")


def _is_there(file: DataFile, folder: Path, manifest: dict[str, dict]) -> bool:
    path = folder / f"{file.name}.jsonl"
    return path.is_file() and manifest.get(path.name, {}).get("sha256") == sha256_of(path)


def _note(folder: Path, manifest: dict[str, dict]) -> None:
    text = json.dumps({"files": manifest}, indent=2, sort_keys=True) + "\n"
    write_atomic(folder / MANIFEST, text.encode())


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def _require_hub(task: str, file: DataFile | None) -> None:
    from huggingface_hub import constants

    from kvbench.models.files import hub_reachable

    if hub_reachable():
        return
    why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "it does not answer from this machine"
    by_hand = f" By hand: {file.by_hand}" if file else ""
    raise ValueError(
        f"task={task} cannot be fetched: the hub cannot be reached ({why}). Run this command where there is a network "
        f"and copy the folder here.{by_hand}"
    )


def _from_hub(file: DataFile) -> tuple[bytes, str]:
    """The file as JSON lines, from the first place on the hub that has it."""
    failures = []
    for repo, path in file.hub:
        try:
            fetched = _download(repo, path)
        except Exception as error:
            if not is_network_error(error):
                raise
            failures.append(f"{repo}/{path}: {_first_line(error)}")
            continue
        content = _as_lines(fetched.path, file.name)
        if content is not None:
            return content, fetched.source
        failures.append(f"{repo}/{path}: it has no {file.name}.jsonl")
    raise ValueError(f"{file.name} cannot be fetched ({'; '.join(failures)}). By hand: {file.by_hand}")


def _download(repo: str, path: str) -> Fetched:
    """Get one file of one commit, and compare it with the hash that the hub states.

    Raises:
        OSError: The hub does not give it.
        ValueError: It is not what the hub says it is.
    """
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.hf_api import RepoFolder

    api = HfApi()
    commit = api.repo_info(repo, repo_type="dataset", timeout=_TIMEOUT_S).sha
    stated = api.get_paths_info(repo, [path], repo_type="dataset", revision=commit)
    if not stated or isinstance(stated[0], RepoFolder):
        raise ValueError("there is no such file")
    local = Path(hf_hub_download(repo, path, repo_type="dataset", revision=commit))
    if stated[0].lfs is not None:
        wanted, found = stated[0].lfs.sha256, sha256_of(local)
    else:  # small files are known by git's own hash
        content = local.read_bytes()
        wanted, found = stated[0].blob_id, hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    if wanted != found:
        raise ValueError(f"what came has the hash {found[:16]}..., the hub states {wanted[:16]}...; try again")
    return Fetched(local, f"{repo}/{path} at {commit}")


def _as_lines(path: Path, name: str) -> bytes | None:
    """A downloaded file as JSON lines; None when it is an archive without this member."""
    if path.suffix in LINES:
        return b"".join(line + b"\n" for line in LINES[path.suffix](path))
    if path.suffix != ".zip":
        return path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        member = next((item for item in archive.namelist() if PurePosixPath(item).name == f"{name}.jsonl"), None)
        return None if member is None else archive.read(member)


def _from_url(file: DataFile) -> tuple[bytes, str]:
    try:
        with urllib.request.urlopen(file.url, timeout=_TIMEOUT_S) as stream:
            return gzip.decompress(stream.read()), file.url
    except (urllib.error.URLError, OSError, EOFError) as error:
        reason = getattr(error, "reason", error)
        raise ValueError(f"{file.url} cannot be fetched ({reason}). By hand: {file.by_hand}") from error
