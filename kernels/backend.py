"""What every backend is: the operations that the store calls."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from kvbench.kernels.codes import Code
from kvbench.kernels.format import PageFormat
from kvbench.kernels.operands import (
    PageChoice,
    Pool,
    PoolRegion,
    PoolStage,
    Reduce,
    Ring,
    ScoreUpdate,
    StepRing,
    StepTarget,
    TierPages,
)
from kvbench.kernels.pool import PagePool
from kvbench.kernels.table import PageTable
from kvbench.kernels.tier_table import ExtremeOf, TierTable


class FusedStep(ABC):
    """A decode step that `Backend.open_step` or `open_tables` prepared: each layer is one call.

    Attributes:
        strips: It takes the rotary position off keys itself before it writes them.
        given: Of a step that `gives`, the last layer's scores: per tier, fp32 [S, H, n].
    """

    strips: bool = False
    given: Sequence[Tensor] = ()

    @abstractmethod
    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Writes one layer's new token, attends over everything held, and updates the tracked scores.

        Args:
            layer: Layer index.
            q: [S, Hq, D]; k, v: [S, H, D], any float dtype.
            scale: Factor on the logits.

        Returns:
            fp32 [S, Hq, D].

        Raises:
            MemoryError: No room for the partial results.
        """


class Backend(ABC):
    """The operations on pages that the store calls; every backend leaves the same bytes in a page.

    Legend: P pages in the pool, M slots of a call, T slots per page, S sequences, H KV heads, Hq query heads, D head
    dim, m pages per list, N prompt tokens. Everywhere, `pages` is the pool, uint8 [P, page_bytes], changed in place by
    the operations that write; `fmt` is the format of the pages that a call names; `scale` is the factor on the logits.

    Attributes:
        name: What `get_backend` knows it by; part of a run's identity.
        is_reference: Made to be right, not fast: its speed is no claim for anything.
        fuses_layers: Whether it has `open_step`.
        searches_slots: Whether it has `slot_extreme`.
        takes_lse: Whether its scores of a prompt take the log-sum-exp that the prompt's attention makes anyway.
        keeps_tables: Whether it keeps pool and page tables itself (`tables`), where its operations pass over page ids
            below 0, and nothing of a decode step waits for the device.
        isa: The instruction set that its own compiled kernels use; part of a run's identity, since sums in another
            order, or products in whole numbers, are other answers. Empty where it has no such choice.
        codes: The `kernels.codes` that it has kernels for; None = all. Pages with others are the reference's work.
        fallbacks: Operations that the plain reference has done in its place so far, by name; on record with a run.
    """

    name: str
    is_reference: bool = False
    fuses_layers: bool = False
    searches_slots: bool = False
    takes_lse: bool = False
    keeps_tables: bool = False
    isa: str = ""
    codes: frozenset[Code] | None = None

    def __init__(self) -> None:
        self.fallbacks: set[str] = set()

    @abstractmethod
    def region(self, pages: Tensor, fmt: PageFormat, name: str) -> Tensor:
        """A region of every page as a typed view.

        Args:
            name: A region of `PageFormat.regions`.

        Returns:
            k_codes [P, W, T] uint8 (or elements [P, D, T]), v_codes [P, T, W] (or [P, T, D]), k_scale and k_zero [P,
            groups, T] or [P, T / group, D] fp16, v_scale and v_zero [P, groups, T] fp16, k_apart and v_apart [P, n, T]
            fp16, k_where and v_where [P, n, T] uint8, score [P, T] fp32, pos [P, T] int32, k_low and k_high [P, D]
            elements.
        """

    @abstractmethod
    def write_keys(self, pages: Tensor, fmt: PageFormat, page: Tensor, slot: Tensor, k: Tensor) -> None:
        """Encodes keys and writes them to their slots.

        Args:
            page: int64 [M] page ids.
            slot: int64 [M] slots within the page. With per-channel keys, runs of `group_tokens` consecutive slots,
                aligned, in order.
            k: [M, D], any float dtype.
        """

    @abstractmethod
    def write_values(self, pages: Tensor, fmt: PageFormat, page: Tensor, slot: Tensor, v: Tensor) -> None:
        """Encodes values [M, D] and writes them to their slots; arguments as in `write_keys`, any slots."""

    @abstractmethod
    def write_tracked(
        self,
        pages: Tensor,
        fmt: PageFormat,
        page: Tensor,
        slot: Tensor,
        score: Tensor | float | None,
        pos: Tensor | None,
    ) -> None:
        """Writes the tracked fields of slots; those that the format does not track are ignored.

        Args:
            page: int64 [M] page ids.
            slot: int64 [M] slots within the page.
            score: fp32 [M], or one number for all; None only where the format tracks no score.
            pos: int64 [M] positions; None only where the format tracks none.
        """

    @abstractmethod
    def widen_bounds(
        self, pages: Tensor, fmt: PageFormat, page: Tensor, slot: Tensor, k: Tensor, *, distinct: bool
    ) -> None:
        """Widens the bounds of pages so that they include keys; slot 0 begins a page anew.

        Args:
            fmt: The pages' format, with bounds.
            page: int64 [M] page ids.
            slot: int64 [M] slots within the page.
            k: [M, D], as they are written.
            distinct: No page comes twice, as in a decode step; then nothing is sorted.
        """

    @abstractmethod
    def read_slots(self, pages: Tensor, fmt: PageFormat, page: Tensor, slot: Tensor) -> tuple[Tensor, Tensor]:
        """Dequantises single slots: int64 [M] pages and slots to keys and values, fp32 [M, D]."""

    @abstractmethod
    def read_tracked(
        self, pages: Tensor, fmt: PageFormat, page: Tensor, slot: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        """Score fp32 [M] and position int64 [M] of single slots; None for a field that is not tracked."""

    @abstractmethod
    def move_slots(
        self, pages: Tensor, fmt: PageFormat, src_page: Tensor, src_slot: Tensor, dst_page: Tensor, dst_slot: Tensor
    ) -> None:
        """Copies the bytes of slots as they are (no requantisation); sources and targets must not overlap.

        Args:
            src_page, src_slot: int64 [M] each, where the bytes come from.
            dst_page, dst_slot: int64 [M] each, where they go.

        Raises:
            ValueError: The format's keys share scales over tokens, so that a slot cannot move alone.
        """

    @abstractmethod
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
        """Attention of one query token per sequence over all tiers and the residual buffer, exact softmax over all of
        them.

        Args:
            q: [S, Hq, D], any float dtype.
            tiers: One to four tiers; with a ring, only tier 0.
            ring: Residual buffer or None.
            power: Probabilities are raised to this power (1 or 2) before the group is reduced.
            group: How to reduce the query heads of a KV head into scores; None = no scores.

        Returns:
            out fp32 [S, Hq, D]; lse fp32 [S, Hq], the log-sum-exp of the logits, with which partial results can be
            merged; scores per tier, fp32 [S, H, m * T] (0 past a list's end), empty without `group`.

        Raises:
            MemoryError: No room for the partial results.
        """

    @abstractmethod
    def choose_pages(
        self, q: Tensor, pages: Tensor, tier: TierPages, count: Tensor, width: int, group: Reduce
    ) -> TierPages:
        """The pages of each list that can hold the largest logits, in slot order; the newest page is always one of
        them.

        A page's bound for a query is the sum over channels of max(q * low, q * high), which no logit in it exceeds.

        Args:
            q: [S, Hq, D].
            tier: All pages of each list, with bounds.
            count: int64 [S] pages to choose per list, >= 1; fewer where a list has fewer.
            width: The largest of `count`, as a number.
            group: How the bounds of the query heads of a KV head are reduced.

        Returns:
            The tier with only the chosen pages: ids [S, H, min(width, m)], and the slots that they hold.

        Source: mit-han-lab/Quest evaluation/quest_attention.py and quest/utils/controller.py.
        """

    @abstractmethod
    def add_scores(self, pages: Tensor, tier: TierPages, scores: Tensor) -> None:
        """Adds fp32 [S, H, m * T] to the tracked scores of a tier's live slots, in place."""

    @abstractmethod
    def gather_dense(self, pages: Tensor, tiers: list[TierPages], ring: Ring | None) -> tuple[Tensor, Tensor, Tensor]:
        """Dequantises everything a layer holds, padded.

        Args:
            tiers, ring: As for `paged_decode`.

        Returns:
            keys and values fp32 [S, H, n, D], and bool [S, H, n]: the entry is live. With a ring, entries are in token
            order.
        """

    @abstractmethod
    def prefill_attention(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Causal attention of a whole prompt on uncompressed keys and values.

        Args:
            q: [Hq, N, D], the model's dtype.
            k, v: [H, N, D], likewise.

        Returns:
            [Hq, N, D] in the same dtype.
        """

    @abstractmethod
    def prefill_attention_with_lse(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor | None]:
        """As `prefill_attention`, with the log-sum-exp of every query's logits, fp32 [Hq, N]; None where `takes_lse` is
        not set, or no kernel gives it for these tensors."""

    @abstractmethod
    def chunk_attention(
        self, q: Tensor, k: Tensor, v: Tensor, history: tuple[Tensor, Tensor, Tensor], scale: float
    ) -> Tensor:
        """Attention of a chunk of tokens over a dequantised history and over itself, causally.

        Args:
            q: [Hq, n, D].
            k, v: [H, n, D].
            history: keys, values fp32 [H, M, D] and live bool [H, M], as `gather_dense` gives them for one sequence.

        Returns:
            fp32 [Hq, n, D].
        """

    @abstractmethod
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
        """The score of every prompt key per KV head: the attention it receives, pooled and reduced in the stated order.

        Args:
            q: [Hq, N, D].
            k: [H, N, D].
            queries: The last `queries` tokens count; -1 = all.
            skip_near: Query i does not count for key j when i - j < skip_near.
            power: 1 or 2: probabilities are raised to it before they are summed.
            pool: Along the keys, stride 1.
            pool_kernel: Odd width of the pool.
            pool_stage: Pool each query head before the group is reduced, or the reduced score.
            pool_region: `prefix` pools only the keys before the last `queries` tokens.
            group: How the query heads of a KV head are reduced.
            lse: fp32 [Hq, N] the log-sum-exp of every query's logits, which saves a pass where `takes_lse`.

        Returns:
            fp32 [H, N].
        """

    @abstractmethod
    def prompt_low_counts(
        self, q: Tensor, k: Tensor, scale: float, *, queries: int, skip_near: int, group: Reduce
    ) -> Tensor:
        """Minus the number of counted queries that attend to a prompt key with less than 1 / (keys they see), per KV
        head.

        Args:
            q: [Hq, N, D].
            k: [H, N, D].
            queries, skip_near, group: As for `prompt_scores`.

        Returns:
            fp32 [H, N].
        """

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
        """Prepares one decode step for all layers; only where `fuses_layers`.

        Args:
            pages: The pool; it must not be moved while the step is open.
            tiers: What each tier holds with the new token in it, with `ids` [S, L, H, m] and counts [S, L, H];
                `rotation` [S, m * T, D / 2] for all layers alike.
            num_q_heads: Query heads.
            seen: int64 [S] tokens before the incoming one.
            target: Where the new token is written; None behind a ring.
            ring: Residual buffers, or None.
            power: Probabilities are raised to this power before the group is reduced.
            group: How query heads are reduced into scores.
            update: Add each layer's scores to the tracked ones, or replace them; None leaves them alone.
            skip_near: A slot nearer to the query than this gets no score.

        Returns:
            The prepared step, or None where the backend does not cover it.

        Raises:
            NotImplementedError: The backend has no such operation.
        """
        raise NotImplementedError(f"backend={self.name} does not fuse layers; use its single operations")

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
        """Prepares one decode step for all layers from the backend's own tables; only where `keeps_tables`.

        Args:
            pages: The pool.
            tiers: Of all lists, the new token counted.
            shape: (layers, heads).
            rows: int64 [S] rows of the step's sequences.
            held: Keys and values in pages, int64 [S, L, H] each, behind a ring; None = the tables' counts.
            gives: Hand out each layer's scores (`FusedStep.given`) instead; then `update` is None and `skip_near` 0.
            turn: Cosine and sine, fp32 [S, D / 2], of the angles that keys are turned by before they are written;
                None = they are written as they come.
            choice: Which pages are read, of one tier with bounds; None = all.
            num_q_heads, seen, target, ring, power, group, update, skip_near: As for `open_step`; contiguous.

        Returns:
            The prepared step, or None where the backend does not cover it. Its last layer comes last.

        Raises:
            NotImplementedError: The backend has no tables of its own.
        """
        raise NotImplementedError(f"backend={self.name} keeps no tables; use open_step")

    def tables(
        self,
        page_bytes: int,
        num_pages: int,
        tokens_per_page: tuple[int, ...],
        shape: tuple[int, int, int],
        max_pages: int,
        device: torch.device | str,
    ) -> tuple[PagePool, PageTable]:
        """A pool of so many pages and its tables, as `PageTable` describes them; only where `keeps_tables`.

        Raises:
            NotImplementedError: The backend has none of its own.
        """
        raise NotImplementedError(f"backend={self.name} keeps no tables; make a PagePool and a PageTable")

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
        """Re-quantises slots into another format, score and position included; only where `keeps_tables`.

        Args:
            source, target: Formats that track the same fields.
            src_page, src_slot: int64 [M] where the slots lie.
            dst_page, dst_slot: int64 [M] where they go; a page below 0 is passed over.

        Raises:
            NotImplementedError: The backend has no such operation.
        """
        raise NotImplementedError(f"backend={self.name} does not demote slots; read them and write them again")

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
        """The slot of every list with the smallest value; ties go to the lower position, then to the lower slot. Only
        where `searches_slots`.

        Args:
            fmt: The pages' format, with the fields that `by` and the conditions need.
            ids: int64 [M, m] page ids in slot order, M lists.
            held: int64 [M] slots.
            by: `score`, `pos`, or `mean` = score / max(1, seen - max(pos, floor)).
            seen: int64 [M] tokens before the incoming one.
            floor: int64 [M] position from which queries were counted, or None.
            before: int64 [M]: only slots whose position is smaller.
            exact: int64 [M]: only the slot at this position.
            first: Only slots whose position is at least this.

        Returns:
            value fp32, slot int64, position int64, each [M]; infinity, -1 and -1 where no slot is eligible.

        Raises:
            NotImplementedError: The backend has no such operation.
        """
        raise NotImplementedError(f"backend={self.name} does not search slots; gather the fields and reduce them")
