"""VATP: attention counts by what it brings, so it is weighed by the norm of the value."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

import kvbench.policy as kv


@dataclass(frozen=True)
class ValueWeighted(kv.Statistic):
    """Attention times the sum of the value's absolute entries; the attention itself is `attention`."""

    also: ClassVar[tuple[str, ...]] = ("attention",)
    by_queries: ClassVar[bool] = True
    in_chunks: ClassVar[bool] = True
    words: ClassVar[str] = "times the L1 norm of the value"

    def of_prompt(self, seen: kv.LayerTensors) -> Tensor:
        return self._weighed(seen.attention(), seen.v)

    def of_slots(self, seen: kv.LayerTensors) -> Tensor:
        assert seen.stored is not None, "the method tracks scores"
        return self._weighed(seen.stored, seen.v)

    def _weighed(self, attention: Tensor, v: Tensor) -> Tensor:
        return torch.stack([attention * v.float().abs().sum(-1), attention])


@dataclass(kw_only=True)
class VATP(kv.Scored):
    """Keeps the tokens with the most attention times the L1 norm of their value, the first ones and a recent window.

    Args:
        recent_share: Share of the budget for the most recent tokens, in [0, 1).
        sinks: First tokens that always stay, since their values are small whatever they do; >= 0.
        window: Last prompt queries that count (Scissorhands' form counts 400); 0 = all, as H2O.

    Source: guozhiyu/vatp utils_hh/modify_llama.py (Guo et al., EMNLP 2024), H2O's form with 20 first tokens.
    Differs: one kept set per KV head, by its query heads' sum; the original masks and frees nothing, at every step;
        here slots are freed, after the prompt and every `decode_every` steps. The recent window yields to the sinks in
        a budget too small for both.
    """

    recent_share: Annotated[float, kv.Number(0, 1)] = 0.5
    sinks: Annotated[int, kv.Whole(0, unit="tokens")] = 20
    window: Annotated[int, kv.Whole(0, unit="tokens")] = 0

    def declare(self) -> None:
        super().declare()
        self.rank_by(
            self.sums(statistic=ValueWeighted(), prefill_queries=self.window or kv.ALL_QUERIES, group_reduce="sum")
        )

    def always(self, budget: int) -> tuple[int, int]:
        return self.sinks, int(budget * self.recent_share)

    def last_tokens(self) -> int:
        return 0  # a share of what each sequence holds: see plan_compact

    def plan_prefill(self, view: kv.PrefillView) -> kv.PrefillPlan:
        plan = super().plan_prefill(view)
        plan.score = view.extra["attention"] if self.evicts_later else None
        return plan

    def plan_compact(self, view: kv.DecodeView) -> kv.CompactPlan:
        slots = view.slots(0)
        held = view.prompt_slots.double().mean((1, 2))
        if self._budget.of_seen:
            held = view.budget_tokens(self._budget).double()
        share = held * self.recent_share
        first = (view.tokens_seen - share.long())[:, None, None, None]
        return self.shrink(view, self._above(slots.score, slots.pos, first))

    def _above(self, score: Tensor, pos: Tensor, first: Tensor | int) -> Tensor:
        """Scores with the sinks above all, and then the recent tokens, the newest first."""
        top = torch.finfo(torch.float32).max / 4
        newest = (1 + pos / 2**22) * top  # rises with the position, in steps that fp32 can tell apart
        return torch.where(pos >= first, newest, score.clamp(max=top)).masked_fill(pos < self.sinks, float("inf"))
