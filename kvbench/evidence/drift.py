"""`kvbench drift`: how far each method strays from the full cache along long answers and streams."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig
from rich.console import Console
from rich.text import Text

from kvbench.config.files import FULL
from kvbench.errors import check_whole
from kvbench.evidence.load import Group, StoredRun, load_groups, patterns
from kvbench.evidence.settings import KINDS, check, out_folder, write_drawn
from kvbench.results.measures import NATS_TOLERANCE
from kvbench.results.sample import SampleRecord
from kvbench.show import terminal
from kvbench.show.csv_file import Cell, csv_row, records_csv
from kvbench.show.palette import GREY, STYLES, method_style
from kvbench.show.picture import drawn
from kvbench.stats.intervals import Estimate, estimate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH_IN, PANEL_IN = 6.4, 2.1
FLOOR = 1e-4  # below this a KL is rounding; a logarithmic axis would give it half of the picture
STYLE: dict[Any, Any] = {"font.size": 8}
MOST_BINS = 16
KL, NLL, SAME = "kl", "nll", "same_first_choice"
COLUMNS = (KL, NLL, SAME)


@dataclass(frozen=True, kw_only=True)
class Bin:
    """One stretch of positions of one run."""

    first: int
    """Its first position, from 0."""
    last: int
    """Its last position."""
    values: Mapping[str, Estimate]
    """Column -> mean over samples of their means over the tokens here, with its interval."""

    @property
    def middle(self) -> float:
        """The position at which it is drawn."""
        return (self.first + self.last + 1) / 2


@dataclass(frozen=True, kw_only=True)
class Curve:
    """The values of one run along its texts."""

    label: str
    method: str
    bins: list[Bin]
    prompt_only: bool = False
    """The method keeps whatever follows the prompt whole."""
    leaves: int | None = None
    """First position of the bin from which on the KL stays above the noise band; None: it never does for good."""


@dataclass(kw_only=True)
class Drawing:
    """The curves of runs that may be compared."""

    title: str
    axis: str
    """Tokens that positions count."""
    num_samples: int
    width: int
    """Tokens of a bin."""
    curves: list[Curve]
    band: list[tuple[float, float]]
    """Middle of each bin, and the upper end of the noise band there, in nats of KL."""
    judged: bool
    """There are enough samples to say where a method leaves the band."""
    notes: list[str] = field(default_factory=list)


def texts_of(run: StoredRun) -> dict[tuple[str, str], SampleRecord]:
    """The records of a run that say what was measured of every token, one for each sample."""
    return {
        (record["subset"], record["sample_id"]): record
        for (_, repeat), record in sorted(run.samples.items())
        if repeat == 0 and record["status"] == "ok" and record.get("per_token")
    }


def drawing_of(group: Group, width: int | None = None) -> Drawing | None:
    """The curves of a group, in bins of so many tokens or at most sixteen of a power of two; None where no run has
    numbers of every token."""
    found = {run.label: texts_of(run) for run in group.runs}
    runs = [run for run in group.runs if found[run.label]]
    common = sorted(set.intersection(*(set(found[run.label]) for run in runs))) if runs else []
    if not common:
        return None
    records = {run.label: [found[run.label][name] for name in common] for run in runs}
    seen = {_offset(record) for record in records[runs[0].label]}
    longest = max(_end(record) for several in records.values() for record in several)
    begin = min(seen)
    step = width or max(1, 2 ** math.ceil(math.log2(max(1, longest - begin) / MOST_BINS)))
    curves = {run.label: _bins(records[run.label], step) for run in runs}
    reference = group.reference
    band = _band(curves.get(reference.label, []) if reference else [], [b for bins in curves.values() for b in bins])
    drawing = Drawing(
        title=group.title,
        axis="tokens seen" if begin else "tokens of the answer",
        num_samples=len(common),
        width=step,
        curves=[],
        band=[(middle, band[middle]) for middle in sorted(band)],
        judged=any(one.values[KL].low is not None for bins in curves.values() for one in bins),
        notes=list(group.notes),
    )
    for run in runs:
        bins = curves[run.label]
        leaves = None if run.method == FULL else leaving(bins, band)
        whole = run.record.prompt_only and run.method != FULL
        drawing.curves.append(Curve(label=run.label, method=run.method, bins=bins, prompt_only=whole, leaves=leaves))
    most = max(len(found[run.label]) for run in runs)
    if len(common) < most:
        drawing.notes.append(f"drawn from the {len(common)} of {most} samples that every run has")
    if reference is None or reference.label not in curves:
        drawing.notes.append("there is no run of the full cache, so the noise band is the documented tolerance alone")
    return drawing


def leaving(bins: Sequence[Bin], band: Mapping[float, float]) -> int | None:
    """The first position of the bin from which on, to the end, the lower end of the interval of the KL is above the
    band (middle of a bin -> its upper end); None where the last bin is not, or has no interval."""
    found = None
    for one in reversed(bins):
        low = one.values[KL].low
        if low is None or low <= band[one.middle]:
            break
        found = one.first
    return found


def _band(reference: Sequence[Bin], everything: Sequence[Bin]) -> dict[float, float]:
    """The noise band at every bin: the documented tolerance, or how far the full cache, read from its pages token by
    token, is from itself read in one pass, whichever is more."""
    band = {one.middle: NATS_TOLERANCE for one in everything}
    for one in reference:
        found = one.values[KL]
        band[one.middle] = max(NATS_TOLERANCE, found.high if found.high is not None else found.value or 0.0)
    return band


def _offset(record: SampleRecord) -> int:
    """Tokens that count before the first forced one: those of the prompt, where the task counts tokens seen."""
    seen = record["meta"].get("seen", 0)
    return seen if type(seen) is int and seen >= 0 else 0


def _end(record: SampleRecord) -> int:
    return _offset(record) + len((record.get("per_token") or {}).get(KL, ()))


def _bins(records: Sequence[SampleRecord], step: int) -> list[Bin]:
    """The bins that a token of some sample lies in."""
    means: dict[int, dict[str, list[float]]] = {}
    for record in records:
        tokens, offset = record.get("per_token") or {}, _offset(record)
        first, count = int(tokens["exact"][0]), len(tokens[KL])
        for place in range((offset + first) // step, -(-(offset + count) // step)):
            low, high = max(place * step - offset, first), min((place + 1) * step - offset, count)
            if low < high:
                cell = means.setdefault(place, {name: [] for name in COLUMNS})
                for name in COLUMNS:
                    cell[name].append(fmean(tokens[name][low:high]))
    return [
        Bin(
            first=place * step,
            last=(place + 1) * step - 1,
            values={name: _mean(values, (0.0, 1.0 if name == SAME else math.inf)) for name, values in cell.items()},
        )
        for place, cell in sorted(means.items())
    ]


def _mean(values: Sequence[float], bounds: tuple[float, float]) -> Estimate:
    """The mean of what samples have in one bin. They are means over tokens and no answers of yes or no, so where none
    differs there is nothing to take an interval from."""
    if len(set(values)) == 1:
        return Estimate(value=values[0], num_samples=len(values))
    return estimate({"": values}, bounds=bounds)


def _perplexity(nll: float) -> float:
    return math.exp(min(nll, 700.0))  # the end of an interval of few answers may be no float any more


# Column, title and what is shown of a value.
SHOWN: tuple[tuple[str, str, Callable[[float], float]], ...] = (
    (KL, "KL to the full cache, nats per token", lambda value: max(value, FLOOR)),
    (SAME, "same first choice, %", lambda value: 100 * value),
    (NLL, "perplexity", _perplexity),
)


def figure(drawing: Drawing) -> "Figure":
    """KL with the noise band, first choices and perplexity along the answers; there is at least one curve."""
    from matplotlib.figure import Figure

    made = Figure(figsize=(WIDTH_IN, PANEL_IN * len(SHOWN) + 0.9), dpi=200, layout="constrained")
    made.suptitle(f"{drawing.title}\nn = {drawing.num_samples}, bins of {drawing.width} tokens", fontsize=9)
    for axes, (column, title, shown) in zip(made.subplots(len(SHOWN), 1, sharex=True), SHOWN, strict=True):
        if column == KL:
            _draw_band(axes, drawing)
        values = [v for one in drawing.curves for b in one.bins if (v := b.values[column].value) is not None]
        if column == NLL and max(values) - min(values) > math.log(10):
            _decades(axes)
        # Intervals of few answers can reach over hundreds of decades, and would press the curves flat.
        least, most = min(map(shown, values)), max(map(shown, values))
        across = most - least or most
        room = (least / 10, most * 10) if axes.get_yscale() == "log" else (least - across, most + across)
        seen: dict[str, int] = {}
        for curve in drawing.curves:  # several runs of a method differ in the kind of line
            place = seen[curve.method] = seen.get(curve.method, -1) + 1
            _draw_curve(axes, curve, column, shown, STYLES[place % len(STYLES)], room)
        axes.set_ylabel(title, fontsize=7)
        axes.grid(color="#EEEEEE", linewidth=0.6)
    axes.set_xlabel(drawing.axis)
    axes.set_xlim(left=min(one.first for curve in drawing.curves for one in curve.bins))
    handles, labels = axes.get_legend_handles_labels()
    made.legend(handles, labels, loc="outside lower center", ncols=min(4, len(labels)), fontsize=7, frameon=False)
    return made


def _draw_curve(
    axes: "Axes", curve: Curve, column: str, shown: Callable[[float], float], line: str, room: tuple[float, float]
) -> None:
    """One run: its line, its interval as a shade as far as there is room, and a marker where it leaves the noise."""
    colour, marker = method_style(curve.method)
    bins = [one for one in curve.bins if one.values[column].value is not None]
    middles = [one.middle for one in bins]
    values = [shown(one.values[column].value or 0.0) for one in bins]
    name = f"{curve.label} (prompt only)" if curve.prompt_only else curve.label
    axes.plot(middles, values, color=colour, linestyle=line, linewidth=1.1, label=name, zorder=3)
    gap = (math.nan, math.nan)  # no shade where a bin has no interval
    ends = [(one.middle, *(one.values[column].ends or gap)) for one in bins]
    if curve.method != FULL:
        x, low, high = zip(*((at, shown(low), shown(high)) for at, low, high in ends), strict=True)
        bottom, top = ([min(max(one, room[0]), room[1]) if one == one else one for one in side] for side in (low, high))
        axes.fill_between(x, bottom, top, color=colour, alpha=0.15, linewidth=0, zorder=2)
        if any(one < room[0] for one in low) or any(one > room[1] for one in high):
            axes.set_title("intervals are cut", fontsize=7, loc="left")
    if column == KL and curve.leaves is not None:
        place = next(place for place, one in enumerate(bins) if one.first == curve.leaves)
        style: dict[str, Any] = {"color": colour, "markersize": 6, "markeredgecolor": "black", "zorder": 4}
        axes.plot(middles[place], values[place], marker=marker, **style)


def _draw_band(axes: "Axes", drawing: Drawing) -> None:
    """The noise band, on a logarithmic axis."""
    _decades(axes)
    middles, tops = [middle for middle, _ in drawing.band], [max(high, FLOOR) for _, high in drawing.band]
    axes.fill_between(middles, FLOOR, tops, color=GREY, alpha=0.3, linewidth=0, zorder=1)
    text = "grey: noise; marked: it leaves the noise for good" if drawing.judged else "grey: noise; too few samples"
    axes.set_title(text, fontsize=7, loc="right")


def _decades(axes: "Axes") -> None:
    """A logarithmic axis whose numbers are plain text: pictures read no formulas."""
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, place: f"{value:g}")
    axes.yaxis.set_minor_formatter(lambda value, place: "")


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
    terminal.print_notes(drawing.notes, console)
    console.print()


def csv_of(several: Sequence[Drawing]) -> bytes:
    """Every bin of every curve, unrounded, with 95 % intervals."""
    records: list[dict[str, Cell]] = []
    for drawing, curve in [(one, curve) for one in several for curve in one.curves]:
        band, leaves = dict(drawing.band), None if curve.leaves is None else curve.leaves + 1
        for one, column in ((one, column) for one in curve.bins for column in COLUMNS):
            found = one.values[column]
            records.append(
                csv_row(group=drawing.title, run=curve.label, metric=column)
                | csv_row(first_token=one.first + 1, last_token=one.last + 1, n=found.num_samples)
                | csv_row(value=found.value, low=found.low, high=found.high)
                | csv_row(noise_kl=band[one.middle] if column == KL else None, leaves_at=leaves)
            )
    return records_csv(records)


def main(cfg: DictConfig) -> int:
    """Carry out `kvbench drift`."""
    check(cfg, lists={"kinds": KINDS})
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
    kinds = patterns(cfg.kinds) or KINDS
    pictures = [(d.title, f".{kind}", drawn(partial(figure, d), kind, STYLE)) for d in several for kind in kinds]
    written = write_drawn(out_folder(cfg, "drift") / "drift.csv", csv_of(several), pictures)
    tolerance = "noise: the full cache beside itself (upper end of its interval), 0.0025 nats at least. "
    rule = "A method leaves it at the first bin from which on the lower end of its interval stays above."
    console.print(Text(tolerance + rule, style="dim"), soft_wrap=True)
    terminal.print_paths(written, console)
    return 0
