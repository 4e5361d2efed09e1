"""Decode-time eviction: slots that lists may hold, bulk evictions down to them, and protected tokens.

Protected tokens are exempt in addition to those that a method keeps.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvbench.errors import SettingsConflict
from kvbench.policy.budget import Budget
from kvbench.policy.plans import APPEND, CompactPlan, DecodePlan
from kvbench.policy.ranking import rank_descending
from kvbench.policy.views import DecodeView


def prompt_share(view: DecodeView, budget: Budget, base: Tensor | None = None) -> Tensor:
    """Slots that each list may hold now, int64 [S, L, H], from its share of the prompt's plan, or from `base`.

    With a ratio budget a list's share grows with the sequence (a prompt too short to have a share gets the ratio);
    otherwise it stays, and a prompt that fitted the budget grows up to it first.
    """
    base = view.prompt_slots if base is None else base
    seen, prompt = view.tokens_seen[:, None, None], view.prompt_tokens[:, None, None]
    if budget.unit == "ratio":
        # The one token that is kept of a prompt too short for the ratio is no share of it, or nothing would ever go.
        grown = (seen.double() * budget.value + 1e-9).long()  # as `Budget.tokens` does
        return torch.where(prompt * budget.value < 1, grown, base * seen // prompt)
    allowed = view.budget_tokens(budget)[:, None, None]
    return torch.where(prompt <= allowed, allowed, base)


def answer_share(view: DecodeView, budget: Budget) -> Tensor:
    """Slots per list, int64 [S, L, H]: the whole prompt, and the budget's share of the answer.

    A ratio is of the answer, a number is tokens of it; a budget in bytes is of both.
    """
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
    """Evicts every list down to its share: compression while decoding for prompt-only methods.

    The slots with the lowest scores go, the last `window` tokens stay.

    Args:
        view: The view.
        budget: The method's budget.
        window: Last tokens that stay.
        score: fp32 [S, L, H, n] to rank by instead of the slots' scores.
        stays: bool [S, L, H, n] held slots that stay in addition to the window, whatever their number; None = none.
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


Protect = Literal["none", "sinks", "instruction", "prompt", "answer"]


@dataclass(frozen=True)
class Protection:
    """Protected tokens of a prompt and of an answer."""

    of: Protect = "none"
    tokens: int = 4

    def check(self, text: object, budget: Budget, no_eviction: str) -> None:
        """Refuses protection that a budget, written as `text`, cannot have.

        `no_eviction` names the setting that makes the method evict while decoding, empty where it does.
        """
        if self.of in ("prompt", "answer") and budget.of_seen:
            raise SettingsConflict(
                f"budget={text} is a share of all tokens seen, of which protect={self.of} keeps a part whole; set "
                "protect to none, sinks or instruction, or give a ratio",
                setting="method.protect",
            )
        if self.of in ("prompt", "answer") and no_eviction:
            raise SettingsConflict(
                f"protect={self.of} is about evictions while decoding, and these settings make none; {no_eviction}",
                setting="method.protect",
            )
        if self.of == "instruction" and budget.unit == "bytes":
            raise SettingsConflict(
                f"budget={text} counts the whole cache, and how long the instruction is that protect=instruction "
                "keeps differs from text to text; give a ratio or tokens",
                setting="method.protect",
            )

    @property
    def sinks(self) -> int:
        """First tokens that are never evicted, whatever the budget."""
        return self.tokens if self.of == "sinks" else 0

    @property
    def is_first(self) -> bool:
        """Protects first tokens, which take their room in the budget."""
        return self.of in ("sinks", "instruction")

    def first(self, instruction_tokens: int) -> int:
        """First tokens of a sequence that are never evicted, of one with so long an instruction."""
        return max(self.sinks, instruction_tokens)

    def first_held(self, view: DecodeView) -> int | Tensor:
        """First tokens that no eviction takes: int64 [S] where sequences differ, else one number."""
        if self.of == "prompt":
            return view.prompt_tokens
        return view.instruction_tokens if self.of == "instruction" else self.sinks

    def room(self, view: DecodeView, allowed: Tensor) -> Tensor:
        """Tokens that a list may hold within a budget, int64 [S]; at least the first ones."""
        first = self.first_held(view)
        return torch.maximum(allowed, first) if isinstance(first, Tensor) else allowed.clamp(min=first)

    def slots(self, view: DecodeView, pos: Tensor) -> Tensor:
        """Mask bool [S, L, H, n] of the slots at these positions that are never evicted."""
        if self.of == "answer":
            return pos >= view.prompt_tokens[:, None, None, None]
        first = self.first_held(view)
        return pos < (first[:, None, None, None] if isinstance(first, Tensor) else first)


def seen_share(view: DecodeView, budget: Budget, protection: Protection, lookahead: int = 0) -> Tensor:
    """Slots per list, int64 [S, L, H], of a budget that is a share of all tokens seen.

    The incoming token and `lookahead` more are among them, in proportion to the prompt's plan. Their mean keeps to the
    share; slots that protected first tokens took of a prompt beyond it do not grow.
    """

    def allowed(tokens: Tensor) -> Tensor:
        return (tokens.double() * budget.value + 1e-9).long().clamp(min=1)  # as `Budget.tokens` does

    share, of_prompt = view.prompt_slots, allowed(view.prompt_tokens)
    if protection.is_first:
        share = share * of_prompt[:, None, None] // protection.room(view, of_prompt)[:, None, None]
    return share * allowed(view.tokens_seen + 1 + lookahead)[:, None, None] // of_prompt[:, None, None]


def displace_lightest(
    view: DecodeView,
    target: Tensor,
    window: int | Tensor,
    first: int | Tensor,
    *,
    grows: bool = True,
    over_layer: bool = False,
) -> DecodePlan:
    """Evicts token by token: in each full list the slot with the lowest score takes the incoming token.

    Nothing is read back from a device.

    Args:
        view: The view.
        target: int64 [S, L, H] tokens that a list may hold with the incoming one; at least `first` + 1.
        window: Last tokens that stay, the incoming one counted, as far as `target` has room; int64 [S] or one number.
        first: First tokens that stay; int64 [S] or one number.
        grows: Tokens of the answer have scores; else those of the prompt go first, and then the oldest.
        over_layer: Decide once per layer, by the mean over its heads.

    Source: none; the papers compress only the prompt, or hold a number of tokens that does not grow.
    """
    last = (target.amin((1, 2)) - first).clamp(min=1)
    last = torch.minimum(last, window) if isinstance(window, Tensor) else last.clamp(max=window)
    before = view.tokens_seen + 1 - last
    among = before if grows else torch.minimum(before, view.prompt_tokens)
    lightest = view.argmin(0, by="score", before=among, first=first, over_layer=over_layer)
    slot = lightest.slot
    if not grows:
        oldest = view.argmin(0, by="pos", before=before, first=first, over_layer=over_layer)
        slot = torch.where(lightest.exists, slot, oldest.slot)
    return DecodePlan(slot=torch.where(view.num_slots(0) >= target, slot, APPEND))  # -1, too, where none may go
