"""Command `bytes`: projected bytes of a method on a model that is not loaded."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig
from rich.table import Table
from rich.text import Text

from kvbench.cli.commands import compose_command
from kvbench.config.settings import as_dict
from kvbench.errors import SettingsConflict, SettingValue
from kvbench.extensions.advise import shipped
from kvbench.extensions.advise.remembered import remembered
from kvbench.results.measures import RESIDENT
from kvbench.results.writing import write_file
from kvbench.rules import MAX_TOKENS, Whole
from kvbench.show import terminal
from kvbench.show.csv_file import Cell, csv_bytes
from kvbench.show.progress import format_bytes, said_when_slow
from kvbench.sizing.projection import Projection
from kvbench.sizing.shapes import presets

# Columns of the table, and the items of the ledger in them; the CSV file has every item.
PARTS = {
    "payload": ("payload_bytes",),
    "quant meta": ("quant_meta_bytes",),
    "track": ("track_bytes",),
    "buffer": ("residual_bytes", "residual_slack_bytes"),
    "rest": ("slack_bytes", "table_bytes", "free_list_bytes", "book_bytes"),
}
OFF_PAGE = {"windows": ("window_bytes",), "states": ("state_bytes",)}
COLUMNS = ("method", "model", "tokens", "batch", "ratio", "fp16_bytes")  # of the CSV file, before the ledger's items
PICTURES = ("png", "svg", "pdf")


@dataclass(frozen=True, kw_only=True)
class Counted:
    """Content of the table, except the number of sequences."""

    title: str
    model: str
    off_page: Sequence[str]
    """Keys of `OFF_PAGE` that the model has."""
    rows: Sequence[tuple[str, int, Projection, str]]
    """Label, tokens of a sequence, its bytes, and share of the layers on which the method acts, of their own."""
    notes: Sequence[str]


def frame_rows(words: Sequence[str]) -> list[dict[str, Any]]:
    """The rows of the table for Python, by the names of the CSV file's columns; `words` as on the command line."""
    cfg = compose_command("bytes", list(words))
    counted = _counted(cfg, _lengths(cfg))
    names = [*COLUMNS, *counted.rows[0][2].items]
    return [dict(zip(names, line, strict=True)) for line in _lines(counted, cfg.batch)]


def main(cfg: DictConfig) -> int:
    """Print the table."""
    kind = _kind_of_picture(cfg.picture, cfg.answer)
    lengths = _lengths(cfg)
    counted = _counted(cfg, lengths)
    console = terminal.console(100)
    console.print(_table(counted, cfg.batch))
    for line in counted.notes:
        console.print(Text(line, style="dim"))
    if cfg.out:
        write_file(Path(cfg.out), _csv(counted, cfg.batch))
        terminal.print_paths([Path(cfg.out)], console)
    if cfg.picture:
        from kvbench.extensions.advise import along, counting

        prompt = max(lengths) - cfg.answer
        shape, methods = counting.shape_of(cfg), counting.methods_of(cfg)
        with said_when_slow(f"counting the bytes of {len(methods)} methods along an answer"):
            sizes = shape.store_shape, prompt, cfg.answer
            lines = [line for one in methods for line in along.lines_of(one.name, one.policy, *sizes, one.store)]
        title = f"Cache of {shape.name}, counted, nothing was run"
        write_file(Path(cfg.picture), along.render(lines, prompt, cfg.batch, title, kind))
        terminal.print_paths([Path(cfg.picture)], console)
    return 0


def _lengths(cfg: DictConfig) -> list[int]:
    """Lengths of sequences; raises ValueError where they, the answer or the batch are none."""
    lengths = [int(x) for x in cfg.length] if isinstance(cfg.length, ListConfig) else [cfg.length]
    for length in lengths:
        Whole(1, MAX_TOKENS, unit="tokens").check("length", length)
    Whole(0, min(lengths) - 1, unit="tokens").check("answer", cfg.answer)
    Whole(1, 2**20, unit="sequences").check("batch", cfg.batch)
    return lengths


def _counted(cfg: DictConfig, lengths: Sequence[int]) -> Counted:
    """The counts of a command, from the cache folder where they were made before."""

    def count() -> dict[str, Any]:
        from kvbench.extensions.advise import counting  # which imports torch

        return counting.count(cfg, lengths)

    settings = as_dict(cfg)
    question = {"what": "bytes", "lengths": list(lengths), "study": shipped.state()}
    question |= {name: settings[name] for name in ("_each_", "methods", "model", "answer", "store")}
    if settings["methods"] is not None:  # settings of each apart, of which one may name a file
        question["methods"] = [[word.split("=") for word in str(text).split()] for text in settings["methods"]]
    plain = count() if cfg.run or settings["model"] not in presets() else remembered(question, count)
    rows = [(label, length, Projection(**bytes_of), alone) for label, length, bytes_of, alone in plain.pop("rows")]
    return Counted(rows=rows, **plain)


def _kind_of_picture(path: str | None, answer: int) -> str:
    """File type of the picture, or an empty string without one."""
    kind = Path(path).suffix.removeprefix(".") if path else ""
    if path and kind not in PICTURES:
        raise SettingValue(
            f"picture={path} must end with {', '.join('.' + each for each in PICTURES)}", setting="picture"
        )
    if path and not answer:
        raise SettingsConflict(
            f"answer={answer} has no steps for picture={path}; set answer to the tokens that are written",
            setting="answer",
        )
    return kind


def _table(counted: Counted, batch: int) -> Table:
    off_page = {name: OFF_PAGE[name] for name in counted.off_page}
    parts, extra = PARTS | off_page, ["% alone"] if off_page else []
    table = terminal.plain_table(counted.title)
    table.add_column("method", no_wrap=True)
    many = [f"x {batch}"] if batch > 1 else []
    for heading in ("tokens", "resident", *many, "FP16", "%", *extra, *parts):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, length, projection, alone in counted.rows:
        table.add_row(
            name,
            str(length),
            *(format_bytes(count * projection.resident_bytes) for count in ([1, batch] if many else [1])),
            format_bytes(batch * projection.fp16_bytes),
            f"{RESIDENT.scale * projection.ratio:.1f}",
            *(alone for _ in extra),
            *(_part(projection, items) for items in parts.values()),
        )
    return table


def _part(projection: Projection, items: Sequence[str]) -> str:
    """Share of some items; a dash of a number that came without items."""
    if items[0] not in projection.items:
        return "-"
    return f"{100 * sum(projection.items[item] for item in items) / projection.fp16_bytes:.1f}"


def _csv(counted: Counted, batch: int) -> bytes:
    """Every item of every row, for all sequences together."""
    items = list(counted.rows[0][2].items)
    return csv_bytes([*COLUMNS, *items], _lines(counted, batch))


def _lines(counted: Counted, batch: int) -> list[list[Cell]]:
    """Each row as the cells of `COLUMNS` and the items of the ledger."""
    items = list(counted.rows[0][2].items)
    return [
        [
            name,
            counted.model,
            length,
            batch,
            projection.ratio,
            batch * projection.fp16_bytes,
            *(batch * projection.items[i] if i in projection.items else None for i in items),
        ]
        for name, length, projection, _ in counted.rows
    ]
