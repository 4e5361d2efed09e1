"""MiniKV: heavy hitters chosen once, then quantised to 2 bits."""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch

import kvbench.policy as kv


@dataclass(kw_only=True)
class MiniKV(kv.Policy):
    """Keeps heavy hitters and a recent window of the prompt, all at `bits`.

    Generated tokens pass a 16-bit buffer and are never evicted.

    Args:
        heavy: Mean over layers of the heavy hitters' share of the prompt, in (0, 1].
        recent: The recent window's share of the prompt, in (0, 1].
        budget: Instead of the two shares: what stays of the prompt as the mean over layers, split in their proportion;
            ratio, tokens per head, or bytes. null = the shares.
        allocation: Heavy hitters per layer: `uniform`; `pyramid`: linear from 2x - x/depth to x/depth; `var_prop`,
            `var_inv`: proportional or inversely proportional to the variance of the layer's accumulated attention.
        depth: Depth of the pyramid, >= 1.
        bits: Bits per element of keys and values.
        group: Tokens per key scale and channels per value scale.
        residual_tokens: Length of the 16-bit buffer, a multiple of `group`.
        native: Store the model's own dtype instead (lossless; for tests).
        granularity: `kv_head`: one kept set per KV head. `q_head`: KV heads are repeated first, as the original does,
            and every query head's copy is stored and billed.

    Source: MiniKV sections 4.2 and 4.3, Algorithm 1; MiniKV-Dev at 486a1ca, cache_impl.py.
    Differs: exact attention sums (the selective kernel leaves out a normalisation); by default one kept set per KV head
        with the group's sum; at least one heavy and one recent token; what a layer's share exceeds the prompt by goes
        to the other layers. The default allocation is the paper's pyramid; pred_minikv.py has uniform. Section 4.2
        prints the pyramid's ends exchanged: lower layers keep more here, as its prose and the released code have it.
        Kept tokens beyond a whole group, of which the paper says nothing, wait in the 16-bit buffer, as in the code;
        that buffer, allocated whole, is billed, and is not in the paper's formula of bytes. Variances are of all
        positions of a KV head, their mean over heads. No token of the answer is evicted, so `50%seen` is refused.
    """

    heavy: Annotated[float, kv.Number(0, 1, above=True)] = 0.25
    recent: Annotated[float, kv.Number(0, 1, above=True)] = 0.25
    budget: kv.BudgetText | None = None
    allocation: Literal["uniform", "pyramid", "var_prop", "var_inv"] = "pyramid"
    depth: Annotated[int, kv.Whole(1, 1000)] = 7
    bits: Annotated[int, kv.Choice((1, 2, 4, 8), unit="bits")] = 2
    group: Annotated[int, kv.Whole(8, 1024, unit="tokens", multiple_of=8)] = 16
    residual_tokens: Annotated[int, kv.Whole(8, 2**16, unit="tokens", multiple_of=8)] = 128
    native: bool = False
    granularity: Literal["kv_head", "q_head"] = "kv_head"
    no_upkeep = "never evicts tokens of the answer, and keys of a group share their scales, so that none can go alone"

    def declare(self) -> None:
        if self.budget is None and self.heavy + self.recent > 1:
            raise kv.SettingsConflict(
                f"heavy={self.heavy} and recent={self.recent} are shares of one prompt, and their sum is above 1; "
                "lower one, or give method.budget, which they then divide",
                setting="method.heavy",
            )
        if self.residual_tokens % self.group:
            raise kv.SettingsConflict(
                f"residual_tokens={self.residual_tokens} must be a multiple of group={self.group}",
                setting="method.residual_tokens",
            )
        self.limit = self._budget = kv.Budget.parse(
            min(1.0, self.heavy + self.recent) if self.budget is None else self.budget
        )
        self.budget_is_mean = self.allocation != "uniform"
        self.fewest_tokens = 2 * self.depth  # below, one heavy token in every layer lifts the pyramid's mean
        self.scope = "model" if self.allocation.startswith("var") else "head"
        coded = kv.Tier(k_bits=self.bits, v_bits=self.bits).per_channel(self.group, v_group=self.group)
        self.tiers = (kv.Tier(native=True) if self.native else coded,)
        self.score = kv.ScoreSpec(prefill_queries=kv.ALL_QUERIES, group_reduce="sum")
        self.residual = kv.Residual(
            num_tokens=self.residual_tokens, v_flush="all", when="before_attention", hold_prompt=False
        )

    def heavy_counts(self, view: kv.PrefillView) -> list[int]:
        """Heavy hitters of every layer of the view; at least one."""
        total, (heavy, recent) = view.num_layers, self._shares(view)
        cap = max(1, view.num_tokens - recent)
        if self.allocation == "uniform" or total == 1:
            return [max(1, int(heavy))] * len(view.layers)
        if self.allocation == "pyramid":
            last = heavy / self.depth
            first = 2 * heavy - last
            exact = [first + (last - first) / (total - 1) * layer for layer in range(total)]
            counts = [max(1, int(count)) for count in exact]
            if counts[0] > cap:
                counts = kv.share_with_cap(torch.tensor(exact, dtype=torch.float64), int(heavy) * total, cap)
            return [counts[layer] for layer in view.layers.tolist()]
        variance = view.score.var(-1, unbiased=False).mean(-1).double()
        weight = variance if self.allocation == "var_prop" else 1.0 / variance.clamp(min=1e-30)
        return kv.share_with_cap(weight, int(heavy) * total, cap)

    def _shares(self, view: kv.PrefillView) -> tuple[float, int]:
        """Heavy hitters, as the exact mean over layers, and recent tokens of a prompt."""
        length = view.num_tokens
        if self.budget is None:
            return length * self.heavy, max(1, int(length * self.recent))
        tokens = max(2, view.budget_tokens(self._budget))
        recent = max(1, int(tokens * self.recent / (self.heavy + self.recent)))
        return tokens - recent, recent

    def plan_prefill(self, view: kv.PrefillView) -> kv.PrefillPlan:
        tier_of = view.filled(0)
        prefix = max(0, view.num_tokens - self._shares(view)[1])
        if prefix:
            counts = torch.tensor(self.heavy_counts(view), device=view.layers.device)[:, None, None]
            tier_of[..., :prefix] = torch.where(kv.rank_descending(view.score[..., :prefix]) < counts, 0, kv.EVICT)
        return kv.PrefillPlan(tier_of=tier_of)

    def bounds(self, extent: kv.Extent) -> kv.Bounds:
        return kv.within(extent, self._budget, at_least=self.fewest_tokens, mean=True)
