"""Parquet: a row for each run, and a row for each answer, for DuckDB, Polars, pandas and the hub."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvbench.api.load import run_row, sample_row
from kvbench.export.stored import Stored, gold_of
from kvbench.results.writing import write_file


def write(runs: Sequence[Stored], to: Path) -> list[Path]:
    """Write runs.parquet and samples.parquet.

    Args:
        runs: What to write.
        to: Folder.

    Returns:
        The two files.
    """
    answers: list[dict[str, Any]] = []
    for run in runs:
        for sample in run.samples:
            prompt = sample.get("prompt")
            row = sample_row(run.record, run.folder, sample) | {"gold": gold_of(sample)}
            row |= {
                "prompt_sha256": prompt["sha256"] if prompt else None,
                "prompt_tail": prompt["tail"] if prompt else None,
            }
            answers.append(row)
    made = {"runs": [run_row(run.record, run.folder) for run in runs], "samples": answers}
    written = []
    for name, rows in made.items():
        path = to / f"{name}.parquet"
        write_file(path, parquet_bytes(rows))
        written.append(path)
    return written


def parquet_bytes(rows: Sequence[dict[str, Any]]) -> bytes:
    """Rows as a parquet file; a column that holds values of several types holds them as text."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {}
    for name in dict.fromkeys(key for row in rows for key in row):
        values = [row.get(name) for row in rows]
        try:
            columns[name] = pa.array(values)
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
            columns[name] = pa.array([None if value is None else str(value) for value in values])
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), sink)
    return sink.getvalue().to_pybytes()
