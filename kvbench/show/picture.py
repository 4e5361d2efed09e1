"""The one way from a matplotlib figure to the bytes of a file: every text in it is drawn as it is."""

import io
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from kvbench.show.text import visible

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# What a file would say of the program and the day is left out: the same results give the same bytes.
METADATA: dict[str, dict[str, Any]] = {"png": {"Software": None}, "svg": {"Date": None, "Creator": None}}
METADATA["pdf"] = {"CreationDate": None, "Creator": None, "Producer": None}

PLAIN: dict[Any, Any] = {"font.family": "DejaVu Sans", "svg.hashsalt": "kvbench", "svg.fonttype": "path"}


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


def picture_bytes(figure: "Figure", kind: str, **options: Any) -> bytes:
    """Draw a figure, which has its canvas, as `png`, `svg` or `pdf`, with further options of `savefig`.

    No text is a formula: a dollar in a name is a dollar. What no font can show becomes a question mark.
    """
    import matplotlib as mpl
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        assert isinstance(text, Text)
        text.set_parse_math(False)
        if (shown := visible(text.get_text())) != text.get_text():
            text.set_text(shown)
        if "$" in shown:
            text.set_wrap(False)  # to measure a line, matplotlib takes it for a formula all the same
    buffer = io.BytesIO()
    with mpl.rc_context({"text.parse_math": False}):  # of the texts that are made while it is drawn
        figure.savefig(buffer, format=kind, **{"metadata": METADATA[kind]} | options)
    return buffer.getvalue()
