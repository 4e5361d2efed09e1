"""Interface of every backend: the operations that the store calls, in plain torch unless a backend overrides them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence, Set
from functools import partial

import torch
from torch import Tensor

from kvbench.kernels.format import PageFormat
from kvbench.kernels.operands import (
    NO_SCORES,
    PLAIN,
    PageChoice,
    SlotSearch,
    Softmax,
    StepRing,
    StepScores,
    StepTarget,
    TierPages,
    TierTable,
)
from kvbench.kernels.pool import PagePool
from kvbench.kernels.reference.attention import DecodeOperations
from kvbench.kernels.reference.prompts import PromptOperations
from kvbench.kernels.reference.windows import WindowOperations
from kvbench.kernels.table import PageTable


class FusedStep(ABC):
    """A decode step that `Backend.open_step` or `open_tables` prepared: each layer is one call.

    Attributes:
        strips: It takes the rotary position off keys itself before it writes them.
        turns: Its `attend` takes a rotation of the query and the key, as a fifth operand.
        layer_scores: Last layer's scores of a step that `gives`: per tier, fp32 [S, H, n].
    """

    strips: bool = False
    turns: bool = False
    layer_scores: Sequence[Tensor] = ()

    @abstractmethod
    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Writes one layer's new token, attends over everything held, and updates the tracked scores.

        Args:
            layer: Layer index.
            q: [S, Hq, D]; k, v: [S, H, D], any float dtype.
            scale: Factor on the logits.

        Returns:
            [S, Hq, D], fp32 or the dtype of `q`.

        Raises:
            MemoryError: No room for the partial results.
        """


class Backend(DecodeOperations, PromptOperations, WindowOperations):
    """The operations on pages that the store calls, in plain torch on any device, made to be right.

    A faster backend overrides those that it has kernels for, and calls `super()` where they do not cover a case. All
    leave the same bytes in a page. The operations are in `reference/pages`, `reference/attention`,
    `reference/prompts` and `reference/windows`; those that plain torch has not are here.

    Legend: P pages in the pool, M slots of a call, T slots per page, S sequences, H KV heads, Hq query heads, D head
    dim, m pages per list, N prompt tokens. Everywhere, `pages` is the pool, uint8 [P, page_bytes], changed in place by
    the operations that write; `fmt` is the format of the pages that a call names; `scale` is the factor on the logits.

    Attributes:
        name: Name for `get_backend`; part of a run's identity.
        is_reference: Correct but slow: never report its timings.
        fuses_layers: It has `open_step`.
        searches_slots: It has `slot_extreme`.
        takes_lse: Its scores of a prompt take the log-sum-exp that the prompt's attention computes anyway.
        keeps_tables: It keeps pool and page tables itself (`tables`), where its operations skip page ids below 0, and
            nothing of a decode step waits for the device.
        rows_are_alone: Its results for a sequence are the same bits whatever other sequences there are, and for any
            number of threads.
        isa: The instruction set that its own compiled kernels use; part of a run's identity, since sums in another
            order, or products in whole numbers, are other answers. Empty where it has no such choice.
        decodes: Kernels of decode steps so far, where `backend.decode` is a choice, with the reason where it is not
            the requested one; on record with a run.
        fallbacks: Operations that the plain reference has done in its place so far, by name; on record with a run.
    """

    name: str = "torch"
    is_reference: bool = True
    fuses_layers: bool = False
    searches_slots: bool = False
    takes_lse: bool = False
    keeps_tables: bool = False
    rows_are_alone: bool = False
    isa: str = ""

    @property
    def decodes(self) -> Set[str]:
        return frozenset()

    def open_step(
        self,
        pages: Tensor,
        tiers: list[TierPages],
        *,
        num_q_heads: int,
        seen: Tensor,
        target: StepTarget | None,
        ring: StepRing | None = None,
        scores: StepScores = NO_SCORES,
        softmax: Softmax = PLAIN,
    ) -> FusedStep | None:
        """Prepares one decode step for all layers; only where `fuses_layers`.

        Args:
            pages: The pool; it must not be moved while the step is open.
            tiers: Contents of each tier with the new token, with `ids` [S, L, H, m] and counts [S, L, H];
                `rotation` [S, m * T, D / 2] for all layers alike.
            num_q_heads: Query heads.
            seen: int64 [S] tokens before the incoming one.
            target: Slots of the new tokens; None with a ring.
            ring: Residual buffers, or None.
            scores: Update of the tracked scores; they are not returned.
            softmax: Caps and sinks of all layers.

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
        scores: StepScores = NO_SCORES,
        strip: tuple[Tensor, Tensor] | None = None,
        choice: PageChoice | None = None,
        softmax: Softmax = PLAIN,
    ) -> FusedStep | None:
        """Prepares one decode step for all layers from the backend's own tables; only where `keeps_tables`.

        Args:
            pages: The pool.
            tiers: Tiers of all lists, the new token counted.
            shape: (layers, heads).
            rows: int64 [S] rows of the step's sequences.
            held: Keys and values in pages, int64 [S, L, H] each, with a ring; None = the tables' counts.
            scores: Update of the tracked scores, or return of each layer's.
            strip: Cosine and sine, fp32 [S, D / 2], of the angles that keys are rotated by before they are written;
                None = they are written as they come.
            choice: Pages that are read, of one tier with bounds; None = all.
            num_q_heads, seen, target, ring, softmax: As for `open_step`; contiguous.

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

    def multiplier(self, matrix: Tensor) -> Callable[[Tensor], Tensor]:
        """The product of rows with a matrix.

        Args:
            matrix: fp32 [n, m].

        Returns:
            Takes fp32 [..., n] and gives [..., m]; where `rows_are_alone`, a row's bits do not depend on the others.
        """
        return partial(torch.matmul, other=matrix)

    def slot_extreme(
        self, pages: Tensor, fmt: PageFormat, ids: Tensor, held: Tensor, search: SlotSearch
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The slot of every list with the smallest value; only where `searches_slots`.

        Args:
            fmt: The pages' format, with the fields that the search needs.
            ids: int64 [M, m] page ids in slot order, M lists.
            held: int64 [M] slots.
            search: Criteria, with numbers per list.

        Returns:
            value fp32, slot int64, position int64, each [M]; infinity, -1 and -1 where no slot is eligible.

        Raises:
            NotImplementedError: The backend has no such operation.
        """
        raise NotImplementedError(f"backend={self.name} does not search slots; gather the fields and reduce them")


REFERENCE = Backend()
