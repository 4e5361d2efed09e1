"""Rows of a benchmark from a folder, the local caches or the hub; broken rows are set aside by file and line."""

import codecs
import hashlib
import json
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

# Takes the JSON object of one line; gives the row, or raises ValueError with the reason why it is none.
RowCheck = Callable[[dict[str, Any]], Mapping[str, Any]]

ID_FIELDS = ("_id", "id", "task_id", "unique_id")  # LongBench, AIME, EvalPlus, MATH-500


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
        """One error that names every part that is missing.

        Args:
            errors: Of one task; at least one.
        """
        first, parts = errors[0], [error._part for error in errors]
        return first if isinstance(first._text, str) or len(parts) == 1 else MissingDataError(first._text(parts))


class Rows(list[dict[str, Any]]):
    """Checked rows of one subset, in the order of the file.

    It is a list of dicts with what lm-eval asks of a data set (`features`).

    Args:
        rows: The rows that passed the check; `index` is the position in the file, so ids do not shift when a row is set
            aside.
        quarantined: Rows that did not: dicts with `file`, `line` (from 1) and `reason`.
        origin: Where the rows came from: `data_dir`, `cache`, `hub` or `generated`.
        file: Name of the file for messages.
        copies: Rows that are, or are called, the same as an earlier one, as in `quarantined`; they are among the rows.
    """

    def __init__(
        self,
        rows: Iterable[dict[str, Any]],
        *,
        quarantined: Sequence[dict] = (),
        origin: str = "",
        file: str = "",
        copies: Sequence[dict] = (),
    ) -> None:
        super().__init__(rows)
        self.quarantined = list(quarantined)
        self.copies = list(copies)
        self.origin = origin
        self.file = file

    def made_into(self, documents: Iterable[dict[str, Any]], *, skipped: Sequence[dict] = ()) -> "Rows":
        """What a task makes of these rows, with their file and with what was set aside.

        Args:
            documents: Each with the `index` of its row.
            skipped: Rows of other files that were set aside on the way.
        """
        broken = [*self.quarantined, *skipped]
        return Rows(documents, quarantined=broken, origin=self.origin, file=self.file, copies=self.copies)

    def set_aside(self, index: int, reason: str) -> dict:
        """What `quarantined` says of the row with this index, when it cannot be used."""
        return {"file": self.file, "line": index + 1, "reason": reason}

    @property
    def features(self) -> dict[str, None]:
        """The names of the fields."""
        return dict.fromkeys(self[0] if self else ())


@dataclass(frozen=True)
class Source:
    """Where the lines of one subset come from.

    Args:
        origin: `data_dir`, `cache` or `hub`.
        name: File name for messages.
        lines: Opens the file; gives its lines as bytes without the line break.
    """

    origin: str
    name: str
    lines: Callable[[], Iterator[bytes]]


def file_lines(path: Path) -> Iterator[bytes]:
    """The lines of a file, split at line feeds only: some rows hold other Unicode line separators."""
    with path.open("rb") as stream:
        for line in stream:
            yield line.removesuffix(b"\n")


def zip_lines(archive: Path, member: str) -> Iterator[bytes]:
    """The lines of one file inside a zip archive."""
    with zipfile.ZipFile(archive) as opened, opened.open(member) as stream:
        for line in stream:
            yield line.removesuffix(b"\n")


def list_lines(path: Path) -> Iterator[bytes]:
    """The rows of a file that is one JSON list, each as a line.

    Raises:
        ValueError: It is none.
    """
    try:
        rows = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read as JSON ({error}); fetch or copy it again") from error
    if not isinstance(rows, list):
        raise ValueError(f"{path} must be a list of rows, it is {type(rows).__name__}; fetch or copy it again")
    for row in rows:
        yield json.dumps(row).encode()


def read_rows(source: Source, check: RowCheck, max_line_bytes: int | None = None) -> Rows:
    """Read and check every row; one broken row does not stop the others.

    Args:
        source: Where from.
        check: What a row must be.
        max_line_bytes: A longer line is no row; None takes any.

    Returns:
        The good rows, each with its `index` (0-based line of the file), the broken ones, and which of the good ones are
        copies: the official scores count every row, so they stay, but nobody should count twice unknowingly.

    Raises:
        ValueError: the file has no rows, or all of them are broken.
    """
    rows: list[dict[str, Any]] = []
    quarantined: list[dict] = []
    copies: list[dict] = []
    seen: dict[tuple[str, object], int] = {}
    for index, line in enumerate(source.lines()):
        line = line.removeprefix(codecs.BOM_UTF8) if not index else line  # some editors put it before the first row
        if not line.strip():
            continue
        try:
            if max_line_bytes is not None and len(line) > max_line_bytes:
                raise ValueError(f"a line of {len(line)} bytes; a row may have {max_line_bytes}")
            row = _parse(line)
            rows.append({**check(row), "index": index})
            for what, name in _names(line, row):
                if (earlier := seen.setdefault((what, name), index)) != index:
                    reason = f"the same {what} as in line {earlier + 1}"
                    copies.append({"file": source.name, "line": index + 1, "reason": reason})
                    break
        except ValueError as error:
            quarantined.append({"file": source.name, "line": index + 1, "reason": str(error)})
    if not rows:
        if not quarantined:
            raise ValueError(f"{source.name} holds no rows; fetch or copy it again")
        first = quarantined[0]
        raise ValueError(
            f"all {len(quarantined)} rows of {source.name} are broken; the first, line {first['line']}: "
            f"{first['reason']}; fetch or copy the file again"
        )
    return Rows(rows, quarantined=quarantined, origin=source.origin, file=source.name, copies=copies)


def _names(line: bytes, row: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    """What tells a row from the others of its file: its content, and its id where it has one."""
    yield "row", hashlib.sha256(line.strip()).digest()
    for key in ID_FIELDS:
        if isinstance(value := row.get(key), str | int):
            yield key, value


def _parse(line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 (byte {error.start})") from error
    except json.JSONDecodeError as error:
        cut = "" if error.doc.rstrip().endswith("}") else " (the line seems to be cut off)"
        raise ValueError(f"not JSON: {error.msg} at character {error.pos + 1}{cut}") from error
    except RecursionError as error:
        raise ValueError("not JSON that can be read: nested too deeply") from error
    if not isinstance(row, dict):
        raise ValueError(f"a row must be a JSON object, this is a {type(row).__name__}")
    return row


def in_folder(folder: str, subset: str) -> tuple[Source | None, str]:
    """Look for a subset in `task.data_dir`.

    Args:
        folder: The setting.
        subset: Name of the subset; the file is `<subset>.jsonl`, directly or in `data/` (as the official archive
            unpacks).

    Returns:
        The source or None, and a phrase that says where was looked.

    Raises:
        ValueError: there is no such folder.
    """
    root = Path(folder).expanduser()
    if not root.is_dir():
        raise ValueError(
            f"task.data_dir={folder} is not a folder (looked for {root.absolute()}); give the folder that holds "
            f"{subset}.jsonl"
        )
    for path in (root / f"{subset}.jsonl", root / "data" / f"{subset}.jsonl"):
        if path.is_file():
            return Source("data_dir", str(path), partial(file_lines, path)), str(path)
    return None, f"task.data_dir={folder} (no {subset}.jsonl there or in its data/)"


def in_archive(archive: Path, subset: str, origin: str) -> Source | None:
    """Look for `<subset>.jsonl` in any folder of a zip archive.

    Raises:
        ValueError: the archive cannot be read.
    """
    try:
        with zipfile.ZipFile(archive) as opened:
            members = [name for name in opened.namelist() if PurePosixPath(name).name == f"{subset}.jsonl"]
    except (zipfile.BadZipFile, OSError) as error:
        raise ValueError(
            f"{archive} cannot be read as a zip archive ({error}); delete it and fetch it again"
        ) from error
    if not members:
        return None
    return Source(origin, f"{archive}:{members[0]}", partial(zip_lines, archive, members[0]))


def in_hub_cache(files: Sequence[tuple[str, str]], read: Callable[[Path], Source | None]) -> tuple[Source | None, str]:
    """Look for files of the hub in the local hub cache.

    Args:
        files: (data-set repository, file) pairs, best first.
        read: Makes a source of a file; None when it does not hold what is looked for.

    Returns:
        The source or None, and a phrase that says where was looked.
    """
    from huggingface_hub import constants, try_to_load_from_cache

    for repo, name in files:
        path = try_to_load_from_cache(repo, name, repo_type="dataset")
        if isinstance(path, str) and (source := read(Path(path))):
            return source, source.name
    names = " or ".join(f"{name} of {repo}" for repo, name in files)
    return None, f"the hub cache {constants.HF_HUB_CACHE} (no {names} that holds these rows)"


def in_datasets_cache(name: str, subset: str, split: str = "test") -> tuple[Source | None, str]:
    """Look for a prepared copy in the cache of the `datasets` library, whoever prepared it.

    Args:
        name: Name of the data set without its owner, compared without case, dashes and underscores.
        subset: Name of its configuration.
        split: Name of the split.

    Returns:
        The source or None, and a phrase that says where was looked.
    """
    import datasets

    root = Path(datasets.config.HF_DATASETS_CACHE)
    wanted = _bare(name)
    for folder in sorted(root.glob("*")):
        if _bare(folder.name.rpartition("___")[2]) != wanted or not (folder / subset).is_dir():
            continue
        shards = sorted((folder / subset).rglob(f"*-{split}*.arrow"))
        if shards:
            # Other versions of the same data may lie beside it: all shards of one folder belong together.
            shards = [path for path in shards if path.parent == shards[0].parent]
            return Source("cache", str(shards[0].parent), partial(_arrow_lines, shards)), str(shards[0])
    return None, f"the cache of the datasets library {root} (no {subset} of {name})"


def _bare(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")


def _arrow_lines(shards: Sequence[Path]) -> Iterator[bytes]:
    import datasets

    for path in shards:
        for row in datasets.Dataset.from_file(str(path)):
            yield json.dumps(row).encode()


def is_network_error(error: BaseException) -> bool:
    """Whether a download failed, rather than our code: the hub's client also raises its HTTP library's own errors."""
    return isinstance(error, OSError | ValueError) or any(
        kind.__module__.split(".")[0].startswith("httpx") for kind in type(error).__mro__
    )


def on_hub(files: Sequence[tuple[str, str]], read: Callable[[Path], Source | None]) -> tuple[Source | None, str]:
    """Fetch a file from the hub into the local cache, if the hub answers within two seconds.

    Args:
        files: (data-set repository, file) pairs, best first.
        read: Makes a source of a file; None when it does not hold what is looked for.

    Returns:
        The source or None, and a phrase that says what was tried.
    """
    from huggingface_hub import constants, hf_hub_download

    from kvbench.models.files import hub_reachable

    if constants.HF_HUB_OFFLINE:
        return None, "the hub (not tried: HF_HUB_OFFLINE is set)"
    # The hub's own client retries for half a minute on a machine without a network.
    if not hub_reachable():
        return None, "the hub (it cannot be reached from here)"
    failures = []
    for repo, name in files:
        try:
            source = read(Path(hf_hub_download(repo, name, repo_type="dataset")))
        except Exception as error:
            if not is_network_error(error):
                raise
            text = str(error).strip()
            failures.append(f"{repo}: {text.splitlines()[0] if text else type(error).__name__}")
            continue
        if source:
            return source, source.name
        failures.append(f"{repo}: {name} does not hold these rows")
    return None, f"the hub ({'; '.join(failures)})"
