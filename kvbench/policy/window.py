"""What the methods share that rank by an observation window."""

import torch
from torch import Tensor

from kvbench.policy.budget import Budget
from kvbench.policy.plans import CompactPlan
from kvbench.policy.ranking import rank_descending
from kvbench.policy.views import DecodeView


def shrink_to_share(view: DecodeView, budget: Budget, window: int, score: Tensor | None = None) -> CompactPlan:
    """Brings every list back to what the prompt's plan gave it: how prompt-only methods compress while decoding.

    With a ratio budget a list's share grows with the sequence; otherwise it stays, and a prompt that fitted the budget
    grows up to it first. The lightest slots go, the last `window` tokens stay.

    Args:
        view: The view.
        budget: The method's budget.
        window: Last tokens that stay.
        score: fp32 [S, L, H, n] to rank by instead of the slots' scores.

    Source: none; the papers compress only the prompt.
    """
    slots = view.slots(0)
    seen, prompt = view.tokens_seen[:, None, None], view.prompt_tokens[:, None, None]
    if budget.unit == "ratio":
        target = view.prompt_slots * seen // prompt
    else:
        allowed = view.budget_tokens(budget)[:, None, None]
        target = torch.where(prompt <= allowed, allowed, view.prompt_slots)
    ranked = slots.score if score is None else score
    ranked = ranked.masked_fill(slots.pos >= (seen - window)[..., None], float("inf"))
    ranked = ranked.masked_fill(~slots.valid, float("-inf"))
    return CompactPlan(keep=[rank_descending(ranked) < target.clamp(min=window)[..., None]])
