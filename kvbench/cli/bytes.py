"""The command `bytes`: what a method would hold on a model that is not here."""

from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig, ListConfig
from rich.table import Table
from rich.text import Text

from kvbench.config.files import FULL
from kvbench.policy import MAX_TOKENS, Policy
from kvbench.results.measures import RESIDENT
from kvbench.results.record import RunRecord
from kvbench.results.sample import read_samples
from kvbench.results.writing import write_atomic
from kvbench.rules import Whole
from kvbench.runs.parts import make_policy
from kvbench.show import terminal
from kvbench.show.csv_file import Cell, csv_bytes
from kvbench.show.progress import format_bytes
from kvbench.sizing.project import Projection, is_one_number, project
from kvbench.sizing.shapes import NamedShape, find_shape
from kvbench.sizing.stored import policy_of, tier_shares

# Columns of the table, and the items of the ledger in them; the CSV file has every item.
PARTS = {
    "payload": ("payload_bytes",),
    "quant meta": ("quant_meta_bytes",),
    "track": ("track_bytes",),
    "buffer": ("residual_bytes", "residual_slack_bytes"),
    "rest": ("slack_bytes", "table_bytes", "free_list_bytes", "book_bytes"),
}
Row = tuple[str, int, Projection]  # what the row is, tokens of a sequence, its bytes


def main(cfg: DictConfig) -> int:
    """Print the table."""
    lengths = [int(x) for x in cfg.length] if isinstance(cfg.length, ListConfig) else [cfg.length]
    for length in lengths:
        Whole(1, MAX_TOKENS, unit="tokens").check("length", length)
    Whole(0, min(lengths) - 1, unit="tokens").check("answer", cfg.answer)
    Whole(1, 2**20, unit="sequences").check("batch", cfg.batch)
    shape = find_shape(cfg.model)
    policy, name, shares = _stored(Path(cfg.run)) if cfg.run else (make_policy(cfg.method), cfg._choices_.method, [])
    rows = [row for length in lengths for row in _rows(policy, name, shape, length, cfg.answer, shares)]
    console = terminal.console(100)
    console.print(_table(rows, shape, cfg.batch))
    for note in _notes(rows, name, shape, cfg.answer, bool(shares)):
        console.print(Text(note, style="dim"))
    if cfg.out:
        write_atomic(Path(cfg.out), _csv(rows, shape, cfg.batch))
        terminal.print_paths([Path(cfg.out)], console)
    return 0


def _stored(folder: Path) -> tuple[Policy, str, list[float]]:
    """The method of a stored run, its name, and the shares that it measured."""
    record = RunRecord.load(folder)
    if record is None:
        raise ValueError(f"run={folder} holds no run.json; give the folder of a run")
    policy = policy_of(record.identity)
    if policy is None:
        raise ValueError(
            f"run={folder}: its method {record.method} is none of kvbench's own, or has other settings now"
        )
    samples, _ = read_samples(folder / "samples.jsonl", record.hash)
    return policy, record.method, tier_shares(samples.values())


def _rows(policy: Policy, name: str, shape: NamedShape, length: int, answer: int, shares: Sequence[float]) -> list[Row]:
    least, most = project(policy, shape.store_shape, length - answer, answer, shares=shares)
    if is_one_number(least, most):
        return [(f"{name}, as measured" if most.measured else name, length, most)]
    return [(f"{name}, at least", length, least), (f"{name}, at most", length, most)]


def _table(rows: Sequence[Row], shape: NamedShape, batch: int) -> Table:
    title = f"Bytes on {shape.name}: {shape.layers} layers, {shape.kv_heads} KV heads of {shape.head_dim} channels"
    table = terminal.plain_table(title)
    table.add_column("method", no_wrap=True)
    many = [f"x {batch}"] if batch > 1 else []
    for heading in ("tokens", "resident", *many, "FP16", "%", *PARTS):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, length, found in rows:
        table.add_row(
            name,
            str(length),
            *(format_bytes(count * found.resident_bytes) for count in ([1, batch] if many else [1])),
            format_bytes(batch * found.fp16_bytes),
            f"{RESIDENT.scale * found.ratio:.1f}",
            *(f"{100 * sum(found.items[item] for item in items) / found.fp16_bytes:.1f}" for items in PARTS.values()),
        )
    return table


def _notes(rows: Sequence[Row], name: str, shape: NamedShape, answer: int, has_shares: bool) -> list[str]:
    notes = [
        f"% and the parts are of an FP16 full cache for the same tokens, of which {answer} were written behind the "
        f"prompt. Shape: {shape.source}. The peak while a prompt is compressed, weights and activations do not count."
    ]
    if any(label != name for label, _, _ in rows):
        notes.append(
            f"How much {name} keeps depends on the text: "
            + (
                "the shares of its tiers are those of the stored run."
                if has_shares
                else "least where queries attend to one token, most where they attend to all alike; run=FOLDER takes "
                "what a stored run measured."
            )
        )
    if shape.context and (longest := max(length for _, length, _ in rows)) > shape.context:
        notes.append(f"{shape.name} was made for {shape.context} tokens; {longest} are more.")
    if name == FULL:
        notes.append("The full cache holds more than 100 %: page tables, and pages that are not full.")
    return notes


def _csv(rows: Sequence[Row], shape: NamedShape, batch: int) -> bytes:
    """Every item of every row, for all sequences together."""
    items = list(rows[0][2].items)
    lines: list[list[Cell]] = [
        [
            name,
            shape.name,
            length,
            batch,
            found.ratio,
            batch * found.fp16_bytes,
            *(batch * found.items[i] for i in items),
        ]
        for name, length, found in rows
    ]
    return csv_bytes(["method", "model", "tokens", "batch", "ratio", "fp16_bytes", *items], lines)
