"""The statistics of a method's `ScoreSpec`: of a prompt, of held slots, of a token, and kept up while decoding."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from kvbench.cache.layout import ModelShape
from kvbench.cache.offsets import KeyOffsets, back
from kvbench.cache.pages import Pages
from kvbench.cache.replay_check import RULE, ReplayCheck, differ
from kvbench.cache.rotation import Rotations
from kvbench.cache.tensors import ChunkTensors, Measurer, PromptTensors, SlotTensors
from kvbench.errors import BrokenRule, Unsupported, call_of
from kvbench.kernels.operands import TierPages
from kvbench.policy import ALL_QUERIES, GONE, AttentionCall, Policy, Replay, Statistic


class QueryRing:
    """Last queries of every row and layer, in 16 bits, for statistics that read them at a bulk eviction.

    The query of position p is entry p modulo the ring's length. Queries are stored with the factor on attention logits
    applied.
    """

    def __init__(self, num_queries: int, rows: int, shape: ModelShape, dtype: torch.dtype) -> None:
        self.num_queries = num_queries
        layout = (rows, shape.num_layers, shape.num_q_heads, num_queries, shape.head_dim)
        self._ring = torch.zeros(layout, dtype=dtype, device=shape.device)

    @property
    def allocated_bytes(self) -> int:
        return self._ring.nbytes

    @property
    def row_bytes(self) -> int:
        return self._ring[0].nbytes

    def held_bytes(self, tokens_seen: int) -> int:
        """Bytes of the queries that a row of so many tokens has in it."""
        return self.row_bytes // self.num_queries * min(self.num_queries, tokens_seen)

    def last(self, q: Tensor, scale: float) -> Tensor:
        """The part of the queries [Hq, N, D] of a prompt that is kept: [Hq, up to num_queries, D]."""
        return (q[:, -self.num_queries :].float() * scale).to(self._ring.dtype)

    def hold_prompt(self, row: int, layer: int, last: Tensor, num_tokens: int) -> None:
        where = torch.arange(num_tokens - last.shape[1], num_tokens, device=last.device) % self.num_queries
        self._ring[row, layer][:, where] = last

    def hold_step(self, rows: Tensor, tokens_seen: Tensor, queries: list[tuple[Tensor, float]]) -> None:
        """Stores a decode step's queries [S, Hq, D] and logit factors, layer by layer; int64 [S] is their position."""
        scales = {scale for _, scale in queries}
        if len(scales) == 1:
            scaled = torch.stack([q for q, _ in queries], 1).float() * scales.pop()
        else:
            scaled = torch.stack([q.float() * scale for q, scale in queries], 1)
        self._ring[rows, :, :, tokens_seen % self.num_queries] = scaled.to(self._ring.dtype)

    def of(self, row: int, layer: int, tokens_seen: int) -> Tensor:
        """The queries [Hq, up to num_queries, D] of a row, in order of position."""
        first = max(0, tokens_seen - self.num_queries)
        where = torch.arange(first, tokens_seen, device=self._ring.device) % self.num_queries
        return self._ring[row, layer][:, where]

    def copy(self, source: int, target: int) -> None:
        self._ring[target] = self._ring[source]


class Scores:
    """Statistics of one method over pages.

    Refuses inconsistent declarations, and a model without a tensor that a statistic reads.
    """

    def __init__(
        self,
        policy: Policy,
        shape: ModelShape,
        pages: Pages,
        rotations: Rotations,
        first_layer: int,
        offsets: KeyOffsets | None = None,
    ) -> None:
        self.spec, self._pages, self._rotations, self._first_layer = policy.score, pages, rotations, first_layer
        self._offsets = offsets
        self._measurer = Measurer(policy.score, shape, pages.backend, first_layer)
        self.second: ReplayCheck[Statistic] | None = None
        self.measures_slots = policy.compaction is not None and self.spec.statistic.answers("of_slots")
        _check_fit(policy, shape, self.measures_slots)
        self.queries: QueryRing | None = None
        if self.spec.slot_queries:
            self.queries = QueryRing(self.spec.slot_queries, pages.shape[0], shape, pages.formats[0].slot.dtype)

    def of_prompt(
        self,
        layer: int,
        q: Tensor | None,
        k: Tensor,
        v: Tensor,
        scale: float,
        call: AttentionCall | None = None,
        replays: tuple[Replay, ...] = (),
        lse: Tensor | None = None,
    ) -> Tensor | None:
        """Scores of one layer of a prompt.

        Args:
            q: [Hq, N, D]; None for a statistic of keys and values only.
            k, v: [H, N, D], at the cache's granularity.
            call, replays: Arguments of the model's call of the layer's attention, and results of the probe's passes.
            lse: fp32 [Hq, N] the log-sum-exp of every query's logits; only where `takes_lse`.

        Returns:
            fp32 [H, N], or [1 + len(also), H, N]; None when the method has no statistic.
        """
        if not self.spec.measures_prompts:
            return None
        hidden = None if call is None else call.hidden_states

        def ask(statistic: Statistic) -> Tensor:
            seen = PromptTensors(self._measurer, layer, q=q, k=k, v=v, scale=scale, call=call, replays=replays, lse=lse)
            return _checked(statistic, "of_prompt", statistic.of_prompt(seen), k, v, q, hidden)

        score = ask(self.spec.statistic)
        self._check_replay(layer, score, ask)
        return score

    def _check_replay(self, layer: int, score: Tensor, ask: Callable[[Statistic], Tensor]) -> None:
        """Refuses prompt scores that a fresh statistic of the same settings does not reproduce.

        One layer of some prompts is checked, another layer each time. Not on a device: it would synchronise.
        """
        if self.second is None or score.device.type != "cpu":
            return
        other = self.second.of("of_prompt", begins=layer == self._first_layer)
        checked = self.second.number("of_prompt") % self._pages.shape[1] + self._first_layer
        if other is not None and layer == checked and bool(differ(score, ask(other))):
            name = call_of(self.spec.statistic, "of_prompt")
            raise BrokenRule(f"{name}, prompt of {score.shape[-1]} tokens, layer {layer}: {RULE}")

    def of_channels(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor | None:
        """Worth of the key channels of one layer of a prompt, fp32 [H, D]; None where the method orders none."""
        if not self.spec.orders_channels:
            return None
        seen = PromptTensors(self._measurer, layer, q=q, k=k, v=v, scale=scale)
        statistic = self.spec.statistic
        return _checked(statistic, "of_channels", statistic.of_channels(seen), k, v, q, shape=(len(k), k.shape[-1]))

    def of_chunk(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        pos: Tensor,
        tokens_seen: int,
        scale: float,
        sums: Tensor | None,
    ) -> Tensor:
        """Scores of what is held of a prompt that is read in chunks, its newest chunk included.

        Args:
            q: [Hq, n, D] the chunk's queries.
            k, v: fp32 [H, M, D], at the cache's granularity; the chunk's are the last n.
            pos: int64 [H, M] positions; -1 where there is nothing.
            sums: fp32 [H, tokens_seen] what earlier chunks' queries gave each position, which is brought up to date;
                None where only the newest queries count.

        Returns:
            fp32 [1 + len(also), H, tokens_seen] by position; where nothing is held the score is `GONE`, the others 0.
        """
        statistic = self.spec.statistic
        out = torch.zeros(1 + len(statistic.also), len(k), tokens_seen, device=k.device)
        out[0] = GONE
        pos, order = pos.sort(-1)
        k, v = (x.gather(1, order[..., None].expand(-1, -1, x.shape[-1])) for x in (k, v))
        for held, heads in _alike((pos >= 0).sum(-1)):
            head_k, head_v, head_pos = (x[heads, -held:] for x in (k, v, pos))
            seen = ChunkTensors(
                self._measurer,
                layer,
                heads=heads,
                num_heads=len(k),
                k=head_k,
                v=head_v,
                pos=head_pos,
                tokens_seen=tokens_seen,
                scale=scale,
                q=q,
                before=None if sums is None else sums[heads].gather(1, head_pos),
            )
            score = _checked(statistic, "of_prompt", statistic.of_prompt(seen), head_k, head_v, q)
            where = head_pos.expand(len(out), -1, -1)
            out[:, heads] = out[:, heads].scatter(-1, where, score.view(where.shape))
            if sums is not None and seen.summed is not None:
                sums[heads] = sums[heads].scatter(-1, head_pos, seen.summed)
        return out

    def of_slots(self, rows: Tensor, tokens_seen: Tensor) -> Tensor:
        """Scores fp32 [1 + len(also), S, L, H, n] of the pages of rows (int64 [S]) at `tokens_seen` tokens (int64 [S]).

        n is the slots of the longest list's pages; 0 past a list's end.
        """
        pages, statistic = self._pages, self.spec.statistic
        if pages.on_device:  # the host goes from row to row and waits for each: the record of a run says so
            pages.backend.fallbacks.add("of_slots")
        lists = pages.lists_of(rows).view(len(rows), *pages.shape[1:])
        width = pages.tier(0, lists).ids.shape[-1]
        slots = width * pages.formats[0].tokens_per_page
        out = torch.zeros(1 + len(statistic.also), *lists.shape, slots, device=rows.device)
        for index, (row, seen) in enumerate(zip(rows.tolist(), tokens_seen.tolist(), strict=True)):
            for layer in range(lists.shape[1]):
                tier = pages.tier(0, lists[index : index + 1, layer], width)
                out[:, index, layer] = self._of_layer(row, layer, seen, tier)
        return out

    def _of_layer(self, row: int, layer: int, tokens_seen: int, tier: TierPages) -> Tensor:
        """Scores of the slots of one layer of a row, [1 + len(also), H, n]."""
        pages, statistic = self._pages, self.spec.statistic
        (k,), (v,), _ = pages.backend.gather_dense(pages.pool.pages, [tier], None)
        k, v = self._rotations.keys.back(k), self._rotations.values.back(v)
        if self._offsets is not None:
            k = back(k, self._offsets.of_layer(row, layer, len(k)))
        q = None if self.queries is None else self.queries.of(row, layer, tokens_seen)
        fields = {name: pages.field(0, name)[tier.ids[0]].flatten(1) for name in pages.formats[0].slot.track}
        out = torch.zeros(1 + len(statistic.also), *fields["pos"].shape, device=k.device)
        for count, heads in _alike(tier.num_k[0]):
            pos, order = fields["pos"][heads, :count].long().sort(-1)
            head_k, head_v = (x[heads, :count].gather(1, order[..., None].expand(-1, -1, x.shape[-1])) for x in (k, v))
            seen = SlotTensors(
                self._measurer,
                self._first_layer + layer,
                heads=heads,
                k=head_k,
                v=head_v,
                pos=pos,
                tokens_seen=tokens_seen,
                scale=1.0,  # the ring's queries have it in them
                q=q,
                stored=fields["score"][heads, :count].gather(1, order) if "score" in fields else None,
            )
            score = _checked(statistic, "of_slots", statistic.of_slots(seen), head_k, head_v, q)
            score = score.view(len(out), len(heads), count)
            out[:, heads, :count] = torch.empty_like(score).scatter_(-1, order.expand_as(score), score)
        return out

    @property
    def takes_lse(self) -> bool:
        """True if the log-sum-exp of a prompt's attention saves a pass, as where all queries count.

        For a few last queries it is cheap to recompute.
        """
        spec = self.spec
        return self._pages.backend.takes_lse and spec.prefill_queries == ALL_QUERIES and spec.query_reduce == "sum"

    @property
    def writes_tokens(self) -> bool:
        """True if a written token brings its own score."""
        return self.spec.statistic.answers("of_token") and "score" in self._pages.formats[0].slot.track

    @property
    def settles(self) -> bool:
        """True if the statistic makes something else of a step's probabilities."""
        spec = self.spec
        return "score" in spec.track and spec.decode_update and spec.statistic.answers("of_step")

    def of_token(self, k: Tensor, v: Tensor, offsets: Tensor | None = None) -> Tensor:
        """Scores fp32 [...] of tokens as they are written, from keys and values [..., D] in the store's form.

        `offsets` are what is subtracted from stored keys.
        """
        k = self._rotations.keys.back(k)
        k = k if offsets is None else back(k, offsets)
        return self.spec.statistic.of_token(k, self._rotations.values.back(v))

    def add_step(
        self, tokens_seen: Tensor, prompt_tokens: Tensor, tiers: list[TierPages], reduced: list[Tensor]
    ) -> None:
        """Updates stored scores after a step at position `tokens_seen` int64 [S].

        For one layer, or for several with their heads H concatenated, from probabilities fp32 [S, H, n] per tier,
        reduced over the group; no tiers when a step updates nothing.
        """
        spec, pages = self.spec, self._pages
        if spec.statistic.answers("of_step"):
            num_keys = torch.stack([tier.num_k for tier in tiers]).sum(0)[..., None]
            step = (tokens_seen - prompt_tokens)[:, None, None]
            reduced = [spec.statistic.of_step(score, num_keys, step) for score in reduced]
        for index, (tier, score) in enumerate(zip(tiers, reduced, strict=False)):
            if spec.skip_near:  # as in the prompt, a query does not count for the keys just before it
                pos = pages.field(index, "pos")[tier.ids].flatten(-2)
                distance = tokens_seen[:, None, None] - pos
                score = score.masked_fill(distance < spec.skip_near, 0.0)
            if spec.decode_replace:
                pages.clear_scores(tier)
            pages.backend.add_scores(pages.pool.pages, tier, score)


def _check_fit(policy: Policy, shape: ModelShape, measures_slots: bool) -> None:
    spec, name = policy.score, f"{type(policy).__name__} with {type(policy.score.statistic).__name__}"
    if spec.slot_queries and not measures_slots:
        raise BrokenRule(f"{name}: slot_queries={spec.slot_queries} are for bulk eviction, but compaction is None")
    if measures_slots and (len(policy.tiers) > 1 or policy.residual is not None or policy.position_mode != "absolute"):
        raise BrokenRule(
            f"{name}: slots are measured where one tier holds every token with its position; a method with more tiers, "
            "a residual buffer or keys without positions cannot have a statistic with of_slots"
        )
    if measures_slots and "pos" not in spec.track:
        raise BrokenRule(f"{name}: slots are measured in the order of their positions; add 'pos' to ScoreSpec.track")
    if "before_rope" in spec.statistic.needs and shape.inv_freq is None:
        raise Unsupported(
            f"{name} looks at vectors before their rotary embedding, and this model's is not of the plain kind that "
            "can be taken off; choose another method for this model"
        )
    if "output_projection" in spec.statistic.needs and shape.output_projections is None:
        raise Unsupported(
            f"{name} looks at the output projection, which was not found in this model (o_proj in every layer); "
            "choose another method for it"
        )


def _checked(
    statistic: Statistic,
    call: str,
    score: object,
    k: Tensor,
    *others: Tensor | None,
    shape: tuple[int, ...] | None = None,
) -> Tensor:
    """Returns a statistic's score of keys [H, n, D] after checking it against the contract.

    It must be finite numbers per token, unless `shape` says otherwise.
    """
    if shape is None:
        shape = tuple(k.shape[:2]) if not statistic.also else (1 + len(statistic.also), *k.shape[:2])
    name = call_of(statistic, call)
    if not isinstance(score, Tensor) or tuple(score.shape) != shape or not score.is_floating_point():
        got = f"{score.dtype} {tuple(score.shape)}" if isinstance(score, Tensor) else type(score).__name__
        raise BrokenRule(f"{name} gave {got}, but it must give a floating-point tensor of shape {shape}")
    # On another device the host would wait for the answer; and what a model spoils shows in its logits.
    if score.device.type == "cpu" and not _finite(score) and all(_finite(x) for x in (k, *others) if x is not None):
        first = tuple((~torch.isfinite(score)).nonzero()[0].tolist())
        raise BrokenRule(
            f"{name} gave {score[first].item()} at {list(first)} of a score of shape {shape}, for tensors that are "
            "finite; every score must be a finite number: look for 0/0, log(0), and infinities that mark a token"
        )
    return score.float()


def _finite(x: Tensor) -> bool:
    return bool(torch.isfinite(x).all())


def _alike(held: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Heads that hold as many tokens (int64 [H]), which are one call: how many, and the heads int64 [h]."""
    for count in sorted(set(held.tolist())):
        yield count, (held == count).nonzero()[:, 0]
