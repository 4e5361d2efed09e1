"""`kvbench report`: everything about a results folder in one page that works anywhere and is under 2 MB."""

import base64
import io
import json
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from omegaconf import DictConfig
from rich.text import Text

from kvbench.evidence import comparison, frontier_figure, pareto
from kvbench.evidence import report_content as content
from kvbench.evidence.frontier import Panel, averages, build
from kvbench.evidence.load import Group, load_groups, patterns
from kvbench.results.measures import COSTS
from kvbench.results.writing import write_file
from kvbench.show import terminal
from kvbench.show.progress import format_bytes

MAX_BYTES = 2_000_000
SHORTEST = 160  # characters of an answer below which it tells little
FEWEST = 5  # answers of a run


def _pictures(panel: Panel, axes: Sequence[str]) -> list[dict]:
    made = {axis: picture for axis in axes if (picture := frontier_figure.render(panel, axis, "png"))}
    return [
        {
            "data": base64.b64encode(_small(picture)).decode("ascii"),
            "name": COSTS[axis].title,
            "alt": content.picture_words(panel, axis),
            "caption": f"{panel.title}: {panel.what.title} against {COSTS[axis].title}.",
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
    """Compute what the page shows: one part for each group, and one for each mean over groups."""
    groups, axes = [group for group in groups if group.runs], patterns(cfg.axes) or list(COSTS)
    compared = [comparison.compare_group(group, cfg) if group.reference else ([], []) for group in groups]
    panels = [build(group, cfg) for group in groups]
    for group, panel in zip(groups, panels, strict=True):
        if panel is not None and cfg.published:
            pareto.add_published(group, panel)
    family = [row for rows, _ in compared for row in rows]
    found: list[dict] = []
    for group, (rows, notes), panel in zip(groups, compared, panels, strict=True):
        said = [*group.notes, *(panel.notes if panel else []), *notes]
        found.append(
            {
                "title": group.title,
                "notes": list(dict.fromkeys(said)),
                "pictures": _pictures(panel, axes) if panel else [],
                "tiers": content.tier_bars(group),
                "ledger": content.byte_bars(group),
                "settings": content.settings_rows(group),
                "environment": content.environment(group),
                "num_changes": sum(len(row.changes) for row in rows),
                "changes_note": content.reference_words(group, rows),
                "rows": rows,
            }
        )
    comparison.correct(family)
    means = averages([panel for panel in panels if panel is not None])
    for item, group, panel in zip(found, groups, panels, strict=True):
        item["table"] = content.methods_table(group, item["rows"], panel, len(family))
        # Why there is no mean, where there is none.
        item["notes"] += [note for note in (panel.notes if panel else ()) if note not in item["notes"]]
    return found, [{"title": p.title, "note": " ".join(p.notes), "pictures": _pictures(p, axes)} for p in means]


def page(found: list[dict], means: list[dict], cfg: DictConfig) -> tuple[bytes, str]:
    """Make the page from the parts of groups and means, with as many and as long answers as fit: HTML, and a sentence
    on what was cut, or nothing. Raises ValueError where it is too large even without answers."""
    limit, length = int(cfg.answers), int(cfg.answer_length)
    cuts: list[str] = []
    while True:
        data = [content.changed_answers(item["rows"], limit, length) for item in found]
        kept, total = sum(len(item["changes"]) for item in data), sum(item["num_changes"] for item in found)
        answers = (
            [f"{kept} of {total} changed answers are shown, the largest changes of each run."] if kept < total else []
        )
        if length < cfg.answer_length:
            answers.append(f"Answers are cut to {length} characters.")
        cut = " ".join([*answers, *cuts])
        made = _render(found, means, data, cut, cfg)
        if len(made) <= MAX_BYTES:
            return made, cut
        pictured = [item for item in (*found, *means) if len(item["pictures"]) > 1]
        if length > SHORTEST:
            length = max(SHORTEST, length // 2)
        elif limit > FEWEST:
            limit = limit // 2
        elif pictured:
            for item in pictured:
                item["pictures"] = item["pictures"][:1]
            cuts = ["Only the first picture of each group fits; `kvbench pareto axes=null` draws all."]
            limit, length = int(cfg.answers), int(cfg.answer_length)
        else:
            raise ValueError(
                f"the report would have {format_bytes(len(made))}, more than {format_bytes(MAX_BYTES)}; choose fewer "
                "runs with tasks=, models=, methods= or where="
            )


def _render(found: list[dict], means: list[dict], data: list[dict], cut: str, cfg: DictConfig) -> bytes:
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    # Answers may hold HTML. The template escapes what it shows; the script's data has no character that could end it,
    # and is put into the page as text only.
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=True)
    for char in "<>&":
        text = text.replace(char, f"\\u{ord(char):04x}")
    template = (files("kvbench.evidence") / "report.html.jinja").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    groups = [item | {"changes_note": f"{item['changes_note']} {cut}".strip()} for item in found]
    num_runs = sum(len(item["settings"]) for item in found)
    size = f"{num_runs} runs in {len(found)} group{'s' if len(found) > 1 else ''}."
    made = environment.from_string(template).render(
        title=str(cfg.title),
        subtitle=f"{size} Only runs of one model, one set of questions and one version of the code are compared.",
        groups=groups,
        means=means,
        data=Markup(text),
    )
    return made.encode(errors="replace")  # half a character, as JSON can hold it, has no bytes


def main(cfg: DictConfig) -> int:
    """Carry out `kvbench report`."""
    pareto.check(cfg)
    groups = load_groups(cfg)
    found, means = gather(groups, cfg)
    if not found:
        reasons = [note for group in groups for note in group.notes]
        raise ValueError(f"nothing to report. {' '.join(reasons[:3])}")
    made, cut = page(found, means, cfg)
    out = Path(str(cfg.out)) if cfg.out is not None else Path(cfg.results_dir) / "report.html"
    write_file(out, made)
    console = terminal.console()
    for item in found:
        console.print(Text(f"{item['title']}: {len(item['settings'])} runs"), soft_wrap=True)
        terminal.print_notes(item["notes"], console)
    terminal.print_notes([cut] if cut else [], console)
    console.print(Text(f"{out} ({format_bytes(len(made))})", overflow="fold"), soft_wrap=True)
    return 0
