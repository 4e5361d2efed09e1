"""The bytes that a method would hold on a model of another size: the store's own decisions and its own ledger, on pages
without memory.

Nothing here repeats a formula of the cache. A prompt goes through the method's plan, the page tables and the rings of a
real store, and the ledger counts what they name; only keys, values and codes are not there.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvbench.cache.layout import ModelShape, StoreOptions
from kvbench.cache.prompts import ScoredLayer
from kvbench.cache.store import CompressedStore
from kvbench.kernels.backend import Backend
from kvbench.kernels.format import PageFormat
from kvbench.kernels.operands import Reduce, Ring, TierPages
from kvbench.kernels.pool import PagePool
from kvbench.policy import ALL_QUERIES, BelowUniform, LayerTensors, Policy, Probability, ScoreSpec, Statistic

CPU = torch.device("cpu")
SAME = 0.01  # two projections this close are one number: how even attention is then decides about nothing but slack
GLANCE_TOKENS = 1024  # a prompt long enough to tell whether it decides


@dataclass(frozen=True, kw_only=True)
class Projection:
    """The ledger of one sequence that is not there: its items and their sum as `Ledger.itemise` gives them, and the
    bytes of an FP16 full cache of the same tokens, windows and states included."""

    items: dict[str, int]
    fp16_bytes: int
    measured: bool = False
    """The shares of tiers that were measured decided it."""

    @property
    def resident_bytes(self) -> int:
        """Bytes held when the answer ends."""
        return self.items["resident_bytes"]

    @property
    def ratio(self) -> float:
        """Share of the FP16 full cache."""
        return self.resident_bytes / self.fp16_bytes


def project(
    policy: Policy,
    shape: ModelShape,
    prompt_tokens: int,
    new_tokens: int,
    options: StoreOptions | None = None,
    shares: Sequence[float] = (),
) -> tuple[Projection, Projection]:
    """Bytes that one sequence holds when its answer ends: the least and the most that attention can make of it.

    A method with a budget keeps the same however attention looks, and both are one. One that decides by thresholds
    keeps the least where queries attend to one token alone, and the most where they attend to all alike; where the
    shares of its tiers were measured, they decide in their place (`project_shares`), at a fraction of the work.

    Raises:
        ValueError: The method does not fit the model.
    """
    asked = policy, shape, prompt_tokens, new_tokens, options
    least, most = _both(policy, shape, min(prompt_tokens, GLANCE_TOKENS), 0, options)
    measures = policy.score.measures_prompts or policy.score.decode_update
    is_one = is_one_number(least, most)
    own = shape.own_fp16_bytes(min(prompt_tokens, GLANCE_TOKENS))
    if is_one and not (measures and prompt_tokens > GLANCE_TOKENS and keeps_all(policy, least, own)):
        # Then it is one at any length, and half the work shows which. A method that keeps all of a short prompt may be
        # one whose windows are longer, and decides later.
        only = run(*asked, is_even=True)
        return only, only
    if is_one or not shares:
        least, most = _both(*asked)
        if not shares or is_one_number(least, most):
            return least, most
    only = project_shares(policy, shape, prompt_tokens, new_tokens, shares, options)
    return only, only


def _both(*asked: Any) -> tuple[Projection, Projection]:
    """Both ends of attention, for what `project` is asked."""
    peaked, even = (run(*asked, is_even=is_even) for is_even in (False, True))
    return (peaked, even) if peaked.resident_bytes < even.resident_bytes else (even, peaked)


def keeps_all(policy: Policy, found: Projection, fp16_bytes: int) -> bool:
    """True where as much is held as of all tokens, whose keys and values take `fp16_bytes` in the layers on which the
    method acts; a method that holds less has begun to decide."""
    bits = min(tier.k_bits + tier.v_bits for tier in policy.tiers)  # of a key's and a value's number
    return 32 * found.items["payload_bytes"] >= bits * fp16_bytes


def is_one_number(least: Projection, most: Projection) -> bool:
    """True when a method keeps the same whatever attention looks like."""
    return most.resident_bytes - least.resident_bytes <= SAME * most.resident_bytes


def project_shares(
    policy: Policy,
    shape: ModelShape,
    prompt_tokens: int,
    new_tokens: int,
    shares: Sequence[float],
    options: StoreOptions | None = None,
) -> Projection:
    """Bytes of one sequence when the method, which has no residual buffer, gives each tier a known share of tokens x
    lists, as a stored run measured it.

    Lists differ by up to half a page from the mean, so that slack is what it is on average.

    Raises:
        ValueError: The method does not fit the model, or has another number of tiers.
    """
    store = shadow_store(policy, shape, prompt_tokens, new_tokens, options, is_even=True)
    if len(shares) != len(policy.tiers) or policy.residual is not None:
        raise ValueError(f"{type(policy).__name__} has {len(policy.tiers)} tiers, not {len(shares)} shares")
    tokens, lists = prompt_tokens + new_tokens, torch.arange(store.pages.lists_per_row)
    row = store.open_row(new_tokens=0)  # windows are filled as by a prompt of all tokens
    for tier, (share, fmt) in enumerate(zip(shares, store.pages.formats, strict=True)):
        placed = store.pages.tier_map
        own = lists if placed is None else placed.where(tier, 1)  # lists that hold any in it
        spread = ((torch.arange(len(own)) + 0.5) / max(1, len(own)) - 0.5) * fmt.tokens_per_page
        each = share * tokens * len(lists) / max(1, len(own))
        count = (each + (spread if tier % 2 else -spread)).round().long()
        store.pages.table.reserve(own, tier, count.clamp(min=0) if share else torch.zeros_like(own))
    for windows in store.beside:
        place_prompt(windows, row, tokens, is_even=True)
    return Projection(items=store.ledger.itemise(row), fp16_bytes=shape.fp16_bytes(tokens), measured=True)


def run(
    policy: Policy,
    shape: ModelShape,
    prompt_tokens: int,
    new_tokens: int,
    options: StoreOptions | None,
    *,
    is_even: bool,
) -> Projection:
    """The ledger behind a prompt and the steps of an answer, where queries attend to all tokens alike, or to one."""
    store = shadow_store(policy, shape, prompt_tokens, new_tokens, options, is_even=is_even)
    row = store.open_row()
    place_prompt(store, row, prompt_tokens, is_even=is_even)
    for _ in range(new_tokens):
        shadow_step(store, [row])
    return Projection(items=store.ledger.itemise(row), fp16_bytes=shape.fp16_bytes(prompt_tokens + new_tokens))


def place_prompt(store: CompressedStore, row: int, num_tokens: int, *, is_even: bool) -> None:
    """Puts a prompt that is not there into an empty row of a `shadow_store`."""
    spec, shape, heads = store.policy.score, store.shape, store.shape.num_kv_heads
    prompt = torch.zeros(1, 1, 1, dtype=shape.dtype).expand(heads, num_tokens, 1)
    score = _prompt_scores(spec, num_tokens, is_even)
    given = None if score is None else score.expand(heads * store.copies, -1)
    if given is not None and (also := spec.statistic.also):
        given = given.expand(1 + len(also), -1, -1)
    if given is not None and store.policy.scope != "head" and hasattr(store.policy, "budget"):
        # Heads that compete for a budget get unequal shares, and pages that are not full.
        share = torch.linspace(0.5, 1.5, given.shape[-2])[:, None]  # of each list, whatever else is ranked beside
        given = given * share * torch.rand(given.shape, generator=torch.Generator().manual_seed(0))
    channels = torch.zeros(heads, shape.head_dim) if spec.orders_channels else None
    for layer in range(shape.num_layers):
        store.place_layer(row, layer, ScoredLayer(prompt, prompt, given, channels=channels))
    for each in store.beside:
        place_prompt(each, row, num_tokens, is_even=is_even)


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
    policy.tiers = tuple(replace(tier, turned="none") for tier in policy.tiers)
    if policy.score.measures_prompts and not isinstance(policy.score.statistic, Probability | BelowUniform):
        policy.score = replace(policy.score, statistic=_standing_for(policy.score.statistic))
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
        places=tuple(replace(place, device=CPU) for place in shape.places),
        beside=tuple(map(_nowhere, shape.beside)),
        # Keys have one channel, which nobody looks at: it turns by no angle.
        inv_freq=None if shape.inv_freq is None else torch.zeros(0),
    )


def _standing_for(statistic: Statistic) -> Statistic:
    """A statistic in another's place, where there are no keys and values to look at: all tokens are alike."""

    @dataclass(frozen=True)
    class Alike(Statistic):
        also = statistic.also
        extremes = statistic.extremes
        needs = statistic.needs & {"replays"}  # a second pass takes nothing that stays

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
    """fp32 [N]: what the queries of a prompt give its keys, as `Shadow` says; None where no query counts."""
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
        """There is nothing to copy."""


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

    def _ignore(self, *given: Any, **named: Any) -> None:
        """There are no keys, no values and no bounds to write."""

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

    def paged_decode(
        self, q: Tensor, pages: Tensor, tiers: list[TierPages], *given: Any, group: Reduce | None = None, **named: Any
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        return torch.zeros(q.shape), torch.zeros(q.shape[:2]), [] if group is None else self._attention(tiers)

    def gather_dense(self, pages: Tensor, tiers: list[TierPages], ring: Ring | None) -> tuple[Tensor, Tensor, Tensor]:
        (tier,) = tiers
        nothing = torch.zeros(*(live := _live(tier)).shape, 1)
        return nothing, nothing, live

    def choose_pages(self, q: Tensor, pages: Tensor, tier: TierPages, *given: Any) -> TierPages:
        return tier  # what is read is not what is held

    def _attention(self, tiers: list[TierPages]) -> list[Tensor]:
        """The attention of a step's queries, per tier fp32 [S, H, m * T]."""
        held = torch.stack([tier.num_k for tier in tiers]).sum(0)
        if self.is_even:
            return [_live(tier) / held[..., None] for tier in tiers]
        found, before = [], torch.zeros_like(held)
        for tier in tiers:
            live = _live(tier)
            found.append((live & (before == 0)[..., None] & (torch.arange(live.shape[-1]) == 0)).float())
            before = before + tier.num_k
        return found


def _live(tier: TierPages) -> Tensor:
    """bool [S, H, m * T]: the slot is held."""
    return torch.arange(tier.ids.shape[-1] * tier.fmt.tokens_per_page) < tier.num_k[..., None]
