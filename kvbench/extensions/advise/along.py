"""Picture of `bytes`: held bytes along an answer, and bytes read per step by methods that select."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvbench.cache.layout import ModelShape
from kvbench.cache.options import StoreOptions
from kvbench.policy import Policy
from kvbench.show.picture import STYLES, drawn, method_style, name_points, width_in
from kvbench.show.progress import format_bytes
from kvbench.sizing.project import project
from kvbench.sizing.projection import is_one_number
from kvbench.sizing.shadow import fill_prompt, shadow_step, shadow_store

if TYPE_CHECKING:
    from matplotlib.figure import Figure

POINTS = 40  # of a line, about; lengths between them are not counted
PERIOD = 16  # pages hold a multiple of as many tokens, and points apart by as many meet them equally full
SIZE = 8.0  # of words, in points
PANEL_IN, LEFT_IN, BELOW_IN, ABOVE_IN = (4.2, 2.9), 0.85, 0.5, 0.3  # width and height of the panel, and around it


@dataclass(frozen=True, kw_only=True)
class Line:
    """Bytes over the tokens of an answer.

    Args:
        name: Label at its end.
        method: The method, for its colour.
        tokens: Tokens of the answer at each point.
        counts: Bytes at each point.
        is_read: They are read in the step that writes the last of the tokens, and not held.
    """

    name: str
    method: str
    tokens: Sequence[int]
    counts: Sequence[float]
    is_read: bool = False


def lines_of(name: str, policy: Policy, shape: ModelShape, prompt: int, answer: int, store: StoreOptions) -> list[Line]:
    """Lines of a method after a prompt of `prompt` tokens: its bytes held, and read per step where it selects pages.

    Held bytes are the least and the most, where the text decides. Page tables are those of an answer that ends there.
    """
    method = name.split()[0]
    apart = -(-answer // POINTS)
    apart = apart if 2 * apart <= PERIOD else -(-apart // PERIOD) * PERIOD
    tokens = [*range(0, answer, apart), answer]
    both = [project(policy, shape, prompt, count, store) for count in tokens]
    parts = [("", [most for _, most in both])]
    if not all(is_one_number(*pair) for pair in both):
        parts = [(", at least", [least for least, _ in both]), (", at most", parts[0][1])]
    lines = [
        Line(name=name + words, method=method, tokens=tokens, counts=[each.resident_bytes for each in sizes])
        for words, sizes in parts
    ]
    if policy.reading is not None:
        counts = reads_of(policy, shape, prompt, answer, store)
        at = [count for count in tokens if count]
        each = [counts[count - 1] for count in at]
        lines.append(Line(name=f"{name}, read in a step", method=method, tokens=at, counts=each, is_read=True))
    return lines


def reads_of(policy: Policy, shape: ModelShape, prompt: int, answer: int, store: StoreOptions) -> list[float]:
    """Bytes of slots and bounds that each step of an answer reads, of a method that chooses."""
    shadow = shadow_store(policy, shape, prompt, answer, store, is_even=True)
    row = shadow.open_row()
    fill_prompt(shadow, row, prompt)
    reads, before = list[float](), 0.0
    for _ in range(answer):
        shadow_step(shadow, [row])
        shadow.ledger.report(row)  # takes what was counted
        read = shadow.ledger.meters[row].read_bytes
        reads.append(read - before)
        before = read
    return reads


def render(lines: Sequence[Line], prompt: int, batch: int, title: str, kind: str) -> bytes:
    """The picture as `png`, `svg` or `pdf`: all lines in one panel, each named at its end."""

    def figure() -> "Figure":
        from matplotlib.figure import Figure
        from matplotlib.ticker import FuncFormatter

        names_in = 0.25 + max(width_in(line.name, SIZE) for line in lines)
        across, tall = PANEL_IN
        width, height = LEFT_IN + across + names_in, BELOW_IN + tall + ABOVE_IN
        made = Figure(figsize=(width, height), dpi=150)
        axes = made.add_axes((LEFT_IN / width, BELOW_IN / height, across / width, tall / height))
        before, ends = Counter[str](), []
        for index, line in enumerate(lines):
            colour, _ = method_style(line.method)
            style = STYLES[before[line.method] % len(STYLES)]
            before[line.method] += 1
            counts = [batch * count for count in line.counts]
            wide = 1.1 + 1.6 * (1 - (index + 1) / len(lines))  # earlier lines show under later ones
            axes.plot(line.tokens, counts, color=colour, linestyle=":" if line.is_read else style, linewidth=wide)
            ends.append((line.name, (line.tokens[-1], counts[-1]), colour))
        axes.set(xlim=(0, max(line.tokens[-1] for line in lines)))
        axes.set_ylim(bottom=0)
        axes.set_xlabel(f"tokens of the answer, behind a prompt of {prompt}", fontsize=SIZE)
        axes.set_ylabel("bytes" + (f" of {batch} sequences" if batch > 1 else ""), fontsize=SIZE)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_bytes(value)))
        axes.tick_params(labelsize=SIZE)
        axes.grid(alpha=0.3)
        axes.set_title(title, fontsize=SIZE + 1, loc="left")
        name_points(axes, ends, tall, SIZE)
        return made

    return drawn(figure, kind, {})
