"""The files of a benchmark, and where each may lie: in a folder, in the local caches, on the hub."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import TypeVar

from kvbench.errors import FileContent, FileMissing, KvbenchError
from kvbench.tasks.formats import READ, find_source, lines_of, source_of, unread
from kvbench.tasks.rows import RowCheck, Rows, Source, file_lines, read_rows

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class DataFile:
    """One file of a benchmark: its contents and its possible locations.

    Args:
        task: Name of the task, for messages.
        stems: Names without `.jsonl`, best first; a fetch writes the first.
        rows: Rows of the whole benchmark; 0 where they are not counted.
        check: Check of a row.
        key: The setting of the task that chooses this file among others, by its first stem; empty for none.
        part: Its name in that setting, where that is not its first stem.
        words: Further settings that choose it, as words of a command.
        list_file: Name of the authors' file that is one JSON list, for `task.data_dir`; empty for none.
        hub: (repository, path) pairs of data sets on the hub, best first: `.jsonl`, `.json` (one list), `.parquet`,
            or a `.zip` that holds `<first stem>.jsonl` in any folder.
        prepared: (name, configuration, split) in the cache of the `datasets` library; the name without its owner.
        local: Further files that other tools leave on a machine, best first.
        url: Address of a gzip file that holds it, for what is not on the hub.
        official: SHA-256 of the authors' own file, where it is known.
        by_hand: Another way to get it, as an imperative.
        has_questions: Its rows are questions; False where they are examples in front of those.
    """

    task: str
    stems: tuple[str, ...]
    rows: int
    check: RowCheck
    key: str = ""
    part: str = ""
    words: str = ""
    list_file: str = ""
    hub: tuple[tuple[str, str], ...] = ()
    prepared: tuple[str, str, str] | None = None
    local: tuple[Path, ...] = ()
    url: str = ""
    official: str = ""
    by_hand: str
    has_questions: bool = True

    @property
    def name(self) -> str:
        """Its name without `.jsonl`, as a fetch writes it."""
        return self.stems[0]

    @property
    def label(self) -> str:
        """Its name in messages."""
        return self.part or self.name


class MissingDataError(KvbenchError, code="data-missing"):
    """Data is neither on this machine nor to be had from it; the message holds the command that gets it.

    Args:
        text: The message, or what makes it from the names of the parts that are missing.
        parts: These names.
    """

    def __init__(self, text: str | Callable[[Sequence[str]], str], *parts: str) -> None:
        super().__init__(text if isinstance(text, str) else text(parts))
        self.text, self.parts = text, parts


def read_each(names: Iterable[str], read: Callable[[str], T]) -> dict[str, T]:
    """Read the parts of a benchmark; the MissingDataError names every part that is missing."""
    contents, missing = {}, []
    for name in names:
        try:
            contents[name] = read(name)
        except MissingDataError as error:
            missing.append(error)
    if missing:
        raise MissingDataError(missing[0].text, *(part for error in missing for part in error.parts))
    return contents


def find_rows(file: DataFile, data_dir: str | None) -> Rows:
    """Read the rows from the first place that has them: a folder, the local caches, the hub.

    A folder that is to hold the only file of a benchmark is the only place; one of several files may lie elsewhere.

    Raises:
        MissingDataError: No place has them; the message says where was looked and how to get them.
        ValueError: data_dir is no folder, has them in a format that is not read, or all rows are broken.
    """
    looked = []
    elsewhere = (_in_local_files, _in_hub_cache, _in_datasets_cache, _on_hub)
    for search in (in_folder, *(elsewhere if file.key or not data_dir else ())):
        source = search(file, data_dir)
        if isinstance(source, Source):
            return read_rows(source, file.check)
        looked += [source] if source else []
    raise _missing(file, looked, data_dir)


def at_hand(file: DataFile, data_dir: str | None) -> bool:
    """Tell whether a file's rows lie in a folder or in the local caches; nothing is read or fetched."""
    searches = (in_folder, _in_local_files, _in_hub_cache, _in_datasets_cache)
    return any(isinstance(search(file, data_dir), Source) for search in searches)


def check_folder(files: Sequence[DataFile], data_dir: str | None) -> None:
    """Refuse a folder of data that has none of a benchmark's files: all of them would be read elsewhere.

    Raises:
        MissingDataError: It has none.
        ValueError: See `find_rows`.
    """
    sources = [in_folder(file, data_dir) for file in files] if data_dir else []
    if sources and not any(isinstance(source, Source) for source in sources):
        raise MissingDataError(_missing(files[0], [str(sources[0])], data_dir).text, *(file.label for file in files))


def _missing(file: DataFile, looked: Sequence[str], data_dir: str | None) -> MissingDataError:
    other = " (or leave it out, and the local caches and the hub are looked in)" if data_dir else ""

    def text(parts: Sequence[str]) -> str:
        chosen = f" task.{file.key}=[{','.join(parts)}]" if file.key else ""
        chosen += f" {file.words}" if file.words else ""
        return (
            f"task={file.task} has no data for {', '.join(parts)}. Looked in: {'; '.join(looked)}. To get it, run "
            f"`kvbench data task={file.task}{chosen} to={file.task}` where there is a network (or {file.by_hand}), and "
            f"set task.data_dir={file.task}{other}. Without it, `kvbench task=longctx` runs on generated data."
        )

    return MissingDataError(text, file.label)


def in_folder(file: DataFile, folder: str | None) -> Source | str:
    """The rows of a file in `task.data_dir`, in whatever format; else what was looked for there.

    Raises:
        ValueError: It is no folder, or has the file in a format that is not read.
    """
    if not folder:
        return "task.data_dir (not set)"
    root = Path(folder).expanduser()
    if not root.is_dir():
        raise FileMissing(
            f"task.data_dir={folder} is not a folder (looked for {root.absolute()}); give the folder that holds "
            f"{file.name}.jsonl",
            setting="task.data_dir",
        )
    listed = [file.list_file] if file.list_file else []
    for base in (root, root / file.task):  # a folder of the task's own, so that one word serves a sweep over tasks
        for path in (*paths_in(base, file), *(base / name for name in listed)):
            if path.is_file():
                return source_of(path) or ""
    # Names such as `test` may be another benchmark's in a folder above: the task's own folder comes first.
    folders = [base / part for base in (root / file.task, root) for part in ("", "data")]
    for base in folders:
        if (source := find_source(base, file.stems) or _as_on_hub(file, base)) is not None:
            return source
    left = {path: step for base in folders for path, step in unread(base, file.stems).items()}
    for path, step in left.items():
        if any(path.name.startswith(f"{stem}.") for stem in file.stems):
            raise FileContent(
                f"task.data_dir={folder} has {path}, which is not read: {step} (rows are read from {READ})",
                setting="task.data_dir",
            )
    names = " or ".join([*(f"{stem}.jsonl" for stem in file.stems), *listed])
    at_hand = "".join(f"; at hand is {path}: {step}" for path, step in left.items())
    return f"task.data_dir={folder} (no {names} there, in its data/ or in its {file.task}/{at_hand})"


def _as_on_hub(file: DataFile, folder: Path) -> Source | None:
    """The rows of a file in a copy of a repository of the hub, or of the folder in it that has the file."""
    for _, name in file.hub:
        for path in (folder / name, *(() if file.key else (folder / PurePosixPath(name).name,))):
            if path.is_file() and (source := hub_source(path, file.name)) is not None:
                return source
    return None


def paths_in(folder: Path, file: DataFile) -> list[Path]:
    """The places of a file in a folder, best first: directly, or in `data/`, as the official archives unpack."""
    return [folder / part / f"{stem}.jsonl" for stem in file.stems for part in ("", "data")]


def _in_local_files(file: DataFile, _: str | None) -> Source | str:
    local = next((path for path in file.local if path.is_file()), None)
    return Source(str(local), file_lines(local)) if local else " or ".join(map(str, file.local))


def _in_hub_cache(file: DataFile, _: str | None) -> Source | str:
    from huggingface_hub import constants, try_to_load_from_cache

    for repo, name in file.hub:
        path = try_to_load_from_cache(repo, name, repo_type="dataset")
        if isinstance(path, str) and (source := hub_source(Path(path), file.name)):
            return source
    names = " or ".join(f"{name} of {repo}" for repo, name in file.hub)
    return names and f"the hub cache {constants.HF_HUB_CACHE} (no {names} that holds these rows)"


def _in_datasets_cache(file: DataFile, _: str | None) -> Source | str:
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
            # Other versions of the same data may be next to it: all shards of one folder belong together.
            shards = [path for path in shards if path.parent == shards[0].parent]
            return Source(str(shards[0].parent), chain.from_iterable(map(lines_of, shards)))
    return f"the cache of the datasets library {root} (no {subset} of {name})"


def _bare(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")


def _on_hub(file: DataFile, _: str | None) -> Source | str:
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
    result = first_on_hub(file, lambda repo, name: Path(hf_hub_download(repo, name, repo_type="dataset")))
    return f"the hub ({result})" if isinstance(result, str) else result[0]


def first_on_hub(file: DataFile, get: Callable[[str, str], Path]) -> tuple[Source, str] | str:
    """The first file of the hub that holds the rows, with its repository and name; else why each does not.

    Args:
        file: Which rows.
        get: Downloads (repository, name).
    """
    failures = []
    for repo, name in file.hub:
        try:
            source = hub_source(get(repo, name), file.name)
        except Exception as error:
            failures.append(f"{repo}/{name}: {network_fault(error)}")
            continue
        if source:
            return source, f"{repo}/{name}"
        failures.append(f"{repo}/{name}: it has no {file.name}.jsonl")
    return "; ".join(failures)


def network_fault(error: Exception) -> str:
    """The first line of what a failed download says, or its kind; raises an error that is our code's again.

    The hub's client also raises errors of its HTTP library.
    """
    theirs = any(kind.__module__.split(".")[0].startswith("httpx") for kind in type(error).__mro__)
    if not theirs and not isinstance(error, OSError | ValueError):
        raise error
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def hub_source(path: Path, name: str) -> Source | None:
    """The rows of a file of the hub; None for an archive that does not hold `<name>` in any format."""
    return source_of(path, [name])
