"""A suite's work in items: a manifest of them, and the worker that takes a selection."""

from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig

from kvbench.cli import endings
from kvbench.cli.words import config_dir_flags
from kvbench.config import files
from kvbench.errors import FileMissing, check_whole
from kvbench.results.writing import write_file
from kvbench.rules.files import read_regular
from kvbench.show.progress import format_seconds, note

MOST_BYTES = 1 << 26  # of a selection: a million items


def write_manifest(cfg: DictConfig, jobs: Sequence[Sequence[str]]) -> int:
    """Write all items of a suite into a file, one a line. Returns the exit code."""
    from kvbench.extensions.suite.worker import Worker

    prompts = check_whole("item_prompts", cfg.item_prompts, 1)
    items = Worker(jobs, flags=config_dir_flags(files.config_dirs())).items(prompts)
    write_file(Path(cfg.manifest), "".join(f"{item}\n" for item in items).encode())
    note(f"{cfg.manifest}: {len(items)} items; give workers some of its lines each, with selection=FILE")
    return 0


def take(cfg: DictConfig, jobs: Sequence[Sequence[str]]) -> int:
    """Finish the items that a file names, as one worker. Returns the exit code."""
    from kvbench.extensions.suite.worker import Item, Worker

    path = Path(cfg.selection)
    try:
        lines = read_regular(path, MOST_BYTES).decode().split()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise FileMissing(
            f"selection={path} cannot be read: {why}; name a file with lines of a manifest", setting="selection"
        ) from error
    items = [Item.read(line) for line in lines]
    worker = Worker(jobs if items else [], name=path.name, flags=config_dir_flags(files.config_dirs()))
    done = worker.work(items)
    note(f"worker {worker.name}: {len(items)} items, {done.answers} answers in {format_seconds(done.work_s)}")
    return max((endings.report(error) for error in done.errors), default=0)
