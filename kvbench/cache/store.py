"""The compressed store: executes what a policy decides, on real pages.

A *row* is one sequence. `prefill_layer` and `append_chunk` write prompts; `begin_step`, `attend` and `end_step` do one
decode step for many rows. The store only conducts: `Pages` hold bytes, `Paged` or `Buffered` hold tokens in them,
`Prompts` plan and write prompts, `Ledger` counts. Legend: S live rows, L layers, H heads (the KV heads, or the query
heads where every one keeps a set of its own), Hq query heads, D head dim, N prompt tokens.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from kvbench.cache.chunks import Chunks
from kvbench.cache.late import to_device
from kvbench.cache.layout import ModelShape, StoreOptions
from kvbench.cache.ledger import Ledger
from kvbench.cache.places import make_holding
from kvbench.cache.prompts import Prompts
from kvbench.cache.steps import PagedStep
from kvbench.kernels.backend import Backend, FusedStep
from kvbench.kernels.pool import PagePool, PoolExhausted
from kvbench.policy import AttentionCall, DecodeView, Policy, Replay

__all__ = ["CompressedStore", "PoolExhausted"]

PromptWatcher = Callable[[Tensor | None, float, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None], None]


@dataclass(frozen=True)
class StepRows:
    """The rows of steps that are captured and replayed for other rows, too.

    Args:
        numbers: The rows as the host knows them; whoever replays a step changes them in place.
        tensor: int64 [S] the same on the device.
    """

    numbers: list[int]
    tensor: Tensor


class CompressedStore:
    """Pages, tables and buffers of all rows of a batch, under one policy.

    Args:
        policy: Decides.
        shape: The model's shape.
        rows: Sequences held at once.
        max_prompt_tokens: Longest prompt, for sizing the page tables.
        max_new_tokens: Most tokens added after a prompt.
        options: Page size, byte budget, extra tracked fields.
        backend: Operations from `kvbench.kernels.dispatch.get_backend`.
        pool: Class of the page pool.

    Raises:
        ValueError: The policy does not fit the model or the options.
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
    ) -> None:
        policy.check_model(shape.num_layers, shape.num_kv_heads)
        self.policy, self.shape = policy, shape
        heads = shape.num_q_heads if policy.granularity == "q_head" else shape.num_kv_heads
        self.copies = heads // shape.num_kv_heads  # of each key and value
        self.holding = make_holding(
            policy,
            shape,
            rows=rows,
            max_slots=min(policy.max_slots(max_prompt_tokens, max_new_tokens), max_prompt_tokens + max_new_tokens),
            options=options,
            backend=backend,
            pool=pool,
        )
        first = self.holding.parts[0]
        self.pages, self.counters = first.pages, first.counters  # of the first place
        self.ledger = Ledger(policy, self.holding, shape)
        self.fit = self.ledger.fit
        for part in self.holding.parts:
            part.fit = self.fit
        self._max_new_tokens = max_new_tokens
        self._prompts = Prompts(policy, shape, self.holding, self.ledger)
        self._chunks = Chunks(policy, shape, first, self.ledger, self._prompts)
        self._free_rows = list(range(rows))
        self._steps: list[PagedStep] = []
        self._layers: list[PagedStep | FusedStep] = []
        self._direct: FusedStep | None = None  # the step's only entry of `_layers`, where nothing comes before it
        # The rows of the last step and their tensor: rows change seldom.
        self._rows: tuple[tuple[int, ...], Tensor] = (), torch.zeros(0, dtype=torch.int64, device=shape.device)
        self.watcher: PromptWatcher | None = None  # sees what `prefill_layer` gets and scores, for a prompt cache

    @property
    def allocated_bytes(self) -> int:
        """Everything the allocator holds for the cache: pool, tables, counters, rings."""
        return self.fit.tokens.nbytes + sum(
            part.pages.allocated_bytes + part.counters.allocated_bytes + part.allocated_bytes
            for part in self.holding.parts
        )

    @property
    def used_bytes(self) -> int:
        """Bytes of the pages in use."""
        return sum(part.pages.pool.num_used * part.pages.pool.page_bytes for part in self.holding.parts)

    @property
    def takes_chunks(self) -> bool:
        """Whether a later prompt segment may come at once (`append_chunk`); otherwise it comes token by token."""
        return self.holding.takes_chunks

    def view(self, rows: Tensor) -> DecodeView:
        """What the policy may see of rows (int64 [S])."""
        return self.holding.view(rows)

    # Rows.

    def open_row(self, new_tokens: int | None = None, instruction_tokens: int = 0) -> int:
        """Takes an empty row.

        Args:
            new_tokens: Most tokens that will be read behind the prompt; None = as many as the store was made for. A
                budget in bytes is solved for with this.
            instruction_tokens: First tokens of the prompt that are its instruction, for methods that ask.
        """
        row = self._free_rows[0]
        self._prompts.new_tokens[row] = self._max_new_tokens if new_tokens is None else new_tokens
        self.ledger.open(row)
        for part in self.holding.parts:
            part.pages.late.collect()  # before what it says of the row that was here is forgotten
            part.counters.open(row, instruction_tokens)
        self.holding.forget(row)
        return self._free_rows.pop(0)  # last, so that whatever fails above leaves the row free

    def close_row(self, row: int) -> None:
        """Returns all pages of a row and the row itself, and ends a step that is under way.

        When it fails for want of memory it may be called again: what was returned already is not returned twice.
        """
        self._chunks.forget(row)
        self._prompts.forget(row)  # first, since this needs no memory and gives some back
        self._end()
        for part in self.holding.parts:
            part.clear(part.lists(row))
        self.ledger.close(row)
        self._free_rows.append(row)

    def fork_row(self, source: int, *, share: bool = True) -> int:
        """Opens a row that holds what another one holds.

        Args:
            source: The other row.
            share: Hold it in the same pages, and copy a page once one of the rows writes to it; else copy all now.

        Raises:
            PoolExhausted: No room; like after any other error, no new row is open.
        """
        row = self.open_row()
        try:
            for part in self.holding.parts:
                part.share(source, row)
                if not share:
                    part.pages.table.own_all(part.lists(row))
                part.counters.copy(source, row)
                part.pages.copy_bounds(source, row)
            if self.fit.budget is not None:
                self.fit.tokens[row] = self.fit.tokens[source]
            self.ledger.fork(source, row)
        except BaseException:
            self.close_row(row)
            raise
        return row

    # Prompts.

    def prompt_attention(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor | None]:
        """Exact causal attention of a whole prompt, which stores nothing.

        Args:
            q: [Hq, N, D]; k, v: [KV heads, N, D], the model's dtype.

        Returns:
            [Hq, N, D] in the same dtype; and fp32 [Hq, N] the log-sum-exp of every query's logits, where the policy's
            scores can use it.
        """
        if self.holding.parts[0].scores.takes_lse:
            return self.pages.backend.prefill_attention_with_lse(q, k, v, scale)
        return self.pages.backend.prefill_attention(q, k, v, scale), None

    def replay_attention(self, q: Tensor, k: Tensor, v: Tensor, past_k: Tensor, past_v: Tensor, scale: float) -> Tensor:
        """Exact attention of tokens behind an uncompressed prompt over it and themselves, causally; stores nothing.

        Args:
            q: [Hq, m, D]; k, v: [KV heads, m, D]; past_k, past_v: [KV heads, N, D], the model's dtype.

        Returns:
            fp32 [Hq, m, D].
        """
        live = torch.ones(past_k.shape[:2], dtype=torch.bool, device=q.device)
        return self.pages.backend.chunk_attention(q, k, v, (past_k.float(), past_v.float(), live), scale)

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
        """Scores, plans and writes one layer of a prompt (for scope `model`, and with a probe, all layers once the last
        one arrives).

        Args:
            q: [Hq, N, D] post-RoPE queries, or None where a probe is all that is looked at; k, v: [KV heads, N, D]
                post-RoPE keys and values, uncompressed.
            scale: Factor on the attention logits.
            call: What the model called the layer's attention with, for statistics that ask for it.
            replays: What the passes gave that the policy's probe asks for.
            lse: What `prompt_attention` gave beside its output; made again where it is missing and wanted, so that
                scores do not depend on where a prompt came from.
        """
        scores, score, last, channels = self.holding.part_of(layer)[1].scores, None, None, None
        if not scores.spec.only_keys_and_values:
            own = tuple(replace(each, k=self._copied(each.k, 0)) for each in replays)
            if lse is None and q is not None and scores.takes_lse:
                _, lse = self.prompt_attention(q, k, v, scale)
            score = scores.of_prompt(layer, q, self._copied(k, 0), self._copied(v, 0), scale, call, own, lse)
        if scores.queries is not None and q is not None:
            last = scores.queries.last(q, scale)
        if q is not None:
            channels = scores.of_channels(layer, q, k, v, scale)
        if self.watcher is not None:
            self.watcher(q, scale, k, v, score, last, channels)
        self.place_layer(row, layer, k, v, score, last, channels)

    def place_layer(
        self,
        row: int,
        layer: int,
        k: Tensor,
        v: Tensor,
        score: Tensor | None,
        last: Tensor | None = None,
        channels: Tensor | None = None,
    ) -> None:
        """Plans and writes one layer of a prompt whose scores are known, or follow from its keys and values.

        Args:
            k, v: [KV heads, N, D] post-RoPE keys and values, uncompressed.
            score: fp32 [H, N] or [1 + len(also), H, N] as the policy's `ScoreSpec` says; None when it asks for none,
                or only keys and values are looked at.
            last: What the cache keeps of the prompt's last queries (`QueryRing.last`), or None.
            channels: fp32 [H, D] what the key channels are worth, or None where the policy does not ask.
        """
        keys, values, (_, part) = self._copied(k, 0), self._copied(v, 0), self.holding.part_of(layer)
        scores, turns = part.scores, part.turns
        if score is None and scores.spec.only_keys_and_values:
            score = scores.of_prompt(layer, None, keys, values, math.nan)
        if scores.queries is not None and last is not None:
            scores.queries.hold_prompt(row, layer - part.first_layer, last, k.shape[1])
        self._prompts.place(row, layer, turns.keys.turn(keys), turns.values.turn(values), score, channels)

    def open_chunks(self, row: int, prompt_tokens: int) -> None:
        """Says that the prompt of an empty row comes in chunks (`read_chunk`).

        Args:
            row: The row.
            prompt_tokens: Tokens of the whole prompt, which budgets are of.

        Raises:
            ValueError: A budget in bytes is too small for it.
        """
        assert self.shape.is_whole, "check_chunk_place refuses chunks of a prompt elsewhere"
        self._chunks.open(row, prompt_tokens)

    def read_chunk(self, row: int, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Attends from one layer of a prompt's next chunk to what is held and to itself, then plans and writes it; the
        last layer of the last chunk ends the prompt.

        Args:
            q: [Hq, n, D]; k, v: [KV heads, n, D], post-RoPE.

        Returns:
            [Hq, n, D], fp32 or the dtype of `q`.
        """
        self.pages.late.collect()
        return self._chunks.read(row, layer, q, self._copied(k, 0), self._copied(v, 0), scale)

    def append_chunk(self, row: int, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Appends a segment to tier 0 and attends over pages and segment; only where `takes_chunks`.

        Args:
            q: [Hq, n, D]; k, v: [KV heads, n, D].

        Returns:
            fp32 [Hq, n, D].
        """
        _, part = self.holding.part_of(layer)
        part.pages.late.collect()
        self.holding.forget(row)
        own, whose = layer - part.first_layer, torch.tensor([row], device=k.device)
        orders = None if part.channels is None else part.channels.of(whose)
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        q, k, v = (x.transpose(0, 1) for x in part.turned(own, q, k, v, orders))
        out = part.append(row, own, q, self._copied(k, 0), self._copied(v, 0), scale)
        if layer + 1 == self.shape.num_layers:
            seen = self.counters.seen[row] + k.shape[1]
            for each in self.holding.parts:
                each.counters.hold(row, seen)
            self.ledger.hold(row)
        return part.turns.values.back(out)

    # Decode steps.

    def begin_step(self, rows: Tensor | Sequence[int] | StepRows) -> None:
        """Plans one decode step for all layers and heads of the rows (int64 [S], or as the host knows them), applies
        it, and fixes where each layer will write. With `StepRows` the caller collects what the device tells the host.

        Raises:
            PoolExhausted: No page for a new slot; nothing was changed, except that a bulk eviction that was due has
                taken place. Of a model in several places or processes, the rows can only be closed then.
            ValueError: The policy's plan breaks a rule; the same holds. On a device that the host does not wait for,
                the step before broke one.
        """
        self._end()
        if isinstance(rows, StepRows):
            self._open(rows.tensor, rows.numbers)
            return
        for part in self.holding.parts:
            part.pages.late.collect()
        numbers = tuple(rows.tolist() if isinstance(rows, Tensor) else rows)
        if numbers != self._rows[0]:
            self._rows = numbers, to_device(numbers, self.shape.device)
        self._open(self._rows[1], numbers)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Writes the new token of one layer, attends over everything held, and adds to the scores.

        Args:
            q: [S, Hq, D]; k, v: [S, KV heads, D], post-RoPE.

        Returns:
            fp32 [S, Hq, D].
        """
        if self._direct is not None:
            return self._direct.attend(layer, q, k, v, scale)
        assert self._steps, "begin_step comes first"
        index, part = self.holding.part_of(layer)
        step, layers, own = self._steps[index], self._layers[index], layer - part.first_layer
        if part.scores.queries is not None:
            step.queries.append((q, scale))
        q, k, v = part.turned(own, q, k, v, step.orders)
        k, v = self._copied(k, 1), self._copied(v, 1)
        if not (isinstance(layers, FusedStep) and layers.strips):
            k = step.strip(k)
        return part.turns.values.back(layers.attend(own, q, k, v, scale))

    def end_step(self) -> None:
        """Counts the new token and the bytes held."""
        assert self._steps, "begin_step comes first"
        for step in self._steps:
            step.end()
            counters = step.holding.counters
            counters.step(step.rows)
            step.pages.late.also(partial(counters.step_on_host, step.numbers))
        self.ledger.step(self._steps)
        first = self._steps[0]
        self.holding.tell(first.rows, first.numbers)
        for step in self._steps:
            step.pages.late.send()
        self._steps, self._layers, self._direct = [], [], None

    def _open(self, rows: Tensor, numbers: Sequence[int]) -> None:
        """Begins a step of rows, which the host knows as `numbers`."""
        self._steps = self.holding.open(rows, numbers)
        self._layers = [step.fused() or step for step in self._steps]
        if len(self._steps) == 1 and self.copies == 1 and self._steps[0].holding.takes_all_as_it_comes:
            step, layers = self._steps[0], self._layers[0]
            if isinstance(layers, FusedStep) and (layers.strips or not step.strips):
                self._direct = layers

    def _end(self) -> None:
        """Forgets a step that is under way."""
        self._steps, self._layers, self._direct = [], [], None
        for part in self.holding.parts:
            part.pages.late.drop()

    # Steps that are captured: of a cache in one place.

    def next_step_is_plain(self, numbers: Sequence[int]) -> bool:
        """Whether the next step of rows shares no pages and evicts nothing in bulk."""
        return self.pages.on_device and self.pages.pool.others is None and not self.holding.due.may_be(numbers)

    @property
    def pages_taken(self) -> int:
        """Pages that steps which were not waited for have taken at most, so far."""
        return self.pages.pool.taken

    def takes_pages(self, most: int) -> bool:
        """Whether so many pages are free for sure; notes them as taken where they are."""
        return self.pages.pool.takes(most)

    def has_pages_for(self, rows: int) -> bool:
        """Whether a page for every list of so many rows is free for sure, several where a ring may leave at once."""
        most = self.holding.parts[0].most_new_pages
        return self.pages.pool.surely_free >= rows * self.pages.lists_per_row * most

    def _copied(self, x: Tensor, dim: int) -> Tensor:
        """Keys or values at the store's granularity: KV heads along `dim`, each as often as it is kept."""
        return x if self.copies == 1 else x.repeat_interleave(self.copies, dim)
