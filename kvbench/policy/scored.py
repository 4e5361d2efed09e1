"""What the methods share that rank a prompt's tokens, and where they are told to, all held tokens again later."""

from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
from torch import Tensor

from kvbench.policy.bounds import Bounds, Extent, of_answer
from kvbench.policy.budget import Budget
from kvbench.policy.declare import Compaction, ScoreSpec
from kvbench.policy.plans import CompactPlan, SlotArrays
from kvbench.policy.ranked import Ranked
from kvbench.policy.ranking import rank_descending
from kvbench.policy.statistics import Statistic
from kvbench.policy.views import DecodeView
from kvbench.rules import MAX_TOKENS, Whole

Steps = Annotated[int, Whole(0, MAX_TOKENS, unit="steps")]


@dataclass(kw_only=True)
class Scored(Ranked):
    """A method that keeps, per KV head, the tokens with the highest scores, and may evict again while decoding.

    Its `declare` calls `super().declare()` and then `self.rank_by(...)`, or `self.score_by(...)` for a statistic that
    can measure held tokens again.

    Args:
        decode_every: Score all slots again and evict before every n-th decode step, down to each list's share of the
            prompt's budget; 0 = never.
    """

    decode_every: Steps = 0

    def declare(self) -> None:
        super().declare()
        if self.decode_every:
            self.compaction = Compaction(self.decode_every)
            self.fewest_tokens = max(self.fewest_tokens, self.last_tokens())

    @property
    def no_eviction(self) -> str:
        return "" if self.decode_every else "set decode_every"

    def score_by(self, statistic: Statistic, *, slot_queries: int = 0, **how: Any) -> None:
        """Declares a score that is measured again before every eviction.

        Args:
            statistic: Measures a prompt, and the slots held where `decode_every` asks for that.
            slot_queries: Last queries that it looks at while decoding.
            how: Further fields of the ScoreSpec.
        """
        later: dict[str, Any] = {"slot_queries": slot_queries, "track": ("pos",)} if self.decode_every else {}
        self.rank_by(ScoreSpec(statistic=statistic, **later, **how))

    def sums(self, **how: Any) -> ScoreSpec:
        """A score of attention, to which every decode step adds its own where `decode_every` asks for evictions.

        Args:
            how: Fields of the ScoreSpec.
        """
        later: dict[str, Any] = {"decode_update": True, "track": ("score", "pos")} if self.decode_every else {}
        return ScoreSpec(**later, **how)

    def last_tokens(self) -> int:
        """Last tokens that evictions while decoding keep. Default: as many as of a prompt of any length."""
        return self.always(MAX_TOKENS)[1]

    def least_tokens(self, num_prompt_tokens: int) -> int:
        more = self.last_tokens() - 1 if self.protect == "prompt" else 0
        return super().least_tokens(num_prompt_tokens) + max(0, more)

    def bounds(self, extent: Extent) -> Bounds | None:
        """The budget has to be met after the prompt, and at the end where the method also evicts while decoding."""
        if self.threshold is not None or self.compaction is None:
            return super().bounds(extent)
        stays, given = self.last_tokens(), extent.allowed(self._budget, extent.tokens_seen)
        if self.protect == "prompt":
            return of_answer(extent, self._budget, stays, self.compaction.every)
        if self.protect == "answer" and extent.new_tokens:
            # Where lists share the budget, some hold little else, others their share.
            stays = max(stays, extent.new_tokens + (given if self.budget_is_mean else 0))
        stays = max(stays, self.protection.first(extent.instruction_tokens), given)
        most = stays + self.compaction.every + self.shares.spare_pages * extent.page_tokens
        return replace(self.within_budget(extent), end_mean=(0, most))

    def plan_compact(self, view: DecodeView) -> CompactPlan:
        return self.shrink(view)

    def shrink(self, view: DecodeView, score: Tensor | None = None) -> CompactPlan:
        """Every list goes back to its share, or to what reaches the threshold; what is protected stays.

        Args:
            view: The view.
            score: fp32 [S, L, H, n] to rank by instead of the slots' scores.
        """
        slots, window = view.slots(0), self.last_tokens()
        stays = self.protection.slots(view, slots.pos) & slots.valid
        if self.threshold is None:
            target = answer_share(view, self._budget) if self.protect == "prompt" else self._share(view)
            return shrink_to_share(view, self._budget, window, score, stays=stays, target=target)
        ranked = self._per_query_held(view, slots) if score is None else score
        stays |= slots.pos >= (view.tokens_seen[:, None, None] - window)[..., None]
        best = rank_descending(ranked.masked_fill(~slots.valid, float("-inf"))) == 0
        return CompactPlan(keep=[(ranked >= self.threshold) | stays | best])

    def _share(self, view: DecodeView) -> Tensor:
        """int64 [S, L, H]: `prompt_share`; what first tokens took beyond the budget does not grow with the sequence."""
        if not self.protection.is_first:
            return prompt_share(view, self._budget)
        allowed = view.budget_tokens(self._budget)
        room = self.protection.room(view, allowed)[:, None, None]
        return prompt_share(view, self._budget, view.prompt_slots * allowed[:, None, None] // room)

    def _per_query_held(self, view: DecodeView, slots: SlotArrays) -> Tensor:
        """Slots' scores; tracked sums divided by the queries since their token, of a prompt those that count."""
        if not self.score.decode_update:
            return slots.score
        origin = slots.pos
        if self.score.prefill_queries > 0:
            origin = torch.maximum(origin, (view.prompt_tokens - self.score.prefill_queries)[:, None, None, None])
        return slots.score / (view.tokens_seen[:, None, None, None] - origin).clamp(min=1)


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
