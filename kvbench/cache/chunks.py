"""Prompts that are read in chunks: after each one the policy plans again, so that the whole prompt never lies there.

A chunk attends to what is held of the chunks before it, as pages give it back, and to itself. Then the policy sees all
positions so far, with scores of those that are held and of the chunk, and says which stay and where. A dropped token
stays dropped, and a token that a plan has sent to a later tier does not come back to an earlier one. Slots keep their
bytes: only a token that changes its tier is encoded again.

Legend as in `store`: H heads of the cache, Hq query heads, n tokens of a chunk, N tokens read so far with it.
"""

from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from kvbench.cache.async_counts import one_row
from kvbench.cache.layout import ModelShape
from kvbench.cache.ledger import Ledger
from kvbench.cache.offsets import back, less
from kvbench.cache.paged import Paged, padded, track
from kvbench.cache.prompts import Prompts
from kvbench.policy import ALL_QUERIES, EVICT, Policy


@dataclass
class _Reading:
    """State of a prompt that is read in chunks.

    The prompt's length; per layer and tier, int32 [H, slots] the position of each slot, -1 past a list's end; per
    layer, fp32 [H, total] scores from all queries so far, where the policy needs them; and the chunk's layers that wait
    for the last one (keys, values, scores).
    """

    total: int
    pos: list[list[Tensor]]
    sums: list[Tensor]
    seen: int = 0
    chunks: int = 0
    staged: list[tuple[Tensor, Tensor, Tensor | None]] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes held outside the pages."""
        held = [*self.sums, *(pos for tiers in self.pos for pos in tiers)]
        return sum(x.nbytes for x in held) + sum(k.nbytes + v.nbytes for k, v, _ in self.staged)


class Chunks:
    """Reads prompts in chunks."""

    def __init__(self, policy: Policy, shape: ModelShape, holding: Paged, ledger: Ledger, prompts: Prompts) -> None:
        self._policy, self._shape, self._holding = policy, shape, holding
        self._ledger, self._prompts = ledger, prompts
        self._counters, self._rotations, self._offsets = holding.counters, holding.rotations, holding.offsets
        self._open: dict[int, _Reading] = {}

    def open(self, row: int, prompt_tokens: int) -> None:
        """Begins a prompt of so many tokens in an empty row."""
        heads, device = self._holding.pages.shape[2], self._shape.device
        layers, tiers = range(self._shape.num_layers), self._holding.pages.formats
        none = torch.zeros(heads, 0, dtype=torch.int32, device=device)
        adds = self._policy.score.prefill_queries == ALL_QUERIES
        sums = [torch.zeros(heads, prompt_tokens, device=device) for _ in layers] if adds else []
        self._open[row] = _Reading(prompt_tokens, [[none for _ in tiers] for _ in layers], sums)
        self._ledger.begin_prompt(row, prompt_tokens, self._prompts.new_tokens[row])

    def forget(self, row: int) -> None:
        """Drops what is known of a prompt that was not read to its end."""
        self._open.pop(row, None)

    def read(self, row: int, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Attends from one layer of a chunk (q [Hq, n, D], k and v [H, n, D], post-RoPE), then plans and writes it.

        For scope `model`, all layers are planned with the last one. Returns [Hq, n, D], fp32 or the dtype of `q`.
        """
        reading, backend = self._open[row], self._holding.pages.backend
        softmax = self._holding.softmax_of(layer)
        begin, end = reading.seen, reading.seen + k.shape[1]
        past_k, past_v, live, pos = self._past(row, layer, reading)
        if (window := self._shape.window) is not None:
            out = backend.window_attention(q, k, v, (past_k, past_v, pos), begin, window, scale, softmax)
        elif begin:
            out = backend.chunk_attention(q, k, v, (past_k, past_v, live), scale, softmax)
        else:
            out = backend.prefill_attention(q, k, v, scale, softmax)
        score = self._scores(layer, q, (past_k, past_v, pos), k, v, scale, reading)
        if (queries := self._holding.scores.queries) is not None:
            queries.hold_prompt(row, layer, queries.last(q, scale), end)
        if self._offsets is not None:
            k = less(k, self._offsets.of_layer(row, layer, len(k)))
        reading.staged.append((self._rotations.keys.apply(k), self._rotations.values.apply(v), score))
        self._ledger.hold(row, staging_bytes=reading.nbytes + past_k.nbytes + past_v.nbytes)
        del past_k, past_v
        last = layer + 1 == self._shape.num_layers
        if last or self._policy.scope != "model":
            self._write(row, layer, reading, end)
        if last:
            reading.seen, reading.chunks = end, reading.chunks + 1
            self._counters.hold(row, end)
            if end == reading.total:
                self._finish(row, reading, k)
        return out

    # Contents.

    def _past(self, row: int, layer: int, reading: _Reading) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Held keys and values fp32 [H, M, D] of earlier chunks, as a chunk attends to them.

        With a bool [H, M] mask of those that are no padding, and int64 [H, M] positions, -1 for padding.
        """
        holding, pages = self._holding, self._holding.pages
        heads, device = pages.shape[2], self._shape.device
        if not reading.seen:
            nothing = torch.zeros(heads, 0, self._shape.head_dim, device=device)
            none = torch.zeros(heads, 0, dtype=torch.int64, device=device)
            return nothing, nothing, none.bool(), none
        tiers, ring = holding.layer(one_row(row, device), layer)
        holding.rope.attach(tiers, None)
        (keys,), (values,), (live,) = pages.gather(layer, tiers, ring)
        if ring is not None:  # nothing was dropped: entry i is token i
            pos = torch.arange(keys.shape[1], device=device).expand(heads, -1)
        else:
            widths = (tier.ids.shape[-1] * tier.fmt.tokens_per_page for tier in tiers)
            each = zip((reading.pos[layer][tier] for tier in pages.tiers_in(layer)), widths, strict=True)
            pos = torch.cat([padded(positions.long(), width) for positions, width in each], 1)
        keys = holding.rope.rotate_past(keys, live, reading.seen)
        keys = self._rotations.keys.back(keys)
        if self._offsets is not None:
            keys = back(keys, self._offsets.of_layer(row, layer, heads))
        return keys, self._rotations.values.back(values), live, pos.masked_fill(~live, -1)

    # The plan.

    def _scores(
        self,
        layer: int,
        q: Tensor,
        past: tuple[Tensor, Tensor, Tensor],
        k: Tensor,
        v: Tensor,
        scale: float,
        reading: _Reading,
    ) -> Tensor | None:
        """Scores fp32 [1 + len(also), H, N] of held tokens and of the chunk; None where the policy needs none.

        Dropped tokens have `GONE`, and 0 in the further fields.
        """
        if not self._holding.scores.spec.measures_prompts:
            return None
        past_k, past_v, pos = past
        begin, end = reading.seen, reading.seen + k.shape[1]
        new_pos = torch.arange(begin, end, device=k.device).expand(len(k), -1)
        keys, values = (torch.cat([old, new.float()], 1) for old, new in ((past_k, k), (past_v, v)))
        sums = reading.sums[layer][:, :end] if reading.sums else None
        return self._holding.scores.of_chunk(layer, q, keys, values, torch.cat([pos, new_pos], 1), end, scale, sums)

    def _write(self, row: int, layer: int, reading: _Reading, end: int) -> None:
        """Plans the layers that wait, the last of which is `layer`, and carries the plan out."""
        staged, reading.staged = reading.staged, []
        first = layer + 1 - len(staged)
        layers, begin = range(first, layer + 1), reading.seen
        tier_of = torch.stack([self._tiers(reading.pos[index], end) for index in layers])
        tier_of[..., 0 if self._policy.residual is not None else begin :] = 0  # nothing is decided of the chunk yet
        scores = [score for _, _, score in staged if score is not None]
        score = torch.stack(scores) if scores else None
        if score is not None and not self._policy.score.statistic.also:
            score = score[:, 0]
        plan, begins_with = self._prompts.plan(
            row, layers, tier_of.shape[1], end, score, prompt_tokens=reading.total, held=tier_of != EVICT
        )
        planned = plan.tier_of.to(torch.int8)
        later = torch.maximum(planned, tier_of)  # a token never comes back, nor to an earlier tier
        tier_of = torch.where((planned == EVICT) | (tier_of == EVICT), EVICT, later).to(torch.int8)
        staged_bytes = sum(k.nbytes + v.nbytes for k, v, _ in staged)
        for index, (k, v, _) in zip(layers, staged, strict=True):
            layer_tiers = tier_of[index - first]
            held = partial(self._ledger.hold, row, reading.nbytes + staged_bytes)
            self._holding.extend_prompt(row, index, k, v, layer_tiers, reading.pos[index], held)
            if end == reading.total:
                stored = None if begins_with is None else begins_with[index - first]
                track(self._holding.pages, self._holding.lists_of_layer(row, index), reading.pos[index], stored)
            held()

    def _tiers(self, pos: list[Tensor], length: int) -> Tensor:
        """Planned tier of each position, int8 [H, length], `EVICT` where it is not held."""
        tier_of = torch.full((len(pos[0]), length + 1), EVICT, dtype=torch.int8, device=pos[0].device)
        for tier, positions in enumerate(pos):
            tier_of.scatter_(
                1, torch.where(positions < 0, length, positions).long(), min(tier, self._holding.pages.num_planned - 1)
            )
        return tier_of[:, :length]

    def _finish(self, row: int, reading: _Reading, k: Tensor) -> None:
        """Ends a prompt whose last chunk was written."""
        del self._open[row]
        planned_layers = self._shape.num_layers if self._policy.scope == "model" else 1
        self._prompts.finish(row, reading.total)
        at_once = 2 * planned_layers * reading.total * k.shape[0] * k.shape[2] * k.element_size()
        self._ledger.note_chunks(row, reading.chunks, at_once)


def append_segment(part: Paged, row: int, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Appends a segment to a layer of a part; see `CompressedStore.append_chunk`."""
    orders = None if part.channels is None else part.channels.of(one_row(row, k.device))
    offsets = None if part.offsets is None else part.offsets.of(one_row(row, k.device))
    q, k, v = part.to_pages(layer, q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), orders, offsets)
    out = part.append(row, layer, q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), scale)
    return part.rotations.values.back(out)
