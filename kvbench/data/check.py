"""Checks files at hand: rows, fields, and hashes where something is known to compare with."""

import hashlib
import json
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from kvbench.data.catalogue import DataFile
from kvbench.tasks.source import Source, file_lines, read_rows

MANIFEST = "kvbench-data.json"


@dataclass(kw_only=True)
class Report:
    """What a check found about one file.

    Args:
        name: Name of the file in the benchmark.
        wanted: Rows of the whole benchmark; 0 for a file whose rows are not counted.
        path: Where it is; None when it is missing.
        rows: Good rows.
        sha256: Of the file as it is.
        broken: Rows that are none: `file`, `line`, `reason`.
        faults: What is wrong with the file as a whole.
        notes: What is worth knowing and not wrong.
    """

    name: str
    wanted: int = 0
    path: Path | None = None
    rows: int = 0
    sha256: str = ""
    broken: list[dict] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        """True when nothing is wrong with the file."""
        return not self.faults and not self.broken


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, 64 hex digits."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def read_manifest(folder: Path) -> dict[str, dict]:
    """What a fetch noted about its files: name in the folder -> `sha256`, `rows`, `source`; empty without a note.

    Raises:
        ValueError: The note cannot be read.
    """
    path = folder / MANIFEST
    if not path.is_file():
        return {}
    try:
        files = json.loads(path.read_text(encoding="utf-8"))["files"]
        return {name: dict(item) for name, item in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} cannot be read ({error}); delete it and fetch the data again") from error


def check_file(file: DataFile, folder: Path, manifest: dict[str, dict], partial_data: bool = False) -> Report:
    """Check one file of a benchmark.

    Args:
        file: What it should be.
        folder: Where it should be, directly or in `data/`.
        manifest: What a fetch noted.
        partial_data: Fewer rows than the whole benchmark has, and missing files, are no fault.

    Returns:
        The report; every broken row is in it.
    """
    report = Report(name=file.name, wanted=file.rows)
    names = [f"{stem}.jsonl" for stem in (file.name, *file.stems)]
    places = [folder / part / name for name in names for part in ("", "data")]
    report.path = next((path for path in places if path.is_file()), None)
    if report.path is None:
        (report.notes if partial_data else report.faults).append(f"missing: no {' or '.join(names)} in {folder}")
        return report
    report.sha256 = sha256_of(report.path)
    try:
        rows = read_rows(Source("data_dir", str(report.path), partial(file_lines, report.path)), file.check)
        report.rows, report.broken = len(rows), rows.quarantined
    except ValueError as error:
        report.faults.append(str(error))
        return report
    if report.rows + len(report.broken) < file.rows:
        text = f"{report.rows} of {file.rows} rows"
        (report.notes if partial_data else report.faults).append(text)
    elif report.rows > file.rows:
        report.faults.append(f"{report.rows} rows, the benchmark has {file.rows}")
    noted = manifest.get(report.path.relative_to(folder).as_posix())
    if noted and noted["sha256"] != report.sha256:
        report.faults.append(f"changed since it was fetched: its SHA-256 was {noted['sha256'][:16]}...")
    elif noted:
        report.notes.append("as fetched")
    if file.official and report.sha256 == file.official:
        report.notes.append("the authors' own file")
    return report


def check_copy(folder: Path, manifest: dict[str, dict]) -> list[Report]:
    """Check a copy of a whole repository against what its fetch noted.

    Raises:
        ValueError: There is no note to compare with.
    """
    if not manifest:
        raise ValueError(
            f"{folder} has no {MANIFEST} to compare with; only copies that `kvbench data to=` made of this "
            "task can be checked"
        )
    reports = []
    for name, noted in sorted(manifest.items()):
        path = folder / name
        report = Report(name=name, path=path if path.is_file() else None)
        if report.path is None:
            report.faults.append("missing")
        else:
            report.sha256 = sha256_of(path)
            if report.sha256 != noted["sha256"]:
                report.faults.append(f"changed since it was fetched: its SHA-256 was {noted['sha256'][:16]}...")
        reports.append(report)
    return reports
