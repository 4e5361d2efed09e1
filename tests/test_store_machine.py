"""Random histories of a compressed store against a slow oracle that keeps every slot by itself."""

import random
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from reference import slow_attention
from reference.slow_store import APPEND, EVICT, SlowStore

from kvbench import ledger
from kvbench.kernels.dispatch import get_backend
from kvbench.layout import ModelShape, StoreOptions
from kvbench.policy import CompactPlan, DecodePlan, DecodeView, Policy, PrefillPlan, PrefillView, ScoreSpec, Tier
from kvbench.store import CompressedStore, PoolExhausted

LAYERS, HEADS, GROUP, DIM, ROWS = 2, 2, 3, 16, 4
SCALE = 0.4
SEEDS = st.integers(0, 2**31)


@dataclass(kw_only=True)
class Dice(Policy):
    """A policy that throws dice, remembers what it decided, and checks what its views say."""

    own_tiers: tuple = (Tier(),)
    spec: ScoreSpec = ScoreSpec()
    own_scores: bool = False
    acts_in_decode: ClassVar[bool] = True
    compact_every: ClassVar[int] = 2
    machine = None
    random = random.Random(0)

    @property
    def tiers(self) -> tuple:
        """As given."""
        return self.own_tiers

    @property
    def score(self) -> ScoreSpec:
        """As given."""
        return self.spec

    def plan_prefill(self, view: PrefillView) -> PrefillPlan:
        """Random tiers and evictions; the last token always stays."""
        make = torch.Generator().manual_seed(self.random.randrange(2**31))
        shape = (len(view.layers), view.num_kv_heads, view.num_tokens)
        tier_of = torch.randint(-1, len(self.tiers), shape, generator=make).to(torch.int8)
        tier_of[..., -1] = 0
        score = torch.rand(shape, generator=make) if self.own_scores else None
        self.prefilled = {int(n): (tier_of[i], None if score is None else score[i]) for i, n in enumerate(view.layers)}
        self.machine.prefill_plans.update(self.prefilled)
        return PrefillPlan(tier_of=tier_of, score=score)

    def plan_compact(self, view: DecodeView) -> CompactPlan:
        """Keeps random slots, at least one per list; sometimes a whole tier."""
        return self.machine.draw_compaction(view)

    def plan_decode(self, view: DecodeView) -> DecodePlan:
        """Appends, overwrites, or demotes, list by list."""
        self.machine.check_view(view)
        return self.machine.draw_plan(view)


TIERS = {
    "diffkv": (Tier(k_bits=8, v_bits=4), Tier(k_bits=4, v_bits=2)),
    "fp16": (Tier(),),
    "three": (Tier(k_bits=8, v_bits=4, v_splits=2), Tier(k_bits=4, v_bits=2, k_splits=2, v_splits=4), Tier()),
    "odd": (Tier(k_bits=4, v_bits=4, symmetric=True), Tier(k_bits=1, v_bits=2)),
}
SCORED = ScoreSpec(prefill_queries=-1, group_reduce="max", decode_update=True, track=("score", "pos"))
WINDOWED = ScoreSpec(
    prefill_queries=4,
    power=2,
    group_reduce="sum",
    decode_update=True,
    track=("score", "pos"),
    pool="max",
    pool_kernel=3,
)
POSITIONS = ScoreSpec(track=("pos",))


class StoreMachine(RuleBasedStateMachine):
    """Opens, fills, decodes, forks and closes rows; the oracle follows."""

    counts: ClassVar[dict] = {}

    @initialize(
        tiers=st.sampled_from(sorted(TIERS)),
        spec=st.sampled_from([SCORED, WINDOWED, POSITIONS]),
        scope=st.sampled_from(["head", "layer", "model"]),
        granularity=st.sampled_from(["kv_head", "kv_head", "q_head"]),
        own_scores=st.booleans(),
        pages=st.sampled_from([None, 14, 30]),
        seed=SEEDS,
    )
    def start(
        self, tiers: str, spec: ScoreSpec, scope: str, granularity: str, own_scores: bool, pages: int | None, seed: int
    ) -> None:
        """A store of 4 rows x 2 layers x 2 heads (6 at query-head granularity) in small pages."""
        self.policy = Dice(own_tiers=TIERS[tiers], spec=spec, own_scores=own_scores)
        self.policy.machine, self.policy.random = self, random.Random(seed)
        self.policy.scope, self.policy.granularity = scope, granularity
        self.heads = HEADS * GROUP if granularity == "q_head" else HEADS
        shape = ModelShape(
            num_layers=LAYERS, num_q_heads=HEADS * GROUP, num_kv_heads=HEADS, head_dim=DIM, dtype=torch.float32,
            device=torch.device("cpu"),
        )  # fmt: skip
        self.page_bytes = 592  # 8 slots of 16-bit tiers, 24 of the lowest
        self.store = CompressedStore(
            self.policy, shape, rows=ROWS, max_prompt_tokens=24, max_new_tokens=200, backend=get_backend("torch"),
            options=StoreOptions(page_bytes=592, budget_bytes=pages and 592 * pages),
        )  # fmt: skip
        group = spec.group_reduce if spec.decode_update else None
        self.slow = SlowStore(TIERS[tiers], LAYERS, self.heads, group, spec.power)
        self.prefill_plans: dict = {}
        self.make = torch.Generator().manual_seed(seed)

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.make)

    def at_granularity(self, x: torch.Tensor) -> torch.Tensor:
        return x.repeat_interleave(self.heads // HEADS, 0)

    def count(self, name: str) -> None:
        StoreMachine.counts[name] = StoreMachine.counts.get(name, 0) + 1

    @rule(
        action=st.sampled_from(["decode"] * 6 + ["prefill"] * 3 + ["chunk", "fork", "close"]),
        size=st.integers(1, 24),
        seed=SEEDS,
    )
    def act(self, action: str, size: int, seed: int) -> None:
        """One action, or a prompt when there is no row, or a step when there is no room for another row."""
        if not self.slow.rows:
            action = "prefill"
        elif len(self.slow.rows) == ROWS and action in ("prefill", "fork"):
            action = "decode"
        if action in ("prefill", "chunk"):
            getattr(self, action)(size if action == "prefill" else 1 + size // 4, seed)
        else:
            getattr(self, action)(seed)

    # Actions ----------------------------------------------------------------------------------------------------------

    def prefill(self, length: int, seed: int) -> None:
        """A prompt in a new row; without room the row is closed again."""
        self.policy.random = random.Random(seed)
        row = self.store.open_row()
        assert row not in self.slow.rows
        self.slow.open(row)
        inputs = [[self.randn(n, length, DIM) for n in (HEADS * GROUP, HEADS, HEADS)] for _ in range(LAYERS)]
        self.prefill_plans = {}
        try:
            for layer, (q, k, v) in enumerate(inputs):
                self.store.prefill_layer(row, layer, q, k, v, SCALE)
        except PoolExhausted:
            self.count("prefill exhausted")
            self.store.close_row(row)
            del self.slow.rows[row]
            return
        self.count("prefill")
        spec = self.policy.spec
        for layer, (q, k, v) in enumerate(inputs):
            k, v = self.at_granularity(k), self.at_granularity(v)
            tier_of, score = self.prefill_plans[layer]
            if score is None and spec.prefill_queries:
                score = slow_attention.prompt_scores(
                    q, k, SCALE, queries=spec.prefill_queries, skip_near=0, power=spec.power, kind=spec.pool,
                    kernel=spec.pool_kernel, stage=spec.pool_stage, where=spec.pool_region, group=spec.group_reduce,
                )  # fmt: skip
            self.slow.prefill(row, layer, k, v, tier_of, torch.zeros(tier_of.shape) if score is None else score)
        self.slow.rows[row].tokens_seen = self.slow.rows[row].prompt_tokens = length

    def decode(self, seed: int) -> None:
        """One step of some rows in some order; without a page for it nothing changes but a compaction that was due."""
        self.policy.random = random.Random(seed)
        rows = self.policy.random.sample(sorted(self.slow.rows), self.policy.random.randint(1, len(self.slow.rows)))
        self.stepping = rows
        held = {"tables": self.store.table.num_slots.clone(), "free": self.store.pool.num_free}
        compactions = StoreMachine.counts.get("compaction", 0)
        try:
            self.store.begin_step(torch.tensor(rows))
        except PoolExhausted:
            self.count("decode exhausted")
            if compactions == StoreMachine.counts.get("compaction", 0):
                assert torch.equal(self.store.table.num_slots, held["tables"])
                assert self.store.pool.num_free == held["free"]
            return
        self.count("decode")
        for i, row in enumerate(rows):
            self.slow.apply(
                row,
                self.plan.tier,
                *(x[i].flatten() for x in (self.plan.slot, self.plan.demote_to, self.plan.demote_slot)),
            )
        for layer in range(LAYERS):
            q, k, v = (self.randn(len(rows), n, DIM) for n in (HEADS * GROUP, HEADS, HEADS))
            out = self.store.attend(layer, q, k, v, SCALE)
            for i, row in enumerate(rows):
                want = self.slow.attend(row, layer, q[i], self.at_granularity(k[i]), self.at_granularity(v[i]), SCALE)
                assert torch.allclose(out[i].double(), want, rtol=0, atol=1e-5)
        self.store.end_step()
        for row in rows:
            self.slow.rows[row].tokens_seen += 1

    def chunk(self, length: int, seed: int) -> None:
        """A segment after a prompt."""
        row = random.Random(seed).choice(sorted(self.slow.rows))
        for layer in range(LAYERS):
            q, k, v = (self.randn(n, length, DIM) for n in (HEADS * GROUP, HEADS, HEADS))
            try:
                out = self.store.append_chunk(row, layer, q, k, v, SCALE)
            except PoolExhausted:
                self.count("chunk exhausted")
                self.store.close_row(row)
                del self.slow.rows[row]
                return
            want = self.slow.chunk(row, layer, q, self.at_granularity(k), self.at_granularity(v), SCALE)
            assert torch.allclose(out.double(), want, rtol=0, atol=1e-5)
        self.count("chunk")
        self.slow.rows[row].tokens_seen += length

    def fork(self, seed: int) -> None:
        """A copy of a row; without room for it nothing changes."""
        source = random.Random(seed).choice(sorted(self.slow.rows))
        try:
            row = self.store.fork_row(source)
        except PoolExhausted:
            self.count("fork exhausted")
            return
        self.count("fork")
        self.slow.fork(source, row)

    def close(self, seed: int) -> None:
        """Returns a row and its pages."""
        row = random.Random(seed).choice(sorted(self.slow.rows))
        self.store.close_row(row)
        del self.slow.rows[row]

    # What the policy asks -------------------------------------------------------------------------------------------

    def draw_compaction(self, view: DecodeView) -> CompactPlan:
        """A random keep mask for the rows whose turn it is, applied to the oracle at once."""
        self.count("compaction")
        due = [
            r
            for r in self.stepping
            if (n := self.slow.rows[r].tokens_seen - self.slow.rows[r].prompt_tokens) and n % 2 == 0
        ]
        assert view.shape == (len(due), LAYERS, self.heads)
        share, keep = self.policy.random.random(), []
        for tier in range(len(self.policy.tiers)):
            valid = view.slots(tier).valid
            mask = torch.rand(valid.shape, generator=self.make) < share
            mask[..., :1] = True
            keep.append(None if self.policy.random.random() < 0.3 else mask)
        for i, row in enumerate(due):
            self.slow.compact(row, [None if mask is None else mask[i].flatten(0, 1) for mask in keep])
        return CompactPlan(keep=keep)

    def draw_plan(self, view: DecodeView) -> DecodePlan:
        """Per list: append, evict, demote to a new slot, or demote over a slot."""
        dice = self.policy.random
        num_tiers = len(self.policy.tiers)
        tier = dice.choice([0, 0, dice.randrange(num_tiers)])
        held = [view.num_slots(t) for t in range(num_tiers)]
        plan = {name: torch.full(view.shape, -1) for name in ("slot", "demote_to", "demote_slot")}
        for where in np.ndindex(*view.shape):
            action = dice.choice(["append", "evict", "demote", "demote over"])
            if action == "append" or not held[tier][where]:
                continue
            plan["slot"][where] = dice.randrange(int(held[tier][where]))
            others = [t for t in range(num_tiers) if t != tier]
            if action == "evict" or not others:
                continue
            to = dice.choice(others)
            plan["demote_to"][where] = to
            if action == "demote over" and held[to][where]:
                plan["demote_slot"][where] = dice.randrange(int(held[to][where]))
        assert (EVICT, APPEND) == (-1, -1)
        self.plan = DecodePlan(tier=tier, **plan)
        if not (plan["demote_to"] != EVICT).any() and dice.random() < 0.5:  # fields may be left out
            return DecodePlan(tier=tier, slot=plan["slot"])
        return self.plan

    def check_view(self, view: DecodeView) -> None:
        """Counts and reductions of the view equal a search through the oracle's slots."""
        owners = [self.slow.rows[r] for r in self.stepping]
        assert view.tokens_seen.tolist() == [o.tokens_seen for o in owners]
        assert view.prompt_tokens.tolist() == [o.prompt_tokens for o in owners]
        dice, window = self.policy.random, self.policy.spec.prefill_queries
        scored = "score" in self.policy.spec.track
        tier, first = dice.randrange(len(self.policy.tiers)), dice.choice([0, 3])
        before = torch.tensor([dice.randint(0, o.tokens_seen) for o in owners]) if dice.random() < 0.7 else None
        by = dice.choice(["mean", "score", "pos"] if scored else ["pos"])
        got, position = (
            view.argmin(tier, by=by, before=before, first=first),
            torch.tensor([dice.randint(0, o.tokens_seen) for o in owners]),
        )
        found = view.find(tier, position)
        for i, row in enumerate(self.stepping):
            for n, tiers in enumerate(owners[i].each()):
                where = (i, n // self.heads, n % self.heads)
                slots = tiers[tier]
                assert int(view.num_slots(tier)[where]) == len(slots)
                limit = 10**9 if before is None else int(before[i])
                value = {
                    "mean": lambda s, r=row: self.slow.mean(r, s, window),
                    "score": lambda s: s.score,
                    "pos": lambda s: s.pos,
                }[by]
                options = [(value(s), s.pos, j) for j, s in enumerate(slots) if first <= s.pos < limit]
                want = min(options, default=(np.inf, -1, -1))
                assert (float(got.value[where]), int(got.pos[where]), int(got.slot[where])) == (
                    float(want[0]),
                    want[1],
                    want[2],
                )
                assert bool(got.found[where]) == bool(options)
                match = [j for j, s in enumerate(slots) if s.pos == int(position[i])]
                assert int(found.slot[where]) == (match[0] if match else -1)
                if match and scored:
                    assert float(found.value[where]) == float(self.slow.mean(row, slots[match[0]], window))

    # What always holds ----------------------------------------------------------------------------------------------

    @invariant()
    def slots_agree(self) -> None:
        """Every slot of every open row reads exactly as the oracle's; scores to fp32 rounding."""
        if not hasattr(self, "store"):
            return
        store = self.store
        for row, owner in self.slow.rows.items():
            assert int(store.tokens_seen[row]) == owner.tokens_seen
        for tier, fmt in enumerate(store.formats):
            slots, lists, ordinal = [], [], []
            for row, owner in self.slow.rows.items():
                for n, tiers in enumerate(owner.each()):
                    number = row * LAYERS * self.heads + n
                    assert int(store.table.num_slots[tier, number]) == len(tiers[tier])
                    slots += tiers[tier]
                    lists += [number] * len(tiers[tier])
                    ordinal += range(len(tiers[tier]))
            if not slots:
                continue
            page, slot = store.table.lookup(torch.tensor(lists), tier, torch.tensor(ordinal))
            k, v = store.backend.read_slots(store.pool.pages, fmt, page, slot)
            assert np.array_equal(k.numpy(), np.stack([s.k for s in slots]))
            assert np.array_equal(v.numpy(), np.stack([s.v for s in slots]))
            score, pos = store.backend.read_tracked(store.pool.pages, fmt, page, slot)
            assert pos.tolist() == [s.pos for s in slots]
            if score is not None:
                assert np.allclose(score.numpy(), [s.score for s in slots], rtol=1e-5, atol=1e-5)
                for s, exact in zip(slots, score.numpy(), strict=True):
                    s.score = exact  # so that rounding never decides a comparison of scores

    @invariant()
    def bytes_agree(self) -> None:
        """Ledgers of the open rows, free pages and empty rows make up what is allocated; pages are counted once."""
        if not hasattr(self, "store"):
            return
        store, pool = self.store, self.store.pool
        used, free = store.table.used_page_ids().tolist(), pool.free_ids().tolist()
        assert sorted(used + free) == list(range(pool.num_pages))
        fixed, ring = ledger.fixed_row_bytes(store)
        assert ring == 0
        total = (ROWS - len(self.slow.rows)) * fixed + len(free) * (self.page_bytes + 4)
        for row, owner in self.slow.rows.items():
            items = ledger.itemise(store, row)
            counts = [sum(len(tiers[t]) for tiers in owner.each()) for t in range(len(self.policy.tiers))]
            pages = sum(
                -(-len(tiers[t]) // f.tokens_per_page) for tiers in owner.each() for t, f in enumerate(store.formats)
            )
            payload = sum(n * DIM * (t.k_bits + t.v_bits) // 8 for n, t in zip(counts, self.policy.tiers, strict=True))
            meta = sum(n * (2 if t.symmetric else 4) * ((t.k_bits < 16) * t.k_splits + (t.v_bits < 16) * t.v_splits)
                       for n, t in zip(counts, self.policy.tiers, strict=True))  # fmt: skip
            track = 4 * len(self.policy.spec.track) * sum(counts)
            assert (items["payload_bytes"], items["quant_meta_bytes"], items["track_bytes"]) == (payload, meta, track)
            assert items["slack_bytes"] == pages * self.page_bytes - payload - meta - track >= 0
            assert items["free_list_bytes"] == 4 * pages
            assert items["residual_bytes"] == items["residual_slack_bytes"] == 0
            assert items["resident_bytes"] == int(ledger.resident_bytes(store, torch.tensor([row]))[0])
            total += items["resident_bytes"]
        tensors = [pool.pages, pool.free_list, store.table.entries, store.table.third, store.table.num_slots]
        tensors += [store.tokens_seen, store.prompt_tokens, store.prompt_slots]
        assert total == store.allocated_bytes == sum(t.numel() * t.element_size() for t in tensors)


def test_random_histories_agree_with_the_oracle():
    """Rows of random tiers, plans and scopes through prompts, steps, compactions, segments, forks and exhaustion."""
    StoreMachine.counts.clear()
    run_state_machine_as_test(
        StoreMachine,
        settings=settings(
            max_examples=40,
            stateful_step_count=25,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.generate],
        ),
    )
    counts = StoreMachine.counts
    assert counts["decode"] > 100, counts
    for name in ("prefill", "compaction", "chunk", "fork", "decode exhausted", "prefill exhausted"):
        assert counts.get(name, 0) > 3, counts


def test_dice_need_a_store():
    """The policy of this test is a policy like any other: its tiers are checked when the store is built."""
    shape = ModelShape(
        num_layers=1, num_q_heads=1, num_kv_heads=1, head_dim=16, dtype=torch.float32, device=torch.device("cpu")
    )
    with pytest.raises(ValueError, match="Dice has 4 tiers; the page table holds one to three"):
        CompressedStore(
            Dice(own_tiers=(Tier(),) * 4), shape, rows=1, max_prompt_tokens=8, max_new_tokens=8,
            options=StoreOptions(), backend=get_backend("torch"),
        )  # fmt: skip
