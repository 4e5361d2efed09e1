"""The policy's view before a decode step: reductions over the tracked fields that lie in the pages."""

from abc import abstractmethod
from collections.abc import Callable
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from kvbench.cache.async_counts import Rows
from kvbench.cache.counters import Counters
from kvbench.cache.pages import Pages
from kvbench.cache.solve_budget import SolvedBudget
from kvbench.errors import BrokenRule
from kvbench.kernels.operands import SlotSearch
from kvbench.policy import ALL_QUERIES, Budget, DecodeView, Extreme, ScoreSpec, SlotArrays

By = Literal["mean", "score", "pos"]


class SlotsView(DecodeView):
    """View that searches all slots of `slots`.

    Queries count by `prefill_queries` and `skip_near` of the policy's `ScoreSpec`.
    """

    def __init__(self, spec: ScoreSpec) -> None:
        self._spec = spec

    @abstractmethod
    def num_columns(self, tier: int) -> int:
        """Slots of each list that `slots` shows, held or not."""

    def mean_score(self, tier: int) -> Tensor:
        """Score divided by the queries counted so far, fp32 [S, L, H, n].

        A prompt token counts the prompt queries of the ScoreSpec from itself on, or from its `skip_near`, then one per
        decode step.
        """
        arrays, spec = self.slots(tier), self._spec
        origin = arrays.pos + spec.skip_near
        if spec.prefill_queries != ALL_QUERIES:
            origin = torch.maximum(origin, (self.prompt_tokens - spec.prefill_queries)[:, None, None, None])
        count = (self.tokens_seen[:, None, None, None] - origin).clamp(min=1)
        return arrays.score / count

    def argmin(
        self, tier: int, *, by: By, before: Tensor | None = None, first: int | Tensor = 0, over_layer: bool = False
    ) -> Extreme:
        return self._search(tier, by, before=before, first=first, over_layer=over_layer)

    def find(self, tier: int, position: Tensor) -> Extreme:
        return self._search(tier, "mean", exact=position)

    def _search(
        self,
        tier: int,
        by: By,
        *,
        before: Tensor | None = None,
        exact: Tensor | None = None,
        first: int | Tensor = 0,
        over_layer: bool = False,
    ) -> Extreme:
        """`argmin`, or the slot at an `exact` position, among the gathered fields of a tier.

        The smallest value, then the smallest position; slot -1 where nothing is eligible.
        """
        arrays = self.slots(tier)
        value, pos = arrays.score, arrays.pos
        if by != "score":
            value = self.mean_score(tier) if by == "mean" else pos.float()
        if over_layer:
            value = value.mean(2, keepdim=True).expand_as(value)

        def by_row(x: int | Tensor) -> int | Tensor:
            return x[:, None, None, None] if isinstance(x, Tensor) else x

        eligible = arrays.valid
        if isinstance(first, Tensor) or first:
            eligible = eligible & (pos >= by_row(first))
        if before is not None:
            eligible = eligible & (pos < by_row(before))
        if exact is not None:
            eligible = eligible & (pos == by_row(exact))
        if value.shape[-1] == 0:
            nothing = torch.full(self.shape, -1, device=value.device)
            return Extreme(value=torch.full(self.shape, float("inf"), device=value.device), slot=nothing, pos=nothing)
        value = value.masked_fill(~eligible, float("inf"))
        best, exists = value.amin(-1), eligible.any(-1)
        far = torch.iinfo(torch.int64).max
        slot = pos.masked_fill(~(eligible & (value == best[..., None])), far).argmin(-1)
        return Extreme(
            value=best,
            slot=slot.masked_fill(~exists, -1),
            pos=pos.gather(-1, slot[..., None])[..., 0].masked_fill(~exists, -1),
        )


class PagesView(SlotsView):
    """A view of the live rows of a cache.

    Slots are searched where they lie, if that is possible (`Pages.find_extreme`); otherwise this view gathers the
    fields of a tier once per step, on first use. `measure` gives the slots of rows at so many tokens the scores that
    `slots` shows, fp32 [1 + len(also), S, L, H, n]; None = those that are stored. With `is_still`, no list takes or
    gives up a slot as long as the view is used, so that it counts them once.
    """

    def __init__(
        self,
        pages: Pages,
        counters: Counters,
        rows: Rows,
        spec: ScoreSpec,
        check_find: Callable[[Tensor, DecodeView], None],
        budget: SolvedBudget | None,
        measure: Callable[[Tensor, Tensor], Tensor] | None = None,
        is_still: bool = False,
    ) -> None:
        super().__init__(spec)
        self._pages, self._counters, self._rows, self._check_find = pages, counters, rows, check_find
        self._budget, self._also, self._measure, self._is_still = budget, spec.statistic.also, measure, is_still
        self._arrays: dict[int, SlotArrays] = {}
        self.shape = (len(rows), *pages.shape[1:])
        self._lists = pages.lists_of(rows.tensor)
        self._held: dict[int, Tensor] = {}

    def _copied(self) -> dict[str, Any]:
        looked_up = DecodeView.__annotations__  # is looked up again: what it was is the store's
        fields = {name: value for name, value in vars(self).items() if name not in looked_up or name == "shape"}
        return fields | {"_arrays": {}, "_held": {}}

    # Looked up on first use: most policies do not need these.

    @cached_property
    def tokens_seen(self) -> Tensor:  # type: ignore[override]
        return self._counters.tokens_seen[self._rows.tensor]

    @cached_property
    def prompt_tokens(self) -> Tensor:  # type: ignore[override]
        return self._counters.prompt_tokens[self._rows.tensor]

    @cached_property
    def prompt_slots(self) -> Tensor:  # type: ignore[override]
        if not self._counters.prompt_slots.numel():
            raise AttributeError("prompt_slots are counted only with a compaction or needs_prompt_slots")
        return self._counters.prompt_slots[self._lists].long().view(self.shape)

    @cached_property
    def instruction_tokens(self) -> Tensor:  # type: ignore[override]
        if not self._counters.instruction_tokens.numel():
            raise AttributeError("instruction_tokens are counted only with needs_instruction")
        return self._counters.instruction_tokens[self._rows.tensor]

    def budget_tokens(self, budget: Budget, tier: int = 0) -> Tensor:
        rows = self._rows.tensor
        if self._budget is not None and self._budget.knows(budget):
            return self._budget.tokens[rows]
        if budget.unit in ("ratio", "seen"):
            tokens = self.tokens_seen + 1 if budget.of_seen else self.prompt_tokens
            return (tokens.double() * budget.value + 1e-9).long().clamp(min=1)
        return torch.full_like(rows, budget.tokens(0, self._pages.lists_of_model, self._pages.planned_bytes[tier]))

    def num_columns(self, tier: int) -> int:
        pages = self._pages.width(self._rows.numbers, tier)
        pages = self._pages.widest(tier, self.num_slots(tier)) if pages is None else pages
        return pages * self._pages.formats[tier].tokens_per_page

    def num_slots(self, tier: int) -> Tensor:
        if not self._is_still:
            return self._count(tier)
        if tier not in self._held:
            self._held[tier] = self._count(tier)
        return self._held[tier]

    def _count(self, tier: int) -> Tensor:
        if (tiers := self._pages.tier_map) is not None:  # a list holds nothing but in its own tier
            held = [self._pages.held(number, self._lists) for number in tiers.tiers]
            return torch.stack(held).sum(0).view(self.shape)
        return self._pages.held(tier, self._lists).view(self.shape)

    def _known(self, tier: int) -> Tensor | None:
        """Slots held where they were counted anyhow, int64 [M]; a device searches its own tables."""
        is_known = self._is_still and self._pages.tier_map is None and not self._pages.on_device
        return self.num_slots(tier).flatten() if is_known else None

    def slots(self, tier: int) -> SlotArrays:
        if tier not in self._arrays:
            score, pos, valid, held = self._pages.tracked(tier, self._rows, self._lists, self._known(tier))
            if self._pages.tier_map is None:
                self._held.setdefault(tier, held.view(self.shape))
            score, pos, valid = (x.view(*self.shape, -1) for x in (score, pos, valid))
            extra: dict[str, Tensor] = {}
            if self._measure is not None:
                score, *others = self._measure(self._rows.tensor, self.tokens_seen)
                extra = dict(zip(self._also, others, strict=True))
            self._arrays[tier] = SlotArrays(score=score, extra=extra, pos=pos, valid=valid)
        return self._arrays[tier]

    def _search(self, tier: int, by: By, *, over_layer: bool = False, **conditions: Any) -> Extreme:
        exact = conditions.get("exact")
        by_position = by == "pos" or any(isinstance(x, Tensor) or x for x in (conditions.get("first"), exact))
        self._require(tier, "pos" if by_position or conditions.get("before") is not None else "score")
        if exact is not None:
            self._check_find(exact, self)
        near, window = self._spec.skip_near, self._spec.prefill_queries
        floor = self.prompt_tokens - window - near if window != ALL_QUERIES and by == "mean" else None
        # A token's queries begin `near` after it: as many as were seen so much earlier from the token itself on.
        seen = self.tokens_seen - near if near else self.tokens_seen
        search = SlotSearch(by=by, seen=seen, floor=floor, **conditions)
        extreme = self._pages.find_extreme(tier, self._rows, self._known(tier), search, over_layer)
        if extreme is None:
            return super()._search(tier, by, over_layer=over_layer, **conditions)
        value, slot, pos = extreme
        return Extreme(value=value, slot=slot, pos=pos)

    def _require(self, tier: int, name: str) -> None:
        if name not in self._pages.formats[tier].slot.track:
            raise BrokenRule(f"this reduction needs the tracked field {name!r}; add it to the policy's ScoreSpec.track")
