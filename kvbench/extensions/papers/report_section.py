"""Chapter of the report on papers: the printed numbers next to those of the runs.

For the methods, settings and tasks of some runs, with the differences of the conditions. Only equal conditions match.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from kvbench.config.files import FULL
from kvbench.evidence.load import Group, StoredRun
from kvbench.extensions.papers import published
from kvbench.extensions.papers.published import method_name, plain, task_name
from kvbench.results import summary
from kvbench.results.measures import RESIDENT, SCORE, plain_subset
from kvbench.show.terminal import NO_INTERVAL, number
from kvbench.show.text import safe
from kvbench.stats.intervals import Estimate

OTHER_MODEL, OTHER_PROTOCOL = "other model", "other protocol"
NOT_COMPARED, AS_STATED = "protocol not compared", "same as far as stated"
MOST_ROWS = 80
# Tables whose percentages are shares of all tokens seen.
OF_SEEN = {("DiffKV", "Table 1"), ("DiffKV", "Table 3")}
# A paper's word for a condition -> ours.
SETTINGS = {"alpha_h": "alpha_h", "alpha_l": "alpha_l", "bits": "bits", "group": "group", "residual": "residual_tokens"}
SETTINGS |= {"pooling": "pool_kernel", "block": "block", "pyramid_depth": "depth", "window": "window"}
SETTINGS |= {"max_prompt": "max_prompt_tokens", "max_gen": "max_new_tokens", "shots": "num_fewshot"}
# Conditions of a table or of its memory, which are none of a run here.
NO_CONDITION = {"memory_source", "memory_basis", "benchmark_printed", "subsets", "C", "benchmark", "levels", "weights"}
HEADINGS = ["run", "match", "printed in", "of", "setting there", "task", "theirs", "ours [95 %]"]
HEADINGS += [f"memory % there, {RESIDENT.short} % here", "conditions that differ"]


def printed_table(group: Group) -> dict[str, Any]:
    """The table of a group as the page shows it; no rows where no paper printed anything of it."""
    rows = [row for run in group.runs if run.method != FULL for row in _rows(group, run)]
    rows.sort(key=lambda row: (row["style"] == "other", row["label"]))  # what is nearest to the paper first
    left = len(rows) - MOST_ROWS
    more = f" {left} more rows: `kvbench report view=published` shows them." if left > 0 else ""
    return {
        "title": "Beside the papers",
        "headings": HEADINGS,
        "rows": rows[:MOST_ROWS],
        "caption": "Printed values as printed, with the full cache's of the same table; ours with the full cache's of "
        f"the same questions. {OTHER_MODEL}, {OTHER_PROTOCOL}, {NOT_COMPARED}: never a match, whatever "
        f"the numbers are. {AS_STATED}: the model has the same name, and every condition that the paper states is the "
        f"same here.{more}",
    }


def _rows(group: Group, run: StoredRun) -> Iterator[dict[str, Any]]:
    frame = published.rows()
    frame = frame[(frame["unit"] == "points") & frame["locator"].str.startswith("Table")]
    frame = published.with_full(frame, ["paper", "locator", "model", "task", "metric"], "printed")
    mine = frame[frame["method"].map(method_name) == method_name(run.method)]
    models = set(published.of_model(run.record.model)["model"]) if run.record.model else set()
    known, held = _settings(run), summary.ledger(list(run.samples.values())).get(f"{RESIDENT.name}_ratio")
    for row in mine.itertuples():
        stated = published.conditions(row.conditions)
        ours = estimate_of(run, row.task, stated)
        is_setting = fits(row.variant, known, (row.paper, row.locator) in OF_SEEN)
        if ours is None or ours.value is None or is_setting is False:
            continue
        full_value = estimate_of(group.reference, row.task, stated) if group.reference else None
        is_model = row.model in models
        notes, match = differences(stated, known, is_setting)
        ends = NO_INTERVAL if ours.ends is None else f"[{', '.join(number(end, SCORE.scale) for end in ours.ends)}]"
        theirs = row.printed if row.printed_full != row.printed_full else f"{row.printed} (full {row.printed_full})"
        text = f"{number(ours.value, SCORE.scale)} {ends}"
        if full_value is not None and full_value.value is not None:
            text += f" (full {number(full_value.value, SCORE.scale)})"
        memory = "-" if row.memory_pct != row.memory_pct else f"{row.memory_pct:g} ({row.memory_kind})"
        memory += ", -" if held is None else f", {RESIDENT.scale * held:.1f}"
        cells = [match if is_model else OTHER_MODEL, f"{row.paper}, {row.locator}", row.model, row.variant, row.task]
        cells += [theirs, text, memory, "; ".join(notes) or "none stated"]
        yield {"label": run.label, "cells": cells, "style": "match" if is_model else "other"}


def fits(variant: str, known: Mapping[str, Any], of_seen: bool = False) -> bool | None:
    """True where a run has the setting of a paper's variant; None where its name says nothing that can be compared.

    With `of_seen` the paper's percentages are shares of all tokens seen.
    """
    budget = known.get("budget")
    if share := re.match(r"(\d+(?:\.\d+)?)%$", variant):
        budget = known.get("read_budget", budget)
        if budget is None:
            return None
        if of_seen:
            return budget == f"{float(share[1]):g}%seen"
        return isinstance(budget, float) and abs(100 * budget - float(share[1])) < 1e-6
    if bits := re.match(r"(\d+) ?bit$", variant):
        return str(known["bits"]) == bits[1] if "bits" in known else None
    if tokens := re.match(r"C=(\d+)", variant):
        return None if budget is None else isinstance(budget, int) and budget == int(tokens[1])
    levels = re.findall(r"K\dV\d", variant)
    if levels and "high" in known:
        here = [plain(str(known.get(name))) for name in ("high", "low")]
        return {plain(level) for level in levels} <= set(here)
    allocation = re.match(r"(uniform|pyramid) ", variant)
    return known["allocation"] == allocation[1] if allocation and "allocation" in known else None


def differences(stated: Mapping[str, str], known: Mapping[str, Any], is_setting: bool | None) -> tuple[list[str], str]:
    """Conditions that a paper states and in which a run differs, in words, with those that are not compared.

    And the resulting verdict on a run with the same model.
    """
    notes, other, unknown = [], False, []
    for name, value in stated.items():
        if name in NO_CONDITION:
            continue
        ours = next((known[key] for key in (SETTINGS.get(name, ""), f"obs_{name}") if key in known), None)
        if value == "unstated":
            notes.append(f"{name}: not stated there")
        elif ours is None:
            unknown.append(f"{name}={value}")
        elif not _same(value, ours):
            notes.append(f"{name}: {value} there, {safe(ours)} here")
            other = True
    if is_setting is None:
        notes.insert(0, "the setting is not compared")
    notes += [f"stated there alone: {', '.join(unknown)}"] if unknown else []
    return notes, OTHER_PROTOCOL if other else NOT_COMPARED if unknown or is_setting is None else AS_STATED


def _same(value: str, ours: Any) -> bool:
    try:
        return float(value) == float(ours)
    except (TypeError, ValueError, OverflowError):
        return plain(value) == plain(str(ours))


def _settings(run: StoredRun) -> dict[str, Any]:
    """Everything that was set of task, protocol, method and formats, by its short name."""
    task = run.record.identity.get("task", {})
    return {key: value for key, value in task.items() if not isinstance(value, dict)} | run.settings


def estimate_of(run: StoredRun, task: str, stated: Mapping[str, str]) -> Estimate | None:
    """A run's score of a printed task: of all of it, of a subset, or of the mean over so many subsets."""
    metric = run.record.metrics.get(run.record.primary or "")
    if metric is None:
        return None
    wanted, is_e = task_name(task), stated.get("benchmark") == "LongBench-E"
    if wanted == task_name(run.record.task) and not re.search(r"avg\d+$", plain(task)):
        return metric
    if all(name.endswith("_e") != is_e for name in metric.subsets):
        return None
    for name, subset in metric.subsets.items():
        if plain(plain_subset(name)) == wanted and name.endswith("_e") == is_e:
            return subset
    count = re.search(r"avg(\d+)$", plain(task))
    if count is None or not plain(task).startswith(plain(run.record.task)) or len(metric.subsets) != int(count[1]):
        return None
    return metric if all(name.endswith("_e") == is_e for name in metric.subsets) else None
