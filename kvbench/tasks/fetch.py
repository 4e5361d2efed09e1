"""Gets the files of a benchmark for machines without a network, notes what it got, and checks files at hand."""

import gzip
import hashlib
import json
import shutil
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvbench.errors import FileContent, FileMissing
from kvbench.tasks.files import DataFile, MissingDataError, first_on_hub, in_folder, network_fault
from kvbench.tasks.rows import read_rows

MANIFEST = "kvbench-data.json"
_TIMEOUT_S = 30


@dataclass(kw_only=True)
class Report:
    """The findings of a check about one file."""

    name: str
    wanted: int = 0  # rows of the whole benchmark; 0 for a file whose rows are not counted
    path: Path | None = None  # None when it is missing
    rows: int = 0  # good ones
    sha256: str = ""
    broken: list[dict] = field(default_factory=list)  # rows that are none: `file`, `line`, `reason`
    faults: list[str] = field(default_factory=list)  # of the file as a whole
    notes: list[str] = field(default_factory=list)  # notes: worth knowing, and no errors

    @property
    def good(self) -> bool:
        """True when nothing is wrong with the file."""
        return not self.faults and not self.broken

    def take(self, path: Path, noted: Mapping[str, str] | None) -> None:
        """Hash the file, and compare it with what a fetch noted of it."""
        self.path, self.sha256 = path, sha256_of(path)
        if noted and noted["sha256"] != self.sha256:
            self.faults.append(f"changed since it was fetched: its SHA-256 was {noted['sha256'][:16]}...")
        elif noted and self.wanted:
            self.notes.append("as fetched")


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, 64 hex digits."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def read_manifest(folder: Path) -> dict[str, dict]:
    """The notes of a fetch about its files: name in the folder -> `sha256`, `rows`, `source`; empty without a note."""
    path = folder / MANIFEST
    if not path.is_file():
        return {}
    try:
        files = json.loads(path.read_text(encoding="utf-8"))["files"]
        return {name: dict(item) for name, item in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FileContent(f"{path} cannot be read ({error}); delete it and fetch the data again") from error


def check_file(file: DataFile, folder: Path, manifest: Mapping[str, dict], partial_data: bool = False) -> Report:
    """Check one file of a benchmark in a folder against what a fetch noted; every broken row is in the report.

    With `partial_data`, fewer rows than the whole benchmark has, and missing files, are no fault.
    """
    report = Report(name=file.name, wanted=file.rows)
    lacks = report.notes if partial_data else report.faults
    path = None
    try:
        source = in_folder(file, str(folder))
        if isinstance(source, str) or source.path is None:
            lacks.append(f"missing: no {' or '.join(f'{stem}.jsonl' for stem in file.stems)} in {folder}")
            return report
        path = source.path
        rows = read_rows(source, file.check)
        report.rows, report.broken = len(rows), rows.quarantined
    except ValueError as error:
        if path is not None:
            report.path, report.sha256 = path, sha256_of(path)
        report.faults.append(str(error))
        return report
    if report.rows + len(report.broken) < file.rows:
        lacks.append(f"{report.rows} of {file.rows} rows")
    elif file.rows and report.rows > file.rows:
        report.faults.append(f"{report.rows} rows, the benchmark has {file.rows}")
    report.take(path, manifest.get(path.relative_to(folder).as_posix()))
    if file.official and report.sha256 == file.official:
        report.notes.append("the authors' own file")
    return report


def check_copy(folder: Path, manifest: Mapping[str, dict]) -> list[Report]:
    """Check a copy of a whole repository against what its fetch noted."""
    if not manifest:
        raise FileMissing(
            f"{folder} has no {MANIFEST} to compare with; only copies that `kvbench data to=` made of this "
            "task can be checked"
        )
    reports = [Report(name=name) for name in sorted(manifest)]
    for report in reports:
        if (folder / report.name).is_file():
            report.take(folder / report.name, manifest[report.name])
        else:
            report.faults.append("missing")
    return reports


@dataclass(frozen=True)
class Fetch:
    """A folder that the files of a benchmark are fetched into."""

    task: str  # for messages
    folder: Path  # made when it is missing
    write: Callable[[Path, bytes], None]  # replaces a file in one step
    say: Callable[[str], None]  # takes one-line notes

    def files(self, files: Sequence[DataFile]) -> None:
        """Get what is not there yet, and note hashes and sources."""
        self.folder.mkdir(parents=True, exist_ok=True)
        manifest = read_manifest(self.folder)
        todo = []
        for file in files:
            path = self.folder / f"{file.name}.jsonl"
            if path.is_file() and manifest.get(path.name, {}).get("sha256") == sha256_of(path):
                self.say(f"already there: {path}")
            else:
                todo.append((file, path))
        if any(file.hub for file, _ in todo):
            self._require_hub(f" By hand: {todo[0][0].by_hand}.")
        for file, path in todo:
            content, source = _from_hub(file) if file.hub else _from_url(file)
            self.write(path, content)
            manifest[path.name] = {"sha256": sha256_of(path), "rows": content.count(b"\n"), "source": source}
            self._note(manifest)
            self.say(f"{path} from {source}")

    def copy(self, repo: str) -> None:
        """Copy a whole data-set repository of the hub, and note the hashes of its files."""
        from huggingface_hub import snapshot_download

        self._require_hub()
        try:
            commit = _commit(repo)
            snapshot_download(repo, repo_type="dataset", revision=commit, local_dir=self.folder)
        except Exception as error:
            raise MissingDataError(
                f"the data set {repo} cannot be fetched ({network_fault(error)}); gated data needs the consent of its "
                "page and `hf auth login`"
            ) from error
        shutil.rmtree(self.folder / ".cache", ignore_errors=True)
        paths = sorted(path for path in self.folder.rglob("*") if path.is_file() and path.name != MANIFEST)
        source = f"{repo} at {commit}"
        hashes = {path.relative_to(self.folder).as_posix(): sha256_of(path) for path in paths}
        self._note({name: {"sha256": digest, "source": source} for name, digest in hashes.items()})
        self.say(f"{len(paths)} files of {source} in {self.folder}")

    def _note(self, manifest: Mapping[str, dict]) -> None:
        text = json.dumps({"files": manifest}, indent=2, sort_keys=True) + "\n"
        self.write(self.folder / MANIFEST, text.encode())

    def _require_hub(self, by_hand: str = "") -> None:
        from huggingface_hub import constants

        from kvbench.models.files import hub_reachable

        if hub_reachable():
            return
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "it does not answer from this machine"
        raise MissingDataError(
            f"task={self.task} cannot be fetched: the hub cannot be reached ({why}). Run this command where there is a "
            f"network and copy the folder here.{by_hand}"
        )


def _from_hub(file: DataFile) -> tuple[bytes, str]:
    """The file as JSON lines, from the first place on the hub that has it, and where that was."""
    commits: dict[str, str] = {}

    def get(repo: str, path: str) -> Path:
        commits[f"{repo}/{path}"] = commit = _commit(repo)
        return _download(repo, path, commit)

    result = first_on_hub(file, get)
    if isinstance(result, str):
        raise MissingDataError(f"{file.name} cannot be fetched ({result}). By hand: {file.by_hand}")
    source, repo = result
    return b"".join(line + b"\n" for line in source.lines), f"{repo} at {commits[repo]}"


def _commit(repo: str) -> str:
    """The newest commit of a data set of the hub."""
    from huggingface_hub import HfApi

    return str(HfApi().repo_info(repo, repo_type="dataset", timeout=_TIMEOUT_S).sha)


def _download(repo: str, path: str, commit: str) -> Path:
    """Get one file of one commit, and compare it with the hash that the hub states."""
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.hf_api import RepoFolder

    api = HfApi()
    stated = api.get_paths_info(repo, [path], repo_type="dataset", revision=commit)
    if not stated or isinstance(stated[0], RepoFolder):
        raise ValueError("there is no such file")
    local = Path(hf_hub_download(repo, path, repo_type="dataset", revision=commit))
    if stated[0].lfs is not None:
        wanted, digest = stated[0].lfs.sha256, sha256_of(local)
    else:  # small files are known by git's own hash
        content = local.read_bytes()
        wanted, digest = stated[0].blob_id, hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    if wanted != digest:
        raise ValueError(f"what came has the hash {digest[:16]}..., the hub states {wanted[:16]}...; try again")
    return local


def _from_url(file: DataFile) -> tuple[bytes, str]:
    try:
        with urllib.request.urlopen(file.url, timeout=_TIMEOUT_S) as stream:
            return gzip.decompress(stream.read()), file.url
    except (urllib.error.URLError, OSError, EOFError) as error:
        reason = getattr(error, "reason", error)
        raise MissingDataError(f"{file.url} cannot be fetched ({reason}). By hand: {file.by_hand}") from error
