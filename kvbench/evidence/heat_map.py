"""`kvbench heatmap`: what a method finds at each depth of a text and each length, beside the full cache."""

from collections.abc import Sequence
from statistics import fmean

from omegaconf import DictConfig
from rich.console import Console
from rich.text import Text

from kvbench.evidence import heat_figure
from kvbench.evidence.drawn import picture_kinds, write_drawn
from kvbench.evidence.heat_cells import Panels, panels_of, place_of
from kvbench.evidence.load import load_groups
from kvbench.show import terminal
from kvbench.show.csv_file import Cell, csv_bytes
from kvbench.show.terminal import number
from kvbench.stats.intervals import estimate


def render(panels: Panels, console: Console) -> None:
    """Print the maps as tables."""
    scale = panels.what.scale
    for found in panels.maps:
        table = terminal.plain_table(f"{found.label}: {panels.title}")
        table.add_column("depth, %", justify="right", no_wrap=True)
        for length in panels.lengths:
            table.add_column(str(length), justify="right", no_wrap=True)
        for depth in panels.depths:
            cells = []
            for length in panels.lengths:
                mine, minus = found.values.get((depth, length)), (found.differences or {}).get((depth, length))
                text = number(fmean(mine), scale) if mine else "-"
                cells.append(f"{text} ({number(fmean(minus), scale, signed=True)})" if minus else text)
            table.add_row(str(depth), *cells)
        console.print(table)
        console.print()
    for note in panels.notes:
        console.print(Text(f"! {note}"), soft_wrap=True)


def csv_of(several: Sequence[Panels]) -> bytes:
    """Every cell of every map, unrounded, with Wilson's or the bootstrap's 95 % interval."""
    headings = "group,run,metric,depth_percent,length_tokens,n,value,low,high,difference".split(",")
    rows: list[list[Cell]] = []
    for panels in several:
        for found in panels.maps:
            for (depth, length), values in sorted(found.values.items()):
                cell = estimate({"": values}, bounds=(0.0, 1.0) if panels.what.bounded else None)
                minus = fmean(found.differences[depth, length]) if found.differences else None
                start: list[Cell] = [panels.title, found.label, panels.what.key, depth, length, len(values)]
                rows.append([*start, cell.value, cell.low, cell.high, minus])
    return csv_bytes(headings, rows)


def main(cfg: DictConfig) -> int:
    """Carry out `kvbench heatmap`.

    Args:
        cfg: The settings in conf/command/heatmap.yaml.

    Returns:
        0.

    Raises:
        ValueError: A setting is wrong, or nothing can be drawn.
    """
    kinds = picture_kinds(cfg)
    groups = [group for group in load_groups(cfg) if any(place_of(run) for run in group.runs)]
    several = [panels for group in groups if (panels := panels_of(group, str(cfg.metric))) is not None]
    if not several:
        raise ValueError(
            f"no run under results_dir={cfg.results_dir} that fits the filters has depths and lengths; "
            "`python -m kvbench task=needle` makes one"
        )
    console = terminal.console(120)
    for panels in several:
        render(panels, console)
    pictures = ((panels.title, kind, heat_figure.render(panels, kind)) for panels in several for kind in kinds)
    written = write_drawn(cfg, "heatmap", csv_of(several), pictures)
    what = "cell: mean over its samples (run minus full cache, the same samples); the CSV has n and 95 % intervals."
    console.print(Text(what, style="dim"))
    terminal.print_paths(written, console)
    return 0
