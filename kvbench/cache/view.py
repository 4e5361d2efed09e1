"""What a policy sees before a decode step: reductions over the tracked fields that lie in the pages."""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from kvbench.cache.counters import Counters
from kvbench.cache.fit import Fit
from kvbench.cache.pages import Pages
from kvbench.kernels.operands import TierPages
from kvbench.kernels.tier_table import SlotSearch
from kvbench.policy import ALL_QUERIES, Budget, DecodeView, Extreme, ScoreSpec, SlotArrays


class SlotsView(DecodeView):
    """A view that finds slots among all that `slots` gives.

    Args:
        window: Prompt queries that count, as in the policy's `ScoreSpec`.
    """

    def __init__(self, window: int) -> None:
        self._window = window

    def mean_score(self, tier: int) -> Tensor:
        """Score divided by the queries counted so far, fp32 [S, L, H, n]: a prompt token counts the prompt queries of
        the ScoreSpec from itself on, then one per decode step."""
        arrays = self.slots(tier)
        origin = arrays.pos
        if self._window != ALL_QUERIES:
            origin = torch.maximum(origin, (self.prompt_tokens - self._window)[:, None, None, None])
        count = (self.tokens_seen[:, None, None, None] - origin).clamp(min=1)
        return arrays.score / count

    def _smallest(
        self,
        tier: int,
        by: Literal["mean", "score", "pos"],
        before: Tensor | None,
        first: int | Tensor,
        over_layer: bool,
    ) -> Extreme:
        """`argmin` among the gathered fields of a tier."""
        per_row = isinstance(first, Tensor)
        arrays = self.slots(tier)
        value = {
            "mean": lambda: self.mean_score(tier),
            "score": lambda: arrays.score,
            "pos": lambda: arrays.pos.float(),
        }[by]()
        if over_layer:
            value = value.mean(2, keepdim=True).expand_as(value)
        floor = first[:, None, None, None] if isinstance(first, Tensor) else first
        eligible = arrays.valid & (arrays.pos >= floor) if per_row or first else arrays.valid
        if before is not None:
            eligible = eligible & (arrays.pos < before[:, None, None, None])
        return self._pick(arrays, value.masked_fill(~eligible, float("inf")), eligible)

    def _pick(self, arrays: SlotArrays, value: Tensor, eligible: Tensor) -> Extreme:
        """Smallest value, then smallest position; slot -1 where nothing is eligible."""
        if value.shape[-1] == 0:
            nothing = torch.full(self.shape, -1, device=value.device)
            return Extreme(value=torch.full(self.shape, float("inf"), device=value.device), slot=nothing, pos=nothing)
        best = value.amin(-1)
        far = torch.iinfo(torch.int64).max
        pos = arrays.pos.masked_fill(~(eligible & (value == best[..., None])), far)
        slot = pos.argmin(-1)
        found = eligible.any(-1)
        return Extreme(
            value=best,
            slot=slot.masked_fill(~found, -1),
            pos=arrays.pos.gather(-1, slot[..., None])[..., 0].masked_fill(~found, -1),
        )


class PagesView(SlotsView):
    """A view of the live rows of a cache.

    Backends that search slots where they lie do the reductions themselves; for the others this view gathers the
    fields of a tier once per step, on first use.

    Args:
        pages: The pages.
        counters: What the rows have seen.
        rows: int64 [S] live rows.
        spec: What the policy asks for.
        check_find: Refuses positions that `find` must not be asked for.
        measure: Gives the slots of rows at so many tokens the scores that `slots` shows, fp32 [1 + len(also), S, L, H,
            n]; None = it shows those that are stored.
        fit: Says what the policy's budget in bytes buys.
        numbers: The rows as the host knows them; empty = it does not, and asks for the length of lists.
        is_still: No list takes or gives up a slot as long as the view is used, so that it counts them once.
    """

    def __init__(
        self,
        pages: Pages,
        counters: Counters,
        rows: Tensor,
        spec: ScoreSpec,
        check_find: Callable[[Tensor, DecodeView], None],
        measure: Callable[[Tensor, Tensor], Tensor] | None = None,
        fit: Fit | None = None,
        numbers: Sequence[int] = (),
        is_still: bool = False,
    ) -> None:
        super().__init__(spec.prefill_queries)
        self._numbers, self._is_still = numbers, is_still
        self._pages, self._check_find = pages, check_find
        self._fit = fit
        self._rows, self._also, self._measure = rows, spec.statistic.also, measure
        self._counters = counters
        self._arrays: dict[int, SlotArrays] = {}
        self.shape = (len(rows), *pages.shape[1:])
        self._lists = pages.lists_of(rows)
        self._held: dict[int, Tensor] = {}

    # What not every policy asks for is looked up when one does.

    @cached_property
    def tokens_seen(self) -> Tensor:  # type: ignore[override]
        return self._counters.tokens_seen[self._rows]

    @cached_property
    def prompt_tokens(self) -> Tensor:  # type: ignore[override]
        return self._counters.prompt_tokens[self._rows]

    @cached_property
    def prompt_slots(self) -> Tensor:  # type: ignore[override]
        if not self._counters.prompt_slots.numel():
            raise AttributeError("prompt_slots are counted only with a compaction")
        return self._counters.prompt_slots[self._lists].long().view(self.shape)

    @cached_property
    def instruction_tokens(self) -> Tensor:  # type: ignore[override]
        if not self._counters.instruction_tokens.numel():
            raise AttributeError("instruction_tokens are counted only with needs_instruction")
        return self._counters.instruction_tokens[self._rows]

    def budget_tokens(self, budget: Budget, tier: int = 0) -> Tensor:
        if self._fit is not None and self._fit.knows(budget):
            return self._fit.of(self._rows)
        token_bytes, lists = self._pages.planned_bytes[tier], self._pages.lists_of_model
        if budget.unit == "ratio":
            return (self.prompt_tokens.double() * budget.value + 1e-9).long().clamp(min=1)
        return torch.full_like(self._rows, budget.tokens(0, lists, token_bytes))

    def num_slots(self, tier: int) -> Tensor:
        if not self._is_still:
            return self._count(tier)
        if tier not in self._held:
            self._held[tier] = self._count(tier)
        return self._held[tier]

    def _count(self, tier: int) -> Tensor:
        if self._pages.homes is not None:  # a list holds nothing but at home
            held = [self._pages.held(home, self._lists) for home in self._pages.homes.tiers]
            return torch.stack(held).sum(0).view(self.shape)
        return self._pages.held(tier, self._lists).view(self.shape)

    def _tier(self, tier: int) -> TierPages:
        width = self._pages.width(self._numbers, tier) if self._numbers else None
        known = self.num_slots(tier).flatten() if self._is_still and self._pages.homes is None else None
        return self._pages.tier(tier, self._lists, width, known)

    def slots(self, tier: int) -> SlotArrays:
        if tier not in self._arrays:
            score, pos, valid = (x.view(*self.shape, -1) for x in self._fields(tier))
            extra: dict[str, Tensor] = {}
            if self._measure is not None:
                score, *others = self._measure(self._rows, self.tokens_seen)
                extra = dict(zip(self._also, others, strict=True))
            self._arrays[tier] = SlotArrays(score=score, extra=extra, pos=pos, valid=valid)
        return self._arrays[tier]

    def _fields(self, tier: int) -> tuple[Tensor, Tensor, Tensor]:
        """Score, position, and whether it is held, of every slot, [M, n] each."""
        fmt = self._pages.formats[tier]
        pages = self._pages.width(self._numbers, tier) if self._numbers else None
        if self._pages.on_device and pages is not None:
            width = pages * fmt.tokens_per_page
            score, pos, there, held = self._pages.table.tracked_slots(self._lists, tier, fmt, width)
            if self._pages.homes is None:
                self._held.setdefault(tier, held.view(self.shape))
            return score, pos, there
        found = self._tier(tier)
        slot = torch.arange(found.ids.shape[-1] * fmt.tokens_per_page, device=found.ids.device)

        def field(name: str, missing: float) -> Tensor:
            if name not in fmt.slot.track:
                return torch.full((len(self._lists), len(slot)), missing, device=found.ids.device)
            return self._pages.field(tier, name)[found.ids].flatten(1)

        return field("score", 0.0).float(), field("pos", -1).long(), slot < found.num_k[:, None]

    def argmin(
        self,
        tier: int,
        *,
        by: Literal["mean", "score", "pos"],
        before: Tensor | None = None,
        first: int | Tensor = 0,
        over_layer: bool = False,
    ) -> Extreme:
        per_row = isinstance(first, Tensor)
        self._require(tier, "pos" if by == "pos" or before is not None or per_row or first else "score")
        if self._pages.on_device:
            return self._search_tables(tier, by, before=before, first=first, over_layer=over_layer)
        if not over_layer and not isinstance(first, Tensor) and self._pages.backend.searches_slots:
            return self._search(tier, by, before=before, first=first)
        return self._smallest(tier, by, before, first, over_layer)

    def find(self, tier: int, position: Tensor) -> Extreme:
        self._require(tier, "pos")
        self._check_find(position, self)
        if self._pages.on_device:
            return self._search_tables(tier, "mean", exact=position)
        if self._pages.backend.searches_slots:
            return self._search(tier, "mean", exact=position)
        arrays = self.slots(tier)
        match = arrays.valid & (arrays.pos == position[:, None, None, None])
        value = self.mean_score(tier).masked_fill(~match, float("inf"))
        return self._pick(arrays, value, match)

    def _search_tables(
        self, tier: int, by: Literal["mean", "score", "pos"], *, over_layer: bool = False, **conditions: Any
    ) -> Extreme:
        """The same reductions by tables on a device, in one launch over all lists."""
        if self._window != ALL_QUERIES and by == "mean":
            conditions["floor"] = self.prompt_tokens - self._window
        fmt, search = self._pages.formats[tier], SlotSearch(by=by, seen=self.tokens_seen, **conditions)
        value, slot, pos = self._pages.table.find_extreme(self._rows, tier, fmt, search, over_layer=over_layer)
        return Extreme(value=value, slot=slot, pos=pos)

    def _search(
        self,
        tier: int,
        by: Literal["mean", "score", "pos"],
        *,
        before: Tensor | None = None,
        exact: Tensor | None = None,
        first: int = 0,
    ) -> Extreme:
        """The same reductions by a backend that makes them where the fields lie."""
        found, per_list = self._tier(tier), self.shape[1] * self.shape[2]
        floor = self.prompt_tokens - self._window if self._window != ALL_QUERIES else None
        search = SlotSearch(by=by, seen=self.tokens_seen, floor=floor, before=before, exact=exact, first=first)
        extreme = self._pages.backend.slot_extreme(
            self._pages.pool.pages, found.fmt, found.ids, found.num_k, search.per_list(per_list)
        )
        value, slot, pos = (x.view(self.shape) for x in extreme)
        return Extreme(value=value, slot=slot, pos=pos)

    def _require(self, tier: int, name: str) -> None:
        if name not in self._pages.formats[tier].slot.track:
            raise ValueError(f"this reduction needs the tracked field {name!r}; add it to the policy's ScoreSpec.track")
