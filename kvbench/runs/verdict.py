"""Verdict of a run's records on its method: kept budgets and promises, and remarks for readers."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from math import inf
from typing import Any

from kvbench.policy import Bounds, Extent, Policy, Ranked

Kept = Mapping[str, Any]


def complaint(policy: Policy, record: Mapping[str, Any]) -> str | None:
    """One line on a sequence that held more or less than its method promises (`Policy.bounds`).

    By a sample's record (`kept` and `ledger`); None when nothing is wrong, or nothing was counted.
    """
    kept: Kept = record.get("kept", {})
    if (ratio := kept.get("read_ratio", 0.0)) > 1:  # reading the bounds of pages costs bytes too
        return f"attention read {ratio:.3f} of the bytes it holds, which saves nothing"
    bounds = policy.bounds(extent(kept)) if "prompt_slots" in kept else None
    if bounds is None:
        return None
    if text := _of_prompt(bounds, kept) or _at_end(bounds, kept):
        return text
    resident = record.get("ledger", {}).get("resident_bytes", 0)
    if resident > bounds.resident_bytes:
        return f"{resident} bytes held at the end, but the budget allows {bounds.resident_bytes:g}"
    return None


def extent(kept: Kept) -> Extent:
    """The lengths of a sequence from a record's `kept`; one without an answer ends with its prompt."""
    values = {"tokens_seen": kept["prompt_tokens"]} | dict(kept)
    return Extent(**{item.name: values[item.name] for item in fields(Extent) if item.name in values})


def _of_prompt(bounds: Bounds, kept: Kept) -> str | None:
    """Violation after the prompt."""
    mean = kept["prompt_slots"] / kept["lists"]
    lists = [float(kept[name]) for name in ("prompt_slots_max", "prompt_slots_min") if name in kept]
    sizes = bounds.prompt_sizes
    for count, (least, most) in [(mean, bounds.prompt_mean), *((count, bounds.prompt) for count in lists)]:
        if not least <= count <= most or (sizes and not set(lists) <= set(sizes)):
            required = _said(count, least, most) if not sizes else " or ".join(map(str, sorted(set(sizes))))
            held = f"a head kept {count:g} of {kept['prompt_tokens']} prompt tokens ({mean:g} on average)"
            return f"{held}, but {bounds.why} {required}"
    return None


def _at_end(bounds: Bounds, kept: Kept) -> str | None:
    """Violation after the last token."""
    if (slots := kept.get("slots_per_tier")) is None:
        return None
    held, inside = sum(slots) / kept["lists"], sum(slots[tier] for tier in bounds.tiers) / kept["lists"]
    if not bounds.end_mean[0] <= held <= bounds.end_mean[1]:
        return f"{held:g} tokens per head held at the end, but {bounds.why} {_said(held, *bounds.end_mean)}"
    if not bounds.in_tiers[0] <= inside <= bounds.in_tiers[1]:
        return f"{inside:g} of {kept['tokens_seen']} tokens per head {bounds.why} {_said(inside, *bounds.in_tiers)}"
    return None


def _said(count: float, least: float, most: float) -> str:
    """The end of a range that a count lies beyond."""
    if count > most or least == most:
        return f"{most:g}"
    return f"at least {least:g}" if most == inf else f"{most:g} and no fewer than {least:g}"


def remark(policy: Policy, records: Sequence[Mapping[str, Any]]) -> str:
    """Remark for readers of a run on its method, from its samples' records; empty without one."""
    held: list[Kept] = [record["kept"] for record in records if record.get("kept")]
    if isinstance(policy, Ranked) and policy.threshold is not None and policy.protect != "prompt":
        return _of_threshold(policy.threshold, [(kept, policy.fewest_of_prompt(extent(kept))) for kept in held])
    return _of_bits(policy, held) if policy.chooses_bits else _of_tiers(policy, held)


def _of_threshold(threshold: float, samples: Sequence[tuple[Kept, int]]) -> str:
    """Remark on the share of the prompts that reached a threshold, where that was everything or nothing.

    Args:
        samples: Of each sample its `kept`, and the tokens per list that stay whatever their score is.
    """
    total = sum(kept["prompt_tokens"] * kept["lists"] for kept, _ in samples)
    if not total:
        return ""
    slots = sum(kept["prompt_slots"] for kept, _ in samples)
    said = f"threshold={threshold:g} kept {100 * slots / total:.1f} % of the prompts' tokens"
    if slots == total:
        return f"{said}: every score reaches it, so that this is the full cache under another name; raise it"
    if all(kept["prompt_slots"] <= kept["lists"] * (least + 1) for kept, least in samples):
        return f"{said}: no score reaches it, so that only what always stays and each head's best did; lower it"
    return said


def _of_tiers(policy: Policy, held: Sequence[Kept]) -> str:
    """Remark on a method with several tiers that used one, and dropped nothing."""
    if len(policy.tiers) < 2 or any(kept.get("slot_ratio", 0) < 1 or "slots_per_tier" not in kept for kept in held):
        return ""
    slots = [sum(counts) for counts in zip(*(kept["slots_per_tier"] for kept in held), strict=True)]
    used = [number for number, count in enumerate(slots) if count]
    if len(used) != 1:
        return ""
    return f"every token is in the tier {policy.tiers[used[0]].name}: here it only quantises"


def _of_bits(policy: Policy, held: Sequence[Kept]) -> str:
    """Remark on the average bits of keys and values."""
    slots = [sum(counts) for counts in zip(*(kept["slots_per_tier"] for kept in held), strict=True)]
    if not sum(slots) or any(tier.native for tier in policy.tiers):
        return ""
    keys, values = (
        sum(count * getattr(tier, side) for count, tier in zip(slots, policy.tiers, strict=True)) / sum(slots)
        for side in ("k_bits", "v_bits")
    )
    return f"keys have {keys:.2f} and values {values:.2f} bits on average"
