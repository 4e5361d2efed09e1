"""The last lines of a run: a summary sentence for each method, and the commands to run next."""

import math
from collections.abc import Sequence

from kvbench.config.files import FULL
from kvbench.results.measures import RESIDENT, SCORE
from kvbench.results.record import RunRecord
from kvbench.show.labels import label_runs
from kvbench.show.text import safe
from kvbench.show.unfit import unfit_run

MOST = 8  # methods that have a sentence
WANTED = 0.05  # difference of a score that the samples which are named would show
POWER = (1.96 + 0.84) / 1.96  # the smallest difference that is shown with 80 %, in half-widths of a 95 % interval


def meaning(record: RunRecord, label: str, *, is_fit: bool) -> str:
    """Summary of one run's result: its bytes, its loss with a bound, and the samples needed to detect 5 points."""
    ratio = RESIDENT.of_run(record)
    said = f"{label}: {100 * ratio:.0f} % of the bytes" if ratio is not None else label
    if record.status == "failed":
        return f"{label}: failed, and says nothing"
    difference = record.comparison.difference if record.comparison is not None else None
    primary = record.metrics.get(record.primary)
    if difference is None or difference.value is None or primary is None:
        return f"{said}; not compared with the full cache"
    if not is_fit:
        return f"{said}; its score says nothing, since the full cache's does not"
    if difference.low is None or difference.high is None:
        return f"{said}; too few samples (n={difference.num_samples}) to say what it loses"
    lost, gained = (
        (-difference.low, difference.high) if primary.higher_is_better else (difference.high, -difference.low)
    )
    loss = -difference.value if primary.higher_is_better else difference.value
    scale, n = SCORE.scale, difference.num_samples
    if lost > 0 > gained:
        return f"{said}; it loses {scale * loss:.0f} points (n={n}), at least {-scale * gained:.0f}"
    said += f"; no loss shown at n={n}, at most {scale * max(0.0, lost):.0f} points"
    half = (difference.high - difference.low) / 2
    needed = math.ceil(n * (POWER * half / WANTED) ** 2)
    return f"{said}; about {needed} samples would show {scale * WANTED:.0f}" if needed > n else said


def lines(records: Sequence[RunRecord], results_dir: str) -> list[str]:
    """The last lines of a command, without the paths of its files."""
    methods = [record for record in records if record.method != FULL]
    full = [record for record in records if record.method == FULL]
    notes = [
        meaning(record, safe(label), is_fit=not any(map(unfit_run, full)))
        for record, label in zip(methods, label_runs(methods), strict=True)
    ]
    more = [f"and {len(notes) - MOST} more"] if len(notes) > MOST else []
    where = "" if results_dir == "results" else f" results_dir={results_dir}"
    words = f"kvbench compare{where}" if methods else f"kvbench method=NAME{where}"
    return [*notes[:MOST], *more, f"next: {words}; kvbench report{where}; kvbench status{where} lists and deletes runs"]
