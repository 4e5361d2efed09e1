"""The reference backend: every operation in plain torch, made to be right; what a faster one lacks, it takes from here.

Each operation that a faster backend could do faster notes that it ran (`Backend.fallbacks`). The others are what every
backend wants: views, indexing of the tracked fields, torch's own attention of a prompt, and the reduction of scores.
The functions are in `pages` and `attention` beside this file; arguments and results are those of `Backend`.
"""

from functools import partial

from torch import Tensor

from kvbench.kernels.backend import Backend
from kvbench.kernels.format import PageFormat
from kvbench.kernels.operands import Pool, PoolRegion, PoolStage, Reduce, Ring, TierPages
from kvbench.kernels.reference import attention as torch_attention
from kvbench.kernels.reference import flash as torch_flash
from kvbench.kernels.reference import pages as torch_pages


class Reference(Backend):
    """Plain torch, on any device; it neither fuses layers nor searches slots."""

    name = "torch"
    is_reference = True

    def _stands_in(self, operation: str) -> None:
        """Notes that plain torch does an operation for a backend that has nothing of its own for this call."""
        if not self.is_reference:
            self.fallbacks.add(operation)

    def _lacks(self, *formats: PageFormat) -> bool:
        """Whether a format has a code that the backend has no kernels for."""
        sides = [code for fmt in formats for code in (fmt.slot.keys, fmt.slot.values)]
        return self.codes is not None and any(code is not None and code not in self.codes for code in sides)

    def region(self, pages: Tensor, fmt: PageFormat, name: str) -> Tensor:
        return torch_pages.region(pages, fmt, name)

    def write_keys(self, pages: Tensor, fmt: PageFormat, page: Tensor, slot: Tensor, k: Tensor) -> None:
        self._stands_in("write_keys")
        torch_pages.write_keys(pages, fmt, page, slot, k)

    def write_values(self, pages: Tensor, fmt: PageFormat, page: Tensor, slot: Tensor, v: Tensor) -> None:
        self._stands_in("write_values")
        torch_pages.write_values(pages, fmt, page, slot, v)

    def write_tracked(
        self,
        pages: Tensor,
        fmt: PageFormat,
        page: Tensor,
        slot: Tensor,
        score: Tensor | float | None,
        pos: Tensor | None,
    ) -> None:
        torch_pages.write_tracked(pages, fmt, page, slot, score, pos)

    def widen_bounds(
        self, pages: Tensor, fmt: PageFormat, page: Tensor, slot: Tensor, k: Tensor, *, distinct: bool
    ) -> None:
        self._stands_in("widen_bounds")
        torch_pages.widen_bounds(pages, fmt, page, slot, k, distinct=distinct)

    def read_slots(self, pages: Tensor, fmt: PageFormat, page: Tensor, slot: Tensor) -> tuple[Tensor, Tensor]:
        self._stands_in("read_slots")
        return torch_pages.read_slots(pages, fmt, page, slot)

    def read_tracked(
        self, pages: Tensor, fmt: PageFormat, page: Tensor, slot: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        return torch_pages.read_tracked(pages, fmt, page, slot)

    def move_slots(
        self, pages: Tensor, fmt: PageFormat, src_page: Tensor, src_slot: Tensor, dst_page: Tensor, dst_slot: Tensor
    ) -> None:
        self._stands_in("move_slots")
        torch_pages.move_slots(pages, fmt, src_page, src_slot, dst_page, dst_slot)

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
        self._stands_in("paged_decode")
        return torch_attention.paged_decode(q, pages, tiers, ring, scale, power=power, group=group)

    def choose_pages(
        self, q: Tensor, pages: Tensor, tier: TierPages, count: Tensor, width: int, group: Reduce
    ) -> TierPages:
        self._stands_in("choose_pages")
        return torch_attention.choose_pages(q, pages, tier, count, width, group)

    def add_scores(self, pages: Tensor, tier: TierPages, scores: Tensor) -> None:
        self._stands_in("add_scores")
        torch_attention.add_scores(pages, tier, scores)

    def gather_dense(self, pages: Tensor, tiers: list[TierPages], ring: Ring | None) -> tuple[Tensor, Tensor, Tensor]:
        self._stands_in("gather_dense")
        return torch_attention.gather_dense(pages, tiers, ring)

    def prefill_attention(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        return torch_attention.prefill_attention(q, k, v, scale)

    def prefill_attention_with_lse(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor | None]:
        found = torch_flash.attention_with_lse(q, k, v, scale) if self.takes_lse else None
        return (self.prefill_attention(q, k, v, scale), None) if found is None else found

    def chunk_attention(
        self, q: Tensor, k: Tensor, v: Tensor, history: tuple[Tensor, Tensor, Tensor], scale: float
    ) -> Tensor:
        self._stands_in("chunk_attention")
        return torch_attention.chunk_attention(q, k, v, history, scale)

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
        """What `prompt_scores` and `prompt_low_counts` reduce, fp32 [Hq, N]: the step that other backends speed up.

        Arguments are those of `reference.attention.column_scores`.
        """
        self._stands_in("column_scores")
        return torch_attention.column_scores(
            q, k, scale, queries=queries, skip_near=skip_near, power=power, below_uniform=below_uniform
        )

    def columns_by_lse(
        self, q: Tensor, k: Tensor, scale: float, *, lse: Tensor, queries: int, skip_near: int = 0, power: int = 1
    ) -> Tensor:
        """As `column_scores`, where the log-sum-exp of the logits, fp32 [Hq, N], is known already; only where
        `takes_lse`."""
        raise NotImplementedError(f"backend={self.name} makes no use of a log-sum-exp; call column_scores")

    def prompt_scores(
        self,
        q: Tensor,
        k: Tensor,
        scale: float,
        *,
        queries: int,
        skip_near: int,
        power: int,
        pool: Pool,
        pool_kernel: int,
        pool_stage: PoolStage,
        pool_region: PoolRegion,
        group: Reduce,
        lse: Tensor | None = None,
    ) -> Tensor:
        return torch_attention.prompt_scores(
            q,
            k,
            scale,
            queries=queries,
            skip_near=skip_near,
            power=power,
            pool=pool,
            pool_kernel=pool_kernel,
            pool_stage=pool_stage,
            pool_region=pool_region,
            group=group,
            columns=self.column_scores if lse is None else partial(self.columns_by_lse, lse=lse),
        )

    def prompt_low_counts(
        self, q: Tensor, k: Tensor, scale: float, *, queries: int, skip_near: int, group: Reduce
    ) -> Tensor:
        return torch_attention.prompt_low_counts(
            q, k, scale, queries=queries, skip_near=skip_near, group=group, columns=self.column_scores
        )
