"""Pages without their bytes: a pool and a backend that keep only what decides where the next token goes."""

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

    def write_keys(self, pages: Tensor, fmt: PageFormat, page: Tensor, slot: Tensor, k: Tensor) -> None:
        pass

    def write_values(self, pages: Tensor, fmt: PageFormat, page: Tensor, slot: Tensor, v: Tensor) -> None:
        pass

    def widen_bounds(
        self, pages: Tensor, fmt: PageFormat, page: Tensor, slot: Tensor, k: Tensor, *, distinct: bool
    ) -> None:
        pass

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
        self,
        q: Tensor,
        pages: Tensor,
        tiers: list[TierPages],
        ring: Ring | None,
        scale: float,
        *,
        power: int = 1,
        group: Reduce | None = None,
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        out, lse = torch.zeros(q.shape), torch.zeros(q.shape[:2])
        return out, lse, [] if group is None else self._attention(tiers)

    def gather_dense(self, pages: Tensor, tiers: list[TierPages], ring: Ring | None) -> tuple[Tensor, Tensor, Tensor]:
        (tier,) = tiers
        nothing = torch.zeros(*(live := _live(tier)).shape, 1)
        return nothing, nothing, live

    def choose_pages(
        self, q: Tensor, pages: Tensor, tier: TierPages, count: Tensor, width: int, group: Reduce
    ) -> TierPages:
        return tier  # what is read is not what is held

    def _attention(self, tiers: list[TierPages]) -> list[Tensor]:
        """What a step's queries attend with, per tier fp32 [S, H, m * T]."""
        held = torch.stack([tier.num_k for tier in tiers])  # [tiers, S, H]
        found = []
        for index, tier in enumerate(tiers):
            live = _live(tier)
            if self.is_even:
                found.append(live / held.sum(0)[..., None])
            else:
                is_first = (held[:index].sum(0) == 0)[..., None] & (torch.arange(live.shape[-1]) == 0)
                found.append((live & is_first).float())
        return found


def _live(tier: TierPages) -> Tensor:
    """bool [S, H, m * T]: the slot is held."""
    return torch.arange(tier.ids.shape[-1] * tier.fmt.tokens_per_page) < tier.num_k[..., None]
