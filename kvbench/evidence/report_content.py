"""The content of the report's page as plain words and numbers: tables, bars, changed answers, environment."""

import json
from collections.abc import Iterable, Mapping, Sequence

from kvbench.config.files import FULL
from kvbench.evidence.compare import count, difference, legend, worst
from kvbench.evidence.comparison import ComparedRun
from kvbench.evidence.dominance import DOMINATED, FRONTIER, MEANING, NEAR, standing
from kvbench.evidence.frontier import Panel
from kvbench.evidence.load import Group, StoredRun
from kvbench.evidence.samples import by_subset, curve_of, strata_of
from kvbench.results import summary
from kvbench.results.measures import AVERAGE, COSTS, PEAK, RESIDENT, SCORE, TIME, Measure, item_title, ledger_items
from kvbench.show.palette import item_place
from kvbench.show.progress import format_bytes
from kvbench.show.terminal import number, p_text
from kvbench.show.text import safe
from kvbench.sizing.shapes import HEADLINE, find_shape
from kvbench.sizing.stored import policy_of, projected, tier_shares

NUM_STYLES = 8
LAST_TOKENS = 16  # of a projection's tokens, those that an answer added
SETTING_LENGTH = 10_000  # characters of a setting; a table of numbers is a long one


def bytes_of(run: StoredRun) -> dict[str, float]:
    """The byte ledger over the finished samples, as `run.json` has it for a complete run."""
    return summary.ledger(list(run.samples.values()))


def methods_table(group: Group, rows: Sequence[ComparedRun], panel: Panel | None, num_family: int) -> dict:
    """The table of methods: quality, difference to the full cache, bytes and time of every run; Holm's correction is
    over `num_family` rows, and the panel has the standing of the runs."""
    by_run = {row.run.name: row for row in rows if row.run}
    places = {}
    if panel is not None:
        keys = standing(panel, RESIDENT.name)
        places = {name: keys.get(point.key, "") for point in panel.points for name in point.names}
    what = rows[0].what if rows else panel.what if panel else None
    shown = []
    for run in group.runs:
        row, ledger = by_run.get(run.name), bytes_of(run)
        cells = [_score(run, what), *(_comparison(row) if row else ["-"] * 6)]
        cells += [_ratio(ledger, RESIDENT), _at_length(run), places.get(run.name, "")]
        cells += [_ratio(ledger, AVERAGE), _ratio(ledger, PEAK), _time(run)]
        verdict = row.verdict if row else "reference" if run is group.reference else "-"
        shown.append({"label": run.label, "cells": cells, "verdict": verdict, "style": verdict.replace(" ", "-")})
    title, unit = (what.title, what.unit) if what else (SCORE.title, SCORE.unit)
    width = number(rows[0].margin if rows else SCORE.margin, what.scale if what else SCORE.scale)
    there = f"% at {HEADLINE[1] // 1024}k on {HEADLINE[0]}"
    headings = ["run", "verdict", title, "n", f"difference, {unit} [95 %]", "lost / gained", "p Holm"]
    headings += [f"p equal +-{width}", "would show", f"{RESIDENT.short} %", there, "frontier"]
    headings += [f"{AVERAGE.short} %", f"{PEAK.short} %", f"{TIME.unit} / token"]
    return {
        "caption": "Paired on the same samples; % of an FP16 full cache for the same tokens. Wide tables scroll.",
        "headings": headings,
        "rows": shown,
        "legend": [
            *legend(num_family),
            f"{there}: what the method would hold there, by the same count; "
            "-: its settings are for this model alone. Where data decide what is kept, it keeps this run's shares.",
            "; ".join(f"{name}: {text}" for name, text in MEANING.items()) + " (by resident bytes).",
            f"{TIME.unit} / token: of the whole engine, teacher-forced rows included, each run timed by itself: no "
            "evidence of a difference. `kvbench bench` times methods in turn.",
        ],
    }


def _score(run: StoredRun, what: Measure | None) -> str:
    values = curve_of(run, what).values if what else {}
    if what is None or not values:
        return "-"
    return number(float(strata_of(values, by_subset(values).values(), run.record.weighting).mean()), what.scale)


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


def tier_names(run: StoredRun, count: int) -> list[str]:
    """Name the tiers of a run, of which a residual buffer is the last, as its method's own code does; `tier 0`, ...
    when the code no longer fits the number of tiers in the records."""
    policy = policy_of(run.record.identity)
    names = [] if policy is None else [tier.name for tier in policy.tiers] + ["16-bit buffer"] * bool(policy.residual)
    return names if len(names) == count else [f"tier {index}" for index in range(count)]


def shares_by_name(run: StoredRun) -> dict[str, float]:
    """Share of all tokens, over layers and KV heads, in each tier at the end; the rest up to 1 was evicted."""
    found = tier_shares(run.samples.values())
    shares: dict[str, float] = {}
    for name, share in zip(tier_names(run, len(found)), found, strict=True):
        shares[name] = shares.get(name, 0.0) + share
    return shares


def _at_length(run: StoredRun) -> str:
    """Resident bytes on the model and at the length of the headline, in percent of its FP16 full cache."""
    name, length = HEADLINE
    found = projected(run.record.identity, run.samples.values(), find_shape(name), length - LAST_TOKENS, LAST_TOKENS)
    return "-" if found is None else f"{RESIDENT.scale * found.ratio:.1f}"


def tier_bars(group: Group) -> dict:
    """Tokens per tier of every run, as the bars of DiffKV's figure 12."""
    found = {run.label: shares for run in group.runs if (shares := shares_by_name(run))}
    names = dict.fromkeys(name for shares in found.values() for name in shares)
    styles = {name: f"c{index % NUM_STYLES}" for index, name in enumerate(names)} | {"evicted": "evicted"}
    rows = []
    for label, shares in found.items():
        rows.append(_bar(label, {**shares, "evicted": max(0.0, 1.0 - sum(shares.values()))}, 1.0, 1.0, styles))
    caption = "Share of all tokens, over layers and KV heads, in each precision at the end of the answer."
    return {"caption": caption, "heading": "tokens", "rows": rows, "key": list(styles.items())}


def byte_bars(group: Group) -> dict:
    """The resident bytes of every run, item by item."""
    ledgers = {run.label: ledger for run in group.runs if (ledger := bytes_of(run)).get("fp16_bytes")}
    items = {label: {k: v for k, v in ledger_items(ledger).items() if v} for label, ledger in ledgers.items()}
    there = dict.fromkeys(name for mine in items.values() for name in mine)
    styles = {item_title(name): f"c{item_place(name)}" for name in there}  # the colours of result.png
    widest = max((sum(mine.values()) for mine in items.values()), default=1.0)
    rows = []
    for label, mine in items.items():
        whole = sum(mine.values())
        rows.append(_bar(label, {item_title(k): v for k, v in mine.items()}, widest, whole, styles))
        ratio = f"{format_bytes(whole)}, {_percent(whole / ledgers[label]['fp16_bytes'])}: "
        rows[-1]["text"] = ratio + rows[-1]["text"]
    caption = "Resident bytes per sample at the end, item by item; the items sum to what the allocator holds."
    return {"caption": caption, "heading": "bytes", "rows": rows, "key": list(styles.items())}


def _bar(label: str, parts: Mapping[str, float], widest: float, whole: float, styles: Mapping[str, str]) -> dict:
    """A bar whose parts are as wide as their share of `widest`, and in words their shares of `whole`."""
    shown = [{"style": styles[k], "width": f"{100 * v / widest:.3f}", "text": k} for k, v in parts.items()]
    return {"label": label, "parts": shown, "text": ", ".join(f"{k} {_percent(v / whole)}" for k, v in parts.items())}


def _percent(share: float) -> str:
    return f"{100 * share:.1f}\u00a0%"  # a line does not break before the sign


def changed_answers(rows: Sequence[ComparedRun], limit: int, length: int) -> dict:
    """The answers that got worse or better, at most so many of a run and each so long, as the page's script reads them:
    `samples` are ids with right answers, `changes` the places of each answer's parts in the other lists, and scores."""
    texts: dict[str, int] = {}
    samples: dict[tuple[str, str], int] = {}
    subsets: dict[str, int] = {}
    changes = []

    def place(text: str) -> int:
        cut = text if len(text) <= length else f"{text[: length // 2]} [...] {text[-(length // 2) :]}"
        return texts.setdefault(cut, len(texts))

    used = [row for row in rows if row.changes]
    for who, row in enumerate(used):
        for item in sorted(row.changes, key=lambda item: -abs(item.mine - item.theirs))[:limit]:
            sample = samples.setdefault((item.sample, safe(item.expected, length)), len(samples))
            subset = subsets.setdefault(item.subset, len(subsets))
            scores = [number(value, row.what.scale) for value in (item.theirs, item.mine)]
            changes.append([who, int(item.lost), subset, sample, place(item.other_text), place(item.text), *scores])
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
    return [
        ("runs", all_of([f"{min(r.started for r in records)} to {max(r.ended for r in records)}"])),
        ("kvbench", all_of(v.kvbench for v in versions) + f"; code {all_of(c.get('harness', '')[:12] for c in code)}"),
        ("git", all_of(r.git.commit[:12] for r in records) + ("; with uncommitted changes" if dirty else "")),
        ("Python", all_of(v.python for v in versions)),
        ("torch", all_of(v.torch for v in versions)),
        ("transformers", all_of(v.transformers for v in versions)),
        ("lm-eval", all_of(v.lm_eval for v in versions)),
        ("device", all_of(m.device for m in machines)),
        ("system", all_of(f"{m.host}, {m.num_cpus} CPUs, {m.num_threads} threads" for m in machines)),
        ("backend", all_of(r.backend for r in records)),
        ("batch size", all_of(r.identity.get("batch_size") for r in records)),
        ("seed", all_of(r.seed for r in records)),
        ("model", all_of(json.dumps(r.identity.get("model"), sort_keys=True) for r in records)),
        ("protocol", all_of(json.dumps(r.protocol, sort_keys=True) for r in records)),
    ]


def settings_rows(group: Group) -> list[dict]:
    """Every run with its state, its method's settings and its folder."""
    rows = []
    for run in group.runs:
        mine = {key: value for key, value in run.record.identity.get("method", {}).items() if key != "_target_"}
        words = ", ".join(safe(f"{key}={value}", SETTING_LENGTH) for key, value in mine.items())
        state = "complete" if run.complete else f"incomplete, {run.progress}"
        odd = [f"{count} {name}" for name in ("oom", "nan", "ungraded") if (count := getattr(run.record.counts, name))]
        rows.append(
            {"label": run.label, "state": ", ".join([state, *odd]), "settings": words or "none", "folder": run.name}
        )
    return rows


def picture_words(panel: Panel, axis: str) -> str:
    """Describe a picture in words, for readers who cannot see it."""
    places = standing(panel, axis)
    front = [point.label for point in panel.points if places.get(point.key) in (FRONTIER, NEAR)]
    beaten = sum(place == DOMINATED for place in places.values())
    words = f"{panel.title}: {panel.what.title} against {COSTS[axis].title} for {len(panel.points)} runs."
    if front:
        words += f" On the frontier of the estimates: {', '.join(front)}."
    return f"{words} Dominated at 5 % for the whole table: {beaten}. All numbers are in the table of methods."


def reference_words(group: Group, rows: Sequence[ComparedRun]) -> str:
    """The sentence that stands before the changed answers."""
    if group.reference is None:
        return f"There is no run of method={FULL} here, so no answer can be called lost."
    total, lost = sum(len(row.changes) for row in rows), sum(row.num_lost for row in rows)
    return f"Samples whose value differs from the reference's: {lost} lost and {total - lost} gained, over all runs."
