"""The CPU backend: the C++ of csrc/, compiled on first use by the system's compiler and called through ctypes.

No torch headers, no Python headers, no build system: plain C functions that take pointers. The functions are in
`pages`, `decode`, `scores` and `step` beside this file; operations that are not here are the reference's.
"""

import warnings
from functools import cache

from torch import Tensor

from kvbench.kernels.backend import FusedStep
from kvbench.kernels.cpu import decode as cpu_decode
from kvbench.kernels.cpu import pages as cpu_pages
from kvbench.kernels.cpu import scores as cpu_scores
from kvbench.kernels.cpu import step as cpu_step
from kvbench.kernels.cpu.abi import chosen_isa, load
from kvbench.kernels.format import PageFormat
from kvbench.kernels.operands import Reduce, Ring, ScoreUpdate, StepRing, StepTarget, TierPages
from kvbench.kernels.reference.backend import Reference
from kvbench.kernels.tier_table import ExtremeOf


class Cpu(Reference):
    """C++ for pages in main memory.

    Raises:
        BuildError: See `cpu.abi.load`.
        ValueError: See `cpu.abi.load`.
    """

    name = "cpu"
    is_reference = False
    fuses_layers = True
    searches_slots = True

    def __init__(self) -> None:
        super().__init__()
        load()  # a machine without a compiler learns it here, not at the first step
        self.isa = chosen_isa()

    def write_keys(self, pages: Tensor, fmt: PageFormat, page: Tensor, slot: Tensor, k: Tensor) -> None:
        if self._lacks(fmt):
            super().write_keys(pages, fmt, page, slot, k)
        else:
            cpu_pages.write_keys(pages, fmt, page, slot, k)

    def write_values(self, pages: Tensor, fmt: PageFormat, page: Tensor, slot: Tensor, v: Tensor) -> None:
        if self._lacks(fmt):
            super().write_values(pages, fmt, page, slot, v)
        else:
            cpu_pages.write_values(pages, fmt, page, slot, v)

    def read_slots(self, pages: Tensor, fmt: PageFormat, page: Tensor, slot: Tensor) -> tuple[Tensor, Tensor]:
        if self._lacks(fmt):
            return super().read_slots(pages, fmt, page, slot)
        return cpu_pages.read_slots(pages, fmt, page, slot)

    def move_slots(
        self, pages: Tensor, fmt: PageFormat, src_page: Tensor, src_slot: Tensor, dst_page: Tensor, dst_slot: Tensor
    ) -> None:
        if self._lacks(fmt):
            super().move_slots(pages, fmt, src_page, src_slot, dst_page, dst_slot)
        else:
            cpu_pages.move_slots(pages, fmt, src_page, src_slot, dst_page, dst_slot)

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
        if self._lacks(*(tier.fmt for tier in tiers)):
            return super().paged_decode(q, pages, tiers, ring, scale, power=power, group=group)
        if not cpu_decode.takes(q, tiers, ring):
            self._stands_in("paged_decode")
        return cpu_decode.paged_decode(q, pages, tiers, ring, scale, power=power, group=group)

    def add_scores(self, pages: Tensor, tier: TierPages, scores: Tensor) -> None:
        cpu_decode.add_scores(pages, tier, scores)

    def column_scores(
        self,
        q: Tensor,
        k: Tensor,
        scale: float,
        *,
        queries: int,
        skip_near: int = 0,
        power: int = 1,
        below_uniform: bool = False,
    ) -> Tensor:
        return cpu_scores.column_scores(
            q, k, scale, queries=queries, skip_near=skip_near, power=power, below_uniform=below_uniform
        )

    def open_step(
        self,
        pages: Tensor,
        tiers: list[TierPages],
        *,
        num_q_heads: int,
        seen: Tensor,
        target: StepTarget | None,
        ring: StepRing | None = None,
        power: int = 1,
        group: Reduce | None = None,
        update: ScoreUpdate | None = None,
        skip_near: int = 0,
    ) -> FusedStep | None:
        if self._lacks(*(tier.fmt for tier in tiers)):
            return None
        return cpu_step.open_step(
            pages,
            tiers,
            num_q_heads=num_q_heads,
            seen=seen,
            target=target,
            ring=ring,
            power=power,
            group=group,
            update=update,
            skip_near=skip_near,
        )

    def slot_extreme(
        self,
        pages: Tensor,
        fmt: PageFormat,
        ids: Tensor,
        held: Tensor,
        *,
        by: ExtremeOf,
        seen: Tensor,
        floor: Tensor | None = None,
        before: Tensor | None = None,
        exact: Tensor | None = None,
        first: int = 0,
    ) -> tuple[Tensor, Tensor, Tensor]:
        return cpu_pages.slot_extreme(
            pages, fmt, ids, held, by=by, seen=seen, floor=floor, before=before, exact=exact, first=first
        )


@cache
def warn_absent(reason: str) -> None:
    """Says once per reason that the reference stands in."""
    warnings.warn(
        f"no compiled CPU kernels: {reason}; going on with backend=torch, the plain reference, which is much slower",
        stacklevel=3,
    )
