"""Tables with a column for each run: statistics of the forced tokens, of the free answers, and along the answer."""

from collections.abc import Sequence

from rich.table import Table

from kvbench.results.measures import SCORE
from kvbench.results.record import RunRecord
from kvbench.show import terminal
from kvbench.show.labels import label_runs

NONE = "-"
DRIFT_FROM = 32  # answers that end before this token have no drift to show
# Statistic of `task_aggregate` -> heading and factor, or form.
TOKENS = {
    "perplexity": ("perplexity", 1.0),
    "word_perplexity": ("perplexity of words", 1.0),
    "bits_per_byte": ("bits per byte", 1.0),
    "log_ratio": ("NLL minus full's, nats", 1.0),
    "kl_mean": ("KL mean, nats", 1.0),
    "kl_median": ("KL median", 1.0),
    "kl_99": ("KL 99 %", 1.0),
    "kl_999": ("KL 99.9 %", 1.0),
    "kl_max": ("KL max", 1.0),
    "dp_mean": ("mean dp, %", 100.0),
    "dp_rms": ("RMS dp, %", 100.0),
    "same_first_choice": ("same first choice, %", 100.0),
}
FREE = {
    "repetition": ("4-grams said before, %", 100.0),
    "loop": ("in the longest loop, %", 100.0),
    "early_stop": ("would have ended before, %", 100.0),
}


def across(
    title: str,
    heading: str,
    records: Sequence[RunRecord],
    rows: Sequence[tuple[str, Sequence[str]]],
    count: bool = True,
) -> Table:
    """A table with a column for each run; the last cell of a row is the number of its samples where they are counted.

    Names of statistics are long, and runs are few.
    """
    table = terminal.plain_table(title)
    table.add_column(heading, no_wrap=True)
    for name in [*label_runs(records), *(["n"] if count else [])]:
        table.add_column(name, justify="right")
    for name, cells in rows:
        table.add_row(name, *cells)
    return table


def long_tables(records: Sequence[RunRecord]) -> list[Table]:
    """A table of the forced tokens and one of the free answers, where the runs have such numbers."""
    tables = []
    for part, names, title in (
        ("tokens", TOKENS, "Over all forced tokens, with 95 % intervals (block bootstrap)"),
        ("free", FREE, "Free answers, with 95 % intervals"),
    ):
        held = [record.task_aggregate.get(part) or {} for record in records]
        rows = [
            (heading, [statistic(agreement.get(name), factor) for agreement in held])
            for name, (heading, factor) in names.items()
            if any(name in agreement for agreement in held)
        ]
        if any(held):
            tables.append(across(title, "", records, rows, count=False))
    return tables


def statistic(estimate: dict | None, factor: float) -> str:
    """A statistic of all tokens, as `run.json` has it, in shown units with its interval."""
    if not estimate or estimate["value"] is None:
        return NONE
    form = "{:.1f}" if factor == SCORE.scale else "{:.3g}"
    text = form.format(factor * estimate["value"])
    if estimate["low"] is None or estimate["high"] is None:
        return text
    return f"{text} [{form.format(factor * estimate['low'])}, {form.format(factor * estimate['high'])}]"


def along_answers(records: Sequence[RunRecord]) -> list[Table]:
    """Distance of the predictions from the full cache's along the answer, where answers are long enough."""
    ranges = {one.first: one.last for record in records for one in record.drift}
    if max(ranges, default=0) < DRIFT_FROM:
        return []
    rows = []
    for first, last in sorted(ranges.items()):
        here = [next((one for one in record.drift if one.first == first), None) for record in records]
        cells = [NONE if one is None else f"{one.kl:.2g} ({SCORE.scale * one.top1:.0f})" for one in here]
        count = max(one.num_samples for one in here if one is not None)
        rows.append((f"{first + 1} on" if last is None else f"{first + 1}-{last + 1}", [*cells, str(count)]))
    title = "Along the answer, token by token: KL to the full cache, nats (same first choice, %)"
    return [across(title, "tokens", records, rows)]
