"""The GPU backend: Triton kernels for NVIDIA and AMD, written once.

Operations without a kernel in this folder run in plain torch, much slower, and `fallbacks` names them: codes whose
levels are a table, sums that are no sums, and reading back all that a list with a residual buffer holds. Which slot
lies where is kept on the device, too (`table`).

Capture-safe, once warmed up, are all operations but `gather_dense` with a residual buffer, which reads how long the
lists are; of `DeviceTable` those that do not look at the pool.
"""

import os
from collections.abc import Set
from typing import Any, Literal

import torch
from torch import Tensor

from kvbench.kernels import checks
from kvbench.kernels.backend import Backend, FusedStep
from kvbench.kernels.codes import every_code
from kvbench.kernels.format import PageFormat
from kvbench.kernels.gpu.bounds import KEYS, _widen_pages, choose, page_bounds
from kvbench.kernels.gpu.cuda_decode import Build, CudaAttention, Decoder
from kvbench.kernels.gpu.cuda_load import cuda_kernels
from kvbench.kernels.gpu.decode import Attention, Lists, ListTier, _add_scores, score_offset
from kvbench.kernels.gpu.pages import (
    BLOCK,
    TILE,
    _demote_both,
    _move_bytes,
    _read_side,
    _write_fields,
    byte_map,
    slots_per_program,
    write_part,
)
from kvbench.kernels.gpu.parts import ELEMENT, launch, power_of_two, side_layout
from kvbench.kernels.gpu.prefill import attend_chunk, sum_columns
from kvbench.kernels.gpu.step import DeviceStep
from kvbench.kernels.gpu.table import DevicePool, DeviceTable
from kvbench.kernels.operands import (
    NO_SCORES,
    PLAIN,
    ColumnSums,
    PageChoice,
    Reduce,
    Ring,
    ScoreUpdate,
    Softmax,
    StepRing,
    StepScores,
    StepTarget,
    TierPages,
    TierTable,
)
from kvbench.kernels.reference.attention import dense_of
from kvbench.kernels.reference.prompts import attention_behind

Decode = Literal["triton", "cuda", "torch"]


class Gpu(Backend):
    """Triton kernels, for CUDA and ROCm devices; `refusal` says where they cannot run.

    Attributes:
        codes: The `kernels.codes` that have kernels; pages with others are plain torch's work.
        decoder: Makes the attention of decode steps; None where plain torch does.
    """

    name = "triton"
    is_reference = False
    takes_lse = True
    keeps_tables = True
    # No calibrated tables: the reference runs operations on pages that have one.
    codes = frozenset(code for code in every_code() if not code.is_book)

    def __init__(self, decode: Decode | Build = "triton") -> None:
        """Selects the kernels of decode attention.

        Args:
            decode: `triton`, `cuda` (which needs an NVIDIA GPU), `torch`, or a builder of kernels in CUDA C++.
        """
        super().__init__()
        build = cuda_kernels if decode == "cuda" else decode if callable(decode) else None
        self.decoder = None if decode == "torch" else Decoder(build)

    @property
    def decodes(self) -> Set[str]:
        return self.decoder.ran if self.decoder else {"torch"}

    def refusal(self, device: torch.device) -> str:
        """Reason why the kernels cannot run on a device, with a remedy; empty where they can."""
        if device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1":
            return ""
        return (
            f"backend=triton needs an NVIDIA or AMD GPU, but this model is on {device}; set model.device=cuda where "
            "there is one, choose backend=cpu or backend=torch, or set TRITON_INTERPRET=1 in the environment to run "
            "the kernels in Triton's interpreter, slowly, for tests"
        )

    def _covers(self, *formats: PageFormat) -> bool:
        """True if all codes of the formats have kernels, and values of their own."""
        if any(fmt.slot.keys_only for fmt in formats):
            return False
        sides = [code for fmt in formats for code in (fmt.slot.keys, fmt.slot.values)]
        return all(code is None or code in self.codes for code in sides)

    def write_keys(self, pages: Tensor, fmt: PageFormat, page: Tensor, slot: Tensor, k: Tensor) -> None:
        """See `Backend.write_keys`; entries with a page below 0 are skipped.

        With per-channel keys the page of a group's first entry decides.
        """
        if not self._covers(fmt):
            super().write_keys(pages, fmt, page, slot, k)
            return
        checks.write(pages, fmt, page, slot, k, keys=True)
        write_part("k", pages, fmt, page, slot, k)

    def write_values(self, pages: Tensor, fmt: PageFormat, page: Tensor, slot: Tensor, v: Tensor) -> None:
        if not self._covers(fmt):
            super().write_values(pages, fmt, page, slot, v)
            return
        checks.write(pages, fmt, page, slot, v, keys=False)
        write_part("v", pages, fmt, page, slot, v)

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
        track = fmt.slot.track
        if not track:
            return
        offsets = {name: fmt.regions[name][0] if name in track else -1 for name in ("score", "pos")}
        scores = score.contiguous() if isinstance(score, Tensor) else page
        same = 0.0 if score is None or isinstance(score, Tensor) else float(score)
        launch(
            _write_fields, (-(-page.numel() // BLOCK),), pages, page.contiguous(), slot.contiguous(), scores,
            page if pos is None else pos.contiguous(), same,
            pages.shape[1], page.numel(), SCORE=offsets["score"], SCORES=isinstance(score, Tensor), POS=offsets["pos"],
            BLOCK=BLOCK,
        )  # fmt: skip

    def widen_bounds(
        self, pages: Tensor, fmt: PageFormat, page: Tensor, slot: Tensor, k: Tensor, *, distinct: bool
    ) -> None:
        """See `Backend.widen_bounds`; no slot may occur twice.

        One launch after a sort; a decode step (`distinct`) needs no sort.
        """
        checks.widen_bounds(pages, fmt, page, slot, k, passes_over=True)
        page, order = (page.contiguous(), page) if distinct else page.sort()
        low, high = (fmt.regions[name][0] for name in ("k_low", "k_high"))
        most = 1 if distinct else fmt.tokens_per_page
        launch(
            _widen_pages, (page.numel(),), k.contiguous(), page, slot.contiguous(), order, pages, page.numel(),
            pages.shape[1], D=k.shape[1], DP=power_of_two(k.shape[1]), BT=min(KEYS, power_of_two(most)), MOST=most,
            LOW=low, HIGH=high, ELEM=ELEMENT[fmt.slot.dtype], SORTED=not distinct,
        )  # fmt: skip

    def read_slots(self, pages: Tensor, fmt: PageFormat, page: Tensor, slot: Tensor) -> tuple[Tensor, Tensor]:
        """See `Backend.read_slots`; 0 where the page is below 0."""
        if not self._covers(fmt):
            return super().read_slots(pages, fmt, page, slot)
        checks.slots(pages, fmt, page, slot)
        count, head_dim = page.numel(), fmt.slot.head_dim
        out = [torch.empty(count, head_dim, device=pages.device) for _ in range(2)]
        padded = power_of_two(head_dim)
        rows = min(64, max(1, TILE // padded))
        for side, target in zip("kv", out, strict=True):
            launch(
                _read_side, (-(-count // rows),), pages, target, page.contiguous(), slot.contiguous(), count,
                pages.shape[1], BM=rows, DP=padded, KEYS=side == "k", D=head_dim, T=fmt.tokens_per_page,
                SIDE=side_layout(fmt, side, least=1),
            )  # fmt: skip
        return out[0], out[1]

    def move_slots(
        self, pages: Tensor, fmt: PageFormat, src_page: Tensor, src_slot: Tensor, dst_page: Tensor, dst_slot: Tensor
    ) -> None:
        checks.move(pages, fmt, src_page, src_slot, dst_page, dst_slot)
        table = byte_map(fmt, tuple(fmt.regions), pages.device)
        count, width = dst_page.numel(), min(64, power_of_two(len(table)))
        rows = TILE // 2 // width
        launch(
            _move_bytes, (-(-count // rows), -(-len(table) // width)), pages, src_page.contiguous(),
            src_slot.contiguous(), dst_page.contiguous(), dst_slot.contiguous(), table, table, count, len(table),
            pages.shape[1], BM=rows, BB=width, COLUMNS=-(-len(table) // width),
        )  # fmt: skip

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
        softmax: Softmax = PLAIN,
        accumulate: bool = False,
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """See `Backend.paged_decode`; dequantises on the fly.

        Keys that are rotated when they are read give logits in fp32. fp32 queries are computed in fp32 throughout; fp16
        and bf16 queries with products in that type, sums in fp32.

        Args:
            accumulate: Add the scores to what the pages track, instead of returning them.
        """
        has_offsets = any(tier.offset is not None for tier in tiers)
        if self.decoder is None or has_offsets or not self._covers(*(tier.fmt for tier in tiers)):
            assert not accumulate, "the reference returns the scores"
            return super().paged_decode(q, pages, tiers, ring, scale, power=power, group=group, softmax=softmax)
        update: ScoreUpdate | None = "add" if accumulate and group else None
        how: dict[str, Any] = {"power": power, "group": group, "update": update, "softmax": softmax}
        return self.prepared_decode(q, pages, tiers, ring, **how)(q, ring, scale)

    def prepared_decode(
        self, q: Tensor, pages: Tensor, tiers: list[TierPages], ring: Ring | None, *, power: int = 1,
        group: Reduce | None = None, update: ScoreUpdate | None = None, softmax: Softmax = PLAIN,
    ) -> CudaAttention | Attention:  # fmt: skip
        """Prepares `paged_decode` for queries and residual buffers of these shapes; calling the result launches it."""
        assert self.decoder is not None, "plain torch prepares nothing"
        checks.decode(q, pages, tiers, ring, power, group, softmax)
        lists, scores = Lists.of(tiers[0]), StepScores(power=power, group=group, update=update)
        return self.decoder(q, pages, [ListTier.of(tier) for tier in tiers], lists, ring, scores, softmax=softmax)

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
        scores: StepScores = NO_SCORES,
        strip: tuple[Tensor, Tensor] | None = None,
        choice: PageChoice | None = None,
        softmax: Softmax = PLAIN,
    ) -> FusedStep | None:
        if self.decoder is None or not self._covers(*(tier.fmt for tier in tiers)):
            return None
        wanted, device = (len(rows), *shape), pages.device
        if num_q_heads % shape[1]:
            raise AssertionError(f"{num_q_heads} query heads are no multiple of {shape[1]} KV heads")
        if (target is None) == (ring is None) or (held is None) != (ring is None):
            raise AssertionError("a step writes its token to a page, or to a residual buffer and says what pages hold")
        if any(tier.fmt.bounds for tier in tiers) != (choice is not None) or (
            choice and (len(tiers) > 1 or ring or strip)
        ):
            raise AssertionError(
                "pages of one tier with bounds are read in part, behind no ring, and keys as they are stored"
            )
        checks.softmax(softmax, (shape[0], num_q_heads), device)
        for tier in tiers:
            checks.pool(pages, tier.fmt)
            if tier.width > tier.entries.shape[1]:
                raise AssertionError(
                    f"a list of {tier.width} pages has no room in {tier.entries.shape[1]} table entries"
                )
        numbers: list[tuple[str, Tensor, tuple[int, ...]]] = [("rows", rows, rows.shape), ("seen", seen, rows.shape)]
        numbers += [
            (f"the target's {name}", x, wanted) for name, x in zip(("page", "slot"), (target or ())[1:], strict=False)
        ]
        numbers += [("held", x, wanted) for x in held or ()]
        numbers += [("count", choice.count, rows.shape)] if choice is not None else []
        if ring is not None:
            numbers += [("a count of the ring", x, wanted) for x in (ring.num_tokens, *ring.before, *ring.after)]
        for name, x, size in numbers:
            checks.index(name, x, size, device)
            if not x.is_contiguous():
                raise AssertionError(f"{name} is not contiguous, but kernels read it as one plain array")
        num_layers, heads = shape
        lists = Lists(
            num_seq=len(rows),
            heads=heads,
            per_row=num_layers * heads,
            rows=rows,
            in_table=True,
            counts_in_table=held is None,
        )
        list_tiers = [ListTier.in_table(tier, held) for tier in tiers]
        onto = None if target is None else (tiers[target[0]].fmt, target[1], target[2])
        return DeviceStep(
            pages, list_tiers, lists, num_layers, seen, onto, ring, scores, strip, choice, softmax, self.decoder
        )

    def choose_pages(
        self, q: Tensor, pages: Tensor, tier: TierPages, count: Tensor, width: int, group: Reduce
    ) -> TierPages:
        checks.choose(q, pages, tier, count, width, group)
        list_tier, lists = ListTier.of(tier), Lists.of(tier)
        bounds = page_bounds(q, pages, list_tier, lists, group)
        ids, held = choose(bounds, list_tier, lists, count, min(width, tier.ids.shape[2]))
        return TierPages(tier.fmt, ids, held, held)

    def add_scores(self, pages: Tensor, tier: TierPages, scores: Tensor) -> None:
        checks.scores(pages, tier, scores)
        lists, columns, slots = tier.num_k.numel(), tier.ids.shape[-1], tier.fmt.tokens_per_page
        launch(
            _add_scores, (columns * lists,), pages, tier.ids.contiguous(), tier.num_k.contiguous(),
            scores.float().contiguous(), pages.shape[1], columns, T=slots, TP=power_of_two(slots),
            TRACK=score_offset(tier.fmt),
        )  # fmt: skip

    def gather_dense(self, pages: Tensor, tiers: list[TierPages], ring: Ring | None) -> tuple[Tensor, Tensor, Tensor]:
        if ring is not None or not self._covers(*(tier.fmt for tier in tiers)):  # reads a ring's width
            return super().gather_dense(pages, tiers, ring)
        checks.dense(pages, tiers, None)
        return dense_of(pages, tiers, None, self._read_pages)

    def _read_pages(self, pages: Tensor, fmt: PageFormat, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Whole pages, int64 [n], as keys fp32 [n, D, T] and values [n, T, D], slot by slot."""
        size, dim = fmt.tokens_per_page, fmt.slot.head_dim
        slot = torch.arange(size, device=ids.device).expand(len(ids), size)
        k, v = self.read_slots(pages, fmt, ids[:, None].expand_as(slot).flatten(), slot.flatten())
        return k.view(len(ids), size, dim).transpose(1, 2), v.view(len(ids), size, dim)

    def chunk_attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        history: tuple[Tensor, Tensor, Tensor | None],
        scale: float,
        softmax: Softmax = PLAIN,
    ) -> Tensor:
        """See `Backend.chunk_attention`; one launch, which skips entries that are not live.

        Products are of 16-bit operands, as tensor cores take them, where queries, keys and values of the chunk are of
        one such type, which the history is rounded to; else of fp32. A history that is live as a whole and of that
        type is torch's flash attention's work.

        Source: FlashAttention (Dao et al. 2022), online softmax over key blocks.
        """
        checks.chunk(q, k, v, history, softmax)
        is_flash = history[2] is None and softmax.is_plain
        out = attention_behind(q, k, v, *history[:2], scale) if is_flash else None
        return attend_chunk(q, k, v, history, scale, softmax) if out is None else out

    def column_scores(
        self,
        q: Tensor,
        k: Tensor,
        scale: float,
        columns: ColumnSums,
        lse: Tensor | None = None,
        softmax: Softmax = PLAIN,
    ) -> Tensor:
        """See `Backend.column_scores`. Memory beyond the result: two fp32 numbers per counted query and head."""
        if columns.reduce != "sum":
            return super().column_scores(q, k, scale, columns, lse, softmax)
        checks.columns(q, k, columns, softmax)
        return sum_columns(q, k, scale, columns, lse, softmax)

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
        """See `Backend.demote`; makes no dense copy, and no target slot is also a source.

        Raises:
            ValueError: The target's keys share scales over tokens, or the formats track different fields.

        Source: DiffKV (tokens go down a tier as they are quantised, not from the original vectors).
        """
        if not self._covers(source, target):
            raise NotImplementedError(
                f"backend={self.name} demotes no slots from or into codes of calibrated tables; use backend=torch"
            )
        if target.slot.channel_keys:
            raise ValueError(
                f"slots cannot be demoted into per-channel keys (group {target.slot.k_channel_group}) one by one; give "
                "the lower tier k_axis=token"
            )
        if source.slot.track != target.slot.track:
            raise ValueError(
                f"the tiers track {source.slot.track} and {target.slot.track}; demotion needs the same fields in both"
            )
        checks.slots(pages, source, src_page, src_slot)
        checks.slots(pages, target, dst_page, dst_slot)
        rows, count = [slots_per_program(target, side) for side in "kv"], dst_page.numel()
        fields = 4 * len(source.slot.track)
        maps = [byte_map(fmt, ("score", "pos"), pages.device) if fields else pages for fmt in (source, target)]
        launch(
            _demote_both, (max(-(-count // each) for each in rows), 3 if fields else 2), pages, src_page.contiguous(),
            src_slot.contiguous(), dst_page.contiguous(), dst_slot.contiguous(), *maps, count, fields, pages.shape[1],
            BK=rows[0], BV=rows[1], D=target.slot.head_dim, META_FIRST=False, BM=max(rows), BB=power_of_two(fields),
            T=target.tokens_per_page, S_T=source.tokens_per_page, K=side_layout(target, "k", least=1),
            V=side_layout(target, "v", least=1), SK=side_layout(source, "k", least=1),
            SV=side_layout(source, "v", least=1), enable_fp_fusion=False,
        )  # fmt: skip

    def tables(
        self,
        page_bytes: int,
        num_pages: int,
        tokens_per_page: tuple[int, ...],
        shape: tuple[int, int, int],
        max_pages: int,
        device: torch.device | str,
    ) -> tuple[DevicePool, DeviceTable]:
        pool = DevicePool(page_bytes, num_pages, device)
        return pool, DeviceTable(pool, tokens_per_page, *shape, max_pages)
