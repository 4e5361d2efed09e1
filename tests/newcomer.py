"""A method whose answers a test gives, and a small store for it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from store_helpers import make_store, read_random, step_random

from kvbench.cache.store import CompressedStore
from kvbench.policy import Compaction, CompactPlan, DecodePlan, Policy, PrefillPlan, ScoreSpec, Tier

LAYERS, HEADS, DIM, TOKENS = 2, 3, 16, 11
SHAPE = (2, LAYERS, HEADS)
BACKENDS = ("torch", "cpu")


@dataclass(frozen=True, kw_only=True)
class Told(Compaction):
    """Is due as told."""

    rule: Callable

    def due(self, view):
        return self.rule(view)


@dataclass(kw_only=True)
class Newcomer(Policy):
    """Two tiers, every third prompt token low; each of its answers may be replaced by a test's own."""

    prompt: Callable = lambda view: PrefillPlan(tier_of=thirds(view))
    step: Callable = lambda view: DecodePlan()
    drop: Callable = lambda view: CompactPlan(keep=[None, None])
    due: Callable = lambda view: torch.zeros(len(view.tokens_seen), dtype=torch.bool)
    tiers: ClassVar = (Tier(k_bits=8, v_bits=4), Tier(k_bits=4, v_bits=2))
    score: ClassVar = ScoreSpec(prefill_queries=4, decode_update=True, track=("score", "pos"))
    acts_in_decode: bool = True
    asked: list = field(default_factory=list)

    def declare(self):
        """Evicts in bulk as told."""
        self.compaction = Told(rule=self.due)

    def plan_prefill(self, view):
        """As told."""
        return self.prompt(view)

    def plan_decode(self, view):
        """As told."""
        return self.step(view) if callable(self.step) else self.step

    def plan_compact(self, view):
        """As told."""
        return self.drop(view)


def thirds(view) -> torch.Tensor:
    """Every third token low, the others high."""
    tier_of = view.filled(0)
    tier_of[..., ::3] = 1
    return tier_of


def store_of(policy: Policy, backend: str = "torch") -> CompressedStore:
    """A store of three rows."""
    shape = {"num_layers": LAYERS, "num_q_heads": HEADS, "num_kv_heads": HEADS, "head_dim": DIM}
    store = make_store(
        policy, **shape, rows=3, max_tokens=32, new_tokens=64, inv_freq=torch.ones(DIM // 2), backend=backend
    )
    store.pages.pool.pages.zero_()  # pages come as they lie in memory, and whole pages are compared here
    return store


def prefill(store: CompressedStore, seed: int = 0) -> int:
    """A prompt of 11 tokens in a new row."""
    return read_random(store, TOKENS, torch.Generator().manual_seed(seed))


def step(store: CompressedStore, rows: list[int]) -> None:
    """One decode step."""
    step_random(store, rows, torch.Generator().manual_seed(5))


def state(store: CompressedStore) -> list:
    """Everything that a refused step may not change: bytes of all pages in use, tables and counters."""
    table = store.pages.table
    return [
        store.pages.pool.pages[table.used_page_ids()].tolist(),
        table.num_slots.tolist(),
        sorted(store.pages.pool.free_ids().tolist()),
        store.counters.tokens_seen.tolist(),
    ]
