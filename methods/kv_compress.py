"""KV-Compress: whole blocks evicted by one ranking over all layers and heads."""

from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from torch import Tensor

import kvbench.policy as kv


@dataclass(frozen=True, kw_only=True)
class OverBudget(kv.Compaction):
    """Evictions before every step that begins with more blocks than the budget allows."""

    budget: kv.Budget
    block: int
    floor_tokens: int

    def due(self, view: kv.DecodeView) -> Tensor:
        return self.surplus(view.num_slots(0).flatten(1), view.budget_tokens(self.budget), coming=1) > 0

    def surplus(self, held: Tensor, tokens: Tensor, coming: int = 0) -> Tensor:
        """Blocks int64 [...] beyond the budget of a sequence's lists, which hold int64 [..., M] slots together.

        The budget is `tokens` per list; blocks that incoming tokens will open do not count yet. Of a share of all
        tokens seen, whole blocks that leave room for `coming` tokens per list.
        """
        tokens = tokens.clamp(min=self.floor_tokens) if self.floor_tokens else tokens
        lists, held = held.shape[-1], kv.num_blocks(held, self.block)
        if self.budget.of_seen:
            return held.sum(-1) - (tokens - coming) * lists // self.block
        return torch.sub(held.sum(-1), kv.num_blocks(tokens, self.block), alpha=lists)


@dataclass(kw_only=True)
class KVCompress(kv.Policy):
    """Evicts the blocks whose costliest token is cheapest, over all layers and KV heads of a sequence together.

    Args:
        budget: Mean over layers and heads of what stays: ratio of the prompt, tokens per head, or bytes, rounded up to
            blocks; or share of all tokens seen (`50%seen`), rounded down to blocks over all lists together.
        variant: `window`: squared attention of the last `obs_window` queries, max-pooled. `full`: of all queries but
            those within `skip_near`.
        power: 2 (squared attention, the paper's) or 1.
        obs_window: Observation window of the `window` variant: its queries are the score, and so many last tokens are
            never evicted, the incoming one counted.
        skip_near: Queries nearer than this do not count in the `full` variant, which protects the last `protected`
            tokens.
        protected: Last tokens that are never evicted in the `full` variant, the incoming one counted.
        block: Tokens per block.
        continual: Also evict while decoding, before every step that begins with more blocks than the budget allows, as
            a share of all tokens seen does. `pages`: from all requests, where shared pages run out; `bench what=serve`.
        floor_tokens: Tokens per head below which no budget goes; the released compression-rate mode has 128.
        tier: Precision of what is kept.

    Source: KV-Compress sections 4.1-4.3; vllm-kvcompress at 5e2a6394.
    Differs: metrics are pooled per query head and then summed, as released; equations 8 and 10 pool the sum of the
        group, which changes 1.1 to 2.6 % of the kept tokens (SmolLM2-135M, three LongBench prompts of 768 tokens, half
        to a sixteenth of them kept). The incoming token counts as one of the protected, as released, so that of the
        window's w prompt tokens w - 1 are safe. One sequence at a time, which avoids the released code's under-eviction
        in batches, and needs no limit of what is sorted at once; a budget is rounded up to blocks (the released rate
        mode rounds down) and may lie below 128 tokens, which `floor_tokens` forbids: the maximum of 128 and the rate's
        share, where the paper prints the minimum. Of the paper's four schedules there are evictions after every prompt
        (3) and, with `continual=pages`, where pages run out (4), of all requests at once and not of those that a limit
        of sorted tokens admits; with `continual=true` before every step; none every c steps (1) or by a count of
        uncompressed tokens (2). A share of all tokens seen, which evicts continually, is kvbench's.
        `obs_window`, `protected` and `skip_near` are those of its README's commands; the defaults of run_longbench.py
        are 32, 50 and 0, and it can protect another number of tokens than it observes. No bias per head, as there.
    """

    budget: kv.BudgetText = 0.25
    variant: Literal["window", "full"] = "window"
    power: Annotated[int, kv.Choice((1, 2))] = 2
    obs_window: Annotated[int, kv.Whole(1, unit="tokens")] = 8
    skip_near: Annotated[int, kv.Whole(0, unit="tokens")] = 10
    protected: Annotated[int, kv.Whole(1, unit="tokens")] = 32
    block: Annotated[int, kv.Whole(1, 1024, unit="tokens")] = 16
    continual: Annotated[bool | str, kv.Choice((False, True, "pages"))] = False
    floor_tokens: Annotated[int, kv.Whole(0, unit="tokens")] = 0
    tier: kv.TierText = "fp16"
    no_upkeep = ""
    scope = "model"
    budget_is_mean = True

    def declare(self) -> None:
        self.tiers = (kv.Tier.parse(self.tier),)
        self.limit = self._budget = kv.Budget.parse(self.budget)
        self._over = OverBudget(budget=self._budget, block=self.block, floor_tokens=self.floor_tokens)
        self.compaction = self._over if self._is_continual else None
        if self.continual == "pages":
            if self._budget.of_seen:  # which is kept to at every step
                raise kv.SettingsConflict(
                    f"budget={self.budget} with continual=pages; give a ratio, tokens or continual=true",
                    setting="method.budget",
                )
            self.compaction = replace(self._over, when_full="continual=pages")
        self.budget_step = self.block
        self.fewest_tokens = kv.num_blocks(max(self._protected, self.floor_tokens), self.block) * self.block
        upkeep = self._is_continual
        both = kv.ScoreSpec(power=self.power, group_reduce="sum", decode_update=upkeep, track=("score", "pos"))
        if self.variant == "window":
            pooled = replace(both, pool="max", pool_kernel=7, pool_stage="per_query_head", pool_region="all")
            self.score = replace(pooled, prefill_queries=self.obs_window)
        else:
            self.score = replace(both, prefill_queries=kv.ALL_QUERIES, skip_near=self.skip_near)

    def plan_prefill(self, view: kv.PrefillView) -> kv.PrefillPlan:
        length = view.num_tokens
        position = torch.arange(length, device=view.score.device)
        cost = view.score.masked_fill(position > length - self._protected, float("inf"))
        lists = cost.flatten(0, 1)
        held = torch.full((len(lists),), length, device=cost.device)
        surplus = self._over.surplus(held, held.new_tensor(view.budget_tokens(self._budget)))
        keep = kv.keep_blocks(lists, held, self.block, surplus)
        return kv.PrefillPlan(tier_of=torch.where(keep, 0, kv.EVICT).to(torch.int8).view(view.score.shape))

    def plan_compact(self, view: kv.DecodeView) -> kv.CompactPlan:
        slots, held = view.slots(0), view.num_slots(0).flatten(1)
        last = view.tokens_seen - self._protected  # the incoming token is one of the protected
        free = slots.valid & (slots.pos <= last[:, None, None, None])
        cost = torch.where(free, slots.score, float("inf")).flatten(1, 2)
        surplus = self._over.surplus(held, view.budget_tokens(self._budget), coming=1)
        keep = kv.keep_blocks(cost, held, self.block, surplus)
        return kv.CompactPlan(keep=[keep.view(slots.valid.shape)])

    def bounds(self, extent: kv.Extent) -> kv.Bounds:
        # A step begins within the budget and adds a token; a share of all tokens is rounded down to whole blocks.
        of_seen = self._budget.of_seen
        at_end = 1 if self.continual is True and not of_seen else None
        return kv.within(
            extent,
            self._budget,
            at_least=self.fewest_tokens,
            mean=True,
            block=self.block,
            unspent=2 * self.block if of_seen else 0,
            at_end=at_end,
            floor=self.fewest_tokens + 1,
        )

    @property
    def _is_continual(self) -> bool:
        return bool(self.continual) or self._budget.of_seen

    @property
    def _protected(self) -> int:
        return self.obs_window if self.variant == "window" else self.protected
