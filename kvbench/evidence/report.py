"""`kvbench report`: everything about a results folder in one page that works anywhere and is under 2 MB."""

import base64
import io
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig
from rich.text import Text

from kvbench.config.extensions import hooks
from kvbench.config.files import FULL
from kvbench.errors import Unsupported
from kvbench.evidence import across, frontier_figure, pareto, view
from kvbench.evidence.answer_traits import mean_of, traits_table
from kvbench.evidence.compare import compare_group, correct
from kvbench.evidence.compared import ComparedRun, count, difference, worst
from kvbench.evidence.dominance import standing
from kvbench.evidence.frontier import Panel, averages, build
from kvbench.evidence.legends import BEST, DOMINATED, MEANING, NEAR, compared_sentences
from kvbench.evidence.load import Group, StoredRun, load_groups
from kvbench.evidence.model_pool import pool_models
from kvbench.evidence.report_bars import byte_bars, bytes_of, tier_bars
from kvbench.results import summary
from kvbench.results.measures import AVERAGE, PEAK, RESIDENT, SCORE, TIME, Measure
from kvbench.results.writing import write_file, write_files
from kvbench.show import terminal
from kvbench.show.progress import format_bytes
from kvbench.show.terminal import number, p_text
from kvbench.show.text import safe
from kvbench.sizing.shapes import HEADLINE, find_shape
from kvbench.sizing.stored import policy_of, projected

if TYPE_CHECKING:
    from kvbench.results.record import RunRecord

MAX_BYTES = 2_000_000
SHORTEST = 160  # characters of an answer below which it shows little
FEWEST = 5  # answers of a run
LAST_TOKENS = 16  # of a projection's tokens, those that an answer added
SETTING_LENGTH = 10_000  # characters of a setting; a table of numbers is a long one


def _pictures(panel: Panel, cfg: DictConfig) -> list[dict]:
    made = {
        axis: picture for axis in pareto.axes_of(panel, cfg) if (picture := frontier_figure.render(panel, axis, "png"))
    }
    return [
        {
            "data": base64.b64encode(_small(picture)).decode("ascii"),
            "name": panel.axes[axis].title,
            "alt": picture_words(panel, axis),
            "caption": f"{panel.title}: {panel.what.title} against {panel.axes[axis].title}.",
        }
        for axis, picture in made.items()
    ]


def _small(png: bytes) -> bytes:
    """The same picture with 256 colours, a third of the size; an SVG of many points is twice as large."""
    from PIL import Image  # comes with matplotlib

    buffer, picture = io.BytesIO(), Image.open(io.BytesIO(png)).convert("RGB")
    picture.quantize(256, dither=Image.Dither.NONE).save(buffer, "png", optimize=True)
    return buffer.getvalue()


def gather(groups: Sequence[Group], cfg: DictConfig) -> tuple[list[dict], list[dict]]:
    """Compute the parts of the page: one for each group, and one for each mean over groups."""
    compared = [compare_group(group, cfg) if group.reference else ([], []) for group in groups]
    panels = [build(group, cfg) for group in groups]
    for group, panel in zip(groups, panels, strict=True):
        if panel is not None and cfg.published:
            pareto.add_published(group, panel)
    family = [row for rows, _ in compared for row in rows]
    items: list[dict] = []
    for group, (rows, notes), panel in zip(groups, compared, panels, strict=True):
        first = dict.fromkeys(filter(None, [panel.unfit if panel else "", *(row.pairs.unfit for row in rows)]))
        said = [*first, *group.notes, *(panel.notes if panel else []), *notes]
        items.append(
            {
                "title": group.title,
                "notes": list(dict.fromkeys(said)),
                "pictures": _pictures(panel, cfg) if panel else [],
                "tiers": tier_bars(group),
                "ledger": byte_bars(group),
                "traits": traits_table(group, {row.run.name: row.longer for row in rows if row.run}),
                "sections": [table for section in hooks("report.section") if (table := section(group))["rows"]],
                "settings": settings_rows(group),
                "environment": environment(group),
                "num_changes": sum(len(row.changes) for row in rows),
                "changes_note": reference_words(group, rows),
                "rows": rows,
            }
        )
    correct(family)
    means = averages([panel for panel in panels if panel is not None])
    for item, group, panel in zip(items, groups, panels, strict=True):
        item["table"] = methods_table(group, item["rows"], panel, len(family))
        # Why there is no mean, where there is none.
        item["notes"] += [note for note in (panel.notes if panel else ()) if note not in item["notes"]]
    return items, [
        {"title": p.title, "note": " ".join(filter(None, [p.unfit, *p.notes])), "pictures": _pictures(p, cfg)}
        for p in means
    ]


def page(items: list[dict], means: list[dict], cfg: DictConfig, summaries: Sequence[dict] = ()) -> tuple[bytes, str]:
    """Make the page from the parts of groups, means and summaries, with as many and as long answers as fit.

    Returns HTML, and a sentence on what was cut, or nothing. Raises ValueError where it is too large even without
    answers.
    """
    limit, length = int(cfg.answers), int(cfg.answer_length)
    cuts: list[str] = []
    while True:
        data = [changed_answers(item["rows"], limit, length) for item in items]
        kept, total = sum(len(item["changes"]) for item in data), sum(item["num_changes"] for item in items)
        answers = (
            [f"{kept} of {total} changed answers are shown, the largest changes of each run."] if kept < total else []
        )
        if length < cfg.answer_length:
            answers.append(f"Answers are cut to {length} characters.")
        cut = " ".join([*answers, *cuts])
        made = _render(items, means, summaries, data, cut, cfg)
        if len(made) <= MAX_BYTES:
            return made, cut
        pictured = [item for item in (*items, *means) if len(item["pictures"]) > 1]
        if length > SHORTEST:
            length = max(SHORTEST, length // 2)
        elif limit > FEWEST:
            limit = limit // 2
        elif pictured:
            for item in pictured:
                item["pictures"] = item["pictures"][:1]
            cuts = ["Only the first picture of each group fits; `kvbench report view=pareto axes=null` draws all."]
            limit, length = int(cfg.answers), int(cfg.answer_length)
        else:
            raise Unsupported(
                f"the report would have {format_bytes(len(made))}, more than {format_bytes(MAX_BYTES)}; choose fewer "
                "runs with tasks=, models=, methods= or where="
            )


def _render(
    items: list[dict], means: list[dict], summaries: Sequence[dict], data: list[dict], cut: str, cfg: DictConfig
) -> bytes:
    from markupsafe import Markup

    # Answers may hold HTML. The template escapes what it shows; the script's data has no character that could end it,
    # and is put into the page as text only.
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=True)
    for char in "<>&":
        text = text.replace(char, f"\\u{ord(char):04x}")
    groups = [item | {"changes_note": f"{item['changes_note']} {cut}".strip()} for item in items]
    num_runs = sum(len(item["settings"]) for item in items)
    size = f"{num_runs} runs in {len(items)} group{'s' if len(items) > 1 else ''}."
    return fill(
        "report.html.jinja",
        title=str(cfg.title),
        subtitle=f"{size} Only runs of one model, one set of questions and one version of the code are compared.",
        groups=groups,
        means=means,
        summaries=summaries,
        data=Markup(text),
    )


def fill(template: str, **values: object) -> bytes:
    """A page made of a template of this folder, which escapes what it shows."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("kvbench.evidence", "")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, loader=loader)
    made = environment.get_template(template).render(**values)
    return made.encode(errors="replace")  # half a character, as JSON can hold it, has no bytes


def methods_table(group: Group, rows: Sequence[ComparedRun], panel: Panel | None, num_family: int) -> dict:
    """Table of methods: quality, difference to the full cache, bytes and time of every run.

    Holm's correction is over `num_family` rows, and the panel has the standing of the runs.
    """
    by_run = {row.run.name: row for row in rows if row.run}
    places = {}
    if panel is not None:
        keys = standing(panel, next(iter(panel.axes)))
        places = {name: keys.get(point.key, "") for point in panel.points for name in point.names}
    what = rows[0].what if rows else panel.what if panel else None
    shown = []
    for run in group.runs:
        row, ledger = by_run.get(run.name), bytes_of(run)
        cells = [number(mean_of(run, what), what.scale) if what else "-", *(_comparison(row) if row else ["-"] * 6)]
        cells += [_ratio(ledger, RESIDENT), _at_length(run), places.get(run.name, "")]
        cells += [_ratio(ledger, AVERAGE), _ratio(ledger, PEAK), _time(run)]
        verdict = row.verdict if row else "reference" if run is group.reference else "-"
        shown.append({"label": run.label, "cells": cells, "verdict": verdict, "style": verdict.replace(" ", "-")})
    title, unit = (what.title, what.unit) if what else (SCORE.title, SCORE.unit)
    width = number(rows[0].margin if rows else SCORE.margin, what.scale if what else SCORE.scale)
    there = f"% at {HEADLINE[1] // 1024}k on {HEADLINE[0]}"
    headings = ["run", "verdict", title, "n", f"difference, {unit} [95 %]", "lost / gained", "p Holm"]
    headings += [f"p equal +-{width}", "would show", f"{RESIDENT.short} %", there, "standing"]
    headings += [f"{AVERAGE.short} %", f"{PEAK.short} %", f"{TIME.unit} / token"]
    return {
        "caption": "Paired on the same samples; % of an FP16 full cache for the same tokens. Wide tables scroll.",
        "headings": headings,
        "rows": shown,
        "legend": [
            *compared_sentences(num_family),
            f"{there}: what the method would hold there, by the same count; "
            "-: its settings are for this model alone. Where data decide what is kept, it keeps this run's shares.",
            "; ".join(f"{name}: {text}" for name, text in MEANING.items()) + " (by resident bytes).",
            f"{TIME.unit} / token: of the whole engine, teacher-forced rows included, each run timed by itself: no "
            "evidence of a difference. `kvbench bench` times methods in turn.",
        ],
    }


def _comparison(row: ComparedRun) -> list[str]:
    return [
        count(row),
        difference(row) + (f"; worst case {worst(row)}" if row.extremes is not None else ""),
        f"{row.num_lost} / {row.num_gained}",
        p_text(row.p_holm),
        p_text(row.p_equal_holm),
        number(row.detectable, row.what.scale),
    ]


def _ratio(ledger: dict[str, float], what: Measure) -> str:
    value = ledger.get(f"{what.name}_ratio")
    return "-" if value is None else f"{what.scale * value:.1f}"


def _time(run: StoredRun) -> str:
    seconds, tokens = summary.sums(run.samples.values(), TIME)
    return f"{TIME.scale * seconds / tokens:.3g}" if tokens and seconds else "-"


def _at_length(run: StoredRun) -> str:
    """Resident bytes on the model and at the length of the headline, in percent of its FP16 full cache."""
    name, length = HEADLINE
    projection = projected(
        run.record.identity, run.samples.values(), find_shape(name), length - LAST_TOKENS, LAST_TOKENS
    )
    return "-" if projection is None else f"{RESIDENT.scale * projection.ratio:.1f}"


def changed_answers(rows: Sequence[ComparedRun], limit: int, length: int) -> dict:
    """Answers that got worse or better, at most `limit` of a run and each at most `length` long, for the page's script.

    `samples` are ids with right answers, `changes` the indices of each answer's parts in the other lists, and scores.
    """
    texts: dict[str, int] = {}
    samples: dict[tuple[str, str], int] = {}
    subsets: dict[str, int] = {}
    changes = []

    def text_index(text: str) -> int:
        cut = text if len(text) <= length else f"{text[: length // 2]} [...] {text[-(length // 2) :]}"
        return texts.setdefault(cut, len(texts))

    used = [row for row in rows if row.changes]
    for who, row in enumerate(used):
        for item in sorted(row.changes, key=lambda item: -abs(item.mine - item.theirs))[:limit]:
            sample = samples.setdefault((item.sample, safe(item.expected, length)), len(samples))
            subset = subsets.setdefault(item.subset, len(subsets))
            scores = [number(value, row.what.scale) for value in (item.theirs, item.mine)]
            changes.append(
                [who, int(item.lost), subset, sample, text_index(item.other_text), text_index(item.text), *scores]
            )
    return {
        "runs": [row.label for row in used],
        "others": [row.pairs.theirs.label for row in used],
        "subsets": list(subsets),
        "samples": [list(key) for key in samples],
        "texts": list(texts),
        "changes": changes,
    }


def environment(group: Group) -> list[tuple[str, str]]:
    """Versions, machines, code and dates of the runs; what differs between runs is listed."""
    records = [run.record for run in group.runs]

    def all_of(values: Iterable[object]) -> str:
        return "; ".join(sorted({str(value) for value in values if value not in (None, "")})) or "not recorded"

    # Every stretch of work has its own; runs of before have those of the last one alone.
    versions = [v for r in records for v in (r.versions, *(part.versions for part in r.sessions)) if v]
    machines = [m for r in records for m in (r.machine, *(part.machine for part in r.sessions)) if m]
    code = [r.identity.get("code", {}) for r in records]
    dirty = any(r.git.dirty for r in records)
    method_libraries = {
        f"{name.partition(':')[2]} {v}" for c in code for name, v in c.items() if name.startswith("method:")
    }
    return [
        ("runs", all_of([f"{min(r.started for r in records)} to {max(r.ended for r in records)}"])),
        ("kvbench", all_of(v.kvbench for v in versions) + f"; code {all_of(c.get('harness', '')[:12] for c in code)}"),
        ("git", all_of(r.git.commit[:12] for r in records) + ("; with uncommitted changes" if dirty else "")),
        ("Python", all_of(v.python for v in versions)),
        ("torch", all_of(v.torch for v in versions)),
        ("transformers", all_of(v.transformers for v in versions)),
        *([("libraries of methods", all_of(method_libraries))] if method_libraries else []),
        ("lm-eval", all_of(v.lm_eval for v in versions)),
        ("device", all_of(m.device for m in machines)),
        ("system", all_of(f"{m.host}, {m.num_cpus} CPUs, {m.num_threads} threads" for m in machines)),
        ("backend", all_of(r.backend for r in records)),
        ("batch size", all_of(map(_batch, records))),
        ("seed", all_of(r.seed for r in records)),
        ("model", all_of(json.dumps(r.identity.get("model"), sort_keys=True) for r in records)),
        ("protocol", all_of(json.dumps(r.protocol, sort_keys=True) for r in records)),
    ]


def _batch(record: "RunRecord") -> str:
    """Batch size of a run, or a note on how its answers depend on it."""
    if record.identity.get("batch") != "free":
        return str(record.identity.get("batch_size", "any: no answer depends on it"))
    num_repeated, differ = (
        sum(getattr(each, name) for each in record.sessions) for name in ("asked_again", "differing")
    )
    return f"free: rows come and go, and {differ} of {num_repeated} answers differ in another order of the requests"


def _flags(run: StoredRun) -> list[str]:
    """The flags that turn a run's method on in the engines that ship it."""
    policy = policy_of(run.record.identity)
    return (
        []
        if policy is None
        else [safe(line, SETTING_LENGTH) for flags in hooks("report.flags") for line in flags(policy)]
    )


def settings_rows(group: Group) -> list[dict]:
    """Every run with its state, its method's settings and its folder."""
    rows = []
    for run in group.runs:
        mine = {key: value for key, value in run.record.identity.get("method", {}).items() if key != "_target_"}
        words = ", ".join(safe(f"{key}={value}", SETTING_LENGTH) for key, value in mine.items())
        state = "complete" if run.complete else f"incomplete, {run.progress}"
        odd = [f"{count} {name}" for name in ("oom", "nan", "ungraded") if (count := getattr(run.record.counts, name))]
        rows.append(
            {
                "label": run.label,
                "state": ", ".join([state, *odd]),
                "settings": words or "none",
                "flags": "; ".join(_flags(run)) or "-",
                "folder": run.name,
            }
        )
    return rows


def picture_words(panel: Panel, axis: str) -> str:
    """Describe a picture in words, as its alternative text."""
    places = standing(panel, axis)
    front = [point.label for point in panel.points if places.get(point.key) in (BEST, NEAR)]
    beaten = sum(status == DOMINATED for status in places.values())
    words = f"{panel.title}: {panel.what.title} against {panel.axes[axis].title} for {len(panel.points)} runs."
    if panel.unfit:
        return f"{panel.unfit}. {words}"
    if front:
        words += f" Best estimates: {', '.join(front)}."
    return f"{words} Dominated at 5 % for the whole table: {beaten}. All numbers are in the table of methods."


def reference_words(group: Group, rows: Sequence[ComparedRun]) -> str:
    """The sentence that stands before the changed answers."""
    if group.reference is None:
        return f"There is no run of method={FULL} here, so no answer can be called lost."
    total, lost = sum(len(row.changes) for row in rows), sum(row.num_lost for row in rows)
    return f"Samples whose value differs from the reference's: {lost} lost and {total - lost} gained, over all runs."


def main(cfg: DictConfig) -> int:
    """Carry out `kvbench report`."""
    pareto.check(cfg)
    groups = pool_models(load_groups(cfg), cfg)
    items, means = gather(groups, cfg)
    made, cut = page(items, means, cfg, across.summaries(groups, [item["rows"] for item in items], cfg))
    if cfg.out is not None:
        write_file(out := Path(str(cfg.out)), made)
    else:
        (out,) = write_files(Path(cfg.results_dir), {Path(cfg.results_dir) / "report.html": made})
    console = terminal.console()
    for item in items:
        console.print(Text(f"{item['title']}: {len(item['settings'])} runs"), soft_wrap=True)
        view.show(view.notes(item["notes"]), console)
    view.show(view.notes([cut] if cut else []), console)
    console.print(Text(f"{out} ({format_bytes(len(made))})", overflow="fold"), soft_wrap=True)
    return 0
