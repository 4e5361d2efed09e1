"""The colours, markers and hatches of all pictures, and the one way from a figure to the bytes of a file.

Okabe and Ito's palette, with black for its yellow, which is invisible on white: distinguishable with every kind of
colour blindness. Markers, lines and hatches repeat it in black and white. Text in a picture is drawn literally.
"""

import io
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from zlib import crc32

from kvbench.config.files import FULL
from kvbench.show.text import visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.transforms import Bbox

BLUE, ORANGE, GREEN, PINK = "#0072B2", "#E69F00", "#009E73", "#CC79A7"
SKY, VERMILION, BLACK, GREY = "#56B4E9", "#D55E00", "#000000", "#999999"

# In pictures of few runs and in bars.
COLOURS = (BLUE, ORANGE, GREEN, PINK, SKY, VERMILION, BLACK, GREY)
MARKERS = ("s", "o", "^", "D", "v", "P", "X", "*")
HATCHES = ("", "//", "..", "\\\\", "xx", "--", "oo", "")
STYLES = ("-", "--", ":")

# Of methods, whose names always stand at their lines: Okabe and Ito's strongest, then darker ones.
PURPLE, BROWN, OLIVE, TEAL, CRIMSON = "#5E3C99", "#7A4A12", "#7A7A00", "#01665E", "#B2182B"
METHOD_COLOURS = (BLUE, VERMILION, GREEN, PINK, ORANGE, SKY, PURPLE, BROWN, OLIVE, TEAL, CRIMSON, GREY)
METHOD_MARKERS = ("o", "s", "^", "D", "v", "P", "X")

# The methods of this repository: those that are drawn together most often come first and have a colour of their own;
# those of the second row share it with a method of their kind, under another marker. A method from elsewhere takes its
# place by its name.
METHODS = (
    *("snapkv", "kivi", "h2o", "diffkv", "streaming_llm", "quest"),
    *("pyramidkv", "minikv", "ada_snapkv", "int4", "tova", "random"),
    *("kv_compress", "kvquant_style", "scissorhands", "diffkv_artifact", "duo_attention", "knorm"),
    *("ada_pyramidkv", "fp8", "leankv", "int8", "h2o_factory", "keydiff"),
    *("expected_attention", "chunkkv", "critical", "kvzip", "r_kv", "vatp"),
    *("lagkv", "cake", "headkv", "turboquant_4bit", "triattention", "keyformer"),
    *("simlayerkv", "dms", "fastgen", "pyramid_infer", "q_hitter", "zipcache"),
    *("random_trace", "kvpress", "nvfp4", "fp8_per_token_head", "turboquant_3bit", "int8_per_token_head"),
    *("turboquant_k8v4", "think", "kvquant"),
)
FULL_STYLE = (BLACK, "*")


def method_style(method: str) -> tuple[str, str]:
    """Colour and marker of a method: the same in every picture, and of this repository's methods its alone."""
    if method == FULL:
        return FULL_STYLE
    count = len(METHOD_COLOURS)
    num_known = len(METHODS)  # a method from elsewhere has no marker and colour of one from here
    rest = count * len(METHOD_MARKERS) - num_known
    index = METHODS.index(method) if method in METHODS else num_known + crc32(method.encode(errors="replace")) % rest
    row, column = divmod(index, count)
    return METHOD_COLOURS[column], METHOD_MARKERS[row]


# The items of the byte ledger, each with its own colour in every picture and on the report's page, there or not.
ITEMS = (
    *("payload_bytes", "quant_meta_bytes", "track_bytes", "slack_bytes", "residual_bytes", "residual_slack_bytes"),
    *("free_list_bytes", "table_bytes", "book_bytes", "window_bytes", "state_bytes"),
)
ITEM_COLOURS = (*COLOURS, PURPLE, BROWN, TEAL)


def item_index(name: str) -> int:
    """Index in `ITEM_COLOURS`, and modulo their number in `HATCHES`, of an item of the ledger, as `slack_bytes` is."""
    return ITEMS.index(name) if name in ITEMS else crc32(name.encode(errors="replace")) % len(COLOURS)


# Program and date are left out of a file: the same results give the same bytes.
METADATA: dict[str, dict[str, Any]] = {"png": {"Software": None}, "svg": {"Date": None, "Creator": None}}
METADATA["pdf"] = {"CreationDate": None, "Creator": None, "Producer": None}

PLAIN: dict[Any, Any] = {"font.family": "DejaVu Sans", "svg.hashsalt": "kvbench", "svg.fonttype": "path"}

LINE_HEIGHT = 1.3  # of a name next to a panel, in sizes of its text
NAMES_LEFT = 1.035  # where names next to a panel begin, in widths of the panel
_heading = ""  # of this process's pictures: what `headed` was given


@contextmanager
def headed(text: str) -> Iterator[None]:
    """Write a text above every picture that is drawn meanwhile."""
    global _heading
    before, _heading = _heading, text
    try:
        yield
    finally:
        _heading = before


def spread(wanted: Sequence[float], gap: float) -> list[float]:
    """Move heights of labels apart as little as a simple pass can, inside [0, 1], in the same order.

    Two are closer than `gap` only when they cannot all have it.
    """
    order = sorted(range(len(wanted)), key=lambda index: wanted[index])
    gap = min(gap, 1 / max(1, len(wanted) - 1))
    result = [min(1.0, max(0.0, height)) for height in wanted]
    for below, above in zip(order, order[1:], strict=False):
        result[above] = max(result[above], result[below] + gap)
    if order and result[order[-1]] > 1.0:
        result[order[-1]] = 1.0
        for above, below in zip(order[::-1], order[-2::-1], strict=False):
            result[below] = min(result[below], result[above] - gap)
    return result


def name_points(
    axes: "Axes", ends: "Sequence[tuple[str, tuple[float, float], str]]", panel_in: float, size: float
) -> None:
    """Write names in a column right of a panel, none over another, each tied to its point by a thin line.

    Args:
        ends: Of each name its text, the point it belongs to in data units, and its colour.
        panel_in: Height of the panel, in inches.
        size: Size of the text, in points.
    """
    ends = sorted(ends, key=lambda end: -end[1][0])  # of points at one height the nearest is lowest: no lines cross
    to_axes = axes.transData + axes.transAxes.inverted()
    heights = [to_axes.transform(point)[1] for _, point, _ in ends]
    gap = LINE_HEIGHT * size / 72 / panel_in
    tie: dict[str, Any] = {"arrowstyle": "-", "linewidth": 0.5, "alpha": 0.6, "shrinkA": 1, "shrinkB": 3}
    for (text, point, colour), height in zip(ends, spread(heights, gap), strict=True):
        axes.annotate(
            text,
            point,
            xytext=(NAMES_LEFT, height),
            textcoords="axes fraction",
            va="center",
            ha="left",
            fontsize=size,
            color=colour,
            annotation_clip=False,
            arrowprops=tie | {"color": colour, "relpos": (0, 0.5)},
        )


def width_in(name: str, size: float) -> float:
    """The width of a name in points of a size, in inches."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath

    return TextPath((0, 0), name.replace("$", r"\$"), prop=FontProperties(size=size)).get_extents().width / 72


def legend_below(figure: "Figure", size: float) -> None:
    """Put one legend of all panels below a picture, in points of a size: each name once, in as many columns as fit."""
    handles: dict[str, Any] = {}
    for panel in figure.axes:
        for handle, name in zip(*panel.get_legend_handles_labels(), strict=True):
            handles.setdefault(name, handle)
    line_in = 4.5 * size / 72  # a line before a name, and the room around both
    columns = int(figure.get_figwidth() / (line_in + max((width_in(name, size) for name in handles), default=0.0)))
    where: dict[str, Any] = {"loc": "outside lower center", "ncols": max(1, columns)}
    figure.legend(list(handles.values()), list(handles), frameon=False, fontsize=size, **where)


def share_bars(rows: "Sequence[tuple[str, Mapping[str, float]]]", last: str, what: str) -> "Figure":
    """Stacked horizontal bars of shares, one for each row.

    Args:
        rows: Of each row its name, and name of a part -> its share of the row, in [0, 1].
        last: The part that stands in grey at the right.
        what: Noun that the shares are of.
    """
    from matplotlib.figure import Figure

    made = Figure(figsize=(6.4, 0.9 + 0.24 * len(rows)), dpi=200, layout="constrained")
    axes, left = made.subplots(), [0.0] * len(rows)
    names = [*dict.fromkeys(name for _, parts in rows for name in parts if name != last), last]
    for index, name in enumerate(names):
        widths = [100 * parts.get(name, 0.0) for _, parts in rows]
        colour = GREY if name == last else COLOURS[index % len(COLOURS)]
        axes.barh(range(len(rows)), widths, left=left, color=colour, label=name, edgecolor="white", lw=0.4)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.set(yticks=range(len(rows)), yticklabels=[name for name, _ in rows], xlim=(0, 100), xlabel=what)
    axes.invert_yaxis()
    made.legend(loc="outside lower center", ncols=7, frameon=False, columnspacing=1, handlelength=1)
    return made


def drawn(make: "Callable[[], Figure]", kind: str, style: Mapping[Any, Any], **options: Any) -> bytes:
    """Draw a figure in a style of matplotlib, to which font and file format of all pictures are added.

    The same results give the same bytes on the same matplotlib. Kind and options are those of `picture_bytes`.
    """
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    with mpl.rc_context({**PLAIN, **style}):
        figure = make()
        FigureCanvasAgg(figure)
        return picture_bytes(figure, kind, **options)


def lay_out(figure: "Figure") -> None:
    """Lay out a figure, which has its canvas, as it will be drawn."""
    import matplotlib as mpl

    _write_plainly(figure)
    with mpl.rc_context({"text.parse_math": False}):
        figure.draw_without_rendering()


def _write_plainly(figure: "Figure") -> None:
    """Make every text literal, with a question mark for characters that no font has."""
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        assert isinstance(text, Text)
        text.set_parse_math(False)
        if (shown := visible(text.get_text())) != text.get_text():
            text.set_text(shown)
        if "$" in shown:
            text.set_wrap(False)  # to measure a line, matplotlib takes it for a formula all the same


def picture_bytes(figure: "Figure", kind: str, **options: Any) -> bytes:
    """Draw a figure, which has its canvas, as `png`, `svg` or `pdf`, with further options of `savefig`.

    No text is a formula: a dollar in a name is a dollar. A character that no font has becomes a question mark.
    """
    import matplotlib as mpl

    if _heading:
        options = {"bbox_inches": _with_heading(figure)} | options
    _write_plainly(figure)
    buffer = io.BytesIO()
    with mpl.rc_context({"text.parse_math": False}):  # of the texts that are made while it is drawn
        figure.savefig(buffer, format=kind, **{"metadata": METADATA[kind]} | options)
    return buffer.getvalue()


def _with_heading(figure: "Figure", size: float = 7) -> "Bbox":
    """Put the heading above what a figure shows, in points of a size; the figure with it, in inches."""
    from matplotlib.transforms import Bbox

    width, height = figure.get_size_inches()
    lines = textwrap.wrap(_heading, max(20, int(width * 72 / (0.56 * size))), break_on_hyphens=False)
    figure.text(0.01, 1, "\n".join(lines), fontsize=size, va="bottom", ha="left", style="italic", in_layout=False)
    return Bbox.from_bounds(0, 0, width, height + (LINE_HEIGHT * len(lines) + 0.6) * size / 72)
