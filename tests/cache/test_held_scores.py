"""Statistics of what pages hold: tensors in the order of positions, a ring of queries that is billed and replayed."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from engine_helpers import comparable, engine, random_tokens, request
from refusals import refused
from store_helpers import held_positions, make_store

from kvbench.cache.replay_check import ReplayCheck
from kvbench.cache.scores import QueryRing
from kvbench.engine.prompt_cache import PromptCache
from kvbench.methods.keydiff import KeyDifference
from kvbench.methods.r_kv import RKV
from kvbench.policy import Compaction, CompactPlan, PrefillPlan, Scored, ScoreSpec, Statistic, shrink_to_share

DIM, PROMPT = 8, 30


@dataclass(frozen=True)
class Spy(Statistic):
    """Ranks by the first channel of keys, and keeps what it was shown."""

    also: ClassVar = ("double",)
    seen: ClassVar[list] = []

    def of_prompt(self, seen):
        first = seen.k[..., 0].float()
        return torch.stack([first, 2 * first])

    def of_slots(self, seen):
        self.seen.append(seen)
        return self.of_prompt(seen)


class Spying(Scored):
    """Keeps different numbers of tokens per head, and evicts by the spy's numbers before every third step."""

    def __post_init__(self):
        super().__post_init__()
        self.score, self.compaction = (
            ScoreSpec(statistic=Spy(), prefill_queries=2, slot_queries=5, track=("score", "pos"), decode_update=True),
            Compaction(3),
        )
        self.views = []

    def plan_prefill(self, view):
        tier_of = view.filled(0)
        tier_of[:, 0, : PROMPT // 2] = -1  # head 0 keeps half
        assert (view.extra["double"] == 2 * view.score).all()
        return PrefillPlan(tier_of=tier_of)

    def plan_compact(self, view):
        self.views.append(view.slots(0))
        keep = torch.ones_like(view.slots(0).valid)
        keep[..., 3::4] = False  # which makes slots change places
        return CompactPlan(keep=[keep])


def run(tier, steps):
    """A store of one layer and two heads of two queries after some steps; all queries, keys and values ever given."""
    torch.manual_seed(5)
    Spy.seen.clear()
    policy = Spying(tier=tier)
    store = make_store(policy, num_q_heads=4, num_kv_heads=2, head_dim=DIM)
    row = store.open_row()
    q, k, v = (torch.randn(heads, PROMPT + steps, DIM) for heads in (4, 2, 2))
    store.prefill_layer(row, 0, q[:, :PROMPT], k[:, :PROMPT], v[:, :PROMPT], 0.5)
    for step in range(PROMPT, PROMPT + steps):
        store.begin_step(torch.tensor([row]))
        store.attend(0, q[None, :, step], k[None, :, step], v[None, :, step], 0.5)
        store.end_step()
    return store, row, policy, (q, k, v)


@pytest.mark.parametrize(("tier", "tolerance"), [("native", 0.0), ("int8", 0.03), ("int4", 0.4)])
def test_slots_come_in_order_with_what_pages_hold(tier, tolerance):
    """Each head's tensors are its held tokens by ascending position, as the tier gives them back, also once slots have
    moved; heads of different lengths come apart, and their numbers go back to their slots."""
    store, _, policy, (q, k, v) = run(tier, 8)
    assert len(policy.views) == 2 and len(Spy.seen) == 4  # two heads of two lengths, twice
    for index, seen in enumerate(Spy.seen):
        head, when = index % 2, PROMPT + 3 * (1 + index // 2)
        pos = seen.pos[0]
        assert seen.k.shape[0] == 1 and (pos.diff() > 0).all() and seen.tokens_seen == when
        for got, given in ((seen.k, k), (seen.v, v)):
            assert (got[0] - given[head, pos]).abs().max() <= tolerance
        assert (seen.k[0] - k[head, pos]).abs().max() > 0 or tier == "native"
        own = q[2 * head : 2 * head + 2, when - 5 : when] * 0.5
        assert (seen.q - own).abs().max() <= (0 if tier == "native" else 2e-3)
        assert seen.q_pos.tolist() == list(range(when - 5, when))
    for view in policy.views:
        for head in range(2):
            valid = view.valid[0, 0, head]
            want = k[head, view.pos[0, 0, head][valid], 0]
            assert (view.score[0, 0, head][valid] - want).abs().max() <= tolerance
            assert torch.equal(view.extra["double"][0, 0, head], 2 * view.score[0, 0, head])


def test_tracked_scores_come_along():
    """`stored` is what the slots track: their own, in the same order of positions."""
    store, row, policy, _ = run("native", 7)
    seen = Spy.seen[0]
    assert seen.stored.shape == seen.pos.shape and (seen.stored != seen.k[..., 0]).any()
    store, row, policy, (_, k, _) = run("native", 3)
    before = store.view(torch.tensor([row])).slots(0)
    store.begin_step(torch.tensor([row]))
    for head, seen in enumerate(Spy.seen):
        valid = before.valid[0, 0, head]
        stored = dict(
            zip(before.pos[0, 0, head][valid].tolist(), before.score[0, 0, head][valid].tolist(), strict=True)
        )
        assert [stored[p] for p in seen.pos[0].tolist()] == seen.stored[0].tolist()


def test_the_attention_of_slots_is_the_ring_s():
    """`attention` over slots: softmax of the last queries over the held keys up to each query, reduced as asked."""
    run("native", 3 + 1)
    seen = Spy.seen[1]
    assert len(seen.q) == 2
    want = torch.zeros(seen.pos.shape[1])
    for head in range(2):
        for query, at in zip(seen.q[head], seen.q_pos, strict=True):
            sees = seen.pos[0] <= at
            want[sees] += (seen.k[0, sees] @ query).softmax(0) / 2
    assert (seen.attention()[0] - want).abs().max() < 1e-6
    with refused("method-broken", None, "low_counts"):
        seen.low_counts()


def test_the_ring_is_billed_and_forked():
    """Five queries of four heads in the ring's own type, whole from the start; a fork has its own copy."""
    policy = RKV(budget=10, window=5, decode_every=3, tier="int8")
    store = make_store(policy, num_q_heads=4, num_kv_heads=2, head_dim=DIM, rows=2)
    row = store.open_row()
    store.prefill_layer(row, 0, torch.randn(4, 3, DIM), *torch.randn(2, 2, 3, DIM), 0.5)
    items = store.ledger.itemise(row)
    assert items["residual_bytes"] == 3 * 4 * DIM * 2 and items["residual_slack_bytes"] == 2 * 4 * DIM * 2
    assert items["resident_bytes"] == store.ledger.row_bytes(row)
    plain = make_store(RKV(budget=10, window=5, decode_every=0), num_q_heads=4, num_kv_heads=2, head_dim=DIM, rows=2)
    assert store.holding.off_page_bytes == 2 * 5 * 4 * DIM * 2 and plain.holding.off_page_bytes == 0
    other = store.fork_row(row)
    rings = [store.holding.scores.queries.of(r, 0, 3) for r in (row, other)]
    assert torch.equal(*rings) and rings[0].abs().sum() > 0
    store.begin_step(torch.tensor([row]))
    store.attend(0, torch.randn(1, 4, DIM), *torch.randn(2, 1, 2, DIM), 0.5)
    store.end_step()
    assert torch.equal(store.holding.scores.queries.of(other, 0, 3), rings[1])
    assert store.holding.scores.queries.of(row, 0, 4).shape == (4, 4, DIM)


def test_replayed_prompts_bring_their_queries(tiny_model):
    """A method that keeps queries gives the same records from a prompt cache as from the model, and other settings of
    its statistic read the prompt again."""
    loaded, prompts = tiny_model("llama", "gqa3", 64), PromptCache(2**30)
    asked = [request("a", random_tokens(60), max_new_tokens=12)]

    def outcome(policy, shared):
        found = []
        with engine(loaded, policy) as running:
            if shared:
                running.runner.prompts = prompts
            running.run(asked, on_outcome=found.append)
        return comparable(found[0])

    policies = [RKV(budget=20, decode_every=4), RKV(budget=30, decode_every=4), RKV(budget=30, decode_every=4, mix=0.9)]
    shared = [outcome(policy, True) for policy in policies]
    assert (prompts.num_read, prompts.num_reused) == (2, 1)
    assert shared == [outcome(policy, False) for policy in policies]


def test_hidden_states_and_projections_are_the_model_s(tiny_model, monkeypatch):
    """What a statistic is shown of a layer: the very input of its attention, and o_proj by query heads."""
    monkeypatch.setattr(ReplayCheck, "of", lambda *_, **__: None)  # which would be asked, too
    loaded, shown = tiny_model("llama", "gqa3", 64), []

    @dataclass(frozen=True)
    class Reads(Statistic):
        """Keeps what it sees."""

        needs: ClassVar = frozenset({"hidden_states", "output_projection", "before_rope"})

        def of_prompt(self, seen):
            shown.append((seen.hidden_states, seen.output_projection, seen.rotated(seen.k, -seen.pos)))
            return seen.pos.float()

    class Reading(Scored):
        def __post_init__(self):
            super().__post_init__()
            self.score_by(Reads())

    with engine(loaded, Reading(budget=9)) as running:
        running.runner.reserve(rows=1, prompt_tokens=20, new_tokens=2)
        row, _ = running.runner.read(random_tokens(17), lookahead=random_tokens(2))
        running.runner.step([row], [5])
        running.runner.close(row)
    assert len(shown) == 2  # once per layer; nothing is noted while decoding
    for (hidden, projection, keys), layer in zip(shown, loaded.model.model.layers, strict=True):
        module = layer.self_attn
        assert hidden.shape == (17, loaded.model.config.hidden_size) and not module._forward_pre_hooks
        plain = (hidden @ module.k_proj.weight.T).view(17, 2, 64).transpose(0, 1)
        assert (keys - plain).abs().max() < 1e-4
        x = torch.randn(6, 64)
        assert torch.allclose(torch.einsum("hd,hde->e", x, projection), module.o_proj(x.flatten()), atol=1e-5)


def test_scored_methods_evict_by_todays_keys():
    """While decoding the lightest by the statistic of all held keys go, among them tokens of the answer."""
    torch.manual_seed(2)

    class Method(Scored):
        def __post_init__(self):
            super().__post_init__()
            self.score_by(KeyDifference())

        def plan_compact(self, view):
            return shrink_to_share(view, self._budget, 0)

    store = make_store(Method(budget=12, decode_every=6, tier="native"), num_q_heads=1, head_dim=DIM)
    row, k = store.open_row(), torch.randn(1, PROMPT + 7, DIM) + 0.5
    store.prefill_layer(row, 0, k[:, :PROMPT], k[:, :PROMPT], k[:, :PROMPT], 1.0)
    for step in range(PROMPT, PROMPT + 6):
        store.begin_step(torch.tensor([row]))
        store.attend(0, k[None, 0, step][None], k[None, 0, step][None], k[None, 0, step][None], 1.0)
        store.end_step()
    held = sorted(held_positions(store, row)[0])
    assert len(held) == 18
    own = k[0, held]
    anchor = torch.stack([key / key.norm() for key in own]).mean(0)
    score = {p: -float(key @ anchor / key.norm() / anchor.norm()) for p, key in zip(held, own, strict=True)}
    store.begin_step(torch.tensor([row]))
    want = sorted(sorted(held, key=lambda p: (-score[p], p))[:12])
    assert sorted(held_positions(store, row)[0])[:-1] == want and any(p >= PROMPT for p in want)


@pytest.mark.parametrize("scales", [(0.5, 0.5), (0.5, 2.0)])
def test_the_queries_of_a_step_are_held_times_their_layer_s_factor(scales):
    """Of every row at its own position, over the oldest ones."""
    shape, make = make_store(RKV(), num_layers=2, num_q_heads=3, head_dim=DIM).shape, torch.Generator().manual_seed(0)
    ring, seen = QueryRing(4, 2, shape, torch.float32), torch.tensor([5, 9])
    layers = [(torch.randn(2, 3, DIM, generator=make), scale) for scale in scales]
    ring.hold_step(torch.tensor([0, 1]), seen, layers)
    for layer, (q, scale) in enumerate(layers):
        for row, position in enumerate(seen.tolist()):
            assert torch.equal(ring.of(row, layer, position + 1)[:, -1], q[row] * scale)
