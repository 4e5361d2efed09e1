"""Random histories of a compressed store against a slow oracle that keeps every slot by itself."""

import random
from collections import Counter
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from oracles import slow_attention
from oracles.dice import POSITIONS, SCORED, TIERS, WINDOWED, Dice
from oracles.slow_store import SlowStore
from store_helpers import make_store

from kvbench.cache.store import PoolExhausted
from kvbench.policy import ScoreSpec

LAYERS, HEADS, GROUP, DIM, ROWS = 2, 2, 3, 16, 4
SCALE = 0.4
SEEDS = st.integers(0, 2**31)


class StoreMachine(RuleBasedStateMachine):
    """Opens, fills, decodes, forks and closes rows; the oracle follows."""

    counts: ClassVar[Counter] = Counter()

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
        self.policy.scope, self.policy.granularity = scope, granularity
        self.heads = HEADS * GROUP if granularity == "q_head" else HEADS
        self.page_bytes = 592  # 8 slots of 16-bit tiers, 24 of the lowest
        sizes = {"num_layers": LAYERS, "num_q_heads": HEADS * GROUP, "num_kv_heads": HEADS, "head_dim": DIM}
        sizes |= {"rows": ROWS, "max_tokens": 24, "new_tokens": 200}
        self.store = make_store(self.policy, **sizes, page_bytes=592, budget_bytes=pages and 592 * pages)
        group = spec.group_reduce if spec.decode_update else None
        self.slow = SlowStore(TIERS[tiers], LAYERS, self.heads, group, spec.power)
        self.policy.slow = self.slow
        self.make = torch.Generator().manual_seed(seed)

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.make)

    def at_granularity(self, x: torch.Tensor) -> torch.Tensor:
        return x.repeat_interleave(self.heads // HEADS, 0)

    def count(self, name: str) -> None:
        self.counts[name] += 1

    @rule(
        action=st.sampled_from(["decode"] * 6 + ["prefill"] * 3 + ["chunk", "fork", "fork", "close"]),
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
        self.policy.dice = random.Random(seed)
        row = self.store.open_row()
        assert row not in self.slow.rows
        self.slow.open(row)
        inputs = [[self.randn(n, length, DIM) for n in (HEADS * GROUP, HEADS, HEADS)] for _ in range(LAYERS)]
        self.policy.prefill_plans = {}
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
            tier_of, score = self.policy.prefill_plans[layer]
            if score is None and spec.prefill_queries:
                score = slow_attention.prompt_scores(
                    q,
                    k,
                    SCALE,
                    queries=spec.prefill_queries,
                    skip_near=0,
                    power=spec.power,
                    kind=spec.pool,
                    kernel=spec.pool_kernel,
                    stage=spec.pool_stage,
                    where=spec.pool_region,
                    group=spec.group_reduce,
                )
            self.slow.prefill(row, layer, k, v, tier_of, torch.zeros(tier_of.shape) if score is None else score)
        self.slow.rows[row].tokens_seen = self.slow.rows[row].prompt_tokens = length

    def decode(self, seed: int) -> None:
        """One step of some rows in some order; without a page for it nothing changes but a compaction that was due."""
        self.policy.dice = random.Random(seed)
        rows = self.policy.dice.sample(sorted(self.slow.rows), self.policy.dice.randint(1, len(self.slow.rows)))
        self.policy.stepping = rows
        # Now and then somebody else holds all but a page or two of a pool that cannot grow.
        pool, spare = self.store.pages.pool, random.Random(~seed).choice([None] * 7 + [0, 1])
        hold = 0 if spare is None or pool.growable else max(0, pool.num_free - spare)
        taken = pool.allocate(torch.tensor([hold]))[0]
        held = {"tables": self.store.pages.table.num_slots.clone(), "free": self.store.pages.pool.num_free}
        compactions = self.policy.compactions
        try:
            self.store.begin_step(torch.tensor(rows))
        except PoolExhausted:
            self.count("decode exhausted")
            if compactions == self.policy.compactions:
                assert torch.equal(self.store.pages.table.num_slots, held["tables"])
                assert self.store.pages.pool.num_free == held["free"]
            return
        finally:
            pool.release(taken)
        self.count("decode")
        self.count("step after compaction" if self.policy.compactions > compactions else "plain step")
        plan = self.policy.plan
        for i, row in enumerate(rows):
            fields = (x[i].flatten() for x in (plan.slot, plan.demote_to, plan.demote_slot))
            self.slow.apply(row, plan.tier, *fields)
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
        """A copy of a row, most often in the same pages; without room for it nothing changes."""
        dice = random.Random(seed)
        source, share = dice.choice(sorted(self.slow.rows)), dice.random() < 0.8
        try:
            row = self.store.fork_row(source, share=share)
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

    # What always holds ----------------------------------------------------------------------------------------------

    @invariant()
    def slots_agree(self) -> None:
        """Every slot of every open row reads exactly as the oracle's; scores to fp32 rounding."""
        if not hasattr(self, "store"):
            return
        store = self.store
        for row, owner in self.slow.rows.items():
            assert int(store.counters.tokens_seen[row]) == owner.tokens_seen
        for tier, fmt in enumerate(store.pages.formats):
            slots, lists, ordinal = [], [], []
            for row, owner in self.slow.rows.items():
                for n, tiers in enumerate(owner.each()):
                    number = row * LAYERS * self.heads + n
                    assert int(store.pages.table.num_slots[tier, number]) == len(tiers[tier])
                    slots += tiers[tier]
                    lists += [number] * len(tiers[tier])
                    ordinal += range(len(tiers[tier]))
            if not slots:
                continue
            page, slot = store.pages.table.lookup(torch.tensor(lists), tier, torch.tensor(ordinal))
            k, v = store.pages.backend.read_slots(store.pages.pool.pages, fmt, page, slot)
            assert np.array_equal(k.numpy(), np.stack([s.k for s in slots]))
            assert np.array_equal(v.numpy(), np.stack([s.v for s in slots]))
            score, pos = store.pages.backend.read_tracked(store.pages.pool.pages, fmt, page, slot)
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
        store, pool = self.store, self.store.pages.pool
        holders, free = Counter(store.pages.table.used_page_ids().tolist()), pool.free_ids().tolist()
        assert sorted([*holders, *free]) == list(range(pool.num_pages))
        others = {page: count - 1 for page, count in holders.items() if count > 1}
        found = [] if pool.others is None else pool.others.tolist()
        assert others == {page: count for page, count in enumerate(found) if count}
        assert (pool.others is None) == (not others)
        self.count("shared pages" if others else "no shared page")
        shared = sum(others.values()) * (self.page_bytes + 4)
        assert shared == store.ledger.shared_bytes
        fixed, ring, books = store.ledger.fixed_row_bytes()
        assert ring == books == 0
        total = (ROWS - len(self.slow.rows)) * fixed + len(free) * (self.page_bytes + 4) - shared
        total += store.ledger.table_slack_bytes  # table entries that a row does not need
        for row, owner in self.slow.rows.items():
            items = store.ledger.itemise(row)
            counts = [sum(len(tiers[t]) for tiers in owner.each()) for t in range(len(self.policy.tiers))]
            pages = sum(
                -(-len(tiers[t]) // f.tokens_per_page)
                for tiers in owner.each()
                for t, f in enumerate(store.pages.formats)
            )
            payload = sum(n * DIM * (t.k_bits + t.v_bits) // 8 for n, t in zip(counts, self.policy.tiers, strict=True))
            meta = sum(
                n * (2 if t.symmetric else 4) * ((t.k_bits < 16) * t.k_splits + (t.v_bits < 16) * t.v_splits)
                for n, t in zip(counts, self.policy.tiers, strict=True)
            )
            track = 4 * len(self.policy.spec.track) * sum(counts)
            assert (items["payload_bytes"], items["quant_meta_bytes"], items["track_bytes"]) == (payload, meta, track)
            assert items["slack_bytes"] == pages * self.page_bytes - payload - meta - track >= 0
            assert items["free_list_bytes"] == 4 * pages
            assert items["residual_bytes"] == items["residual_slack_bytes"] == 0
            assert items["resident_bytes"] == int(store.ledger.resident_bytes(torch.tensor([row]))[0])
            total += items["resident_bytes"]
        tensors = [
            pool.pages,
            pool.free_list,
            store.pages.table.entries,
            store.pages.table.further,
            store.pages.table.num_slots,
        ]
        if pool.others is not None:
            total += 4 * pool.num_pages
            tensors.append(pool.others)
        tensors += [store.counters.tokens_seen, store.counters.prompt_tokens, store.counters.prompt_slots]
        assert total == store.allocated_bytes == sum(t.numel() * t.element_size() for t in tensors)


@pytest.mark.long
@pytest.mark.parametrize(("examples", "few"), [(12, 0), pytest.param(40, 3, marks=pytest.mark.exhaustive)])
def test_random_histories_agree_with_the_oracle(examples, few):
    """Rows of random tiers, plans and scopes through prompts, steps, compactions, segments, forks and exhaustion."""
    StoreMachine.counts.clear()
    run_state_machine_as_test(
        StoreMachine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=25,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.generate],
        ),
    )
    counts = StoreMachine.counts
    assert counts["decode"] > 2 * examples, counts
    for name in ("prefill", "step after compaction", "chunk", "fork", "decode exhausted", "prefill exhausted"):
        assert counts[name] > few, counts
    assert counts["shared pages"] > 2 * examples, counts
