"""The compressed store: executes what a policy decides, on real pages.

A *row* is one sequence. `prefill_layer` and `append_chunk` write prompts; `begin_step`, `attend` and `end_step` do one
decode step for many rows. Legend: S live rows, L layers, H KV heads, Hq query heads, D head dim, N prompt tokens,
M = S * L * H lists.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvbench.cache import ledger
from kvbench.cache import prompt as store_prompt
from kvbench.cache import step as store_step
from kvbench.cache.layout import ModelShape, StoreOptions, compile_formats
from kvbench.cache.ring import ResidualBuffer
from kvbench.kernels.backend import Backend, Ring, TierPages
from kvbench.kernels.pool import PagePool, PoolExhausted
from kvbench.kernels.reference.attention import rotate
from kvbench.kernels.table import PageTable
from kvbench.policy import Policy

if TYPE_CHECKING:
    from kvbench.engine.prompt_cache import Recording

__all__ = ["CompressedStore", "PoolExhausted"]


class CompressedStore:
    """Pages, tables and buffers of all rows of a batch, under one policy.

    By the policy's `position_mode` pages hold keys as the model gives them, with their rotary position (`absolute`), or
    without it, and then they are rotated when read: to their index in the cache (`cache_relative`) or to their true
    position (`pre_rope`; nothing may be evicted, so that slot i holds token i). Residual rings hold them as given.

    Args:
        policy: Decides.
        shape: The model's shape.
        rows: Sequences held at once.
        max_prompt_tokens: Longest prompt, for sizing the page tables.
        max_new_tokens: Most tokens added after a prompt.
        options: Page size, byte budget, extra tracked fields.
        backend: Operations from `kvbench.kernels.dispatch.get_backend`.

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
    ) -> None:
        policy.check_model(shape.num_layers, shape.num_kv_heads)
        self.policy, self.shape, self.backend = policy, shape, backend
        self.formats = compile_formats(policy, shape, options)
        self.num_heads = shape.num_q_heads if policy.granularity == "q_head" else shape.num_kv_heads
        _check_positions(policy, shape)
        size = self.formats[0].page_bytes
        limit = options.budget_bytes // size if options.budget_bytes is not None else None
        self.pool = PagePool(size, 64 if limit is None else limit, shape.device, growable=limit is None)
        tokens = tuple(fmt.tokens_per_page for fmt in self.formats)
        slots = min(policy.max_slots(max_prompt_tokens, max_new_tokens), max_prompt_tokens + max_new_tokens)
        max_pages = -(-slots // min(tokens)) + len(tokens)
        self.table = PageTable(self.pool, tokens, rows, shape.num_layers, self.num_heads, max_pages)
        self.residual = None
        if policy.residual is not None:
            slot = self.formats[0].slot
            ring_dtype = slot.dtype  # fp16 (bf16 for bf16 models), or the model's own dtype when the tier is native
            self.residual = ResidualBuffer(
                policy.residual, self.table.shape, shape.head_dim, ring_dtype, slot.group_tokens, shape.device
            )
        self.tokens_seen = torch.zeros(rows, dtype=torch.int64, device=shape.device)
        self.prompt_tokens = torch.zeros(rows, dtype=torch.int64, device=shape.device)
        # Only bulk eviction asks how much the prompt's plan gave each list.
        self.prompt_slots = torch.zeros(
            self.table.num_lists if policy.compact_every else 0, dtype=torch.int32, device=shape.device
        )
        self.meters = [ledger.RowMeter() for _ in range(rows)]
        self._free_rows = list(range(rows))
        self.stash: dict[int, list[tuple[Tensor, Tensor, Tensor | None]]] = {}
        self._step: store_step.Step | None = None
        self.recording: Recording | None = None  # takes what `prefill_layer` sees, for a prompt cache

    @property
    def lists_per_row(self) -> int:
        """Lists of one row: layers x heads."""
        return self.shape.num_layers * self.num_heads

    @property
    def allocated_bytes(self) -> int:
        """Everything the allocator holds for the cache: pool, tables, counters, rings."""
        ring = self.residual.allocated_bytes if self.residual is not None else 0
        seen = self.tokens_seen.nbytes + self.prompt_tokens.nbytes + self.prompt_slots.nbytes
        return self.pool.allocated_bytes + self.table.allocated_bytes + seen + ring

    def lists_of(self, rows: Tensor) -> Tensor:
        """int64 [M] list numbers of rows, row-major then layer then head."""
        return (rows[:, None] * self.lists_per_row + torch.arange(self.lists_per_row, device=rows.device)).flatten()

    def slots_per_tier(self, lists: Tensor) -> list[Tensor]:
        """Tokens held per list and tier, the residual's as one more entry; int64 [M] each."""
        if self.residual is None:
            return [self.table.num_slots[tier, lists].long() for tier in range(len(self.formats))]
        held = self.residual.num_k[lists].long()
        return [held, self.residual.num_tokens[lists].long() - held]

    # Rows ----

    def open_row(self) -> int:
        """Takes an empty row."""
        row = self._free_rows.pop(0)
        self.tokens_seen[row] = self.prompt_tokens[row] = 0
        self.meters[row] = ledger.RowMeter()
        return row

    def close_row(self, row: int) -> None:
        """Returns all pages of a row and the row itself."""
        lists = self.lists_of(torch.tensor([row], device=self.shape.device))
        for tier in range(len(self.formats)):
            self.table.truncate(lists, tier, torch.zeros_like(lists))
        if self.residual is not None:
            for counter in (self.residual.num_k, self.residual.num_v, self.residual.num_tokens):
                counter[lists] = 0
        self.stash.pop(row, None)
        self._free_rows.append(row)

    def fork_row(self, source: int) -> int:
        """Copies a row, page by page, into a new row."""
        row = self.open_row()
        old, new = (self.lists_of(torch.tensor([r], device=self.shape.device)) for r in (source, row))
        try:
            for tier in range(len(self.formats)):
                self.table.reserve(new, tier, self.table.num_slots[tier, old].long())
        except PoolExhausted:
            self.close_row(row)
            raise
        for tier in range(len(self.formats)):
            width = int(self.table.num_pages(tier)[old].max())
            live = torch.arange(width, device=old.device) < self.table.num_pages(tier)[old][:, None]
            source_ids, target_ids = (self.table.page_ids(x, tier, width)[live] for x in (old, new))
            self.pool.pages[target_ids] = self.pool.pages[source_ids]
        if self.residual is not None:
            for counter in (self.residual.num_k, self.residual.num_v, self.residual.num_tokens):
                counter[new] = counter[old]
            self.residual.k[row], self.residual.v[row] = self.residual.k[source], self.residual.v[source]
        self.tokens_seen[row], self.prompt_tokens[row] = self.tokens_seen[source], self.prompt_tokens[source]
        if self.prompt_slots.numel():
            self.prompt_slots[new] = self.prompt_slots[old]
        meter = self.meters[source]
        self.meters[row] = ledger.RowMeter(
            meter.peak_bytes, meter.staging_peak_bytes, prompt_slots=dict(meter.prompt_slots)
        )
        return row

    # Prompts ----

    def prefill_layer(self, row: int, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> None:
        """Plans and writes one layer of a prompt (for scope `model`, all layers once the last one arrives).

        Args:
            q: [Hq, N, D] post-RoPE queries; k, v: [H, N, D] post-RoPE keys and values, uncompressed.
            scale: Factor on the attention logits.
        """
        store_prompt.prefill_layer(self, row, layer, q, k, v, scale)

    def append_chunk(self, row: int, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Appends a segment to tier 0 and attends over pages and segment; only for policies that do not act in decode.

        Args:
            q: [Hq, n, D]; k, v: [H, n, D].

        Returns:
            fp32 [Hq, n, D].
        """
        return store_prompt.append_chunk(self, row, layer, q, k, v, scale)

    # Decode steps ----

    def begin_step(self, rows: Tensor) -> None:
        """Plans one decode step for all layers and heads of the rows, applies it, and fixes where each layer will
        write.

        Raises:
            PoolExhausted: No page for a new slot; nothing was changed, except that a bulk eviction that was due has
                taken place.
        """
        self._step = store_step.begin(self, rows)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Writes the new token of one layer, attends over everything held, and adds to the scores.

        Args:
            q: [S, Hq, D]; k, v: [S, H, D], post-RoPE.

        Returns:
            fp32 [S, Hq, D].
        """
        if self.num_heads != self.shape.num_kv_heads:
            k, v = (x.repeat_interleave(self.num_heads // self.shape.num_kv_heads, 1) for x in (k, v))
        # A ring holds keys as they come; they lose their position on the way to a page.
        if self.residual is None and self.policy.position_mode != "absolute":
            k = self.unrotate(k, self.tokens_seen[self._step.rows][:, None])
        return store_step.attend(self, self._step, layer, q, k, v, scale)

    def end_step(self) -> None:
        """Counts the new token and the bytes held."""
        store_step.end(self, self._step)
        self._step = None

    def layer_pages(
        self, rows: Tensor, layer: int, width: list[int] | None = None
    ) -> tuple[list[TierPages], Ring | None]:
        """The kernels' description of one layer of the given rows; `width` is the pages to read per tier, found when
        absent."""
        lists, tiers = self.layer_lists(rows, layer), []
        for tier, fmt in enumerate(self.formats):
            held = self.table.num_slots[tier, lists].long()
            pages = width[tier] if width is not None else int(-(-held.max() // fmt.tokens_per_page))
            ids = self.table.page_ids(lists, tier, pages)
            num_k, num_v = held, held
            if self.residual is not None:
                num_k, num_v = self.residual.num_k[lists].long(), self.residual.num_v[lists].long()
            tiers.append(TierPages(fmt, ids, num_k, num_v))
            if self.policy.position_mode == "pre_rope":
                position = torch.arange(pages * fmt.tokens_per_page, device=ids.device).float()
                tiers[-1].rotation = (position[:, None] * self.shape.inv_freq).expand(len(rows), -1, -1)
        if self.residual is None:
            return tiers, None
        return tiers, Ring(*self.residual.of_layer(rows, layer), self.residual.num_tokens[lists].long())

    # Small things ----

    def layer_lists(self, rows: Tensor, layer: int) -> Tensor:
        """int64 [S, H] list numbers of one layer."""
        base = rows * self.lists_per_row + layer * self.num_heads
        return base[:, None] + torch.arange(self.num_heads, device=rows.device)

    def at_granularity(self, x: Tensor) -> Tensor:
        """[H, N, D] to the store's granularity."""
        return x if x.shape[0] == self.num_heads else x.repeat_interleave(self.num_heads // x.shape[0], 0)

    def unrotate(self, k: Tensor, position: Tensor) -> Tensor:
        """Keys without their rotary position when pages hold them so, else unchanged; `position` broadcasts against
        k[..., 0]."""
        if self.policy.position_mode == "absolute":
            return k
        angle = -position[..., None].float() * self.shape.inv_freq
        return rotate(k.float(), angle)

    def row_bytes(self, row: int) -> int:
        return int(ledger.resident_bytes(self, torch.tensor([row], device=self.shape.device))[0])


def _check_positions(policy: Policy, shape: ModelShape) -> None:
    """Refuses a `position_mode` that the model or the rest of the policy does not carry.

    Raises:
        ValueError: Keys of this model cannot be rotated, or slots would lose their places.
    """
    if policy.position_mode == "absolute":
        return
    if shape.inv_freq is None:
        raise ValueError(
            f"{type(policy).__name__} stores keys without their rotary position and rotates them on reading, but this "
            "model's rotary embedding is not of the plain kind that allows it; set method.position_mode=absolute or "
            "method.pre_rope=false where the method has that option"
        )
    if policy.position_mode == "pre_rope" and (policy.acts_in_decode or policy.compact_every or len(policy.tiers) > 1):
        raise ValueError(
            f"{type(policy).__name__}: position_mode='pre_rope' needs one tier in which slot i stays token i"
        )
