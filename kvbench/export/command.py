"""`kvbench export`: which runs are written, in which format, and what was left out."""

import fnmatch
from collections.abc import Callable, Iterator
from pathlib import Path

from omegaconf import DictConfig

from kvbench.api.load import find_runs
from kvbench.errors import unknown_name
from kvbench.evidence.load import patterns
from kvbench.export import leaderboard, lm_eval_files, tables
from kvbench.export.stored import Stored
from kvbench.results.sample import read_samples
from kvbench.show import terminal
from kvbench.show.progress import note
from kvbench.show.text import safe

FORMATS: dict[str, Callable[[list[Stored], Path], list[Path]]] = {
    "lm_eval": lm_eval_files.write,
    "parquet": tables.write,
    "leaderboard": leaderboard.write,
}


def main(cfg: DictConfig) -> int:
    """Carry out `kvbench export`.

    Args:
        cfg: The settings in conf/command/export.yaml.

    Returns:
        0.

    Raises:
        ValueError: A setting is wrong, there is nothing to write, or the format does not take these runs.
    """
    if cfg.format not in FORMATS:
        raise unknown_name("format", cfg.format, FORMATS)
    if not cfg.to:
        raise ValueError(f"export needs a folder to write into: python -m kvbench export format={cfg.format} to=DIR")
    root = Path(cfg.results_dir)
    if not root.is_dir():
        raise ValueError(f"results_dir={cfg.results_dir} is not a folder; run an experiment first, or give its folder")
    runs = list(_wanted(cfg, root))
    if not runs:
        raise ValueError(f"no complete run under results_dir={root} fits tasks, models and methods")
    written = FORMATS[cfg.format](runs, Path(str(cfg.to)))
    terminal.print_paths(written, terminal.console(100))
    return 0


def _wanted(cfg: DictConfig, root: Path) -> Iterator[Stored]:
    """The complete runs that the filters let through; the others are named."""
    filters = [patterns(cfg.get(name)) for name in ("tasks", "models", "methods")]
    left_out: dict[str, str] = {}
    for folder, record in find_runs(root, left_out):
        name = folder.relative_to(root).as_posix()
        parts = name.split("/")
        fits = (
            wanted is None or any(fnmatch.fnmatchcase(part, one) for one in wanted)
            for part, wanted in zip(parts, filters, strict=False)
        )
        if not all(fits):
            continue
        if record.status != "complete":
            left_out[name] = f"it is {record.status}"
            continue
        try:
            samples, damaged = read_samples(folder / "samples.jsonl", record.hash)
        except (ValueError, OSError) as error:
            left_out[name] = str(error)
            continue
        if damaged or not samples:
            left_out[name] = f"samples.jsonl has {damaged} damaged lines and {len(samples)} samples"
            continue
        yield Stored(folder=folder, record=record, samples=list(samples.values()))
    for name, reason in left_out.items():
        note(f"{safe(name)} is left out: {safe(reason, 400)}")
