"""The compressed store: executes what a policy decides, on real pages.

A *row* is one sequence. `prefill_layer` and `append_chunk` write prompts; `begin_step`, `attend` and `end_step` do one
decode step for many rows. The store only conducts: `Pages` hold bytes, `Paged` or `Buffered` hold tokens in them,
`Prompts` plan and write prompts, `Ledger` counts. Legend: S live rows, L layers, H heads (the KV heads, or the query
heads where every one keeps a set of its own), Hq query heads, D head dim, N prompt tokens. In all of this folder,
`policy` decides, `shape` is the model's, `row`, `layer` and `tier` are numbers, `lists` are list numbers int64 [M], and
`scale` is the factor on the attention logits.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvbench.cache.async_counts import AsyncCounts, ReplayLog, Rows
from kvbench.cache.chunks import Chunks, append_segment
from kvbench.cache.counters import CountsBeforeStep
from kvbench.cache.layout import ModelShape, most_slots
from kvbench.cache.ledger import Ledger
from kvbench.cache.options import StoreOptions
from kvbench.cache.prompts import Prompts, ScoredLayer
from kvbench.cache.replay_check import ReplayCheck
from kvbench.cache.split import make_holding
from kvbench.cache.steps import Attend, PagedStep
from kvbench.cache.windows import Windows, less_windows, window_tier
from kvbench.kernels.backend import Backend
from kvbench.kernels.operands import Softmax
from kvbench.kernels.pool import PagePool, PoolExhausted
from kvbench.policy import AttentionCall, DecodeView, Policy, Replay

__all__ = ["CompressedStore", "PoolExhausted"]

PromptWatcher = Callable[[ScoredLayer, Tensor | None, float], None]  # a layer, its queries, the factor on the logits


Rotation = tuple[Tensor, Tensor]  # cosines and sines


class CompressedStore:
    """Pages, tables and buffers of all rows of a batch, under one policy.

    `max_prompt_tokens` and `max_new_tokens` size the page tables. Refuses a policy that does not fit the model or the
    options.

    Attributes:
        pages, counters: Those of the first part; counters are alike in all.
        other_kinds: The stores of layers of other kinds (`ModelShape.other_kinds`), whose rows and steps follow this
            one's. Each has layers of its own, which `kinds` finds.
        watcher: Sees what `prefill_layer` gets and scores, for a prompt cache.
    """

    def __init__(
        self,
        policy: Policy,
        shape: ModelShape,
        *,
        rows: int,
        max_prompt_tokens: int,
        max_new_tokens: int,
        options: StoreOptions,
        backend: Backend,
        pool: type[PagePool] = PagePool,
        counts: dict[torch.device, AsyncCounts] | None = None,
    ) -> None:
        policy.check_model(shape.num_layers, shape.num_kv_heads)
        self.policy, self.shape, self.backend = policy, shape, backend
        counts = {} if counts is None else counts  # of all kinds of layers, so that a step needs one copy to the host
        as_method = options.windows == "method"
        other_options = StoreOptions(
            rotation=options.rotation if as_method else "none",
            key_offset="prompt" if as_method and options.key_offset == "prompt" else "none",
        )
        self.other_kinds = tuple(
            CompressedStore(
                Windows(each.window, window_tier(policy, options.windows)) if each.window else policy,
                each,
                rows=rows,
                max_prompt_tokens=max_prompt_tokens,
                max_new_tokens=max_new_tokens,
                options=other_options,
                backend=backend,
                pool=pool,
                counts=counts,
            )
            for each in shape.other_kinds
        )
        if options.budget_bytes is not None and self.other_kinds:
            held = sum(
                each.ledger.budget.bytes_of(max_prompt_tokens, max_prompt_tokens, max_new_tokens)
                for each in self.other_kinds
            )
            options = less_windows(options, rows, held)
        self.holding = make_holding(
            policy,
            shape,
            rows=rows,
            max_slots=most_slots(policy, max_prompt_tokens, max_new_tokens),
            options=options,
            backend=backend,
            pool=pool,
            counts=counts,
        )
        first = self.holding.parts[0]
        self.pages, self.counters, self.copies, self._scores = first.pages, first.counters, first.copies, first.scores
        self.ledger: Ledger = Ledger(policy, self.holding, shape, [each.ledger for each in self.other_kinds])
        self.budget = self.ledger.budget
        for part in self.holding.parts:
            part.budget = self.budget
        self._max_new_tokens = max_new_tokens
        self.prompts = Prompts(policy, shape, self.holding, self.ledger)
        self._chunks = Chunks(policy, shape, first, self.ledger, self.prompts)
        self._free_rows = list(range(rows))
        self._steps: list[PagedStep] = []
        self._doors: list[Attend] = []
        self._rows = Rows.of((), shape.device)  # of the last step: they change seldom
        self.watcher: PromptWatcher | None = None

    def enable_replay_check(self) -> None:
        """Checks calls of policy and statistic on fresh copies from now on (`ReplayCheck`); refuses other answers."""
        self.holding.plans.second = ReplayCheck(self.policy)
        for part in self.holding.parts:
            part.scores.second = ReplayCheck(self.policy.score.statistic)

    @property
    def kinds(self) -> "tuple[CompressedStore, ...]":
        """The stores of all kinds of layers, this one first."""
        return (self, *self.other_kinds)

    @property
    def allocated_bytes(self) -> int:
        total = self.budget.tokens.nbytes + self.holding.allocated_bytes
        return total + sum(each.allocated_bytes for each in self.other_kinds)

    @property
    def used_bytes(self) -> int:
        return self.holding.used_bytes + sum(each.used_bytes for each in self.other_kinds)

    @property
    def takes_chunks(self) -> bool:
        """True if a later prompt segment may come at once (`append_chunk`); otherwise it comes token by token."""
        # Once a layer has written a chunk, layers that share its keys could not separate it from earlier tokens.
        return self.holding.takes_chunks and not self.shape.shared and all(x.takes_chunks for x in self.other_kinds)

    @property
    def layers(self) -> "list[tuple[CompressedStore, int]]":
        """Results of `kind_of` for all layers that have keys and values, in the model's order."""
        return [self.kind_of(layer) for layer in sorted(self.shape.kinds)]

    def kind_of(self, layer: int) -> "tuple[CompressedStore, int]":
        """The store that holds a layer of the model, or the layer whose keys it shares; and that one's number there."""
        if self.shape.is_uniform:
            return self, layer
        kind, index = self.shape.kinds[self.shape.shared.get(layer, layer)]
        return self.kinds[kind], index

    def view(self, rows: Tensor) -> DecodeView:
        """The policy's view of rows (int64 [S])."""
        return self.holding.view(Rows(rows))

    def open_row(self, new_tokens: int | None = None, instruction_tokens: int = 0, number: int | None = None) -> int:
        """Takes an empty row, the one of `number` if that is passed.

        At most `new_tokens` will be read after the prompt, for which a budget in bytes is solved (None = as many as the
        store was made for); its first `instruction_tokens` are its instruction, for methods that use it.
        """
        row = self._free_rows[0] if number is None else number
        self.prompts.new_tokens[row] = self._max_new_tokens if new_tokens is None else new_tokens
        self.ledger.open(row)
        self.holding.open_row(row, instruction_tokens)
        for each in self.other_kinds:
            each.open_row(new_tokens, number=row)
        self._free_rows.remove(row)  # last, so that whatever fails above leaves the row free
        return row

    def close_row(self, row: int) -> None:
        """Returns all pages of a row and the row itself, and ends a step in progress.

        When it fails for lack of memory it may be called again: returned pages are not returned twice.
        """
        self._chunks.forget(row)
        self.prompts.forget(row)  # first, since this needs no memory and gives some back
        self._end()
        self.holding.close_row(row)
        self.ledger.close(row)
        for each in self.other_kinds:
            if row not in each._free_rows:
                each.close_row(row)
        self._free_rows.append(row)

    def fork_row(self, source: int, *, share: bool = True) -> int:
        """Opens a row with the contents of another one.

        Pages are shared until one of the rows writes to them, unless `share` is False. Raises PoolExhausted without
        room; after an error no new row is open.
        """
        row = self.open_row()
        try:
            for each in self.kinds:
                each.holding.fork_row(source, row, share)
                each.ledger.fork(source, row)
            if self.budget.budget is not None:
                self.budget.tokens[row] = self.budget.tokens[source]
        except BaseException:
            self.close_row(row)
            raise
        return row

    def prompt_attention(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float
    ) -> tuple[Tensor, Tensor | None]:
        """Exact causal attention of a layer of a whole prompt; stores nothing.

        Takes q [Hq, N, D], k and v [KV heads, N, D]. Returns [Hq, N, D] in the same dtype, and fp32 [Hq, N] the
        log-sum-exp of every query's logits, where the policy's scores can use it.
        """
        softmax = self._softmax_of(layer)
        if self.shape.window is not None:
            return self.backend.window_attention(q, k, v, None, 0, self.shape.window, scale, softmax), None
        if self._scores.takes_lse:
            return self.backend.prefill_attention_with_lse(q, k, v, scale, softmax)
        return self.backend.prefill_attention(q, k, v, scale, softmax), None

    def replay_attention(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, past_k: Tensor, past_v: Tensor, scale: float
    ) -> Tensor:
        """Exact causal attention of a layer's tokens after an uncompressed prompt; stores nothing.

        Takes q [Hq, m, D], k and v [KV heads, m, D], and the prompt's keys and values [KV heads, N, D]. Returns [Hq, m,
        D], fp32 or the dtype of `q`.
        """
        softmax = self._softmax_of(layer)
        if self.shape.window is not None:
            position = torch.arange(past_k.shape[1], device=q.device).expand(len(past_k), -1)
            last = [x[:, -self.shape.window.num_tokens :] for x in (past_k, past_v, position)]
            history = last[0], last[1], last[2]
            return self.backend.window_attention(q, k, v, history, past_k.shape[1], self.shape.window, scale, softmax)
        return self.backend.chunk_attention(q, k, v, (past_k, past_v, None), scale, softmax)

    def _softmax_of(self, layer: int) -> Softmax:
        _, part = self.holding.part_of(layer)
        return part.softmax_of(layer - part.first_layer)

    def prefill_layer(
        self,
        row: int,
        layer: int,
        q: Tensor | None,
        k: Tensor,
        v: Tensor,
        scale: float,
        call: AttentionCall | None = None,
        replays: tuple[Replay, ...] = (),
        lse: Tensor | None = None,
    ) -> None:
        """Scores, plans and writes one layer of a prompt; the arguments are those of `measure`.

        For scope `model`, and with a probe, all layers are written once the last one arrives.
        """
        scored = self.measure(layer, q, k, v, scale, call, replays, lse)
        if self.watcher is not None:
            self.watcher(scored, q, scale)
        self.write_layer(row, layer, scored)

    def measure(
        self,
        layer: int,
        q: Tensor | None,
        k: Tensor,
        v: Tensor,
        scale: float,
        call: AttentionCall | None = None,
        replays: tuple[Replay, ...] = (),
        lse: Tensor | None = None,
    ) -> ScoredLayer:
        """Scores one layer of a prompt, and stores nothing.

        Args:
            q: [Hq, N, D] post-RoPE queries, or None where only a probe is read; k, v: [KV heads, N, D]
                post-RoPE keys and values, uncompressed.
            call: The model's call of the layer's attention, for statistics that need it.
            replays: Results of the passes of the policy's probe.
            lse: From `prompt_attention`; recomputed where it is missing and needed, so that
                scores do not depend on where a prompt came from.
        """
        _, part = self.holding.part_of(layer)
        scores, score, last, channels = part.scores, None, None, None
        if not scores.spec.only_keys_and_values:
            part_replays = tuple(replace(each, k=part.copied(each.k, 0)) for each in replays)
            if lse is None and q is not None and scores.takes_lse:
                _, lse = self.prompt_attention(layer, q, k, v, scale)
            score = scores.of_prompt(layer, q, part.copied(k, 0), part.copied(v, 0), scale, call, part_replays, lse)
        if q is not None:
            last = None if scores.queries is None else scores.queries.last(q, scale)
            channels = scores.of_channels(layer, q, k, v, scale)
        return ScoredLayer(k, v, score, last, channels)

    def write_layer(self, row: int, layer: int, scored: ScoredLayer) -> None:
        """Plans and writes one layer of a prompt whose scores are known, or follow from its keys and values."""
        _, part = self.holding.part_of(layer)
        if scored.score is None and part.scores.spec.only_keys_and_values:
            keys, values = part.copied(scored.k, 0), part.copied(scored.v, 0)
            scored = replace(scored, score=part.scores.of_prompt(layer, None, keys, values, math.nan))
        if part.scores.queries is not None and scored.last is not None:
            part.scores.queries.hold_prompt(row, layer - part.first_layer, scored.last, scored.num_tokens)
        self.prompts.write(row, layer, scored)

    def open_chunks(self, row: int, prompt_tokens: int) -> None:
        """Says that the prompt of an empty row comes in chunks (`read_chunk`); refuses a budget too small for it."""
        assert self.shape.is_whole, "check_chunk_devices refuses chunks of a prompt elsewhere"
        for each in self.kinds:
            each._chunks.open(row, prompt_tokens)

    def read_chunk(self, row: int, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Attends from one layer of a prompt's next chunk to held tokens and the chunk, then plans and writes it.

        Takes q [Hq, n, D], k and v [KV heads, n, D], post-RoPE; the last layer of the last chunk ends the prompt.
        Returns [Hq, n, D], fp32 or the dtype of `q`.
        """
        self.holding.collect()
        part = self.holding.parts[0]
        return self._chunks.read(row, layer, q, part.copied(k, 0), part.copied(v, 0), scale)

    def append_chunk(self, row: int, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Appends a segment to tier 0 and attends over pages and segment; only where `takes_chunks`.

        Takes q [Hq, n, D], k and v [KV heads, n, D]. Returns fp32 [Hq, n, D].
        """
        _, part = self.holding.part_of(layer)
        part.pages.counts.collect()
        self.holding.forget(row)
        out = append_segment(part, row, layer - part.first_layer, q, k, v, scale)
        if layer + 1 == self.shape.num_layers:
            self.holding.hold(row, self.counters.seen[row] + k.shape[1])
            self.ledger.hold(row)
        return out

    def begin_step(self, rows: Tensor | Sequence[int] | Rows) -> None:
        """Plans one decode step for all layers and heads of the rows, applies it, and fixes each layer's write slots.

        Rows are int64 [S], or a `Rows` with host numbers; with `Rows` the caller collects what the device sends to the
        host.

        Raises:
            PoolExhausted: No page for a new slot; nothing was changed, except that a bulk eviction that was due has
                taken place. Of a model in several places or processes, the rows can only be closed then.
            ValueError: The policy's plan breaks a rule; the same holds. On a device that the host does not wait for,
                the step before broke one.
        """
        self._end()
        if not isinstance(rows, Rows):
            self.holding.collect()
            numbers = tuple(rows.tolist() if isinstance(rows, Tensor) else rows)
            if numbers != self._rows.numbers:
                self._rows = Rows.of(numbers, self.shape.device)
            rows = self._rows
        for each in self.kinds:
            each._steps = each.holding.open(rows)
            each._doors = [step.door() for step in each._steps]

    def compact(self, rows: Sequence[int]) -> None:
        """Evicts in bulk from rows, between two steps, by the policy's `plan_compact`.

        Raises PoolExhausted where rows share pages and there is no room to copy them, and ValueError as `begin_step`
        does.
        """
        self._end()
        self.holding.collect()
        self.holding.compact(Rows.of(list(rows), self.shape.device))
        self.holding.send()

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, *turn: Rotation) -> Tensor:
        """Writes the new token of one layer, attends over everything held, and adds to the scores.

        Takes q [S, Hq, D], k and v [S, KV heads, D], post-RoPE, or to be rotated by cosines and sines [S, D / 2], where
        the step `turns`. Returns [S, Hq, D], fp32 or the dtype of `q`.
        """
        assert self._doors, "begin_step comes first"
        index, part = self.holding.part_of(layer)
        return self._doors[index](layer - part.first_layer, q, k, v, scale, *turn)

    @property
    def positions(self) -> Tensor:
        """Positions int64 [S] of the tokens of the step, on the first device."""
        assert self._steps, "begin_step comes first"
        return self._steps[0].tokens_seen

    def turns(self, layer: int) -> bool:
        """True if `attend` takes the rotation of a layer's queries and keys."""
        return self._steps[self.holding.part_of(layer)[0]].turns

    def attend_stored(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Attends over a layer that has its new token, for another layer of the model that shares its keys.

        Arguments and result are those of `attend`. Writes nothing, and adds nothing to scores.
        """
        index, part = self.holding.part_of(layer)
        return self._steps[index].attend_stored(layer - part.first_layer, q, k, v, scale)

    def end_step(self) -> None:
        """Counts the new token and the bytes held."""
        assert self._steps, "begin_step comes first"
        for step in (step for each in self.kinds for step in each._steps):
            step.end()
            step.holding.counters.step(step.rows)
        self.ledger.step(self._steps)
        for each in self.kinds:
            each.holding.tell(each._steps[0].rows)
            each._steps, each._doors = [], []
        self.holding.send()

    def _end(self) -> None:
        self._steps, self._doors = [], []
        self.holding.drop()

    # Steps that are captured: of a cache in one place.

    @property
    def spare_row(self) -> int | None:
        """The row that pads a step; None where plain torch writes to pages, which passes over nothing."""
        return self.pages.shape[0] - 1 if self.pages.on_device and self.pages.codebooks is None else None

    def next_step_is_plain(self, numbers: Sequence[int]) -> bool:
        """True if the next step of rows shares no pages and evicts nothing in bulk."""
        return not self.shape.shared and all(
            each.pages.on_device and each.pages.pool.others is None and not each.holding.due.may_be(numbers)
            for each in self.kinds
        )

    def has_pages_for(self, rows: int) -> bool:
        """True if a page for every list of so many rows is free for sure, several where a ring may leave at once."""
        each = ((kind.pages, kind.holding.parts[0].most_new_pages) for kind in self.kinds)
        return all(pages.pool.surely_free >= rows * pages.lists_per_row * most for pages, most in each)

    def takes(self, most_pages: Sequence[int]) -> bool:
        """True if so many pages of each kind of layers are free for sure; notes them as taken."""
        return all(each.pages.pool.takes(most) for each, most in zip(self.kinds, most_pages, strict=True))

    def note_replay(self, numbers: Sequence[int], log: ReplayLog) -> None:
        """Repeats the host's part of a captured step of rows, once its replay is launched."""
        for each in self.kinds:
            each.holding.parts[0].note_replay(numbers)
        self.pages.counts.resend(log)

    def counts_before_step(self) -> CountsBeforeStep:
        held = [counts for each in self.kinds for counts in each.holding.parts[0].held_counts]
        return CountsBeforeStep(held, self.counters.seen)
