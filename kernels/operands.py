"""Operands of a backend: tiers of a layer, residual buffers, score reductions, and criteria of slot searches."""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from kvbench.kernels.format import PageFormat

Reduce = Literal["sum", "mean", "max"]
Pool = Literal["none", "avg", "max"]
PoolStage = Literal["per_query_head", "after_group"]
PoolRegion = Literal["prefix", "all"]
ScoreUpdate = Literal["add", "replace"]
ExtremeOf = Literal["mean", "score", "pos"]
StepTarget = tuple[int, Tensor, Tensor]  # tier, page and slot (int64 [S, L, H]) that a step's new token is written to


@dataclass(frozen=True, eq=False)
class Softmax:
    """A model's softmax: cap of its logits, and attention sinks.

    Args:
        cap: A logit x becomes cap * tanh(x / cap); 0 = no cap.
        sinks: fp32 [Hq] a logit of each query head that belongs to no key, and takes its share of every query's
            probability; [L, Hq] of several layers; minus infinity where a head has none. None = no head has one.
    """

    cap: float = 0.0
    sinks: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        return not self.cap and self.sinks is None

    def of_layer(self, layer: int) -> "Softmax":
        """Operand of one of several layers."""
        return self if self.sinks is None else replace(self, sinks=self.sinks[layer])

    def capped(self, logits: Tensor) -> Tensor:
        """The logits after the cap; of minus infinity, which masks a key, use it before that is put there."""
        return torch.tanh(logits / self.cap) * self.cap if self.cap else logits

    def probabilities(self, logits: Tensor) -> Tensor:
        """Probabilities of capped logits [..., w, n], the leading dimensions being the query heads."""
        if self.sinks is None:
            return logits.softmax(-1)
        sink = self.sinks.view(*logits.shape[:-2], 1, 1).expand(*logits.shape[:-1], 1)
        return torch.cat([logits, sink], -1).softmax(-1)[..., :-1]

    def with_sinks(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """Attention [Hq, N, D] and its log-sum-exp fp32 [Hq, N], which knew of no sinks, with them."""
        if self.sinks is None:
            return out, lse
        total = torch.logaddexp(lse, self.sinks[:, None])
        return (out * (lse - total).exp()[..., None]).to(out.dtype), total


PLAIN = Softmax()


@dataclass(frozen=True)
class Window:
    """Attention window of a layer: the last `num_tokens` tokens, the query's included.

    With `in_chunks`, back to the beginning of the query's chunk of `num_tokens`.
    """

    num_tokens: int
    in_chunks: bool = False

    def sees(self, query: Tensor, key: Tensor) -> Tensor:
        """Mask bool [..., n, M] of the keys that queries see, by positions int64 [..., n] and [..., M].

        A key at position -1 is padding.
        """
        query, key = query[..., :, None], key[..., None, :]
        near = query - key < self.num_tokens
        if self.in_chunks:
            near = query // self.num_tokens == key // self.num_tokens
        return near & (key <= query) & (key >= 0)


@dataclass(frozen=True, kw_only=True)
class StepScores:
    """Scores that a decode step makes of its queries' attention.

    Args:
        power: Probabilities are raised to this power (1 or 2) before the group is reduced.
        group: Reduction of the query heads of a KV head into scores; None = no scores.
        update: Add each layer's scores to the tracked ones, or replace them; None leaves them alone.
        skip_near: A slot nearer to the query than this gets no score.
        gives: Hand out each layer's scores (`FusedStep.layer_scores`); then `update` is None and `skip_near` 0.
    """

    power: int = 1
    group: Reduce | None = None
    update: ScoreUpdate | None = None
    skip_near: int = 0
    gives: bool = False


NO_SCORES = StepScores()


@dataclass(frozen=True, kw_only=True)
class ColumnSums:
    """Reduction of the columns of a prompt's attention matrix: the queries that count for a key, and their weight.

    Args:
        queries: The last `queries` tokens count; -1 = all.
        skip_near: Query i does not count for key j when i - j < skip_near.
        power: 1 or 2: probabilities are raised to it before they are summed.
        reduce: `sum`; `mean` over the queries that count for the key, 0 where none does; or `max`.
        below_uniform: Instead of probabilities, sum minus 1 for every counted query that attends to the key with less
            than 1 / (keys it sees).
    """

    queries: int
    skip_near: int = 0
    power: int = 1
    reduce: Reduce = "sum"
    below_uniform: bool = False


@dataclass(frozen=True, kw_only=True)
class HeadScores:
    """Reduction of the column sums of query heads to the scores of a KV head.

    Args:
        group: Reduction of the query heads of a KV head.
        pool: Along the keys, stride 1.
        pool_kernel: Odd width of the pool.
        pool_stage: Pool each query head before the group is reduced, or the reduced score.
        pool_region: `prefix` pools only the keys before the queries that count.
    """

    group: Reduce
    pool: Pool = "none"
    pool_kernel: int = 1
    pool_stage: PoolStage = "per_query_head"
    pool_region: PoolRegion = "all"


@dataclass(frozen=True)
class Channels:
    """Scale and zero of key codes, channel by channel, applied to their levels before keys are rotated.

    Args:
        scale: fp32 [H, D].
        zero: fp32 [H, D].
    """

    scale: Tensor
    zero: Tensor


@dataclass(frozen=True, eq=False)
class InOrder:
    """Rotary positions of keys that lie in the order of their positions: slot i of a sequence is at `first` + i.

    Args:
        first: int64 [S] the positions of the first slots.
        frequencies: fp32 [D / 2] the angle between neighbours.
    """

    first: Tensor
    frequencies: Tensor

    def angles(self, num_slots: int, step: int = 1) -> Tensor:
        """Angles of every `step`-th slot, fp32 [S, num_slots, D / 2]."""
        positions = self.first[:, None] + step * torch.arange(num_slots, device=self.first.device)
        return positions[..., None].float() * self.frequencies


@dataclass
class TierPages:
    """One tier of one layer, for the sequences of a step.

    Args:
        fmt: The tier's page format.
        ids: int64 [S, H, m] page ids in slot order; entries past a list's end are ignored.
        num_k: int64 [S, H] keys held; slot i < num_k is read.
        num_v: int64 [S, H] values held (differs from `num_k` only with a residual buffer).
        rotation: Rotation of the stored keys: fp32 angles [S, m * T, D / 2], or positions in order; or None.
        channels: Scales of keys that belong to a channel for good, or None where a page has its own.
        offset: fp32 [H, D] what keys were stored less, which is added before they are rotated; or None. Only the
            reference supports it.
    """

    fmt: PageFormat
    ids: Tensor
    num_k: Tensor
    num_v: Tensor
    rotation: Tensor | InOrder | None = None
    channels: Channels | None = None
    offset: Tensor | None = None

    @property
    def angles(self) -> Tensor | None:
        """Angles of the stored keys, fp32 [S, m * T, D / 2], or None."""
        if isinstance(self.rotation, InOrder):
            return self.rotation.angles(self.ids.shape[-1] * self.fmt.tokens_per_page)
        return self.rotation

    @property
    def half(self) -> int:
        """Angles per key; 0 where keys are not rotated."""
        if isinstance(self.rotation, InOrder):
            return self.rotation.frequencies.numel()
        return 0 if self.rotation is None else self.rotation.shape[-1]


@dataclass
class Ring:
    """The residual buffers of one layer: token i of a list lies at i modulo the buffer's length.

    Args:
        k: [S, H, Rk, D] keys.
        v: [S, H, Rv, D] values.
        num_tokens: int64 [S, H] tokens of the list, in tier 0 and buffer together.
    """

    k: Tensor
    v: Tensor
    num_tokens: Tensor


@dataclass(frozen=True, kw_only=True)
class PageChoice:
    """Choice of the pages that the layers of a step read, by their bounds.

    Args:
        count: int64 [S] pages per list, >= 1; fewer where a list has fewer.
        width: As large as the largest of them, or larger.
        group: Reduction of the bounds of a KV head's query heads.
        dense_layers: First layers of the step that read everything.
    """

    count: Tensor
    width: int
    group: Reduce
    dense_layers: int


@dataclass(kw_only=True)
class StepRing:
    """The residual buffers of a step, and what leaves them.

    Args:
        k: [rows, L, H, Rk, D]; v: [rows, L, H, Rv, D], the whole buffers.
        rows: int64 [S] rows of the step's sequences.
        num_tokens: int64 [S, L, H] tokens of each list, the incoming one included.
        before: int64 [S, L, H] twice: keys and values in pages so far.
        after: The same counts after this step.
        flush_first: Quantise before attention, so that it reads the codes.
        most_leaving: Most keys and values of a list that leave in a step; None = as many as the buffers hold.
        frequencies: fp32 [D_rot / 2] rotary frequencies of the position that keys lose on their way to a page, a
            token's number in its list; None = they go as they are.
    """

    k: Tensor
    v: Tensor
    rows: Tensor
    num_tokens: Tensor
    before: tuple[Tensor, Tensor]
    after: tuple[Tensor, Tensor]
    flush_first: bool
    most_leaving: tuple[int, int] | None = None
    frequencies: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class SlotSearch:
    """Criteria of the search for the slot with the smallest value.

    Ties go to the lower position, then to the lower slot.

    Tensors are int64, one number per sequence, or per list (`per_list`).

    Args:
        by: `score`, `pos`, or `mean` = score / max(1, seen - max(pos, floor)).
        seen: Tokens before the incoming one.
        floor: Position from which queries were counted, or None.
        before: Only slots whose position is smaller.
        exact: Only the slot at this position.
        first: Only slots whose position is at least this; one number where a backend searches.
    """

    by: ExtremeOf
    seen: Tensor
    floor: Tensor | None = None
    before: Tensor | None = None
    exact: Tensor | None = None
    first: int | Tensor = 0

    def per_list(self, lists: int) -> "SlotSearch":
        """Repeat every sequence's numbers for each of its lists."""
        bounds = {name: getattr(self, name) for name in ("seen", "floor", "before", "exact")}
        return replace(self, **{name: x.repeat_interleave(lists) for name, x in bounds.items() if x is not None})


@dataclass(frozen=True)
class KeyRotation:
    """The angles that stored keys are rotated by when they are read: a position times the rotary frequencies.

    Args:
        frequencies: fp32 [D / 2].
        ages: int64 [S, n] places of the slots in the cache, from the oldest on, which put the newest token of every
            list at its true position; None = slot i lies at position i.
    """

    frequencies: Tensor
    ages: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class TierTable:
    """One tier of all lists, as a step reads it from the tables that a backend keeps itself.

    Args:
        fmt: The tier's page format.
        entries: int32 [lists, max_pages] page ids.
        is_reversed: A list's pages begin at the right end of its entries.
        num_slots: int32 [lists] slots held.
        width: Pages of a list of the step at most.
        rotation: Rotation of stored keys on reading, or None.
    """

    fmt: PageFormat
    entries: Tensor
    is_reversed: bool
    num_slots: Tensor
    width: int
    rotation: KeyRotation | None = None
