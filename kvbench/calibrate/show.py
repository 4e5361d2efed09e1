"""The end of a calibration on the terminal: every grid point, the verdict, and how to use the file."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Group
from rich.table import Table
from rich.text import Text

from kvbench.calibrate.choose import ALLOWED, Measured, beside, settings_text
from kvbench.calibrate.layers import LayerSearch
from kvbench.calibrate.plan import Rule
from kvbench.calibrate.write import Choice, Result, StageResult
from kvbench.config.files import FULL
from kvbench.results.measures import LOSSES, RESIDENT, SCORE
from kvbench.show import terminal
from kvbench.show.progress import format_bytes
from kvbench.stats.intervals import Estimate


def show(result: Result, files: Sequence[Path]) -> None:
    """Prints the tables, the verdict and the files, the file to use first."""
    rule = result.plan.rule
    tables = [] if result.layers is None else [_layer_table(result.layers, rule)]
    tables += [_stage_table(item, rule) for item in result.stages]
    if result.choice is not None:
        tables.append(_held_out_table(result, result.choice))
    console = terminal.console(120)
    console.print(Group(*(item for table in tables for item in (Text(), table))))
    console.print(verdict(result), markup=False, highlight=False)
    for path in files:
        console.print(str(path), markup=False, highlight=False, soft_wrap=True)
    if result.choice is not None:
        use = f"kvbench method={result.method} method.calibration={files[0]}"
        console.print(f"use it: {use}", markup=False, highlight=False, soft_wrap=True)


def verdict(result: Result) -> str:
    """The result in one sentence."""
    rule = result.plan.rule
    lost = LOSSES[rule.criterion]
    what = f"{lost.short} at most {lost.scale * rule.margin:g} ({rule.proof})"
    choice = result.choice
    if choice is None:
        stage = result.stages[-1].stage
        return (
            f"No value of {stage.parameter} is good enough: {what} was asked. Try gentler values, more samples "
            "(calibrate.tuning_samples), or another margin; no calibration file was written."
        )
    loss = interval(choice.held_out.losses[rule.criterion], lost.scale)
    state = "confirmed" if choice.confirmed else "NOT confirmed"
    return (
        f"{settings_text(choice.settings)}: {state} on {choice.held_out.num_samples} held-out samples, {lost.short} "
        f"{loss}, asked {what}; {RESIDENT.scale * (choice.held_out.bytes_ratio.value or 0):.1f} % of the FP16 bytes."
        + _doubt(result)
    )


def _doubt(result: Result) -> str:
    """The limits of trust in a confirmation."""
    rate = result.false_confirmations
    if rate is None:
        return ""
    text = f" If every setting truly lost the margin, this plan would confirm one in {100 * rate:.1f} % of cases"
    if result.looks > 1:
        text += (
            f"; these held-out samples have judged {result.looks} calibrations, so count on up to "
            f"{100 * min(1.0, rate * result.looks):.1f} %"
        )
    if min(1.0, rate * result.looks) > ALLOWED:
        text += ". That is too often: take more held-out samples, calibrate.proof=interval, or another split_seed"
    return f"{text}."


def interval(estimate: Estimate | None, scale: float = 1.0) -> str:
    """A value with its 95 % interval; points get one digit, nats three."""
    if estimate is None or estimate.value is None:
        return "-"
    digits = 3 if scale == 1.0 else 1
    value, *ends = (
        round(scale * end, digits) + 0.0 for end in (estimate.value, estimate.low, estimate.high) if end is not None
    )
    return f"{value:+.{digits}f}" + (f" [{ends[0]:.{digits}f}, {ends[1]:.{digits}f}]" if ends else "")


def _table(title: str, first: str, rule: Rule) -> Table:
    table = terminal.plain_table(title)
    table.add_column(first, no_wrap=True)
    for name in ("score, %", *(LOSSES[key].short for key in _losses(rule)), RESIDENT.short, "%", ""):
        table.add_column(name, justify="right")
    return table


def _losses(rule: Rule) -> tuple[str, ...]:
    return ("score", "nll") if rule.criterion == "score" else ("nll", "kl")


def _row(table: Table, name: str, point: Measured, mark: str, rule: Rule) -> None:
    losses = [interval(point.losses.get(key), LOSSES[key].scale) for key in _losses(rule)]
    score = "-" if point.score is None else f"{SCORE.scale * point.score:.1f}"
    ratio = f"{RESIDENT.scale * (point.bytes_ratio.value or 0):.1f}"
    failed = f"{point.num_failed} failed" if point.num_failed else ""
    table.add_row(name, score, *losses, format_bytes(point.resident_bytes), ratio, failed or mark)


def _layer_table(found: LayerSearch, rule: Rule) -> Table:
    """The cost of one layer alone at each precision."""
    lost, costs = LOSSES[rule.criterion], found.costs(rule.criterion)
    table = terminal.plain_table(f"{lost.short}, of one layer alone beside {found.plan.usual}")
    for heading in ("layer", *costs):
        table.add_column(heading, justify="right")
    for layer, row in enumerate(zip(*costs.values(), strict=True)):
        table.add_row(str(layer), *(f"{lost.scale * cost:+.4f}" for cost in row))
    return table


def _stage_table(item: StageResult, rule: Rule) -> Table:
    text = beside(item.points, item.stage.parameter)
    title = f"{item.stage.parameter} on {item.points[0].num_samples} tuning samples" + (f" ({text})" if text else "")
    table = _table(title, item.stage.parameter, rule)
    for index, (value, point) in enumerate(zip(item.stage.values, item.points, strict=True)):
        mark = "chosen" if index == item.chosen else "within" if point.within else "too much"
        _row(table, settings_text({"": value})[1:], point, mark, rule)
    return table


def _held_out_table(result: Result, choice: Choice) -> Table:
    table = _table(f"{choice.held_out.num_samples} held-out samples", "method", result.plan.rule)
    settings = result.default.identity["method"]
    replaced = {item.parameter: settings[item.parameter] for item in result.plan.stages}
    _row(table, FULL, choice.held_out_full, "", result.plan.rule)
    for name, used, point in (
        ("uncalibrated", replaced, choice.held_out_default),
        ("calibrated", choice.settings, choice.held_out),
    ):
        mark = "within" if point.within else "too much"
        _row(table, f"{name}\n{settings_text(used)}", point, mark, result.plan.rule)
    return table
