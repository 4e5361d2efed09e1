"""What the methods share that rank a prompt's tokens, and where they are told to, all held tokens again later."""

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from kvbench.policy.budget import Budget
from kvbench.policy.declare import ScoreSpec
from kvbench.policy.outcomes import answer_tokens, kept_first, prompt_complaint
from kvbench.policy.plans import CompactPlan, SlotArrays
from kvbench.policy.ranked import Ranked
from kvbench.policy.ranking import rank_descending
from kvbench.policy.statistics import Statistic
from kvbench.policy.views import DecodeView
from kvbench.rules import MAX_TOKENS, Whole


@dataclass(kw_only=True)
class Scored(Ranked):
    """A method that keeps, per KV head, the tokens with the highest scores; a subclass says by which statistic.

    Its `__post_init__` calls `super().__post_init__()` and then `self.score_by(...)`.

    Args:
        decode_every: Score all slots again and evict before every n-th decode step, down to each list's share of the
            prompt's budget; 0 = never.
    """

    decode_every: Annotated[int, Whole(0, MAX_TOKENS, unit="steps")] = 0

    how_to_evict_later = "set decode_every"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.compact_every = self.decode_every
        if self.decode_every:
            self.fewest_tokens = max(self.fewest_tokens, self.last_tokens())

    def evicts_later(self) -> bool:
        return self.decode_every > 0

    def score_by(self, statistic: Statistic, *, slot_queries: int = 0, **how: Any) -> None:
        """Declares the score.

        Args:
            statistic: Measures a prompt, and the slots held where `decode_every` asks for that.
            slot_queries: Last queries that it looks at while decoding.
            how: Further fields of the ScoreSpec.
        """
        self.rank_by(
            ScoreSpec(
                statistic=statistic,
                slot_queries=slot_queries if self.decode_every else 0,
                track=("pos",) if self.decode_every else (),
                **how,
            )
        )

    def last_tokens(self) -> int:
        """Last tokens that evictions while decoding keep. Default: as many as of a prompt of any length."""
        return self.always(MAX_TOKENS)[1]

    def least_tokens(self, num_prompt_tokens: int) -> int:
        more = self.last_tokens() - 1 if self.protect == "prompt" else 0
        return super().least_tokens(num_prompt_tokens) + max(0, more)

    def plan_compact(self, view: DecodeView) -> CompactPlan:
        return self.shrink(view)

    def shrink(self, view: DecodeView, score: Tensor | None = None) -> CompactPlan:
        """Every list goes back to its share, or to what reaches the threshold; what is protected stays.

        Args:
            view: The view.
            score: fp32 [S, L, H, n] to rank by instead of the slots' scores.
        """
        slots, window = view.slots(0), self.last_tokens()
        stays = self._protected(view, slots.pos) & slots.valid
        if self.threshold is None:
            target = answer_share(view, self._budget) if self.protect == "prompt" else self._share(view)
            return shrink_to_share(view, self._budget, window, score, stays=stays, target=target)
        ranked = self._per_query_held(view, slots) if score is None else score
        stays |= slots.pos >= (view.tokens_seen[:, None, None] - window)[..., None]
        best = rank_descending(ranked.masked_fill(~slots.valid, float("-inf"))) == 0
        return CompactPlan(keep=[(ranked >= self.threshold) | stays | best])

    def _share(self, view: DecodeView) -> Tensor:
        """int64 [S, L, H]: `prompt_share`; what first tokens took beyond the budget does not grow with the sequence."""
        if self.protect not in ("sinks", "instruction"):
            return prompt_share(view, self._budget)
        allowed = view.budget_tokens(self._budget)
        first = view.instruction_tokens if self.protect == "instruction" else torch.full_like(allowed, self._sinks)
        given = view.prompt_slots * allowed[:, None, None] // torch.maximum(allowed, first)[:, None, None]
        return prompt_share(view, self._budget, given)

    def _protected(self, view: DecodeView, pos: Tensor) -> Tensor:
        """bool [S, L, H, n]: slots that `protect` never evicts."""
        prompt = view.prompt_tokens[:, None, None, None]
        if self.protect == "sinks":
            return pos < self.protect_tokens
        if self.protect == "instruction":
            return pos < view.instruction_tokens[:, None, None, None]
        if self.protect == "none":
            return torch.zeros_like(pos, dtype=torch.bool)
        return pos < prompt if self.protect == "prompt" else pos >= prompt

    def _per_query_held(self, view: DecodeView, slots: SlotArrays) -> Tensor:
        """Slots' scores; tracked sums divided by the queries since their token, of a prompt those that count."""
        if not self.score.decode_update:
            return slots.score
        origin = slots.pos
        if self.score.prefill_queries > 0:
            origin = torch.maximum(origin, (view.prompt_tokens - self.score.prefill_queries)[:, None, None, None])
        return slots.score / (view.tokens_seen[:, None, None, None] - origin).clamp(min=1)

    def check_outcome(self, record: dict) -> str | None:
        """The budget has to be met after the prompt, and at the end where the method also evicts while decoding."""
        if self.threshold is not None:
            return None
        kept, window = record.get("kept", {}), self.last_tokens()
        if self.protect == "prompt":
            return prompt_complaint(record, self._budget, window, self.compact_every)
        first = kept_first(kept, self._sinks)
        answer = answer_tokens(kept) if kept and self.protect == "answer" else 0
        if answer and self.budget_is_mean:  # some lists hold little else, others their share
            answer += kept.get("budget_tokens") or self._budget.tokens(
                kept["tokens_seen"], kept["lists"], kept["slot_bytes"]
            )
        window = max(window, answer, first)
        return self.share_complaint(record, self._budget, window, at_least=max(1, first), **self._leeway)


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
