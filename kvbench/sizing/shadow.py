"""Pages without their bytes: a pool and a backend that keep only what decides where the next token goes."""

from typing import Any

import torch
from torch import Tensor

from kvbench.kernels.backend import Backend
from kvbench.kernels.format import PageFormat
from kvbench.kernels.operands import Reduce, Ring, TierPages
from kvbench.kernels.pool import PagePool


class ShadowPool(PagePool):
    """A pool that hands out pages, takes them back and counts them, but owns no memory for what they hold."""

    def _make_pages(self, num_pages: int, device: torch.device | str) -> Tensor:
        return torch.zeros(1, 1, dtype=torch.uint8, device=device).expand(num_pages, self.page_bytes)

    def _copy_pages(self, pages: Tensor) -> None:
        """There is nothing to copy."""


class Shadow(Backend):
    """Keeps the tracked score and position of every slot, and no key and no value.

    Every query attends to what is held as `is_even` says: to all slots alike, or to the first one alone. No other
    attention makes a method that decides by thresholds keep much more, or much less.

    Args:
        is_even: Which of the two.
    """

    name = "shadow"

    def __init__(self, is_even: bool) -> None:
        super().__init__()
        self.is_even = is_even
        self._fields: dict[tuple[PageFormat, str], Tensor] = {}

    def region(self, pages: Tensor, fmt: PageFormat, name: str) -> Tensor:
        dtype = torch.float32 if name == "score" else torch.int32
        field = self._fields.get((fmt, name), torch.zeros(0, fmt.tokens_per_page, dtype=dtype))
        if len(field) < len(pages):  # the pool grew
            more = torch.zeros(len(pages) - len(field), fmt.tokens_per_page, dtype=dtype)
            field = self._fields[fmt, name] = torch.cat([field, more])
        return field

    def _ignore(self, *given: Any, **named: Any) -> None:
        """There are no keys, no values and no bounds to write."""

    write_keys = write_values = widen_bounds = _ignore

    def read_slots(self, pages: Tensor, fmt: PageFormat, page: Tensor, slot: Tensor) -> tuple[Tensor, Tensor]:
        nothing = torch.zeros(len(page), 1)
        return nothing, nothing

    def move_slots(
        self, pages: Tensor, fmt: PageFormat, src_page: Tensor, src_slot: Tensor, dst_page: Tensor, dst_slot: Tensor
    ) -> None:
        for name in fmt.slot.track:
            field = self.region(pages, fmt, name)
            field[dst_page, dst_slot] = field[src_page, src_slot]

    def paged_decode(
        self, q: Tensor, pages: Tensor, tiers: list[TierPages], *given: Any, group: Reduce | None = None, **named: Any
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        return torch.zeros(q.shape), torch.zeros(q.shape[:2]), [] if group is None else self._attention(tiers)

    def gather_dense(self, pages: Tensor, tiers: list[TierPages], ring: Ring | None) -> tuple[Tensor, Tensor, Tensor]:
        (tier,) = tiers
        nothing = torch.zeros(*(live := _live(tier)).shape, 1)
        return nothing, nothing, live

    def choose_pages(self, q: Tensor, pages: Tensor, tier: TierPages, *given: Any) -> TierPages:
        return tier  # what is read is not what is held

    def _attention(self, tiers: list[TierPages]) -> list[Tensor]:
        """The attention of a step's queries, per tier fp32 [S, H, m * T]."""
        held = torch.stack([tier.num_k for tier in tiers]).sum(0)
        if self.is_even:
            return [_live(tier) / held[..., None] for tier in tiers]
        found, before = [], torch.zeros_like(held)
        for tier in tiers:
            live = _live(tier)
            found.append((live & (before == 0)[..., None] & (torch.arange(live.shape[-1]) == 0)).float())
            before = before + tier.num_k
        return found


def _live(tier: TierPages) -> Tensor:
    """bool [S, H, m * T]: the slot is held."""
    return torch.arange(tier.ids.shape[-1] * tier.fmt.tokens_per_page) < tier.num_k[..., None]
