"""What commands that draw several pictures beside one CSV share: which file types, and where the files lie."""

from collections.abc import Iterable
from pathlib import Path

from omegaconf import DictConfig

from kvbench.errors import unknown_name
from kvbench.evidence.load import patterns
from kvbench.results.identity import folder_name
from kvbench.results.writing import write_file

KINDS = ("png", "svg")


def picture_kinds(cfg: DictConfig) -> list[str]:
    """The file types that `kinds` names; all when it is null.

    Raises:
        ValueError: One of them does not exist.
    """
    kinds = patterns(cfg.kinds) or list(KINDS)
    for kind in kinds:
        if kind not in KINDS:
            raise unknown_name("kinds", kind, KINDS)
    return kinds


def write_drawn(cfg: DictConfig, name: str, csv: bytes, pictures: Iterable[tuple[str, str, bytes]]) -> list[Path]:
    """Writes a CSV and the pictures beside it into `out`, or below the results.

    Args:
        cfg: The settings `out` and `results_dir`.
        name: Of the CSV, and of the folder below the results.
        csv: Its content.
        pictures: Title, file type and content of each.

    Returns:
        The files, the CSV first.
    """
    out = Path(str(cfg.out)) if cfg.out is not None else Path(cfg.results_dir) / name
    written = [out / f"{name}.csv"]
    write_file(written[0], csv)
    for title, kind, content in pictures:
        written.append(out / f"{folder_name(title.replace(' with ', '_')).lower()}.{kind}")
        write_file(written[-1], content)
    return written
