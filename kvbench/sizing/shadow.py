"""A store on pages without memory: the store's own decisions and its own ledger, of keys and values that are not there.

A prompt goes through the method's plan, the page tables and the rings of a real store; only keys, values and codes are
missing.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvbench.cache.layout import ModelShape
from kvbench.cache.options import StoreOptions
from kvbench.cache.prompts import ScoredLayer
from kvbench.cache.store import CompressedStore
from kvbench.kernels.backend import Backend
from kvbench.kernels.format import PageFormat
from kvbench.kernels.operands import Reduce, Ring, TierPages
from kvbench.kernels.pool import PagePool
from kvbench.policy import ALL_QUERIES, BelowUniform, LayerTensors, Policy, Probability, ScoreSpec, Statistic

CPU = torch.device("cpu")


def act_out(
    policy: Policy,
    shape: ModelShape,
    prompt_tokens: int,
    new_tokens: int,
    options: StoreOptions | None,
    *,
    is_even: bool,
) -> dict[str, int]:
    """Items of the ledger after a prompt and the steps of an answer.

    Queries attend to all tokens alike, or to one: every list of every layer takes every token.
    """
    store = shadow_store(policy, shape, prompt_tokens, new_tokens, options, is_even=is_even)
    row = store.open_row()
    fill_prompt(store, row, prompt_tokens)
    for _ in range(new_tokens):
        shadow_step(store, [row])
    return store.ledger.itemise(row)


def fill_prompt(store: CompressedStore, row: int, num_tokens: int) -> None:
    """Puts a prompt that is not there into an empty row of a `shadow_store`."""
    shape = store.shape
    prompt = torch.zeros(1, 1, 1, dtype=shape.dtype).expand(shape.num_kv_heads, num_tokens, 1)
    score, channels = measured(store, num_tokens)
    for layer in range(shape.num_layers):
        store.write_layer(row, layer, ScoredLayer(prompt, prompt, score, channels=channels))
    for each in store.other_kinds:
        fill_prompt(each, row, num_tokens)


def measured(store: CompressedStore, num_tokens: int) -> tuple[Tensor | None, Tensor | None]:
    """Placeholder measurements of each layer of a prompt: the score and the channels of a `ScoredLayer`."""
    spec, shape, heads = store.policy.score, store.shape, store.shape.num_kv_heads
    backend = store.backend
    assert isinstance(backend, Shadow), "of a shadow_store"
    score = _prompt_scores(spec, num_tokens, backend.is_even)
    scores = None if score is None else score.expand(heads * store.copies, -1)
    if scores is not None and (also := spec.statistic.also):
        scores = scores.expand(1 + len(also), -1, -1)
    if scores is not None and store.policy.scope != "head" and hasattr(store.policy, "budget"):
        # Heads that compete for a budget get unequal shares, and pages that are not full.
        share = torch.linspace(0.5, 1.5, scores.shape[-2])[:, None]  # one per list, for every statistic
        scores = scores * share * torch.rand(scores.shape, generator=torch.Generator().manual_seed(0))
    return scores, torch.zeros(heads, shape.head_dim) if spec.orders_channels else None


def shadow_step(store: CompressedStore, rows: Sequence[int]) -> None:
    """Makes a decode step of rows of a `shadow_store`; raises PoolExhausted as a real one does."""
    store.begin_step(rows)
    if store.policy.score.track:
        nothing = torch.zeros(1, 1, 1, dtype=store.shape.dtype)
        q, kv = (nothing.expand(len(rows), heads, 1) for heads in (store.shape.num_q_heads, store.shape.num_kv_heads))
        for layer in range(store.shape.num_layers):
            store.attend(layer, q, kv, kv, 1.0)
    store.end_step()


def shadow_store(
    policy: Policy,
    shape: ModelShape,
    prompt_tokens: int,
    new_tokens: int,
    options: StoreOptions | None = None,
    *,
    is_even: bool,
    rows: int = 1,
) -> CompressedStore:
    """A store for so many rows that holds no keys and values; queries attend to all tokens alike, or to one."""
    policy = copy(policy)
    policy.tiers = tuple(replace(tier, rotated="none") for tier in policy.tiers)
    if policy.score.measures_prompts and not isinstance(policy.score.statistic, Probability | BelowUniform):
        policy.score = replace(policy.score, statistic=standing_for(policy.score.statistic))
    return CompressedStore(
        policy,
        _nowhere(shape),
        rows=rows,
        max_prompt_tokens=prompt_tokens,
        max_new_tokens=new_tokens,
        options=replace(options or StoreOptions(), rotation="none"),
        backend=Shadow(is_even),
        pool=ShadowPool,
    )


def _nowhere(shape: ModelShape) -> ModelShape:
    """The shape of a model that may lie on other devices, for tensors that hold nothing and lie here."""
    return replace(
        shape,
        device=CPU,
        device_spans=tuple(replace(span, device=CPU) for span in shape.device_spans),
        other_kinds=tuple(map(_nowhere, shape.other_kinds)),
        # Keys have one channel, which nobody looks at: it turns by no angle.
        inv_freq=None if shape.inv_freq is None else torch.zeros(0),
    )


def standing_for(statistic: Statistic, is_probed: bool = True) -> Statistic:
    """Substitute of a statistic without keys and values: all tokens are alike.

    With `is_probed` it needs the second pass that the replaced one does.
    """

    @dataclass(frozen=True)
    class Alike(Statistic):
        also = statistic.also
        extremes = statistic.extremes
        needs = statistic.needs & {"replays"} if is_probed else frozenset()  # a second pass takes nothing that stays

        def of_prompt(self, seen: LayerTensors) -> Tensor:
            return torch.zeros(1 + len(self.also), *seen.pos.shape).squeeze(0)

    for answer in ("of_slots", "of_token", "of_step"):
        if statistic.answers(answer):
            setattr(Alike, answer, _ALIKE[answer])
    return Alike()


_ALIKE = {
    "of_slots": lambda self, seen: self.of_prompt(seen),
    "of_token": lambda self, k, v: torch.zeros(k.shape[:-1]),
    "of_step": lambda self, probability, num_keys, step: probability,
}


def _prompt_scores(spec: ScoreSpec, num_tokens: int, is_even: bool) -> Tensor | None:
    """Scores of a prompt's keys from its queries, fp32 [N], see `Shadow`; None where no query counts."""
    if not spec.measures_prompts:
        return None
    if spec.statistic.extremes is not None:
        return torch.full((num_tokens,), spec.statistic.extremes[is_even])
    counts = isinstance(spec.statistic, BelowUniform)
    if not spec.prefill_queries or (counts and is_even):
        return torch.zeros(num_tokens)
    queries = torch.arange(num_tokens)
    if spec.prefill_queries != ALL_QUERIES:
        queries = queries[-spec.prefill_queries :]
    if is_even:
        each = torch.zeros(num_tokens).index_add_(0, queries, (1.0 / (queries + 1.0)) ** spec.power)
        return each.flip(0).cumsum(0).flip(0)  # a key is seen by the queries from its own on
    score = torch.zeros(num_tokens)
    if counts:
        score = -(queries[None] >= torch.arange(num_tokens)[:, None]).sum(1).float()
    score[0] = 0.0 if counts else len(queries)
    return score


class ShadowPool(PagePool):
    """A pool that hands out pages, takes them back and counts them, but owns no memory for what they hold."""

    def _make_pages(self, num_pages: int, device: torch.device | str) -> Tensor:
        return torch.zeros(1, 1, dtype=torch.uint8, device=device).expand(num_pages, self.page_bytes)

    def _copy_pages(self, pages: Tensor) -> None:
        """No-op: there is nothing to copy."""


class Shadow(Backend):
    """Keeps the tracked score and position of every slot, and no key and no value.

    Every query attends to all slots that are held alike (`is_even`), or to the first one alone. No other attention
    makes a method that decides by thresholds keep much more, or much less.
    """

    name = "shadow"

    def __init__(self, is_even: bool) -> None:
        super().__init__()
        self.is_even = is_even
        self._fields: dict[tuple[PageFormat, str], Tensor] = {}

    def region(self, pages: Tensor, fmt: PageFormat, name: str) -> Tensor:
        dtype = torch.float32 if name == "score" else torch.int32
        field = self._fields.get((fmt, name), torch.zeros(0, fmt.tokens_per_page, dtype=dtype))
        if len(field) < len(pages):  # the pool grew
            more = torch.zeros(len(pages) - len(field), fmt.tokens_per_page, dtype=dtype)
            field = self._fields[fmt, name] = torch.cat([field, more])
        return field

    def _ignore(self, *operands: Any, **named: Any) -> None:
        """No-op: there are no keys, values or bounds to write."""

    write_keys = write_values = widen_bounds = _ignore

    def read_slots(self, pages: Tensor, fmt: PageFormat, page: Tensor, slot: Tensor) -> tuple[Tensor, Tensor]:
        nothing = torch.zeros(len(page), 1)
        return nothing, nothing

    def move_slots(
        self, pages: Tensor, fmt: PageFormat, src_page: Tensor, src_slot: Tensor, dst_page: Tensor, dst_slot: Tensor
    ) -> None:
        for name in fmt.slot.track:
            field = self.region(pages, fmt, name)
            field[dst_page, dst_slot] = field[src_page, src_slot]

    def add_scores(self, pages: Tensor, tier: TierPages, scores: Tensor) -> None:
        """Adds page by page: a slot past a list's end has no score that anything looks at."""
        tokens = tier.fmt.tokens_per_page
        live = torch.arange(tier.ids.shape[-1]) * tokens < tier.num_k[..., None]
        field = self.region(pages, tier.fmt, "score")
        field.index_add_(0, tier.ids[live], scores.unflatten(-1, (-1, tokens))[live])

    def paged_decode(
        self,
        q: Tensor,
        pages: Tensor,
        tiers: list[TierPages],
        *operands: Any,
        group: Reduce | None = None,
        **named: Any,
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        return torch.zeros(q.shape), torch.zeros(q.shape[:2]), [] if group is None else self._attention(tiers)

    def gather_dense(self, pages: Tensor, tiers: list[TierPages], ring: Ring | None) -> tuple[Tensor, Tensor, Tensor]:
        (tier,) = tiers
        nothing = torch.zeros(*(live := _live(tier)).shape, 1)
        return nothing, nothing, live

    def choose_pages(self, q: Tensor, pages: Tensor, tier: TierPages, *operands: Any) -> TierPages:
        return tier  # what is read is not what is held

    def _attention(self, tiers: list[TierPages]) -> list[Tensor]:
        """The attention of a step's queries, per tier fp32 [S, H, m * T]."""
        held = torch.stack([tier.num_k for tier in tiers]).sum(0)
        if self.is_even:
            return [_live(tier) / held[..., None] for tier in tiers]
        shares, before = [], torch.zeros_like(held)
        for tier in tiers:
            live = _live(tier)
            shares.append((live & (before == 0)[..., None] & (torch.arange(live.shape[-1]) == 0)).float())
            before = before + tier.num_k
        return shares


def _live(tier: TierPages) -> Tensor:
    """Mask bool [S, H, m * T] of held slots."""
    return torch.arange(tier.ids.shape[-1] * tier.fmt.tokens_per_page) < tier.num_k[..., None]
