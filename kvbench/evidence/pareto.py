"""`kvbench pareto`: quality against bytes or time, with intervals, as pictures, a table and a CSV."""

from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig
from rich.console import Console
from rich.text import Text

from kvbench.errors import check_whole, unknown_name
from kvbench.evidence import frontier_figure, published
from kvbench.evidence.averages import averages
from kvbench.evidence.compare import check_margin
from kvbench.evidence.compare_table import ESTIMATORS
from kvbench.evidence.costs import NO_EVIDENCE
from kvbench.evidence.dominance import MEANING, standing
from kvbench.evidence.frontier import Panel, Point, build
from kvbench.evidence.load import load_groups, patterns
from kvbench.evidence.runs import Group
from kvbench.results.identity import folder_name
from kvbench.results.measures import COSTS, SCORE
from kvbench.results.writing import write_file
from kvbench.show import terminal
from kvbench.show.csv_file import Cell, csv_bytes
from kvbench.show.terminal import NO_INTERVAL, number

KINDS = ("png", "svg", "pdf")
PANELS = "panels"  # the layout of the report, and of pareto where nothing else is asked for
DRAWN = ("png", "svg")  # where kinds=null
QUALITIES = ("difference", "score")


def check(cfg: DictConfig) -> None:
    """Check the settings of the picture.

    Raises:
        ValueError: Names the setting, its value and the rule.
    """
    for name, known in (("axes", COSTS), ("kinds", KINDS)):
        for value in patterns(cfg.get(name)) or ():
            if value not in known:
                raise unknown_name(name, value, known)
    if cfg.get("layout", PANELS) not in frontier_figure.LAYOUTS:
        raise unknown_name("layout", cfg.layout, frontier_figure.LAYOUTS)
    if cfg.quality not in QUALITIES:
        raise unknown_name("quality", cfg.quality, QUALITIES)
    check_margin(cfg.margin)
    for name in ("incomplete", "published"):
        if not isinstance(cfg[name], bool):
            raise ValueError(f"{name}={cfg[name]} is neither true nor false")
    for name, least in (("resamples", 100), ("seed", 0)):
        check_whole(name, cfg[name], least)


def panels_of(groups: Sequence[Group], cfg: DictConfig) -> list[Panel]:
    """One panel for each group with something to draw, and the averages over several.

    Args:
        groups: The runs.
        cfg: The settings in conf/command/pareto.yaml.

    Raises:
        ValueError: Nothing can be drawn; says why.
    """
    pairs = [(group, build(group, cfg)) for group in groups]
    for group, panel in pairs:
        if panel is not None and cfg.published:
            add_published(group, panel)
    found = [panel for _, panel in pairs if panel is not None]
    if not found:
        reasons = [note for group in groups for note in group.notes]
        raise ValueError(f"nothing can be drawn. {' '.join(reasons[:3])}")
    return [*found, *averages(found)]


def add_published(group: Group, panel: Panel) -> None:
    """Put what papers printed for the group's task and methods into its panel, and say so."""
    methods = sorted({point.method for point in panel.points})
    panel.published = published.points(group.task, methods) if panel.reference and panel.what.part == SCORE.part else []
    if panel.published:
        papers = ", ".join(sorted({point.row.paper for point in panel.published}))
        panel.notes.append(f"crosses: printed in the papers ({papers}) for other models; not measured here")
    else:
        panel.notes.append(f"no paper printed a score with its memory for {group.task} and these methods")


def render(panel: Panel, axis: str, console: Console) -> None:
    """Print the points of one panel, the cheapest first."""
    table = terminal.plain_table(f"{panel.title}: {COSTS[axis].title}")
    shown = sorted((p for p in panel.points if axis in p.costs), key=lambda p: p.costs[axis].value)
    terminal.add_names(table, "run", [point.label for point in shown])
    what = f"difference, {panel.what.unit}" if panel.reference else f"{panel.what.title}, {panel.what.unit}"
    for heading in (COSTS[axis].unit, panel.what.title, what, "standing"):
        # Where the terminal is narrow, an interval goes below its number.
        table.add_column(heading, justify="right", no_wrap=heading == "standing")
    places = standing(panel, axis)
    for point in shown:
        cost, scale = point.costs[axis], COSTS[axis].scale
        held = f"{cost.value * scale:.3g}"
        if axis not in NO_EVIDENCE:
            ends = "[{:.3g}, {:.3g}]".format(*(end * scale for end in cost.interval)) if cost.interval else NO_INTERVAL
            held += f" {ends}"
        table.add_row(
            point.label,
            held,
            number(point.score, panel.what.scale),
            quality_text(panel, point),
            places.get(point.key, "-"),
        )
    console.print(table)
    for note in panel.notes:
        console.print(Text(f"! {note}"), soft_wrap=True)


def quality_text(panel: Panel, point: Point) -> str:
    """What is drawn of a point, with its interval, in shown units."""
    signed, scale = panel.reference is not None, panel.what.scale
    text = number(point.quality, scale, signed=signed)
    if point.interval:
        return f"{text} [{', '.join(number(end, scale, signed=signed) for end in point.interval)}]"
    return text if point.key == panel.reference else f"{text} {NO_INTERVAL}"


def csv_of(panels: Sequence[Panel]) -> bytes:
    """Every point of every panel with all its costs, unrounded: ratios, seconds, and the metric's own unit."""
    rows: list[list[Cell]] = []
    axes = [name for name in COSTS if name not in NO_EVIDENCE]  # a time in a table looks like a measurement
    costs = [f"{name}{end}" for name in axes for end in ("", "_low", "_high", "_standing")]
    headings = "group,run,method,family,metric,n,score,quality,quality_low,quality_high".split(",") + costs
    for panel in panels:
        places = {name: standing(panel, name) for name in axes}
        for point in panel.points:
            cells: list[Cell] = []
            for name in axes:
                cost = point.costs.get(name)
                ends = (cost.interval if cost else None) or (None, None)
                cells += [cost.value, *ends, places[name].get(point.key)] if cost else [None] * 4
            low, high = point.interval or (None, None)
            rows.append(
                [
                    panel.title,
                    point.label,
                    point.method,
                    point.family,
                    panel.what.key,
                    panel.num_samples,
                    point.score,
                    point.quality,
                    low,
                    high,
                    *cells,
                ]
            )
    return csv_bytes(headings, rows)


def file_stem(panel: Panel) -> str:
    """The start of a panel's file names."""
    return folder_name(panel.title.replace(" with ", "_")).lower()


def main(cfg: DictConfig) -> int:
    """Carry out `kvbench pareto`.

    Args:
        cfg: The settings in conf/command/pareto.yaml.

    Returns:
        0.

    Raises:
        ValueError: A setting is wrong, or nothing can be drawn.
    """
    check(cfg)
    panels = panels_of(load_groups(cfg), cfg)
    console = terminal.console(120)
    out = Path(str(cfg.out)) if cfg.out is not None else Path(cfg.results_dir) / "pareto"
    written = [out / "pareto.csv"]
    write_file(written[0], csv_of(panels))
    for panel in panels:
        for axis in patterns(cfg.axes) or list(COSTS):
            console.print()
            render(panel, axis, console)
            for kind in patterns(cfg.kinds) or DRAWN:
                picture = frontier_figure.render(panel, axis, kind, layout=cfg.layout)
                if picture is not None:
                    written.append(
                        out / f"{file_stem(panel)}_{axis}{'' if cfg.layout == PANELS else f'_{cfg.layout}'}.{kind}"
                    )
                    write_file(written[-1], picture)
    words = [f"[a, b]: 95 % interval, {ESTIMATORS}", *(f"{name}: {text}" for name, text in MEANING.items())]
    console.print(Text("\n" + ". ".join(words) + ".", style="dim"))
    terminal.print_paths(written, console)
    return 0
