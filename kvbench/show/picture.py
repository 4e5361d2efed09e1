"""The one way from a matplotlib figure to the bytes of a file: every text in it is drawn as it is."""

import io
from typing import TYPE_CHECKING, Any

from kvbench.show.text import visible

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# What a file would say of the program and the day is left out: the same results give the same bytes.
METADATA: dict[str, dict[str, Any]] = {"png": {"Software": None}, "svg": {"Date": None, "Creator": None}}
METADATA["pdf"] = {"CreationDate": None, "Creator": None, "Producer": None}


def picture_bytes(figure: "Figure", kind: str, **options: Any) -> bytes:
    """Draw a figure.

    No text is a formula: a dollar in a name is a dollar. What no font can show becomes a question mark.

    Args:
        figure: Has its canvas.
        kind: `png`, `svg` or `pdf`.
        options: Further ones of `savefig`.
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
