"""What the records of a run show that a method with a threshold, or with a protected prompt, did."""

from collections.abc import Iterable, Mapping
from typing import Any

from kvbench.policy.budget import Budget

Kept = Mapping[str, Any]


def kept_first(kept: Kept, sinks: int) -> int:
    """First tokens of a sequence that `protect` kept, from a record's `kept`."""
    return max(sinks, kept.get("instruction_tokens", 0))


def answer_tokens(kept: Kept) -> int:
    """Tokens of a sequence behind its prompt."""
    return int(kept["tokens_seen"] - kept["prompt_tokens"])


def prompt_complaint(record: Mapping[str, Any], budget: Budget, window: int, spare: int) -> str | None:
    """What is wrong with a sequence whose prompt is kept whole and whose answer has the budget; None when nothing is.

    Args:
        record: Its record.
        budget: Of the answer; in bytes, of both.
        window: Last tokens that stay.
        spare: Tokens per list that may come in before the next eviction.
    """
    kept: Kept = record.get("kept", {})
    if not kept:
        return None
    if kept["prompt_slots"] != kept["prompt_tokens"] * kept["lists"]:
        mean = kept["prompt_slots"] / kept["lists"]
        return f"a head kept {mean:g} of {kept['prompt_tokens']} prompt tokens, but protect=prompt keeps all"
    new, held = answer_tokens(kept), sum(kept["slots_per_tier"]) / kept["lists"]
    allowed = int(budget.value * new) if budget.unit == "ratio" else int(budget.value)
    if budget.unit == "bytes":
        allowed = kept["budget_tokens"] - kept["prompt_tokens"]
        resident = record.get("ledger", {}).get("resident_bytes", 0)
        if resident > budget.value:
            return f"{resident} bytes held at the end, but the budget allows {budget.value:g}"
    limit = kept["prompt_tokens"] + max(window, allowed) + spare
    if held <= limit:
        return None
    return f"{held:g} tokens per head held at the end, but the prompt and the budget allow {limit}"


def threshold_remark(threshold: float, samples: Iterable[tuple[Kept, int]]) -> str:
    """What share of the prompts reached a threshold, and whether that was everything or nothing.

    Args:
        threshold: The setting.
        samples: Of each sample its `kept`, and the tokens per list that stay whatever their score is.
    """
    found = [(kept, least) for kept, least in samples if kept]
    total = sum(kept["prompt_tokens"] * kept["lists"] for kept, _ in found)
    if not total:
        return ""
    slots = sum(kept["prompt_slots"] for kept, _ in found)
    said = f"threshold={threshold:g} kept {100 * slots / total:.1f} % of the prompts' tokens"
    if slots == total:
        return f"{said}: every score reaches it, so that this is the full cache under another name; raise it"
    if all(kept["prompt_slots"] <= kept["lists"] * (least + 1) for kept, least in found):
        return f"{said}: no score reaches it, so that only what always stays and each head's best did; lower it"
    return said
