"""The table and the picture of `bench what=capacity`: the most sequences and the longest prompt over memory."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvbench.show.picture import COLOURS, MARKERS, legend_below
from kvbench.show.progress import format_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SAID = (
    "Counted: by the store's own counting, without memory; - = attention decides what is kept. Tried: a real cache was "
    "filled with real prompts until no page was left; + = as far as was tried. Nobody counts beyond a million tokens."
)
SIZE = 9  # of the text, in points
LONGEST = "longest that was tried"
PANELS = (("sequences at once", "batch"), ("tokens of the longest prompt", "prompt"))


def table(cells: Sequence[dict]) -> tuple[list[str], list[list[str]]]:
    """Headings and lines: one for each method and memory."""
    headings = ["memory", "method", "a sequence"]
    headings += [f"{what}, {how}" for what in ("sequences", "longest prompt") for how in ("counted", "tried")]
    lines = []
    for cell in cells:
        for row in cell["variants"]:
            line = [f"{cell['cell']['kv_mb']} MB", row["name"], format_bytes(row["sequence_bytes"])]
            for _, key in PANELS:
                tried, last = row[f"tried_{key}"], key == "prompt" and row[f"tried_{key}"] == row["longest"]
                line += [_number(row[f"counted_{key}"]), _number(tried) + "+" * last]
            lines.append(line)
    return headings, lines


def _number(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def figure(document: dict) -> "Figure":
    """Both over memory: lines are counted, points were tried. Where methods coincide, each leaves a ring."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, NullFormatter

    cells, settings = [cell for cell in document["cells"] if cell["variants"]], document["settings"]
    names = list(dict.fromkeys(row["name"] for cell in cells for row in cell["variants"]))
    made = Figure(figsize=(10.0, 4.6), dpi=150, layout="constrained")
    FigureCanvasAgg(made)
    for axes, (label, key) in zip(made.subplots(1, 2), PANELS, strict=True):
        for index, name in enumerate(names):
            points = [(cell["cell"]["kv_mb"], row) for cell in cells for row in cell["variants"] if row["name"] == name]
            known = [(mb, row[f"counted_{key}"]) for mb, row in points if row[f"counted_{key}"]]
            colour, behind = COLOURS[index % len(COLOURS)], len(names) - 1 - index
            style = {"color": colour, "marker": MARKERS[index % len(MARKERS)], "linewidth": 1.2}
            style |= {"markersize": 4 + 1.3 * behind, "markeredgecolor": "white", "markeredgewidth": 0.4}
            axes.plot([mb for mb, _ in known], [value for _, value in known], **style | {"marker": ""})
            tried = [(mb, row[f"tried_{key}"]) for mb, row in points if row[f"tried_{key}"]]
            axes.plot([mb for mb, _ in tried], [value for _, value in tried], **style | {"linestyle": "none"})
            axes.plot([], [], **style, label=name)
        if key == "prompt" and any(row["tried_prompt"] for cell in cells for row in cell["variants"]):
            axes.axhline(settings["longest"], color="black", linestyle="--", linewidth=1.0, label=LONGEST)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_xticks([cell["cell"]["kv_mb"] for cell in cells])
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
            axis.set_minor_formatter(NullFormatter())
        axes.set_xlabel("MB of KV memory", fontsize=SIZE)
        axes.set_ylabel(label, fontsize=SIZE)
        axes.grid(alpha=0.3)
        axes.tick_params(labelsize=8)
    legend_below(made, SIZE)
    made.suptitle(f"{title(document)}\nlines are counted, points were tried", fontsize=11)
    return made


def remarks(_: dict) -> list[str]:
    """No remarks."""
    return []


def title(document: dict) -> str:
    """Title: the model, and the tokens of a counted sequence."""
    settings = document["settings"]
    model = settings["shape"] or document["model"]["name"]
    return f"{model}: sequences of {settings['context']:,} + {settings['new_tokens']:,} tokens, and the longest prompt"
