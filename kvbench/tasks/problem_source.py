"""Where the rows of a benchmark of one or few files come from: a folder, the local caches, the hub."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kvbench.tasks.source import (
    MissingDataError,
    RowCheck,
    Rows,
    Source,
    file_lines,
    in_datasets_cache,
    in_folder,
    in_hub_cache,
    list_lines,
    on_hub,
    read_rows,
)


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where one file of a benchmark can be found.

    Args:
        task: Name of the task, for messages.
        what: Which part of it, for messages, for example `the train file`.
        stems: Names of the file without `.jsonl`, best first, for `task.data_dir`.
        list_file: What a file of the authors is called that is one JSON list, for `task.data_dir`; empty for none.
        hub: (repository, file) pairs on the hub, best first; `.jsonl`, `.json` (one list) or `.parquet`.
        prepared: (name, configuration, split) in the cache of the `datasets` library.
        local: Further files that other tools leave on a machine, best first.
        fetch: How to get it, one sentence or two.
    """

    task: str
    what: str
    stems: tuple[str, ...]
    list_file: str = ""
    hub: tuple[tuple[str, str], ...] = ()
    prepared: tuple[tuple[str, str, str], ...] = ()
    local: tuple[Path, ...] = ()
    fetch: str


def find_rows(place: Place, data_dir: str | None, check: RowCheck) -> Rows:
    """Read the rows from the first place that has them.

    Args:
        place: Where to look.
        data_dir: The setting `task.data_dir`; a folder without the file goes on to the local caches and the hub.
        check: What a row must be.

    Returns:
        The rows, each with its `index`.

    Raises:
        MissingDataError: No place has them; the message says where was looked and how to get them.
        ValueError: data_dir is no folder, or all rows are broken.
    """
    looked = []
    for find in (_in_data_dir, _in_local_files, _in_hub_cache, _prepared, _on_hub):
        source, where = find(place, data_dir)
        if source:
            return read_rows(source, check)
        looked += [where] if where else []

    def text(parts: Sequence[str]) -> str:
        return (
            f"task={place.task} has no data for {', '.join(parts)}. Looked in: {'; '.join(looked)}. {place.fetch} "
            f"`kvbench data task={place.task} to=FOLDER` does it for you where there is a network."
        )

    raise MissingDataError(text, place.what)


def _in_data_dir(place: Place, data_dir: str | None) -> tuple[Source | None, str]:
    if not data_dir:
        return None, "task.data_dir (not set)"
    where = ""
    for stem in place.stems:
        source, where = in_folder(data_dir, stem)
        if source:
            return source, where
    path = Path(data_dir).expanduser() / place.list_file
    if place.list_file and path.is_file():
        return Source("data_dir", str(path), partial(list_lines, path)), str(path)
    names = " or ".join([*(f"{stem}.jsonl" for stem in place.stems), *filter(None, [place.list_file])])
    return None, f"task.data_dir={data_dir} (no {names} there or in its data/)"


def _in_local_files(place: Place, data_dir: str | None) -> tuple[Source | None, str]:
    for path in place.local:
        if path.is_file():
            return Source("cache", str(path), partial(file_lines, path)), str(path)
    return None, " or ".join(map(str, place.local))


def _in_hub_cache(place: Place, data_dir: str | None) -> tuple[Source | None, str]:
    return in_hub_cache(place.hub, partial(_hub_file, "cache")) if place.hub else (None, "")


def _prepared(place: Place, data_dir: str | None) -> tuple[Source | None, str]:
    phrases = []
    for name, subset, split in place.prepared:
        source, where = in_datasets_cache(name, subset, split)
        if source:
            return source, where
        phrases.append(where)
    return None, "; ".join(phrases)


def _on_hub(place: Place, data_dir: str | None) -> tuple[Source | None, str]:
    return on_hub(place.hub, partial(_hub_file, "hub")) if place.hub else (None, "")


def _hub_file(origin: str, path: Path) -> Source:
    return Source(origin, str(path), partial(LINES.get(path.suffix, file_lines), path))


def parquet_lines(path: Path) -> Iterator[bytes]:
    """The rows of a Parquet file as lines of JSON."""
    import json

    import pyarrow.parquet

    for batch in pyarrow.parquet.ParquetFile(path).iter_batches():
        for row in batch.to_pylist():
            yield json.dumps(row).encode()


# How the rows of a file are read, by the end of its name; others have one row a line.
LINES: dict[str, Callable[[Path], Iterator[bytes]]] = {".parquet": parquet_lines, ".json": list_lines}


def text_field(row: Mapping[str, object], *names: str, required: bool = True) -> str:
    """Read a text from a row that may call it by several names.

    Args:
        row: The object that a line holds.
        names: Names of the field, best first.
        required: False gives an empty text when the field is missing or null.

    Raises:
        ValueError: The field is missing, empty or no text.
    """
    value = next((row[name] for name in names if row.get(name) is not None), None)
    if value is None and not required:
        return ""
    if not isinstance(value, str) or (required and not value.strip()):
        kind = "missing" if value is None else "empty" if isinstance(value, str) else type(value).__name__
        raise ValueError(f"field {names[0]} must be a text, it is {kind}")
    return value
