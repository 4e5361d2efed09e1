"""What all methods share that rank a prompt's tokens: who competes for the budget, and what is ranked."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from kvbench.errors import NotForModel
from kvbench.policy.allocation import Allocation, read_table, shares_by_score, shares_by_table
from kvbench.policy.budget import Budget
from kvbench.policy.by_layer import ByLayer
from kvbench.policy.declare import ALL_QUERIES, ScoreSpec
from kvbench.policy.outcomes import kept_first, threshold_remark
from kvbench.policy.plans import EVICT, PrefillPlan
from kvbench.policy.ranking import pyramid_budgets, rank_descending, share_with_cap
from kvbench.policy.settings import BudgetText, TierText
from kvbench.policy.statistics import WithValueNorms
from kvbench.policy.tiers import Tier
from kvbench.policy.views import GONE, PrefillView
from kvbench.rules import TABLE_OR_PATH, Number, Whole


@dataclass(kw_only=True)
class Ranked(ByLayer):
    """A method that keeps the tokens with the highest scores; its lists share a budget as `allocation` says.

    A subclass says by what it ranks: its `__post_init__` calls `super().__post_init__()` and then
    `self.rank_by(ScoreSpec(...))`. It defines `always` where some tokens stay whatever their score is, and `ranking`
    where it does not rank by the score as it is.

    Args:
        budget: What stays of the prompt: ratio, tokens per head, or bytes; the mean where lists share it unequally;
            null = `threshold` decides.
        tier: Precision of what is kept.
        allocation: `uniform`: every head of every layer keeps as much. `pyramid`: lower layers keep more, as PyramidKV.
            `ada`: a head of a layer keeps as many tokens as it has among the layer's best, as Ada-KV. `ada_pyramid`:
            both. `global`: as `ada`, over all layers and heads. `table`: in proportion to `table`. `preference`: in
            proportion to what the method finds a prompt's layers to be worth, where it does (`cake`).
        alpha: Share of a head's budget that `ada`, `global` and `table` do not touch, in [0, 1].
        beta: Steepness of a pyramid: the last layer keeps base / beta beside what always stays; >= 1.
        table: Weights for `allocation=table`, >= 0, one per layer and KV head: a path, or a list of lists.
        chunk: Rank chunks of so many consecutive tokens by their mean: they stay or go together, but for one per head
            that `cut_chunk` is about. 1 = single tokens.
        cut_chunk: A chunk that the budget has room for in part stays in part, so that the budget is met; false = it
            goes, and up to `chunk` - 1 tokens per head stay unspent.
        value_aware: Let the score choose half of a head's tokens, and the score times the norm of the projected value
            the others, as CriticalKV.
        protect: What is never evicted beside what the method itself keeps: `none`; the first `protect_tokens`
            (`sinks`); the `instruction` that stands before the user's text in a chat; the whole `prompt`, so that only
            the answer is compressed, as it is written, and the budget is of the answer (in bytes, of both); the
            `answer`, so that only tokens of the prompt go.
        protect_tokens: First tokens that `protect=sinks` keeps; >= 1.
        threshold: Keep the tokens whose score is at least this, however many they are, in place of a budget. A sum over
            queries counts per query. null = the budget decides.
    """

    budget: BudgetText | None = 0.25
    tier: TierText = "fp16"
    allocation: Allocation = "uniform"
    alpha: Annotated[float, Number(0, 1)] = 0.2
    beta: Annotated[int, Whole(1, 1000)] = 20
    table: Annotated[str | Sequence[Sequence[float]] | None, TABLE_OR_PATH] = None
    chunk: Annotated[int, Whole(1, unit="tokens")] = 1
    cut_chunk: bool = True
    value_aware: bool = False
    protect: Literal["none", "sinks", "instruction", "prompt", "answer"] = "none"
    protect_tokens: Annotated[int, Whole(1, unit="tokens")] = 4
    threshold: Annotated[float | None, Number(-1e9, 1e9)] = None

    how_to_evict_later = "the method decides about prompts alone, so set protect=none"

    # What only some methods make settings of.
    official_rounding = False  # of pyramids and of Ada-KV's shares, which then miss the budget
    first_stage = 0.5  # of a value-aware choice: the share that goes by the score alone
    value_epsilon = 1e-4  # what is added to the score before it is multiplied

    def __post_init__(self) -> None:
        if (self.budget is None) == (self.threshold is None):
            raise ValueError(
                f"budget={self.budget} and threshold={self.threshold}: one of them says what stays, so give one and "
                "set the other to null"
            )
        # A threshold has no budget, and what asks for one is told that everything fits.
        self.tiers, self._budget = (Tier.parse(self.tier),), Budget.parse(1.0 if self.budget is None else self.budget)
        self.spread()
        self.needs_instruction = self.protect == "instruction"
        self.fewest_tokens = max(1, self._sinks)
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
        self._check_protection()
        if not self.cut_chunk and self.chunk == 1:
            raise ValueError("cut_chunk=false is about chunks, and chunk=1 makes none; set chunk to more tokens")
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

    def _check_protection(self) -> None:
        """Refuses what `protect` and `threshold` do not go with."""
        if self.threshold is not None and (self.allocation != "uniform" or self.value_aware):
            what = f"allocation={self.allocation}" if self.allocation != "uniform" else "value_aware=true"
            raise ValueError(f"threshold={self.threshold} leaves {what} no budget to divide; set one of the two")
        if self.protect in ("prompt", "answer") and not self.evicts_later():
            raise ValueError(
                f"protect={self.protect} is about evictions while decoding, and these settings make none; "
                f"{self.how_to_evict_later}"
            )
        if self.protect == "instruction" and self._budget.unit == "bytes":
            raise ValueError(
                f"budget={self.budget} counts the whole cache, and how long the instruction is that protect="
                "instruction keeps differs from text to text; give a ratio or tokens"
            )

    def rank_by(self, spec: ScoreSpec) -> None:
        """Declares the score."""
        self.score = replace(spec, statistic=WithValueNorms(spec.statistic)) if self.value_aware else spec

    def check_model(self, num_layers: int, num_kv_heads: int) -> None:
        super().check_model(num_layers, num_kv_heads)
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
        """Tokens per list that stay of a prompt, the mean where lists share them. Default: the budget, and what is
        protected where that is more."""
        return max(view.budget_tokens(self._budget), min(self._kept_first(view), view.num_tokens))

    def least_tokens(self, num_prompt_tokens: int) -> int:
        return num_prompt_tokens + 1 if self.protect == "prompt" else super().least_tokens(num_prompt_tokens)

    def most_tokens(self, budget: int, num_prompt_tokens: int, num_new_tokens: int) -> int:
        if self.protect == "answer":  # which stays, while lists that share the budget hold what is theirs beside it
            return min(budget, num_prompt_tokens) + num_new_tokens
        return super().most_tokens(budget, num_prompt_tokens, num_new_tokens)

    def evicts_later(self) -> bool:
        """Whether the settings evict while decoding; asked before the method's own `__post_init__` has ended."""
        return False

    # The plan.

    def plan_prefill(self, view: PrefillView) -> PrefillPlan:
        if self.protect == "prompt":
            return PrefillPlan(tier_of=view.filled(0))
        if self.threshold is not None:
            return PrefillPlan(tier_of=torch.where(self._reaches(view, self.threshold), 0, EVICT).to(torch.int8))
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
        score = self._scores(view, free)
        # A head without a token would be none; where nothing stays anyhow, each begins with its best one.
        own = self._own(view, score, budget - first - last, reserve=int(first + last == 0))
        keep = torch.ones(*view.filled(0).shape, dtype=torch.bool, device=score.device)
        chosen = self._two_stages(view, score, free, own) if self.value_aware else rank_descending(score) < own
        if not self.cut_chunk:
            chosen = self._whole_chunks(chosen, self._held(view, free), may_be_none=first + last > 0)
        keep[..., free] = chosen
        return keep

    def _held(self, view: PrefillView, free: slice) -> Tensor:
        """bool [V, H, n]: tokens that are not gone."""
        held = torch.ones_like(view.filled(0), dtype=torch.bool) if view.held is None else view.held
        return held[..., free]

    def _scores(self, view: PrefillView, free: slice) -> Tensor:
        """fp32 [V, H, n] what tokens are ranked by, chunks made; the smallest number of those that are gone."""
        score = self.ranking(view)[..., free]
        if self.chunk > 1:
            score = self._of_chunks(score, self._held(view, free))
        return score if view.held is None else score.masked_fill(~view.held[..., free], GONE)

    def _reaches(self, view: PrefillView, threshold: float) -> Tensor:
        """bool [V, H, N]: tokens whose score reaches the threshold, those that always stay, and each list's best."""
        first, last = self._first_last(view, view.num_tokens)
        position = torch.arange(view.num_tokens, device=view.layers.device)
        stays = (position < first) | (position >= view.num_tokens - last)
        score = self.per_query(self._scores(view, slice(None)), view.num_tokens)
        return (score >= threshold) | stays | (rank_descending(score) == 0)

    def _whole_chunks(self, chosen: Tensor, held: Tensor, may_be_none: bool) -> Tensor:
        """Chosen tokens, bool [V, H, n], without those of chunks of which not all that are held are; a list that would
        be empty keeps its part of a chunk."""
        count, size = self._per_chunk((chosen & held).long()), self._per_chunk(held.long())
        whole = chosen & (count == size)[..., self._chunk_of(chosen)]
        return whole if may_be_none else torch.where(whole.any(-1, keepdim=True), whole, chosen)

    def _first_last(self, view: PrefillView, budget: int) -> tuple[int, int]:
        first, last = self.always(budget)
        return max(first, self._kept_first(view)), last

    def _kept_first(self, view: PrefillView) -> int:
        return max(self._sinks, view.instruction_tokens)

    @property
    def _sinks(self) -> int:
        """First tokens that are never evicted, whatever the budget."""
        return self.protect_tokens if self.protect == "sinks" else 0

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

    def _of_chunks(self, score: Tensor, held: Tensor) -> Tensor:
        """Every token's mean over those of its chunk that are held, fp32 [V, H, n]; equal chunks keep their order."""
        total = self._per_chunk(score.masked_fill(~held, 0.0))
        return (total / self._per_chunk(held.long()).clamp(min=1))[..., self._chunk_of(score)]

    def _chunk_of(self, tokens: Tensor) -> Tensor:
        """Of tokens [.., n] the chunk of each, int64 [n]."""
        return torch.arange(tokens.shape[-1], device=tokens.device) // self.chunk

    def _per_chunk(self, x: Tensor) -> Tensor:
        """x [.., n], summed over chunks."""
        count = -(-x.shape[-1] // self.chunk)
        return x.new_zeros(*x.shape[:-1], count).index_add_(-1, self._chunk_of(x), x)

    def _two_stages(self, view: PrefillView, score: Tensor, free: slice, own: Tensor) -> Tensor:
        """CriticalKV's choice among tokens with scores [V, H, n], bool; scores below 0 count from the smallest."""
        mean, held = self.per_query(score, view.num_tokens), self._held(view, free)
        mean = mean - mean.masked_fill(~held, float("inf")).amin(-1, keepdim=True).clamp(max=0)
        first = rank_descending(mean) < (own * self.first_stage).long()
        worth = ((mean + self.value_epsilon) * view.extra["norm"][..., free]).masked_fill(~held, float("-inf"))
        return rank_descending(worth.masked_fill(first, float("inf"))) < own

    def per_query(self, score: Tensor, num_tokens: int) -> Tensor:
        """A prompt's scores, divided by the queries that they are sums over."""
        spec = self.score
        if not spec.statistic.by_queries or spec.query_reduce != "sum" or not spec.prefill_queries:
            return score
        return score / (num_tokens if spec.prefill_queries == ALL_QUERIES else min(spec.prefill_queries, num_tokens))

    # What was done.

    def check_outcome(self, record: dict) -> str | None:
        return None if self.threshold is not None else self.prompt_budget_complaint(record)

    def prompt_budget_complaint(self, record: dict, at_end: int | None = None) -> str | None:
        """`budget_complaint` of what these settings ask for; `at_end` as there."""
        first = kept_first(record.get("kept", {}), self._sinks)
        return self.budget_complaint(record, self._budget, at_least=max(1, first), at_end=at_end, **self._leeway)

    @property
    def _leeway(self) -> dict[str, Any]:
        """How a list may differ from the budget, as `budget_complaint` takes it."""
        unspent = 0 if self.cut_chunk else self.chunk - 1
        return {"mean": self.budget_is_mean, "spare_pages": self.spare_pages, "unspent": unspent}

    def remark(self, records: Sequence[dict]) -> str:
        if self.threshold is None or self.protect == "prompt":
            return ""
        samples = []
        for kept in (record["kept"] for record in records if record.get("kept")):
            first, last = self.always(kept["prompt_tokens"])
            samples.append((kept, min(kept["prompt_tokens"], max(first, kept_first(kept, self._sinks)) + last)))
        return threshold_remark(self.threshold, samples)
