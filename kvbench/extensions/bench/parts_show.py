"""The table and the picture of `bench what=parts`: the share of each part in a prompt's time and in a step's."""

from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from kvbench.show.picture import share_bars

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SAID = (
    "Shares are means over rounds of what the calls of a part took themselves. The clock costs: how much longer the "
    "same work took with it, in the same rounds."
)


def _rows(cells: Sequence[dict]) -> Iterator[tuple[dict, dict]]:
    return ((cell["cell"], row) for cell in cells for row in cell["variants"] if "parts" in row and "versus" in row)


def table(cells: Sequence[dict]) -> tuple[list[str], list[list[str]]]:
    """Headings and lines: one for each method and phase."""
    names = list(dict.fromkeys(name for _, row in _rows(cells) for name in row["parts"]))
    lines = []
    for cell, row in _rows(cells):
        steps = row.get("tokens_per_call", cell["batch"]) // cell["batch"]
        took = 1e3 * row["median"] / steps
        shares = [f"{100 * fmean(row['parts'][name]):.1f}" for name in names]
        cost = 100 * (1 / row["versus"]["median"] - 1)
        lines.append([cell["phase"], row["versus"]["name"], f"{took:.3g}", *shares, f"{cost:+.0f} %"])
    return ["phase", "method", "ms", *(f"{name}, %" for name in names), "the clock costs"], lines


def remarks(_: dict) -> list[str]:
    """No remarks."""
    return []


def title(document: dict) -> str:
    """Title with model, number of tokens, and machine."""
    settings, where = document["settings"], document["environment"]
    sizes = f"prompts of {settings['context']:,} tokens, and steps behind them with batch {settings['batch']}"
    return f"{document['model']['name']}, {sizes},\non {where['device_name']} (backend {where['backend']})"


def figure(document: dict) -> "Figure":
    """A stacked bar of parts for each method and phase."""
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    rows = [
        (f"{cell['phase']}: {row['versus']['name']}", {name: fmean(each) for name, each in row["parts"].items()})
        for cell, row in _rows(document["cells"])
    ]
    with mpl.rc_context({"font.size": 7}):
        made = share_bars(rows, "rest", "% of the time")
        made.suptitle(title(document))
    FigureCanvasAgg(made)
    return made
