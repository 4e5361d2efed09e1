"""StreamingLLM: attention sinks and a recent window."""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

import kvbench.policy as kv


@dataclass(kw_only=True)
class StreamingLLM(kv.Policy):
    """Keeps the first `sinks` and the last tokens; every new token overwrites the oldest one that is not a sink.

    Args:
        sinks: First tokens that always stay, >= 0.
        budget: Sinks and recent tokens together: ratio of the prompt, tokens, or bytes; or share of all tokens seen
            (`50%seen`), with which the window grows and the positions of slots are kept.
        position_mode: `cache_relative`: keys are stored without rotary position and rotated to their index in the
            cache, as the paper does. `absolute`: keys keep their true positions, as most comparison papers do.
        tier: Precision of what is kept.

    Source: mit-han-lab/streaming-llm (start_size 4, recent_size 512).
    Differs: the prompt's own output is exact (the original evicts while it reads a prompt longer than the cache; so
        does `prefill.chunk`, after each chunk).
    """

    sinks: Annotated[int, kv.Whole(0, unit="tokens")] = 4
    budget: kv.BudgetText = 516
    position_mode: Literal["cache_relative", "absolute"] = "cache_relative"
    tier: kv.TierText = "fp16"
    acts_in_decode = True
    no_upkeep = ""

    def declare(self) -> None:
        self.tiers = (kv.Tier.parse(self.tier),)
        self.limit = self._budget = kv.Budget.parse(self.budget)
        self.fewest_tokens = self.sinks + 1
        if self._budget.of_seen:
            self.score = kv.ScoreSpec(track=("pos",))
        if self._budget.unit == "tokens" and self._budget.value <= self.sinks:
            raise kv.SettingsConflict(
                f"budget={self.budget} tokens leaves no recent token beside sinks={self.sinks}; raise the budget",
                setting="method.budget",
            )

    def most_tokens(self, budget: int, num_prompt_tokens: int, num_new_tokens: int) -> int:
        return min(budget, num_prompt_tokens + num_new_tokens)  # a token is overwritten before one comes in

    def plan_prefill(self, view: kv.PrefillView) -> kv.PrefillPlan:
        recent = max(1, view.budget_tokens(self._budget) - self.sinks)
        tier_of = view.filled(0)
        tier_of[..., self.sinks : max(self.sinks, view.num_tokens - recent)] = kv.EVICT
        return kv.PrefillPlan(tier_of=tier_of)

    def plan_decode(self, view: kv.DecodeView) -> kv.DecodePlan:
        if self._budget.of_seen:
            oldest = view.argmin(0, by="pos", first=self.sinks)
            is_full = view.num_slots(0) >= self._room(view)[:, None, None]
            return kv.DecodePlan(slot=torch.where(is_full, oldest.slot, kv.APPEND))
        recent, turns = self._ring(view)
        slot = torch.where(turns >= 0, self.sinks + turns % recent, -1)
        return kv.DecodePlan(slot=slot[:, None, None].expand(view.shape))

    def cache_positions(self, view: kv.DecodeView, num_slots: int) -> Tensor:
        if self._budget.of_seen:
            return self._ages(view, num_slots)
        recent, turns = self._ring(view)
        slot = torch.arange(num_slots, device=turns.device).expand(len(turns), -1)
        age = self.sinks + (slot - self.sinks - (turns + 1)[:, None]) % recent[:, None]
        return torch.where((slot < self.sinks) | (turns < 0)[:, None], slot, age)

    def bounds(self, extent: kv.Extent) -> kv.Bounds:
        return kv.within(extent, self._budget, at_least=self.sinks + 1, at_end=0, floor=self.sinks + 1)

    def _room(self, view: kv.DecodeView) -> Tensor:
        """Tokens that lists may hold of a share of all tokens seen, int64 [S], the incoming one among them."""
        return view.budget_tokens(self._budget).clamp(min=self.sinks + 1)

    def _ages(self, view: kv.DecodeView, num_slots: int) -> Tensor:
        """Slot indices by age where the window grows; recent tokens are consecutive in slots.

        The positions may be of before the step, when the incoming token had no slot, or that of one that has left the
        window.
        """
        slots = view.slots(0)
        pos, valid = (x[:, 0, 0, :num_slots] for x in (slots.pos, slots.valid))
        held = torch.minimum(view.tokens_seen + 1, self._room(view))[:, None]
        age = pos - (view.tokens_seen[:, None] + 1 - held)
        is_new = ~valid | ((age < self.sinks) & (pos >= self.sinks))
        ages = torch.where(is_new, held - 1, torch.where(pos < self.sinks, pos, age))
        return torch.cat([ages, (held - 1).expand(-1, num_slots - ages.shape[1])], 1)

    def _ring(self, view: kv.DecodeView) -> tuple[Tensor, Tensor]:
        """Recent tokens per sequence, and the overwrites before this step (negative: not full yet); int64 [S].

        The recent slots form a ring: overwrite number t takes slot sinks + t mod recent, so no positions need to be
            stored.
        """
        recent = (view.budget_tokens(self._budget) - self.sinks).clamp(min=1)
        return recent, view.tokens_seen - torch.maximum(view.prompt_tokens, recent + self.sinks)
