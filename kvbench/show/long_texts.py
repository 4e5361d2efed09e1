"""Tables of tasks with long answers and streams: what every token says, and how answers repeat themselves."""

from collections.abc import Callable, Sequence

from rich.table import Table

from kvbench.results.record import RunRecord
from kvbench.show import terminal
from kvbench.show.labels import label_runs

# Statistic of `task_aggregate` -> heading and factor.
TOKENS = {
    "perplexity": ("perplexity", 1.0),
    "word_perplexity": ("perplexity of words", 1.0),
    "bits_per_byte": ("bits per byte", 1.0),
    "log_ratio": ("NLL minus full's, nats", 1.0),
    "kl_mean": ("KL mean, nats", 1.0),
    "kl_median": ("KL median", 1.0),
    "kl_99": ("KL 99 %", 1.0),
    "kl_max": ("KL max", 1.0),
    "same_first_choice": ("same first choice, %", 100.0),
}
FREE = {
    "repetition": ("4-grams said before, %", 100.0),
    "loop": ("in the longest loop, %", 100.0),
    "early_stop": ("would have ended before, %", 100.0),
}


def long_tables(records: Sequence[RunRecord]) -> list[Table]:
    """A table of the forced tokens and one of the free answers, where the runs have such numbers."""
    tables = []
    for part, names, title in (
        ("tokens", TOKENS, "Over all forced tokens, with 95 % intervals (block bootstrap)"),
        ("free", FREE, "Free answers, with 95 % intervals"),
    ):
        if any(record.task_aggregate.get(part) for record in records):
            tables.append(_table(title, records, part, names))
    return tables


def _table(title: str, records: Sequence[RunRecord], part: str, names: dict[str, tuple[str, float]]) -> Table:
    """One row for each statistic, one column for each run: names of statistics are long, and runs are few."""
    table = terminal.plain_table(title)
    table.add_column("", no_wrap=True)
    for label in label_runs(records):
        table.add_column(label, justify="right")
    for name, (heading, factor) in names.items():
        if not any(name in record.task_aggregate.get(part, {}) for record in records):
            continue
        form = _percent if factor == 100.0 else _number
        cells = [_cell(record.task_aggregate.get(part, {}).get(name), factor, form) for record in records]
        table.add_row(heading, *cells)
    return table


def _number(value: float) -> str:
    return f"{value:.3g}"


def _percent(value: float) -> str:
    return f"{value:.1f}"


def _cell(found: dict | None, factor: float, form: Callable[[float], str]) -> str:
    if not found or found["value"] is None:
        return "-"
    text = form(factor * found["value"])
    if found["low"] is None or found["high"] is None:
        return text
    return f"{text} [{form(factor * found['low'])}, {form(factor * found['high'])}]"
