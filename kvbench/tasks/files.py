"""The files of a benchmark, and where each may lie: in a folder, in the local caches, on the hub."""

import json
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TypeVar

from kvbench.tasks.rows import RowCheck, Rows, Source, file_lines, list_lines, read_rows

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class DataFile:
    """One file of a benchmark: what it holds and where it may be.

    Args:
        task: Name of the task, for messages.
        stems: Names without `.jsonl`, best first; a fetch writes the first.
        rows: Rows of the whole benchmark.
        check: What a row must be.
        key: The setting of the task that chooses this file among others, by its first stem; empty for none.
        list_file: What a file of the authors is called that is one JSON list, for `task.data_dir`; empty for none.
        hub: (repository, path) pairs of data sets on the hub, best first: `.jsonl`, `.json` (one list), `.parquet`,
            or a `.zip` that holds `<first stem>.jsonl` in any folder.
        prepared: (name, configuration, split) in the cache of the `datasets` library; the name without its owner.
        local: Further files that other tools leave on a machine, best first.
        url: Address of a gzip file that holds it, for what is not on the hub.
        official: SHA-256 of the authors' own file, where it is known.
        by_hand: How to get it otherwise, an imperative.
    """

    task: str
    stems: tuple[str, ...]
    rows: int
    check: RowCheck
    key: str = ""
    list_file: str = ""
    hub: tuple[tuple[str, str], ...] = ()
    prepared: tuple[str, str, str] | None = None
    local: tuple[Path, ...] = ()
    url: str = ""
    official: str = ""
    by_hand: str

    @property
    def name(self) -> str:
        """Its name without `.jsonl`, as a fetch writes it."""
        return self.stems[0]


class MissingDataError(ValueError):
    """Data is neither on this machine nor to be had from it; the message holds the command that gets it.

    Args:
        text: The message, or what makes it from the names of the parts that are missing.
        part: The part that is missing.
    """

    def __init__(self, text: str | Callable[[Sequence[str]], str], part: str = "") -> None:
        super().__init__(text if isinstance(text, str) else text([part]))
        self._text, self._part = text, part

    @staticmethod
    def of_all(errors: "Sequence[MissingDataError]") -> "MissingDataError":
        """One error that names every part of a task that is missing."""
        first, parts = errors[0], [error._part for error in errors]
        return first if isinstance(first._text, str) or len(parts) == 1 else MissingDataError(first._text(parts))


def read_each(names: Iterable[str], read: Callable[[str], T]) -> dict[str, T]:
    """Read the parts of a benchmark.

    Raises:
        MissingDataError: Names every part that is missing.
    """
    found, missing = {}, []
    for name in names:
        try:
            found[name] = read(name)
        except MissingDataError as error:
            missing.append(error)
    if missing:
        raise MissingDataError.of_all(missing)
    return found


def find_rows(file: DataFile, data_dir: str | None) -> Rows:
    """Read the rows from the first place that has them: a folder, the local caches, the hub.

    Args:
        file: Which rows.
        data_dir: The setting `task.data_dir`; a folder without the file goes on to the local caches and the hub.

    Returns:
        The rows, each with its `index`.

    Raises:
        MissingDataError: No place has them; the message says where was looked and how to get them.
        ValueError: data_dir is no folder, or all rows are broken.
    """
    looked = []
    for place in (partial(_in_folder, data_dir), _in_local_files, _in_hub_cache, _in_datasets_cache, _on_hub):
        found = place(file)
        if isinstance(found, Source):
            return read_rows(found, file.check)
        looked += [found] if found else []

    def text(parts: Sequence[str]) -> str:
        chosen = f" task.{file.key}=[{','.join(parts)}]" if file.key else ""
        return (
            f"task={file.task} has no data for {', '.join(parts)}. Looked in: {'; '.join(looked)}. To get it, run "
            f"`kvbench data task={file.task}{chosen} to={file.task}` where there is a network (or {file.by_hand}), and "
            f"set task.data_dir={file.task}. Without it, `kvbench task=longctx` runs on generated data."
        )

    raise MissingDataError(text, file.name)


def _in_folder(folder: str | None, file: DataFile) -> Source | str:
    if not folder:
        return "task.data_dir (not set)"
    root = Path(folder).expanduser()
    if not root.is_dir():
        raise ValueError(
            f"task.data_dir={folder} is not a folder (looked for {root.absolute()}); give the folder that holds "
            f"{file.name}.jsonl"
        )
    listed = [root / file.list_file] if file.list_file else []
    path = next((path for path in (*paths_in(root, file), *listed) if path.is_file()), None)
    if path is not None:
        return Source("data_dir", str(path), partial(list_lines if path in listed else file_lines, path))
    names = " or ".join([*(f"{stem}.jsonl" for stem in file.stems), *(path.name for path in listed)])
    return f"task.data_dir={folder} (no {names} there or in its data/)"


def paths_in(folder: Path, file: DataFile) -> list[Path]:
    """The places of a file in a folder, best first: directly, or in `data/`, as the official archives unpack."""
    return [folder / part / f"{stem}.jsonl" for stem in file.stems for part in ("", "data")]


def _in_local_files(file: DataFile) -> Source | str:
    found = next((path for path in file.local if path.is_file()), None)
    return Source("cache", str(found), partial(file_lines, found)) if found else " or ".join(map(str, file.local))


def _in_hub_cache(file: DataFile) -> Source | str:
    from huggingface_hub import constants, try_to_load_from_cache

    for repo, name in file.hub:
        path = try_to_load_from_cache(repo, name, repo_type="dataset")
        if isinstance(path, str) and (source := hub_source("cache", Path(path), file.name)):
            return source
    names = " or ".join(f"{name} of {repo}" for repo, name in file.hub)
    return names and f"the hub cache {constants.HF_HUB_CACHE} (no {names} that holds these rows)"


def _in_datasets_cache(file: DataFile) -> Source | str:
    """A copy that the `datasets` library prepared, by whomever; names count without case and dashes."""
    if file.prepared is None:
        return ""
    import datasets

    name, subset, split = file.prepared
    root = Path(datasets.config.HF_DATASETS_CACHE)
    for folder in sorted(root.glob("*")):
        if _bare(folder.name.rpartition("___")[2]) != _bare(name) or not (folder / subset).is_dir():
            continue
        shards = sorted((folder / subset).rglob(f"*-{split}*.arrow"))
        if shards:
            # Other versions of the same data may lie beside it: all shards of one folder belong together.
            shards = [path for path in shards if path.parent == shards[0].parent]
            return Source("cache", str(shards[0].parent), partial(_arrow_lines, shards))
    return f"the cache of the datasets library {root} (no {subset} of {name})"


def _bare(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")


def _on_hub(file: DataFile) -> Source | str:
    """Fetches from the hub into the local cache, if the hub answers within two seconds."""
    from huggingface_hub import constants, hf_hub_download

    from kvbench.models.files import hub_reachable

    if not file.hub:
        return ""
    if constants.HF_HUB_OFFLINE:
        return "the hub (not tried: HF_HUB_OFFLINE is set)"
    # The hub's own client retries for half a minute on a machine without a network.
    if not hub_reachable():
        return "the hub (it cannot be reached from here)"
    failures = []
    for repo, name in file.hub:
        try:
            source = hub_source("hub", Path(hf_hub_download(repo, name, repo_type="dataset")), file.name)
        except Exception as error:
            if not is_network_error(error):
                raise
            failures.append(f"{repo}: {first_line(error)}")
            continue
        if source:
            return source
        failures.append(f"{repo}: {name} does not hold these rows")
    return f"the hub ({'; '.join(failures)})"


def is_network_error(error: BaseException) -> bool:
    """Tell whether a download failed, and not our code; the hub's client also raises errors of its HTTP library."""
    return isinstance(error, OSError | ValueError) or any(
        kind.__module__.split(".")[0].startswith("httpx") for kind in type(error).__mro__
    )


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its kind."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def hub_source(origin: str, path: Path, name: str) -> Source | None:
    """The rows of a file of the hub; None for an archive that does not hold `<name>.jsonl`.

    Raises:
        ValueError: The archive cannot be read.
    """
    readers = {".parquet": _parquet_lines, ".json": list_lines}
    if path.suffix != ".zip":
        return Source(origin, str(path), partial(readers.get(path.suffix, file_lines), path))
    try:
        with zipfile.ZipFile(path) as opened:
            members = [item for item in opened.namelist() if PurePosixPath(item).name == f"{name}.jsonl"]
    except (zipfile.BadZipFile, OSError) as error:
        raise ValueError(f"{path} cannot be read as a zip archive ({error}); delete it and fetch it again") from error
    return Source(origin, f"{path}:{members[0]}", partial(_zip_lines, path, members[0])) if members else None


def _zip_lines(archive: Path, member: str) -> Iterator[bytes]:
    with zipfile.ZipFile(archive) as opened, opened.open(member) as stream:
        for line in stream:
            yield line.removesuffix(b"\n")


def _parquet_lines(path: Path) -> Iterator[bytes]:
    import pyarrow.parquet

    for batch in pyarrow.parquet.ParquetFile(path).iter_batches():
        for row in batch.to_pylist():
            yield json.dumps(row).encode()


def _arrow_lines(shards: Sequence[Path]) -> Iterator[bytes]:
    import datasets

    for path in shards:
        for row in datasets.Dataset.from_file(str(path)):
            yield json.dumps(row).encode()
