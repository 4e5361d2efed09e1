"""What lists may hold while decoding, and how they get back to it: evictions of many tokens at once."""

import torch
from torch import Tensor

from kvbench.policy.budget import Budget
from kvbench.policy.plans import CompactPlan
from kvbench.policy.ranking import rank_descending
from kvbench.policy.views import DecodeView


def prompt_share(view: DecodeView, budget: Budget, given: Tensor | None = None) -> Tensor:
    """int64 [S, L, H]: what each list may hold now, from what the prompt's plan gave it.

    With a ratio budget a list's share grows with the sequence (a prompt too short to have a share gets the ratio);
    otherwise it stays, and a prompt that fitted the budget grows up to it first.

    Args:
        view: The view.
        budget: The method's budget.
        given: int64 [S, L, H] what counts as given by the plan; None = all that it gave.
    """
    given = view.prompt_slots if given is None else given
    seen, prompt = view.tokens_seen[:, None, None], view.prompt_tokens[:, None, None]
    if budget.unit == "ratio":
        # The one token that is kept of a prompt too short for the ratio is no share of it, or nothing would ever go.
        grown = (seen.double() * budget.value + 1e-9).long()  # as `Budget.tokens` does
        return torch.where(prompt * budget.value < 1, grown, given * seen // prompt)
    allowed = view.budget_tokens(budget)[:, None, None]
    return torch.where(prompt <= allowed, allowed, given)


def answer_share(view: DecodeView, budget: Budget) -> Tensor:
    """int64 [S, L, H]: the whole prompt, and a ratio of the answer or as many tokens of it as the budget says; a budget
    in bytes is of both."""
    prompt = view.prompt_tokens[:, None, None]
    answer = view.tokens_seen[:, None, None] - prompt
    if budget.unit == "ratio":
        return (prompt + (answer.double() * budget.value + 1e-9).long()).expand(view.shape)
    if budget.unit == "bytes":
        return torch.maximum(prompt, view.budget_tokens(budget)[:, None, None]).expand(view.shape)
    return (prompt + torch.full_like(answer, budget.value)).expand(view.shape)


def shrink_to_share(
    view: DecodeView,
    budget: Budget,
    window: int,
    score: Tensor | None = None,
    *,
    stays: Tensor | None = None,
    target: Tensor | None = None,
) -> CompactPlan:
    """Brings every list back to its share: how prompt-only methods compress while decoding. The lightest slots go, the
    last `window` tokens stay.

    Args:
        view: The view.
        budget: The method's budget.
        window: Last tokens that stay.
        score: fp32 [S, L, H, n] to rank by instead of the slots' scores.
        stays: bool [S, L, H, n] held slots that stay beside the window, however many they are; None = none.
        target: int64 [S, L, H] slots that may stay; None = `prompt_share`.

    Source: none; the papers compress only the prompt.
    """
    slots = view.slots(0)
    target = prompt_share(view, budget) if target is None else target
    target = target.clamp(min=max(1, window))
    first = slots.pos >= (view.tokens_seen[:, None, None] - window)[..., None]
    if stays is not None:
        first |= stays
        target = torch.maximum(target, (first & slots.valid).sum(-1))
    ranked = slots.score if score is None else score
    ranked = ranked.masked_fill(first, float("inf"))
    ranked = ranked.masked_fill(~slots.valid, float("-inf"))
    return CompactPlan(keep=[rank_descending(ranked) < target[..., None]])
