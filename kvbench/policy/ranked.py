"""What all methods share that rank a prompt's tokens: who competes for the budget, and what is ranked."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import torch
from torch import Tensor

from kvbench.errors import NotForModel
from kvbench.policy.allocation import Allocation, read_table, shares_by_score, shares_by_table
from kvbench.policy.base import Policy
from kvbench.policy.budget import Budget
from kvbench.policy.declare import ALL_QUERIES, ScoreSpec, Tier
from kvbench.policy.plans import EVICT, PrefillPlan
from kvbench.policy.ranking import pyramid_budgets, rank_descending, share_with_cap
from kvbench.policy.settings import BudgetText, TierText
from kvbench.policy.statistics import WithValueNorms
from kvbench.policy.views import PrefillView
from kvbench.rules.kinds import Number, TableOrPath, Whole


@dataclass(kw_only=True)
class Ranked(Policy):
    """A method that keeps the tokens with the highest scores; its lists share a budget as `allocation` says.

    A subclass says by what it ranks: its `__post_init__` calls `super().__post_init__()` and then
    `self.rank_by(ScoreSpec(...))`. It defines `always` where some tokens stay whatever their score is, and `ranking`
    where it does not rank by the score as it is.

    Args:
        budget: What stays of the prompt: ratio, tokens per head, or bytes; the mean where lists share it unequally.
        tier: Precision of what is kept.
        allocation: `uniform`: every head of every layer keeps as much. `pyramid`: lower layers keep more, as PyramidKV.
            `ada`: a head of a layer keeps as many tokens as it has among the layer's best, as Ada-KV. `ada_pyramid`:
            both. `global`: as `ada`, over all layers and heads. `table`: in proportion to `table`. `preference`: in
            proportion to what the method finds a prompt's layers to be worth, where it does (`cake`).
        alpha: Share of a head's budget that `ada`, `global` and `table` do not touch, in [0, 1].
        beta: Steepness of a pyramid: the last layer keeps base / beta beside what always stays; >= 1.
        table: Weights for `allocation=table`, >= 0, one per layer and KV head: a path, or a list of lists.
        chunk: Rank chunks of so many consecutive tokens by their mean: they stay or go together, but for one per head
            that is cut where the budget ends. 1 = single tokens.
        value_aware: Let the score choose half of a head's tokens, and the score times the norm of the projected value
            the others, as CriticalKV.
    """

    budget: BudgetText = 0.25
    tier: TierText = "fp16"
    allocation: Allocation = "uniform"
    alpha: Annotated[float, Number(0, 1)] = 0.2
    beta: Annotated[int, Whole(1, 1000)] = 20
    table: Annotated[str | Sequence[Sequence[float]] | None, TableOrPath()] = None
    chunk: Annotated[int, Whole(1, unit="tokens")] = 1
    value_aware: bool = False

    # What only some methods make settings of.
    official_rounding = False  # of pyramids and of Ada-KV's shares, which then miss the budget
    first_stage = 0.5  # of a value-aware choice: the share that goes by the score alone
    value_epsilon = 1e-4  # what is added to the score before it is multiplied

    def __post_init__(self) -> None:
        self.tiers, self._budget = (Tier.parse(self.tier),), Budget.parse(self.budget)
        self.budget_is_mean = self.allocation != "uniform"
        self.spare_pages = int(self.official_rounding and self.budget_is_mean)
        if self.allocation in ("ada", "ada_pyramid"):
            self.scope = "layer"
        elif self.allocation in ("global", "preference"):
            self.scope = "model"
        if self.allocation == "preference" and type(self).layer_weights is Ranked.layer_weights:
            raise ValueError(
                f"allocation=preference is for methods that say what a prompt's layers are worth, and "
                f"{type(self).__name__} does not; choose another allocation, or a method such as cake"
            )
        if self.spare_pages and self._budget.unit == "bytes":
            raise ValueError(
                f"official_rounding=true may spend more than budget={self.budget}, which bytes do not allow; give a "
                "ratio or tokens"
            )
        if self.value_aware and self.chunk > 1:
            raise ValueError(
                f"value_aware=true ranks single tokens a second time, which chunk={self.chunk} does not allow; set one "
                "of the two"
            )
        if self.table is not None:
            if self.allocation != "table":
                raise ValueError(f"table is for allocation=table, but allocation={self.allocation}; set one of the two")
            self.table = read_table(self.table)  # the numbers, so that a run's identity does not hang on a path
            self._weights = torch.tensor(self.table, dtype=torch.float64)
            if bool((self._weights < 0).any()) or not bool(self._weights.any()):
                raise ValueError("table holds weights below 0, or nothing but 0; give what every head's share is worth")

    def rank_by(self, spec: ScoreSpec) -> None:
        """Declares the score."""
        self.score = replace(spec, statistic=WithValueNorms(spec.statistic)) if self.value_aware else spec

    def check_model(self, num_layers: int, num_kv_heads: int) -> None:
        if self.allocation != "table":
            return
        found = tuple(self._weights.shape) if self.table is not None else (0, 0)
        if found != (num_layers, num_kv_heads):
            raise NotForModel(
                f"method.table has {found[0]} layers x {found[1]} heads, but the model has {num_layers} layers x "
                f"{num_kv_heads} KV heads; give allocation=table the weights of this model as method.table=PATH"
            )

    # What a subclass may say.

    def always(self, budget: int) -> tuple[int, int]:
        """How many first and last tokens of a prompt stay whatever their score is; the first ones come first where the
        budget holds not all of them. Default: none."""
        return 0, 0

    def ranking(self, view: PrefillView) -> Tensor:
        """fp32 [V, H, N] what the tokens of a prompt are ranked by. Default: the score."""
        return view.score

    def layer_weights(self, view: PrefillView) -> Tensor:
        """fp64 [L], >= 0: what each layer of a prompt is worth, for `allocation=preference`; the view has them all."""
        raise NotImplementedError(f"{type(self).__name__} does not define layer_weights")

    def prompt_budget(self, view: PrefillView) -> int:
        """Tokens per list that stay of a prompt, the mean where lists share them. Default: the budget."""
        return view.budget_tokens(self._budget)

    # The plan.

    def plan_prefill(self, view: PrefillView) -> PrefillPlan:
        budget, tier_of = self.prompt_budget(view), view.filled(0)
        if budget < view.num_tokens:
            tier_of = torch.where(self._stays(view, budget), tier_of, EVICT).to(torch.int8)
        return PrefillPlan(tier_of=tier_of)

    def _stays(self, view: PrefillView, budget: int) -> Tensor:
        """bool [V, H, N]: which tokens of a prompt longer than the budget stay."""
        first, last = self._first_last(view, budget)
        first = min(first, budget)
        last = min(last, budget - first)
        free = slice(first, view.num_tokens - last)
        score = self._of_chunks(self.ranking(view)[..., free])
        # A head without a token would be none; where nothing stays anyhow, each begins with its best one.
        own = self._own(view, score, budget - first - last, reserve=int(first + last == 0))
        keep = torch.ones(*view.filled(0).shape, dtype=torch.bool, device=score.device)
        keep[..., free] = self._two_stages(view, score, free, own) if self.value_aware else rank_descending(score) < own
        return keep

    def _first_last(self, view: PrefillView, budget: int) -> tuple[int, int]:
        return self.always(budget)

    def _own(self, view: PrefillView, score: Tensor, mean: int, reserve: int) -> Tensor:
        """Tokens that each list keeps of those ranked, int64 and broadcast against [V, H, 1]; their mean is `mean`.

        Args:
            view: The view.
            score: fp32 [V, H, n] the tokens to choose from.
            mean: At most n.
            reserve: Tokens (0 or 1) that every list has before others are shared out.
        """
        base, room = mean - reserve, score.shape[-1] - reserve
        if self.allocation == "uniform":
            return torch.tensor(mean, device=score.device)
        if self.allocation == "table":
            weights = self._weights.repeat_interleave(view.num_kv_heads // self._weights.shape[1], 1)
            return (reserve + shares_by_table(weights, base, room, self.alpha))[view.layers.cpu()].to(score.device)[
                ..., None
            ]
        if self.allocation == "preference":
            own = share_with_cap(self.layer_weights(view), base * view.num_layers, room, at_least=0)
            return reserve + torch.tensor(own, device=score.device)[:, None, None]
        layers = torch.full((len(view.layers),), base, device=score.device)
        if "pyramid" in self.allocation and base:
            layers = torch.tensor(self._pyramid(view, base, room), device=score.device)[view.layers]
        if self.allocation == "pyramid":
            return reserve + layers[:, None, None]
        if reserve:
            score = score.masked_fill(rank_descending(score) == 0, float("-inf"))
        if self.allocation == "global":
            score, layers = score.flatten(0, 1)[None], layers[:1]
        shares = shares_by_score(score, layers, self.alpha, official_rounding=self.official_rounding)
        return reserve + shares.view(len(view.layers), -1, 1)

    def _pyramid(self, view: PrefillView, base: int, room: int) -> list[int]:
        return pyramid_budgets(
            base,
            room,
            view.num_tokens,
            view.num_layers,
            beta=self.beta,
            official_rounding=self.official_rounding,
            uniform_middle=self.allocation == "pyramid" or not self.official_rounding,
        )

    def _of_chunks(self, score: Tensor) -> Tensor:
        """Every token's mean over its chunk, fp32 [V, H, n]; equal chunks keep their order."""
        if self.chunk == 1:
            return score
        chunk = torch.arange(score.shape[-1], device=score.device) // self.chunk
        count = torch.bincount(chunk)
        total = score.new_zeros(*score.shape[:-1], len(count)).index_add_(-1, chunk, score)
        return (total / count)[..., chunk]

    def _two_stages(self, view: PrefillView, score: Tensor, free: slice, own: Tensor) -> Tensor:
        """CriticalKV's choice among tokens with scores [V, H, n], bool; scores below 0 count from the smallest."""
        mean = self.per_query(score, view.num_tokens)
        mean = mean - mean.amin(-1, keepdim=True).clamp(max=0)
        first = rank_descending(mean) < (own * self.first_stage).long()
        worth = (mean + self.value_epsilon) * view.extra["norm"][..., free]
        return rank_descending(worth.masked_fill(first, float("inf"))) < own

    def per_query(self, score: Tensor, num_tokens: int) -> Tensor:
        """A prompt's scores, divided by the queries that they are sums over."""
        spec = self.score
        if not spec.statistic.by_queries or spec.query_reduce != "sum" or not spec.prefill_queries:
            return score
        return score / (num_tokens if spec.prefill_queries == ALL_QUERIES else min(spec.prefill_queries, num_tokens))
