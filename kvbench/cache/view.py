"""The reference implementation of `DecodeView`: reductions over the tracked fields that lie in the pages."""

from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from kvbench.policy import ALL_QUERIES, Budget, DecodeView, Extreme, SlotArrays

if TYPE_CHECKING:
    from kvbench.cache.store import CompressedStore


class StoreDecodeView(DecodeView):
    """A view of the live rows of a store. This reference gathers the fields of a tier once per step, on first use.

    Args:
        store: The store.
        rows: int64 [S] live rows.
    """

    def __init__(self, store: "CompressedStore", rows: Tensor) -> None:
        self._store = store
        self._rows = rows
        self._cache: dict[int, SlotArrays] = {}
        self.shape = (len(rows), *store.table.shape[1:])
        self.tokens_seen = store.tokens_seen[rows]
        self.prompt_tokens = store.prompt_tokens[rows]
        self._lists = store.lists_of(rows)
        if store.prompt_slots.numel():
            self.prompt_slots = store.prompt_slots[self._lists].long().view(self.shape)

    def budget_tokens(self, budget: Budget, tier: int = 0) -> Tensor:
        token_bytes, lists = self._store.formats[tier].slot.slot_bytes, self._store.lists_per_row
        if budget.unit == "ratio":
            return (self.prompt_tokens.double() * budget.value + 1e-9).long().clamp(min=1)
        return torch.full_like(self.prompt_tokens, budget.tokens(0, lists, token_bytes))

    def num_slots(self, tier: int) -> Tensor:
        return self._store.table.num_slots[tier, self._lists].long().view(self.shape)

    def slots(self, tier: int) -> SlotArrays:
        if tier not in self._cache:
            store, fmt = self._store, self._store.formats[tier]
            held = store.table.num_slots[tier, self._lists].long()
            width = int(-(-held.max() // fmt.tokens_per_page)) if held.numel() else 0
            ids = store.table.page_ids(self._lists, tier, width)
            slot = torch.arange(width * fmt.tokens_per_page, device=ids.device)

            def field(name: str, missing: float) -> Tensor:
                if name not in fmt.slot.track:
                    return torch.full((len(self._lists), len(slot)), missing, device=ids.device)
                return store.backend.region(store.pool.pages, fmt, name)[ids].flatten(1)

            valid = slot < held[:, None]
            self._cache[tier] = SlotArrays(
                score=field("score", 0.0).float().view(*self.shape, -1),
                pos=field("pos", -1).long().view(*self.shape, -1),
                valid=valid.view(*self.shape, -1),
            )
        return self._cache[tier]

    def mean_score(self, tier: int) -> Tensor:
        """Score divided by the queries counted so far, fp32 [S, L, H, n]: a prompt token counts the prompt queries of
        the ScoreSpec from itself on, then one per decode step."""
        arrays = self.slots(tier)
        window = self._store.policy.score.prefill_queries
        origin = arrays.pos
        if window != ALL_QUERIES:
            origin = torch.maximum(origin, (self.prompt_tokens - window)[:, None, None, None])
        count = (self.tokens_seen[:, None, None, None] - origin).clamp(min=1)
        return arrays.score / count

    def argmin(
        self,
        tier: int,
        *,
        by: Literal["mean", "score", "pos"],
        before: Tensor | None = None,
        first: int = 0,
        over_layer: bool = False,
    ) -> Extreme:
        self._require(tier, "pos" if by == "pos" or before is not None or first else "score")
        if not over_layer and self._store.backend.searches_slots:
            return self._search(tier, by, before=before, first=first)
        arrays = self.slots(tier)
        value = {
            "mean": lambda: self.mean_score(tier),
            "score": lambda: arrays.score,
            "pos": lambda: arrays.pos.float(),
        }[by]()
        if over_layer:
            value = value.mean(2, keepdim=True).expand_as(value)
        eligible = arrays.valid & (arrays.pos >= first) if first else arrays.valid
        if before is not None:
            eligible = eligible & (arrays.pos < before[:, None, None, None])
        return self._pick(arrays, value.masked_fill(~eligible, float("inf")), eligible)

    def find(self, tier: int, position: Tensor) -> Extreme:
        self._require(tier, "pos")
        if self._store.backend.searches_slots:
            return self._search(tier, "mean", exact=position)
        arrays = self.slots(tier)
        match = arrays.valid & (arrays.pos == position[:, None, None, None])
        value = self.mean_score(tier).masked_fill(~match, float("inf"))
        return self._pick(arrays, value, match)

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
        store, fmt = self._store, self._store.formats[tier]
        per_list = self.shape[1] * self.shape[2]
        held = store.table.num_slots[tier, self._lists].long()
        ids = store.table.page_ids(self._lists, tier, int(-(-held.max() // fmt.tokens_per_page)))
        window = store.policy.score.prefill_queries
        floor = self.prompt_tokens - window if window != ALL_QUERIES else None
        seen, floor, before, exact = (
            None if x is None else x.repeat_interleave(per_list) for x in (self.tokens_seen, floor, before, exact)
        )
        found = store.backend.slot_extreme(
            store.pool.pages, fmt, ids, held, by=by, seen=seen, floor=floor, before=before, exact=exact, first=first
        )
        value, slot, pos = (x.view(self.shape) for x in found)
        return Extreme(value=value, slot=slot, pos=pos)

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

    def _require(self, tier: int, name: str) -> None:
        if name not in self._store.formats[tier].slot.track:
            raise ValueError(f"this reduction needs the tracked field {name!r}; add it to the policy's ScoreSpec.track")
