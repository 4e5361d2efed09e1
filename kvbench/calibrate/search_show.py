"""What a search prints and writes."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from rich.text import Text

from kvbench.calibrate.by_hand import STORED
from kvbench.calibrate.search_verdict import BETTER, Judged
from kvbench.calibrate.tried import Tried, Wanted
from kvbench.config.settings import as_dict
from kvbench.evidence.pareto import quality_text
from kvbench.results.measures import LOSSES, RESIDENT
from kvbench.results.writing import plain, write_atomic
from kvbench.show import terminal
from kvbench.show.terminal import number
from kvbench.show.text import LINE_LENGTH, safe


def write(folder: Path, wanted: Wanted, tried: Sequence[Tried], judged: Judged, origin: str) -> list[Path]:
    """Write `search.json`: every setting that was tried, the held-out points, and the verdict.

    Args:
        folder: The search's folder.
        wanted: What was asked for.
        tried: What was measured on the tuning samples.
        judged: What the held-out samples say.
        origin: Where the settings made by hand are from.
    """
    criterion = wanted.plan.rule.criterion
    points = judged.panel.points if judged.panel else []
    content = {
        "search": as_dict(wanted.cfg),
        "by_hand": origin,
        "verdict": verdict(judged, origin, wanted),
        "tried": [
            {
                "method": item.method,
                "settings": item.settings,
                "hash": item.measured.hash,
                "bytes_ratio": item.bytes_ratio,
                "loss": dataclasses.asdict(item.measured.losses[criterion]),
            }
            for item in tried
        ],
        "held_out": [
            {
                "point": point.label,
                "found": point.key in judged.found,
                "bytes_ratio": point.costs[RESIDENT.name].value,
                "quality": point.quality,
                "interval": point.interval,
            }
            for point in points
        ],
    }
    path = folder / "search.json"
    write_atomic(path, json.dumps(plain(content), indent=2).encode("ascii") + b"\n")
    return [path, folder / "study.log"]


def verdict(judged: Judged, origin: str, wanted: Wanted) -> list[str]:
    """What was found, in sentences."""
    if judged.panel is None:
        return ["nothing could be judged: no setting ended well on the held-out samples"]
    what, count = judged.panel.what, judged.panel.num_samples
    made = "the stored runs' settings" if origin == STORED else "the shipped settings (no run of this task is stored)"
    lines = []
    for item in judged.beyond:
        mine, theirs = (100 * point.costs[RESIDENT.name].value for point in (item.found, item.hand))
        gain = number(abs(item.gain), what.scale)
        how = (
            f"loses {gain} {what.unit} less (p < 0.05, Holm)"
            if item.how == BETTER
            else f"loses no more than {number(judged.panel.margin, what.scale)} {what.unit} more (95 % interval)"
        )
        lines.append(
            f"beyond: {item.found.label} holds {mine:.1f} % where {item.hand.label} holds {theirs:.1f} %; it {how}"
        )
    if not judged.beyond:
        lines.append(f"found no point that is proven beyond {made}, on {count} held-out samples")
    else:
        lines.insert(0, f"found points beyond {made}, on {count} held-out samples that took no part in the search:")
    if judged.maybe:
        named = "; ".join(point.label for point in judged.maybe)
        lines.append(
            f"better by the estimates alone, which can be chance: {named}; more search.held_out_samples would tell"
        )
    return lines


def show(
    wanted: Wanted, tried: Sequence[Tried], judged: Judged, origin: str, task: str, model: str, paths: Sequence[Path]
) -> None:
    """Print the held-out table, the cheapest first, and the verdict."""
    console = terminal.console(80)
    criterion = wanted.plan.rule.criterion
    methods = len({item.method for item in tried})
    console.print(Text(f"\nTried {len(tried)} settings of {methods} methods on {task} with {model}."))
    if judged.panel is not None:
        what = judged.panel.what
        table = terminal.plain_table(f"Held out: {judged.panel.num_samples} samples, difference to full")
        terminal.add_names(table, "settings", [point.label for point in judged.panel.points])
        for heading in ("by", "% of FP16", f"{what.short}, {what.unit}"):
            table.add_column(heading, justify="right", no_wrap=True)
        for point in sorted(judged.panel.points, key=lambda one: one.costs[RESIDENT.name].value):
            by = "search" if point.key in judged.found else "-" if point.key == judged.panel.reference else "hand"
            held = f"{100 * point.costs[RESIDENT.name].value:.1f}"
            table.add_row(safe(point.label, LINE_LENGTH), by, held, quality_text(judged.panel, point))
        console.print(table)
    for line in (*judged.notes, *verdict(judged, origin, wanted)):
        console.print(Text(line))
    console.print(
        Text(
            f"Loss: {LOSSES[criterion].rule}. A point is beyond the settings made by hand when it holds at least 1 % "
            "less than one on their frontier and loses less, or at most the margin more.",
            style="dim",
        )
    )
    terminal.print_paths(paths, console)
