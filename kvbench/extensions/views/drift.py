"""`kvbench report view=drift`: how far each method strays from the full cache along long answers and streams."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig
from rich.text import Text

from kvbench.config.files import FULL
from kvbench.errors import check_whole
from kvbench.evidence.load import Group, StoredRun
from kvbench.evidence.view import Grid, Part, View, ViewResult, frame_of, line, notes
from kvbench.results.measures import NATS_TOLERANCE
from kvbench.results.refusals import NoResults
from kvbench.results.sample import SampleRecord
from kvbench.show.csv_file import Cell, csv_row
from kvbench.show.picture import GREY, STYLES, drawn, legend_below, method_style
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
# First position of a bin -> column -> mean over samples of their means over the tokens there, with its interval.
Bins = Mapping[int, Mapping[str, Estimate]]


@dataclass(frozen=True, kw_only=True)
class Curve:
    """The values of one run along its texts."""

    run: StoredRun
    bins: Bins
    leaves: int | None
    """First position of the bin from which on the KL stays above the noise band; None: it never does for good."""

    @property
    def prompt_only(self) -> bool:
        """True where the method keeps all tokens after the prompt."""
        return self.run.record.prompt_only and self.run.method != FULL


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """The curves of runs that may be compared."""

    title: str
    axis: str
    """Tokens that positions count."""
    num_samples: int
    width: int
    """Tokens of a bin."""
    curves: list[Curve]
    band: dict[int, float]
    """First position of each bin, in order -> the upper end of the noise band there, in nats of KL."""
    notes: list[str]

    @property
    def judged(self) -> bool:
        """True where there are enough samples to judge where a method leaves the band."""
        return any(values[KL].low is not None for curve in self.curves for values in curve.bins.values())


def texts_of(run: StoredRun) -> dict[tuple[str, str], SampleRecord]:
    """The records of a run with measurements of every token, one for each sample."""
    return {
        (record["subset"], record["sample_id"]): record
        for (_, repeat), record in sorted(run.samples.items())
        if repeat == 0 and record["status"] == "ok" and _is_whole(record.get("per_token") or {})
    }


def _is_whole(tokens: Mapping[str, list[float]]) -> bool:
    """Every column has a number for each token, and it is known how many first ones the means leave out."""
    columns = [tokens.get(name, []) for name in COLUMNS]
    exact, count = tokens.get("exact", []), len(columns[0])
    alike = all(len(column) == count and None not in column for column in columns)
    return alike and len(exact) == 1 and exact[0] is not None and exact[0] >= 0


def drawing_of(group: Group, width: int | None = None) -> Drawing | None:
    """Curves of a group, in bins of `width` tokens or at most sixteen of a power of two.

    None where no run has numbers of every token.
    """
    texts_by_run = {run.name: texts for run in group.runs if (texts := texts_of(run))}
    notes = list(group.notes)
    usual = next((run.name for run in (group.reference, *group.runs) if run and run.name in texts_by_run), None)
    for run in group.runs:  # one run with other samples would leave none that all have
        if usual and run.name in texts_by_run and texts_by_run[usual].keys().isdisjoint(texts_by_run[run.name]):
            notes.append(f"{run.label} is not drawn: it has no sample of the others'")
            del texts_by_run[run.name]
    runs = [run for run in group.runs if run.name in texts_by_run]
    common = sorted(set.intersection(*map(set, texts_by_run.values()))) if runs else []
    if not common:
        return None
    records = {name: [texts[sample] for sample in common] for name, texts in texts_by_run.items()}
    begin = min(map(_offset, records[runs[0].name]))
    longest = max(_offset(r) + len((r.get("per_token") or {})[KL]) for several in records.values() for r in several)
    step = width or max(1, 2 ** math.ceil(math.log2(max(1, longest - begin) / MOST_BINS)))
    bins = {name: _bins(several, step) for name, several in records.items()}
    # The band is the documented tolerance, or how far the full cache, read from its pages token by token, is from
    # itself read in one pass, whichever is more.
    reference = group.reference
    band = dict.fromkeys(sorted({first for run_bins in bins.values() for first in run_bins}), NATS_TOLERANCE)
    if not band:  # answers of one token, which the prompt predicts
        return None
    for first, values in bins.get(reference.name, {}).items() if reference else ():
        high = values[KL].high
        band[first] = max(NATS_TOLERANCE, high if high is not None else values[KL].value or 0.0)
    most = max(map(len, texts_by_run.values()))
    if len(common) < most:
        notes.append(f"drawn from the {len(common)} of {most} samples that every run has")
    if reference is None or reference.name not in bins:
        notes.append("there is no run of the full cache, so the noise band is the documented tolerance alone")

    def curve(run: StoredRun) -> Curve:
        run_bins = bins[run.name]
        return Curve(run=run, bins=run_bins, leaves=None if run.method == FULL else _leaving(run_bins, band))

    return Drawing(
        title=group.title,
        axis="tokens seen" if begin else "tokens of the answer",
        num_samples=len(common),
        width=step,
        curves=[curve(run) for run in runs],
        band=band,
        notes=notes,
    )


def _leaving(bins: Bins, band: Mapping[int, float]) -> int | None:
    """First bin from which to the end the interval of the KL is above the band.

    None where the last one is not, or has no interval.
    """
    last = None
    for first in sorted(bins, reverse=True):
        low = bins[first][KL].low
        if low is None or low <= band[first]:
            break
        last = first
    return last


def _offset(record: SampleRecord) -> int:
    """Tokens that count before the first forced one: those of the prompt, where the task counts tokens seen."""
    seen = record["meta"].get("seen", 0)
    return seen if type(seen) is int and seen >= 0 else 0


def _bins(records: Sequence[SampleRecord], step: int) -> Bins:
    """The bins that a token of some sample lies in."""
    means: dict[int, dict[str, list[float]]] = {}
    for record in records:
        tokens, offset = record.get("per_token") or {}, _offset(record)
        first, count = int(tokens["exact"][0]), len(tokens[KL])
        for begin in range((offset + first) // step * step, offset + count, step):
            low, high = max(begin - offset, first), min(begin + step - offset, count)
            if low < high:
                cell = means.setdefault(begin, {name: [] for name in COLUMNS})
                for name in COLUMNS:
                    cell[name].append(fmean(tokens[name][low:high]))
    return {begin: {name: _mean(name, values) for name, values in means[begin].items()} for begin in sorted(means)}


def _mean(column: str, values: Sequence[float]) -> Estimate:
    """Mean of the samples' values in one bin.

    They are means over tokens and no answers of yes or no, so where none differs there is no interval.
    """
    if len(set(values)) == 1:
        return Estimate(value=values[0], num_samples=len(values))
    return estimate({"": values}, bounds=(0.0, 1.0 if column == SAME else math.inf))


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
        values = [v for curve in drawing.curves for b in curve.bins.values() if (v := b[column].value) is not None]
        if column == KL or (column == NLL and max(values) - min(values) > math.log(10)):
            axes.set_yscale("log")  # its numbers are plain text: pictures read no formulas
            axes.yaxis.set_major_formatter(lambda value, position: f"{value:g}")
            axes.yaxis.set_minor_formatter(lambda value, position: "")
        if column == KL:
            middles = [first + drawing.width / 2 for first in drawing.band]
            tops = [max(high, FLOOR) for high in drawing.band.values()]
            axes.fill_between(middles, FLOOR, tops, color=GREY, alpha=0.3, linewidth=0, zorder=1)
            marked = "marked: it leaves the noise for good" if drawing.judged else "too few samples"
            axes.set_title(f"grey: noise; {marked}", fontsize=7, loc="right")
        # Intervals of few answers can reach over hundreds of decades, and would press the curves flat.
        least, most = min(map(shown, values)), max(map(shown, values))
        across = most - least or most
        room = (least / 10, most * 10) if axes.get_yscale() == "log" else (least - across, most + across)
        seen: dict[str, int] = {}
        for curve in drawing.curves:  # several runs of a method differ in the kind of line
            index = seen[curve.run.method] = seen.get(curve.run.method, -1) + 1
            _draw_curve(axes, curve, drawing.width, column, shown, STYLES[index % len(STYLES)], room)
        axes.set_ylabel(title, fontsize=7)
        axes.grid(color="#EEEEEE", linewidth=0.6)
    axes.set_xlabel(drawing.axis)
    axes.set_xlim(left=min(drawing.band))
    legend_below(made, 7)
    return made


def _draw_curve(
    axes: "Axes",
    curve: Curve,
    width: int,
    column: str,
    shown: Callable[[float], float],
    line: str,
    room: tuple[float, float],
) -> None:
    """One run: its line, its interval as a shade as far as there is room, and a marker where it leaves the noise."""
    colour, marker = method_style(curve.run.method)
    values_at = {first + width / 2: values[column] for first, values in curve.bins.items()}
    points = {middle: shown(one.value) for middle, one in values_at.items() if one.value is not None}
    name = f"{curve.run.label} (prompt only)" if curve.prompt_only else curve.run.label
    axes.plot(list(points), list(points.values()), color=colour, linestyle=line, linewidth=1.1, label=name, zorder=3)
    if curve.run.method != FULL:
        gap = (math.nan, math.nan)  # no shade where a bin has no interval
        low, high = zip(*(map(shown, values_at[middle].ends or gap) for middle in points), strict=True)
        bottom, top = ([min(max(one, room[0]), room[1]) if one == one else one for one in side] for side in (low, high))
        axes.fill_between(list(points), bottom, top, color=colour, alpha=0.15, linewidth=0, zorder=2)
        if any(one < room[0] for one in low) or any(one > room[1] for one in high):
            axes.set_title("intervals are cut", fontsize=7, loc="left")
    if column == KL and curve.leaves is not None:
        middle = curve.leaves + width / 2
        style: dict[str, Any] = {"color": colour, "markersize": 6, "markeredgecolor": "black", "zorder": 4}
        axes.plot(middle, points[middle], marker=marker, **style)


def texts(drawing: Drawing) -> list[Part]:
    """The curves as a table, where each run leaves the noise band, and notes."""

    def cell(values: Mapping[str, Estimate] | None) -> str:
        kl, same = (values[KL].value, values[SAME].value) if values else (None, None)
        return f"{kl:.2g} ({100 * same:.0f})" if kl is not None and same is not None else "-"

    title = f"{drawing.title}: KL to the full cache, nats per token (same first choice, %)"
    bins = [f"{first + 1}-{first + drawing.width}" for first in drawing.band]
    columns = [(curve.run.label, [cell(curve.bins.get(first)) for first in drawing.band]) for curve in drawing.curves]
    columns.append(("noise", [f"{high:.2g}" for high in drawing.band.values()]))
    parts: list[Part] = [Grid(title=title, heading=drawing.axis, names=bins, columns=columns, breaks=True)]
    for curve in drawing.curves:
        if curve.run.method == FULL:
            continue
        where = "does not leave the noise for good" if curve.leaves is None else f"leaves it at {curve.leaves + 1}"
        whole = " (it compresses the prompt alone, and keeps all that follows whole)" if curve.prompt_only else ""
        said = where if drawing.judged else "cannot be judged: too few samples"
        parts.append(Text(f"{curve.run.label}{whole} {said}"))
    return [*parts, *notes(drawing.notes), Text()]


def records(drawing: Drawing) -> Iterator[dict[str, Cell]]:
    """Every bin of every curve, unrounded, with 95 % intervals."""
    for curve in drawing.curves:
        leaves = None if curve.leaves is None else curve.leaves + 1
        for first, column in [(first, column) for first in curve.bins for column in COLUMNS]:
            estimate = curve.bins[first][column]
            yield (
                csv_row(group=drawing.title, run=curve.run.label, metric=column, first_token=first + 1)
                | csv_row(last_token=first + drawing.width, n=estimate.num_samples, value=estimate.value)
                | csv_row(low=estimate.low, high=estimate.high)
                | csv_row(noise_kl=drawing.band[first] if column == KL else None, leaves_at=leaves)
            )


def _width(cfg: DictConfig) -> int | None:
    return None if cfg.width is None else check_whole("width", cfg.width, 1, ", or null")


def compute(groups: Sequence[Group], cfg: DictConfig) -> ViewResult:
    """The curves of all groups; raises ValueError where no run has measurements of every token."""
    several = [drawing for group in groups if (drawing := drawing_of(group, _width(cfg))) is not None]
    if not several:
        raise NoResults(
            f"no run under results_dir={cfg.results_dir} that fits the filters says what was measured of every token; "
            "`python -m kvbench task=drift` or `task=stream` makes one, and so does any task with "
            "fidelity.per_token=true"
        )
    tolerance = "noise: the full cache beside itself (upper end of its interval), 0.0025 nats at least. "
    rule = "A method leaves it at the first bin from which on the lower end of its interval stays above."
    return ViewResult(
        parts=[*(part for drawing in several for part in texts(drawing)), line(tolerance + rule, style="dim")],
        frame=frame_of(record for drawing in several for record in records(drawing)),
        figures=[(drawing.title, "", partial(drawn, partial(figure, drawing), style=STYLE)) for drawing in several],
    )


main = View(name="drift", compute=compute, check=_width, width=100)
