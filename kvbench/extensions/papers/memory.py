"""Sizes of caches as their papers count them, next to the bytes that were resident, of each row of an entry."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvbench.evidence.load import StoredRun
from kvbench.evidence.report_bars import tier_names
from kvbench.extensions.papers.papers import Entry, Paper
from kvbench.extensions.papers.printed import row_of
from kvbench.extensions.papers.published import task_name
from kvbench.policy import Budget, Tier
from kvbench.results import summary
from kvbench.results.lines import read_samples
from kvbench.results.measures import RESIDENT, plain_subset
from kvbench.results.record import RunRecord
from kvbench.results.sample import SampleRecord
from kvbench.show.csv_file import csv_row, records_csv
from kvbench.show.formats import markdown_table
from kvbench.sizing.stored import tier_shares

FP16_BITS, SCALE_BYTES = 16, 4  # of an element; of the scale and zero of a group, of which MiniKV counts each
MINIKV_PROMPT = 4096  # tokens, for which MiniKV's figures are drawn (section 5.3)
HEADINGS = [
    "row",
    "task",
    "subset",
    "score, %",
    "by the paper, %",
    "by the paper, GB",
    "printed, %",
    "resident, %",
    "front",
]


class Size(NamedTuple):
    """A line of the table; None where there is no number.

    Args:
        score: Score in the task's metric.
        share: Share of the full cache's size, as the paper counts both.
        size_bytes: That size where the paper states it in bytes.
        printed: The share that the paper printed for this row, model and task, in %.
        resident: Share of the FP16 full cache that was resident as the answers ended.
    """

    row: str
    task: str
    subset: str
    score: float | None
    share: float | None
    size_bytes: float | None
    printed: float | None
    resident: float | None


def diffkv(
    run: StoredRun, records: Sequence[SampleRecord], answer_tokens: int | None
) -> tuple[float | None, float | None]:
    """Bits of the codes over those of FP16, without scales; of what prunes, the share that it keeps or reads.

    Source: DiffKV section 7.2 (its tables' 50 %, 25 %, 18.8 % and 12.5 %), figure 1.
    """
    settings = run.settings
    for name in ("read_budget", "budget"):
        if name in settings:
            budget = Budget.parse(settings[name])
            return (budget.value if budget.unit in ("ratio", "seen") else None), None
    shares = tier_shares(records)
    if not shares:
        return None, None
    try:
        tiers = [Tier.parse(name) if "buffer" not in name else None for name in tier_names(run, len(shares))]
    except ValueError:  # named otherwise than a setting is
        bits = settings.get("bits")
        return (bits / FP16_BITS if isinstance(bits, int) else None), None
    return sum(share * _bits(tier) / FP16_BITS for share, tier in zip(shares, tiers, strict=True)), None


def kv_compress(
    run: StoredRun, records: Sequence[SampleRecord], answer_tokens: int | None
) -> tuple[float | None, None]:
    """KVs that are held over KVs that were seen, which is one over the compression rate.

    Source: KV-Compress section 3.3.
    """
    shares = tier_shares(records)
    return (sum(shares) if shares else None), None


def minikv(
    run: StoredRun, records: Sequence[SampleRecord], answer_tokens: int | None
) -> tuple[float | None, float | None]:
    """The formulas of section 4.4, of a prompt of 4,096 tokens and the longest answer.

    Source: MiniKV sections 4.4 and 5.3. H2O's and SnapKV's has no token of the answer in it.
    Differs: a quantised H2O (figure 3) counts its bits without scales; of it there is no formula.
    """
    if answer_tokens is None:
        return None, None
    prompt, settings = MINIKV_PROMPT, run.settings
    whole = prompt + answer_tokens
    share = None
    if run.method == "full":
        share = 1.0
    elif run.method == "kivi":
        share = _grouped(settings["bits"], settings["group"])
    elif run.method == "minikv":
        share = _grouped(2, 16) * ((settings["heavy"] + settings["recent"]) * prompt + answer_tokens) / whole
    elif isinstance(settings.get("budget"), float):
        share = settings["budget"] * prompt / whole * _bits(Tier.parse(settings.get("tier", "fp16"))) / FP16_BITS
    ok = [record for record in records if record["status"] == "ok" and record["kept"].get("tokens_seen")]
    if share is None or not ok:
        return share, None
    token_bytes = ok[0]["ledger"]["fp16_bytes"] / ok[0]["kept"]["tokens_seen"]
    return share, share * token_bytes * whole


FORMULAS: Mapping[str, Callable[..., tuple[float | None, float | None]]] = {
    "DiffKV": diffkv,
    "LeanKV": diffkv,
    "KV-Compress": kv_compress,
    "MiniKV": minikv,
}


def sizes(paper: Paper, entry: Entry, ran: Sequence[tuple[str, Path | None]]) -> list[Size]:
    """The lines of an entry's runs: of each task, and of its subsets where it has several."""
    result = []
    for row, folder in ran:
        record = RunRecord.load(folder) if folder is not None else None
        if folder is None or record is None or paper.name not in FORMULAS:
            continue
        samples = read_samples(folder / "samples.jsonl", record.hash, sealed=record.sealed)[0]
        run = StoredRun(name=str(folder), record=record, samples=samples, total=record.counts.total or None)
        subsets = sorted({sample["subset"] for sample in samples.values()})
        for subset in ["", *(subsets if len(subsets) > 1 or paper.name == "MiniKV" else [])]:
            mine = [sample for sample in samples.values() if subset in ("", sample["subset"])]
            result.append(_size(paper, entry, row, run, subset, mine))
    return result


def _size(paper: Paper, entry: Entry, row: str, run: StoredRun, subset: str, records: Sequence[SampleRecord]) -> Size:
    record = run.record
    metric = record.metrics.get(record.primary or "")
    score = metric.subsets.get(subset) if metric is not None and subset else metric
    rules: Any = record.protocol.get("rules") or {}
    longest = {each["max_new_tokens"] for name, each in rules.items() if subset in ("", name)}
    # Of answers of several lengths there is no size.
    share, size_bytes = FORMULAS[paper.name](run, records, longest.pop() if len(longest) == 1 else None)
    printed = entry.printed(paper)
    wanted = {task_name(plain_subset(subset) if subset else record.task)}
    mine = [
        line["memory_pct"]
        for _, line in printed.iterrows()
        if line["model"] == paper.printed_model(record.model)
        and task_name(line["task"]) in wanted
        and row_of(line["method"], line["variant"]) == row
    ]
    return Size(
        row=row,
        task=record.task,
        subset=subset,
        score=score.value if score is not None else None,
        share=share,
        size_bytes=size_bytes,
        printed=float(mine[0]) if mine and mine[0] == mine[0] else None,
        resident=summary.ledger(list(records)).get(f"{RESIDENT.name}_ratio"),
    )


def front(sizes: Sequence[Size]) -> list[bool | None]:
    """Mark lines that no other of their task and subset dominates by best estimates.

    A line dominates with a larger score at most the same size, or an equal score and less size; None where score or
    size is unknown.
    """
    marks: list[bool | None] = []
    for one in sizes:
        if one.score is None or one.share is None:
            marks.append(None)
            continue
        others = [each for each in sizes if (each.task, each.subset) == (one.task, one.subset) and each is not one]
        marks.append(not any(_dominates(each, one) for each in others))
    return marks


def _dominates(other: Size, one: Size) -> bool:
    if other.score is None or other.share is None or one.score is None or one.share is None:
        return False
    is_no_worse = other.score >= one.score and other.share <= one.share
    return is_no_worse and (other.score > one.score or other.share < one.share)


def _bits(tier: Tier | None) -> float:
    """Bits of an element, the mean of key and value; of a 16-bit buffer for None."""
    return FP16_BITS if tier is None else (tier.k_bits + tier.v_bits) / 2


def _grouped(bits: int, group: int) -> float:
    """Share of FP16 that a group takes with its scale and zero."""
    return (group * bits / 8 + SCALE_BYTES) / (group * FP16_BITS / 8)


def csv_of(sizes: Sequence[Size]) -> bytes:
    """Every line, unrounded."""
    return records_csv([csv_row(**one._asdict(), front=mark) for one, mark in zip(sizes, front(sizes), strict=True)])


def markdown(title: str, sizes: Sequence[Size]) -> str:
    """The table as a page."""
    lines = [HEADINGS]
    for one, mark in zip(sizes, front(sizes), strict=True):
        numbers = (_text(one.score, 100), _text(one.share, 100), _text(one.size_bytes, 1e-9, ".3f"))
        shares = (_text(one.printed, 1), _text(one.resident, 100))
        word = "-" if mark is None else "yes" if mark else "no"
        lines.append([one.row, one.task, one.subset or "all", *numbers, *shares, word])
    return (
        f"# {title}: memory\n\n{markdown_table(lines)}\n\n- by the paper: the size as the paper counts it, and its "
        "share of the full cache's; it leaves out some of what the resident bytes have, such as scales, buffers, "
        "tables and started pages\n- front: no other row of the task has a better score at no more of the paper's "
        "size, by best estimates alone\n"
    )


def _text(value: float | None, scale: float, digits: str = ".1f") -> str:
    return "-" if value is None else f"{value * scale:{digits}}"
