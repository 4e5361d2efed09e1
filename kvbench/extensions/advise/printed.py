"""Notes of `kvbench advise` on evidence of others.

The repository's studies, their validity for an unmeasured model, and papers' numbers.
"""

import math
from collections import Counter
from collections.abc import Sequence

from rich.text import Text

from kvbench.extensions.advise import shipped
from kvbench.extensions.advise.advice import Advice, Target
from kvbench.extensions.papers import published
from kvbench.show import terminal
from kvbench.show.progress import format_bytes
from kvbench.show.terminal import number
from kvbench.show.text import safe

PRINTED = 8  # rows of what papers print


def studies(ranked: Sequence[Advice]) -> list[str]:
    """Name the repository's studies whose losses are in the table: folder, task and number of samples."""
    shown = [item.worst for item in ranked if item.worst and item.worst.study]
    named = Counter(f"{one.study} ({one.task} with {one.model}, n={one.num_samples})" for one in shown)
    each = "; ".join(f"{count} from {name}" for name, count in named.items())
    return [f"Rows of the studies: {each}."] if each else []


def carried(ranked: Sequence[Advice], target: Target, metric: str) -> list[str]:
    """State which results of the studies of other models apply to an unmeasured one, and which do not.

    Their common order of the methods, and how far one method's losses differ.
    """
    every = [quality for item in ranked for quality in item.quality]
    if any(quality.same_model for quality in every) or not any(quality.study for quality in every):
        return []
    name = target.shape.name
    lines = [f"Nothing was measured on {name}. What may carry over is which method loses less, as far as others agree:"]
    lines += [
        f"  {order.places[0]} and {order.places[1]}: rank correlation {order.correlation:+.2f} [{order.low:+.2f}, "
        f"{order.high:+.2f}], {order.num_methods} methods ({order.runs})"
        for order in shipped.orders(metric)
    ] or ["  nobody measured whether two models agree."]
    each = {item.label: sorted((one for one in item.quality if one.study), key=lambda one: one.lost) for item in ranked}
    label = max(each, key=lambda one: each[one][-1].lost - each[one][0].lost if each[one] else 0.0)
    if len(entries := each[label]) > 1:
        texts = [
            f"{number(one.lost, one.scale, True)} on {one.task} with {one.model}" for one in (entries[0], entries[-1])
        ]
        lines.append(f"How much it loses does not: {safe(label)} loses {texts[0]}, and {texts[1]} ({entries[0].unit}).")
    return lines


def show_printed(target: Target, metric: str) -> None:
    """Print papers' numbers for the target model, as far as they fit memory and margin."""
    losses = [] if metric != "score" else published.losses(target.shape.name)
    if not losses:
        return
    fp16 = target.batch * target.shape.store_shape.fp16_bytes(target.context_tokens)
    limit = math.inf if target.memory_bytes is None else target.memory_bytes
    fits = [one for one in losses if one.memory_pct / 100 * fp16 <= limit and one.lost <= target.margin]
    best = {one.method: one for one in sorted(fits, key=lambda one: (-one.num_tasks, one.memory_pct), reverse=True)}
    console = terminal.console(80)
    console.print()
    if best:
        table = terminal.plain_table(f"Printed by papers for {safe(losses[0].model)}, within memory and margin")
        for heading in ("method", "variant", "place"):
            table.add_column(heading, overflow="fold")
        for heading in ("caches", "%", "most lost", "tasks"):
            table.add_column(heading, justify="right", no_wrap=True)
        for one in list(best.values())[::-1][:PRINTED]:
            size = format_bytes(one.memory_pct / 100 * fp16)
            locator = f"{one.paper}, {one.locator}"
            table.add_row(
                one.method,
                one.variant,
                locator,
                size,
                f"{one.memory_pct:g}",
                f"{100 * one.lost:+.1f}",
                str(one.num_tasks),
            )
        console.print(table)
    else:
        console.print(Text(f"Of {len(losses)} settings that papers print for {safe(losses[0].model)}, none fits."))
    words = f"kvbench report view=published 'models=[{losses[0].model}]'"
    console.print(Text(f"{published.NOTE} No interval is printed. All of them: {words}", style="dim"))
