"""`kvbench report view=pareto`: quality against bytes or time, with intervals, as pictures, a table and a CSV."""

from collections.abc import Collection, Iterator, Sequence
from functools import partial

from omegaconf import DictConfig
from rich.text import Text

from kvbench.config.extensions import hooks
from kvbench.errors import SettingValue, unknown_name
from kvbench.evidence import frontier_figure, multiples
from kvbench.evidence.dominance import standing
from kvbench.evidence.frontier import NO_EVIDENCE, Panel, Point, averages, build
from kvbench.evidence.legends import MORE
from kvbench.evidence.load import Group, patterns, sentences
from kvbench.evidence.one_panel import WHISKERS, Look
from kvbench.evidence.settings import POSITIVE
from kvbench.evidence.settings import check as check_settings
from kvbench.evidence.view import Figure, Grid, Part, View, ViewResult, frame_of, notes
from kvbench.results.measures import COSTS, SCORE
from kvbench.results.refusals import NoResults
from kvbench.show.csv_file import Cell, csv_row
from kvbench.show.terminal import NO_INTERVAL, number, span, three_digits

KINDS = ("png", "svg", "pdf")
QUALITIES = ("difference", "score")


def check(cfg: DictConfig) -> None:
    """Check the settings of the picture; raises ValueError as `settings.check`."""
    layouts: dict[str, Collection[str]] = {"layout": frontier_figure.LAYOUTS} if cfg.get("layout") is not None else {}
    if cfg.get("by") is not None:
        layouts["by"] = multiples.BY
    check_settings(cfg, lists={"axes": COSTS, "kinds": KINDS}, choices=layouts | {"quality": QUALITIES})
    look = look_of(cfg)
    if look.whiskers not in WHISKERS:
        raise unknown_name("figure.whiskers", look.whiskers, WHISKERS)


def look_of(cfg: DictConfig) -> Look:
    """Appearance of the pictures, from `figure` and `labels`; raises ValueError for a value out of range."""
    settings = dict(cfg.get("figure") or {})
    for name in ("width", "size"):
        if settings.get(name) is not None and not POSITIVE.fits(settings[name]):
            raise SettingValue(f"figure.{name}={settings[name]} is not a number above 0", setting=f"figure.{name}")
    labels = {str(key): str(value) for key, value in (cfg.get("labels") or {}).items()}
    return Look(**settings, labels=labels)


def panels_of(groups: Sequence[Group], cfg: DictConfig) -> list[Panel]:
    """One panel for each group with something to draw, and the averages over several; raises ValueError without any."""
    panels = []
    for group in groups:
        if (panel := build(group, cfg)) is not None:
            if cfg.published:
                add_published(group, panel)
            panels.append(panel)
    if not panels:
        reasons = [note for group in groups for note in group.notes]
        raise NoResults(f"nothing can be drawn. {sentences(reasons)}")
    return [*panels, *averages(panels)]


def axes_of(panel: Panel, cfg: DictConfig) -> list[str]:
    """The requested axes that a panel has; all of its axes where it has none of these."""
    return [axis for axis in patterns(cfg.axes) or () if axis in panel.axes] or list(panel.axes)


def add_published(group: Group, panel: Panel) -> None:
    """Add the printed numbers of papers for the group's task and methods to its panel, with a note."""
    methods = sorted({point.method for point in panel.points})
    is_whole = panel.what.part == SCORE.part and panel.what.of is None and not panel.what.subsets
    panel.published = []
    if panel.reference and is_whole:
        panel.published = [point for printed in hooks("pareto.printed") for point in printed(group.task, methods)]
    if panel.published:
        papers = ", ".join(sorted({point.source for point in panel.published}))
        panel.notes.append(f"crosses: printed in the papers ({papers}) for other models; not measured here")
    else:
        panel.notes.append(f"no paper printed a score with its memory for {group.task} and these methods")


def texts(panel: Panel, axis: str) -> list[Part]:
    """The points of one panel as a table, the cheapest first, and notes."""
    shown = sorted((p for p in panel.points if axis in p.costs), key=lambda p: p.costs[axis].value)
    places, cost = standing(panel, axis), panel.axes[axis]

    def held(point: Point) -> str:
        mine = point.costs[axis]
        ends = three_digits(mine.interval, cost.scale) if mine.interval else NO_INTERVAL
        return f"{mine.value * cost.scale:.3g}" + ("" if axis in NO_EVIDENCE else f" {ends}")

    quality = "share" if panel.what.of else "difference" if panel.reference else panel.what.title
    columns = [
        (cost.unit, [held(point) for point in shown]),
        (panel.what.title, [number(point.score, panel.what.scale) for point in shown]),
        (f"{quality}, {panel.what.unit}", [quality_text(panel, point) for point in shown]),
        ("standing", [places.get(point.key, "-") for point in shown]),
    ]
    title, names = f"{panel.title}: {cost.title}", [point.label for point in shown]
    table = Grid(title=title, names=names, columns=columns, breaks=True)
    return [*notes(filter(None, [panel.unfit])), table, *notes(panel.notes)]


def quality_text(panel: Panel, point: Point) -> str:
    """The drawn value of a point, with its interval, in shown units."""
    signed, scale = panel.reference is not None and panel.what.of is None, panel.what.scale
    text = number(point.quality, scale, signed=signed)
    if point.interval is None and point.key == panel.reference:
        return text
    return f"{text} {span(point.interval, scale, signed)}"


def records(panels: Sequence[Panel]) -> Iterator[dict[str, Cell]]:
    """Every point of every panel with all its costs, unrounded: ratios, seconds, and the metric's own unit."""
    names = dict.fromkeys(name for panel in panels for name in panel.axes)
    axes = [name for name in names if name not in NO_EVIDENCE]  # a time in a table looks like a measurement
    for panel in panels:
        places = {name: standing(panel, name) for name in axes}
        for point in panel.points:
            low, high = point.interval or (None, None)
            record: dict[str, Cell] = (
                csv_row(group=panel.title, run=point.label, method=point.method, family=point.family)
                | csv_row(metric=panel.what.csv_name, n=panel.num_samples, score=point.score)
                | csv_row(quality=point.quality, quality_low=low, quality_high=high)
            )
            for name in axes:
                cost = point.costs.get(name)
                low, high = (cost.interval if cost else None) or (None, None)
                where = places[name].get(point.key) if cost else None
                record |= {name: cost.value if cost else None, f"{name}_low": low, f"{name}_high": high}
                record[f"{name}_standing"] = where
            yield record


def compute(groups: Sequence[Group], cfg: DictConfig) -> ViewResult:
    """The panels of all groups and averages, and the small ones of `by`; raises ValueError as `panels_of`."""
    panels = panels_of(groups, cfg)
    parts, figures = list[Part](), list[Figure]()
    small = {group.title: multiples.panels_of(group, cfg) for group in groups} if cfg.by is not None else {}
    for title, several in small.items():
        for axis in axes_of(several[0], cfg) if several else ():
            figures.append((title, f"_{axis}_by_{cfg.by}", partial(multiples.render, title, several, axis)))
    look = look_of(cfg)
    for panel in panels:
        for axis in axes_of(panel, cfg):
            parts += [Text(), *texts(panel, axis)]
            draw = partial(frontier_figure.render, panel, axis, layout=cfg.layout, look=look)
            figures.append((panel.title, f"_{axis}" + (f"_{cfg.layout}" if cfg.layout else ""), draw))
    parts.append(Text(f"\n[a, b]: 95 % interval. {MORE}", style="dim"))
    every = [*panels, *(panel for several in small.values() for panel in several)]
    return ViewResult(parts=parts, frame=frame_of(records(every)), figures=figures)


main = View(name="pareto", compute=compute, lists={}, check=check)
