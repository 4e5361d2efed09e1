"""Bars of a report: where a run's tokens are, and what its bytes are."""

from collections.abc import Mapping, Sequence

from kvbench.evidence.load import Group, StoredRun
from kvbench.results import summary
from kvbench.results.measures import item_title, ledger_items
from kvbench.show.picture import item_index
from kvbench.show.progress import format_bytes
from kvbench.sizing.stored import policy_of, tier_shares

NUM_STYLES = 8


def bytes_of(run: StoredRun) -> dict[str, float]:
    """The byte ledger over the finished samples, as `run.json` has it for a complete run."""
    return summary.ledger(list(run.samples.values()))


def tier_names(run: StoredRun, count: int) -> list[str]:
    """Names of a run's tiers, the last of which is a residual buffer, by its method's code.

    `tier 0`, ... when the code no longer fits the number of tiers in the records.
    """
    policy = policy_of(run.record.identity)
    names = [] if policy is None else [tier.name for tier in policy.tiers] + ["16-bit buffer"] * bool(policy.residual)
    return names if len(names) == count else [f"tier {index}" for index in range(count)]


def shares_by_name(run: StoredRun) -> dict[str, float]:
    """Share of all tokens, over layers and KV heads, in each tier at the end; the rest up to 1 was evicted."""
    shares = tier_shares(run.samples.values())
    return named(tier_names(run, len(shares)), shares)


def named(names: Sequence[str], values: Sequence[float]) -> dict[str, float]:
    """Shares of tiers by their names; those of tiers with one name together."""
    shares: dict[str, float] = {}
    for name, share in zip(names, values, strict=True):
        shares[name] = shares.get(name, 0.0) + share
    return shares


def tier_bars(group: Group) -> dict:
    """Tokens per tier of every run, as the bars of DiffKV's figure 12."""
    by_label = {run.label: shares for run in group.runs if (shares := shares_by_name(run))}
    names = dict.fromkeys(name for shares in by_label.values() for name in shares)
    styles = {name: f"c{index % NUM_STYLES}" for index, name in enumerate(names)} | {"evicted": "evicted"}
    rows = []
    for label, shares in by_label.items():
        rows.append(_bar(label, {**shares, "evicted": max(0.0, 1.0 - sum(shares.values()))}, 1.0, 1.0, styles))
    caption = "Share of all tokens, over layers and KV heads, in each precision at the end of the answer."
    return {"caption": caption, "heading": "tokens", "rows": rows, "key": list(styles.items())}


def byte_bars(group: Group) -> dict:
    """The resident bytes of every run, item by item."""
    ledgers = {run.label: ledger for run in group.runs if (ledger := bytes_of(run)).get("fp16_bytes")}
    items = {
        label: {k: v / ledger["fp16_bytes"] for k, v in ledger_items(ledger).items() if v}
        for label, ledger in ledgers.items()
    }
    there = dict.fromkeys(name for mine in items.values() for name in mine)
    styles = {item_title(name): f"c{item_index(name)}" for name in there}  # the colours of result.png
    widest = max((sum(mine.values()) for mine in items.values()), default=1.0)
    rows = []
    for label, mine in items.items():
        whole = sum(mine.values())
        rows.append(_bar(label, {item_title(k): v for k, v in mine.items()}, widest, whole, styles))
        held = format_bytes(whole * ledgers[label]["fp16_bytes"])
        rows[-1]["text"] = f"{_percent(whole)}, {held}: {rows[-1]['text']}"
    caption = (
        "Resident bytes per sample at the end, item by item, as shares of an FP16 full cache of the same tokens; the "
        "items sum to what the allocator holds."
    )
    return {"caption": caption, "heading": "bytes", "rows": rows, "key": list(styles.items())}


def _bar(label: str, parts: Mapping[str, float], widest: float, whole: float, styles: Mapping[str, str]) -> dict:
    """A bar whose parts are as wide as their share of `widest`, and in words their shares of `whole`."""
    shown = [{"style": styles[k], "width": f"{100 * v / widest:.3f}", "text": k} for k, v in parts.items()]
    return {"label": label, "parts": shown, "text": ", ".join(f"{k} {_percent(v / whole)}" for k, v in parts.items())}


def _percent(share: float) -> str:
    return f"{100 * share:.1f}\u00a0%"  # a line does not break before the sign
