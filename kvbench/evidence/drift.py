"""`kvbench drift`: how far each method strays from the full cache along long answers and streams."""

from collections.abc import Sequence

from omegaconf import DictConfig
from rich.console import Console
from rich.text import Text

from kvbench.config.files import FULL
from kvbench.errors import check_whole
from kvbench.evidence import drift_figure
from kvbench.evidence.drawn import picture_kinds, write_drawn
from kvbench.evidence.drift_curves import COLUMNS, KL, SAME, Drawing, drawing_of, texts_of
from kvbench.evidence.load import load_groups
from kvbench.show import terminal
from kvbench.show.csv_file import Cell, csv_bytes


def render(drawing: Drawing, console: Console) -> None:
    """Print the curves as a table, and where each run leaves the noise band."""
    table = terminal.plain_table(f"{drawing.title}: KL to the full cache, nats per token (same first choice, %)")
    table.add_column(drawing.axis, no_wrap=True)
    for curve in drawing.curves:
        table.add_column(curve.label, justify="right")
    table.add_column("noise", justify="right", no_wrap=True)
    by_first = {curve.label: {one.first: one for one in curve.bins} for curve in drawing.curves}
    band = dict(drawing.band)
    for first in sorted({first for bins in by_first.values() for first in bins}):
        here = [by_first[curve.label].get(first) for curve in drawing.curves]
        cells = []
        for one in here:
            kl, same = (one.values[KL].value, one.values[SAME].value) if one else (None, None)
            cells.append(f"{kl:.2g} ({100 * same:.0f})" if kl is not None and same is not None else "-")
        some = next(one for one in here if one is not None)
        table.add_row(f"{first + 1}-{some.last + 1}", *cells, f"{band[some.middle]:.2g}")
    console.print(table)
    for curve in drawing.curves:
        if curve.method == FULL:
            continue
        where = "does not leave the noise for good" if curve.leaves is None else f"leaves it at {curve.leaves + 1}"
        whole = " (it compresses the prompt alone, and keeps all that follows whole)" if curve.prompt_only else ""
        console.print(Text(f"{curve.label}{whole} {where if drawing.judged else 'cannot be judged: too few samples'}"))
    for note in drawing.notes:
        console.print(Text(f"! {note}"), soft_wrap=True)
    console.print()


def csv_of(several: Sequence[Drawing]) -> bytes:
    """Every bin of every curve, unrounded, with 95 % intervals."""
    headings = "group,run,metric,first_token,last_token,n,value,low,high,noise_kl,leaves_at".split(",")
    rows: list[list[Cell]] = []
    for drawing in several:
        band = dict(drawing.band)
        for curve in drawing.curves:
            leaves = None if curve.leaves is None else curve.leaves + 1
            for one in curve.bins:
                for column in COLUMNS:
                    found = one.values[column]
                    noise = band[one.middle] if column == KL else None
                    start: list[Cell] = [drawing.title, curve.label, column, one.first + 1, one.last + 1]
                    rows.append([*start, found.num_samples, found.value, found.low, found.high, noise, leaves])
    return csv_bytes(headings, rows)


def main(cfg: DictConfig) -> int:
    """Carry out `kvbench drift`.

    Args:
        cfg: The settings in conf/command/drift.yaml.

    Returns:
        0.

    Raises:
        ValueError: A setting is wrong, or nothing can be drawn.
    """
    kinds = picture_kinds(cfg)
    width = None if cfg.width is None else check_whole("width", cfg.width, 1, ", or null")
    groups = [group for group in load_groups(cfg) if any(texts_of(run) for run in group.runs)]
    several = [drawing for group in groups if (drawing := drawing_of(group, width)) is not None]
    if not several:
        raise ValueError(
            f"no run under results_dir={cfg.results_dir} that fits the filters says what was measured of every token; "
            "`python -m kvbench task=drift` or `task=stream` makes one, and so does any task with "
            "fidelity.per_token=true"
        )
    console = terminal.console(100)
    for drawing in several:
        render(drawing, console)
    pictures = ((drawing.title, kind, drift_figure.render(drawing, kind)) for drawing in several for kind in kinds)
    written = write_drawn(cfg, "drift", csv_of(several), pictures)
    tolerance = "noise: the full cache beside itself (upper end of its interval), 0.0025 nats at least. "
    rule = "A method leaves it at the first bin from which on the lower end of its interval stays above."
    console.print(Text(tolerance + rule, style="dim"), soft_wrap=True)
    terminal.print_paths(written, console)
    return 0
