"""The GPU backend: Triton kernels for NVIDIA and AMD, written once.

The functions are in `bounds`, `chunks`, `decode`, `fields`, `moves`, `pages`, `prefill` and `step` beside this file.
Prompt attention is torch's own fused kernel. For the rest the reference stands in, much slower, and `fallbacks` names
it: codes whose levels are a table, and reading back all that a list with a residual buffer holds. Which slot lies where
is kept on the device, too (`table` with `manager`, `lookup` and `placing`).

Capture-safe, once warmed up: `paged_decode`, `choose_pages`, `add_scores`, `write_keys`, `write_values`,
`write_tracked`, `widen_bounds`, `read_slots`, `demote`, `move_slots`, `prompt_scores`, `prefill_attention`,
`chunk_attention`, `gather_dense`, and of `DevicePages` `reserve`, `truncate`, `lookup`, `page_ids` and `compact`. Not:
`gather_dense` behind a residual buffer (it reads how long the lists are), `DevicePages.check`, `stats` and `free_ids`.

The store does not use `attention_with_lse`: torch's own fused attention gives the same.
"""

import math
import os

import torch
from torch import Tensor

from kvbench.kernels import checks
from kvbench.kernels.backend import FusedStep
from kvbench.kernels.codes import BITS, code_of
from kvbench.kernels.format import PageFormat
from kvbench.kernels.gpu import chunks as gpu_chunks
from kvbench.kernels.gpu import decode as triton_decode
from kvbench.kernels.gpu import fields as gpu_fields
from kvbench.kernels.gpu import moves as gpu_moves
from kvbench.kernels.gpu import pages as triton_pages
from kvbench.kernels.gpu import prefill as triton_prefill
from kvbench.kernels.gpu.bounds import page_bounds, widen_bounds
from kvbench.kernels.gpu.choice import choose
from kvbench.kernels.gpu.decode import Lists, ListTier
from kvbench.kernels.gpu.manager import DevicePages
from kvbench.kernels.gpu.step import DeviceStep, StepScores, check_step
from kvbench.kernels.gpu.table import DevicePool, DeviceTable
from kvbench.kernels.operands import PageChoice, Reduce, Ring, ScoreUpdate, StepRing, StepTarget, TierPages
from kvbench.kernels.reference import attention as torch_attention
from kvbench.kernels.reference.backend import Reference
from kvbench.kernels.tier_table import TierTable


class Gpu(Reference):
    """Triton kernels, for CUDA and ROCm devices; `refusal` says where they cannot run."""

    name = "triton"
    is_reference = False
    takes_lse = True
    keeps_tables = True
    # No table that a calibration found: the reference does what pages with one are asked for.
    codes = frozenset(
        code_of(name, bits)
        for name, widths in {
            "min_max": BITS,
            "symmetric": BITS[1:],
            "lloyd": (2, 3, 4),
            "nvfp4": (4,),
            "mxfp4": (4,),
            "e4m3": (8,),
            "e4m3_scaled": (8,),
        }.items()
        for bits in widths
    )

    def refusal(self, device: torch.device) -> str:
        """Why the kernels cannot run on a device, with a remedy; empty where they can."""
        if device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1":
            return ""
        return (
            f"backend=triton needs an NVIDIA or AMD GPU, but this model is on {device}; set model.device=cuda where "
            "there is one, choose backend=cpu or backend=torch, or set TRITON_INTERPRET=1 in the environment to run "
            "the kernels in Triton's interpreter, slowly, for tests"
        )

    def write_keys(self, pages: Tensor, fmt: PageFormat, page: Tensor, slot: Tensor, k: Tensor) -> None:
        if self._lacks(fmt):
            super().write_keys(pages, fmt, page, slot, k)
        else:
            triton_pages.write_keys(pages, fmt, page, slot, k)

    def write_values(self, pages: Tensor, fmt: PageFormat, page: Tensor, slot: Tensor, v: Tensor) -> None:
        if self._lacks(fmt):
            super().write_values(pages, fmt, page, slot, v)
        else:
            triton_pages.write_values(pages, fmt, page, slot, v)

    def write_tracked(
        self,
        pages: Tensor,
        fmt: PageFormat,
        page: Tensor,
        slot: Tensor,
        score: Tensor | float | None,
        pos: Tensor | None,
    ) -> None:
        checks.write_tracked(pages, fmt, page, slot, score, pos, passes_over=True)
        gpu_fields.write_tracked(pages, fmt, page, slot, score, pos)

    def widen_bounds(
        self, pages: Tensor, fmt: PageFormat, page: Tensor, slot: Tensor, k: Tensor, *, distinct: bool
    ) -> None:
        widen_bounds(pages, fmt, page, slot, k, distinct=distinct)

    def read_slots(self, pages: Tensor, fmt: PageFormat, page: Tensor, slot: Tensor) -> tuple[Tensor, Tensor]:
        if self._lacks(fmt):
            return super().read_slots(pages, fmt, page, slot)
        return gpu_fields.read_slots(pages, fmt, page, slot)

    def move_slots(
        self, pages: Tensor, fmt: PageFormat, src_page: Tensor, src_slot: Tensor, dst_page: Tensor, dst_slot: Tensor
    ) -> None:
        gpu_moves.move_slots(pages, fmt, src_page, src_slot, dst_page, dst_slot)

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
        accumulate: bool = False,
        pages_per_part: int | None = None,
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """As `Backend.paged_decode`; `accumulate` and `pages_per_part` are explained at `gpu.decode.paged_decode`."""
        if self._lacks(*(tier.fmt for tier in tiers)):
            assert not accumulate, "the reference returns the scores"
            return super().paged_decode(q, pages, tiers, ring, scale, power=power, group=group)
        return triton_decode.paged_decode(
            q, pages, tiers, ring, scale, power=power, group=group, accumulate=accumulate, pages_per_part=pages_per_part
        )

    def open_tables(
        self,
        pages: Tensor,
        tiers: list[TierTable],
        shape: tuple[int, int],
        rows: Tensor,
        *,
        num_q_heads: int,
        seen: Tensor,
        target: StepTarget | None,
        held: tuple[Tensor, Tensor] | None = None,
        ring: StepRing | None = None,
        power: int = 1,
        group: Reduce | None = None,
        update: ScoreUpdate | None = None,
        gives: bool = False,
        skip_near: int = 0,
        turn: tuple[Tensor, Tensor] | None = None,
        choice: PageChoice | None = None,
    ) -> FusedStep | None:
        if self._lacks(*(tier.fmt for tier in tiers)):
            return None
        check_step(
            pages, tiers, shape, rows, num_q_heads=num_q_heads, seen=seen, target=target, held=held, ring=ring,
            turn=turn, choice=choice,
        )  # fmt: skip
        num_layers, heads = shape
        lists = Lists(
            num_seq=len(rows),
            heads=heads,
            per_row=num_layers * heads,
            rows=rows,
            in_table=True,
            counts_in_table=held is None,
        )
        found = [ListTier.in_table(tier, held) for tier in tiers]
        onto = None if target is None else (tiers[target[0]].fmt, target[1], target[2])
        how = StepScores(power=power, group=group, update=update, gives=gives, skip_near=skip_near)
        return DeviceStep(pages, found, lists, num_layers, seen, onto, ring, how, turn, choice)

    def choose_pages(
        self, q: Tensor, pages: Tensor, tier: TierPages, count: Tensor, width: int, group: Reduce
    ) -> TierPages:
        checks.choose(q, pages, tier, count, width, group)
        found, lists = ListTier.of(tier), Lists.of(tier)
        bounds = page_bounds(q, pages, found, lists, group)
        ids, held = choose(bounds, found, lists, count, min(width, tier.ids.shape[2]))
        return TierPages(tier.fmt, ids, held, held)

    def add_scores(self, pages: Tensor, tier: TierPages, scores: Tensor) -> None:
        triton_decode.add_scores(pages, tier, scores)

    def gather_dense(self, pages: Tensor, tiers: list[TierPages], ring: Ring | None) -> tuple[Tensor, Tensor, Tensor]:
        if ring is not None or self._lacks(*(tier.fmt for tier in tiers)):  # a ring's width is asked of the device
            return super().gather_dense(pages, tiers, ring)
        return torch_attention.gather_dense(pages, tiers, None, read=gpu_chunks.read_pages)

    def chunk_attention(
        self, q: Tensor, k: Tensor, v: Tensor, history: tuple[Tensor, Tensor, Tensor], scale: float
    ) -> Tensor:
        return gpu_chunks.chunk_attention(q, k, v, history, scale)

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
        return triton_prefill.column_scores(
            q, k, scale, queries=queries, skip_near=skip_near, power=power, below_uniform=below_uniform
        )

    def columns_by_lse(
        self, q: Tensor, k: Tensor, scale: float, *, lse: Tensor, queries: int, skip_near: int = 0, power: int = 1
    ) -> Tensor:
        return triton_prefill.column_scores(q, k, scale, queries=queries, skip_near=skip_near, power=power, lse=lse)

    def demote(
        self,
        pages: Tensor,
        source: PageFormat,
        target: PageFormat,
        src_page: Tensor,
        src_slot: Tensor,
        dst_page: Tensor,
        dst_slot: Tensor,
    ) -> None:
        """Re-quantises slots into another format without a dense copy; see `gpu.moves.demote`."""
        if self._lacks(source, target):
            raise NotImplementedError(
                f"backend={self.name} demotes no slots from or into codes of calibrated tables; use backend=torch"
            )
        gpu_moves.demote(pages, source, target, src_page, src_slot, dst_page, dst_slot)

    def attention_with_lse(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """A prompt's attention with the log-sum-exp of every query's logits; see `gpu.prefill.attention_with_lse`."""
        return triton_prefill.attention_with_lse(q, k, v, scale)

    def device_pages(
        self,
        page_bytes: int,
        num_pages: int,
        tokens_per_page: tuple[int, ...],
        num_lists: int,
        max_pages: int,
        device: torch.device | str,
    ) -> DevicePages:
        """A pool and its page tables that are kept and changed on the device; see `gpu.manager.DevicePages`."""
        return DevicePages(page_bytes, num_pages, tokens_per_page, num_lists, max_pages, device)

    def tables(
        self,
        page_bytes: int,
        num_pages: int,
        tokens_per_page: tuple[int, ...],
        shape: tuple[int, int, int],
        max_pages: int,
        device: torch.device | str,
    ) -> tuple[DevicePool, DeviceTable]:
        held = DevicePages(page_bytes, num_pages, tokens_per_page, math.prod(shape), max_pages, device)
        pool = DevicePool(held)
        return pool, DeviceTable(pool, *shape)
