"""What a policy is told of the slots before a step, beside plain loops over all of them, on every backend."""

import math
from dataclasses import dataclass

import pytest
import torch
from refusals import refused
from store_helpers import make_store, read_random, step_random

from kvbench.cache.layout import DeviceSpan
from kvbench.cache.store import CompressedStore
from kvbench.methods.snapkv import SnapKV
from kvbench.methods.tova import TOVA
from kvbench.policy import ALL_QUERIES, Policy, PrefillPlan, ScoreSpec, Tier

LAYERS, HEADS, DIM = 2, 2, 16
PROMPTS, STEPS = (13, 24, 9), 4


@dataclass(kw_only=True)
class Scattered(Policy):
    """Two tiers, some tokens in neither, and scores that are drawn and often equal."""

    queries: int = ALL_QUERIES

    def __post_init__(self) -> None:
        self.tiers = (Tier(k_bits=8, v_bits=8), Tier(k_bits=4, v_bits=4))
        self.score = ScoreSpec(prefill_queries=self.queries, decode_update=False, track=("score", "pos"))

    def plan_prefill(self, view) -> PrefillPlan:
        """Differs from list to list; the last tokens stay high."""
        make = torch.Generator().manual_seed(view.num_tokens + int(view.layers[0]))
        shape = view.score.shape
        tier_of = torch.randint(-1, 2, shape, generator=make)
        tier_of[..., -2:] = 0
        return PrefillPlan(tier_of=tier_of.to(torch.int8), score=torch.randint(0, 4, shape, generator=make).float())


def store_of(policy: Policy, backend: str, places: tuple[DeviceSpan, ...] = ()) -> CompressedStore:
    """Three rows of 2 layers and 2 heads."""
    shape = {"num_layers": LAYERS, "num_q_heads": HEADS, "num_kv_heads": HEADS, "head_dim": DIM}
    return make_store(policy, **shape, rows=3, max_tokens=32, new_tokens=16, device_spans=places, backend=backend)


def filled(policy: Policy, backend: str = "torch", places: tuple[DeviceSpan, ...] = ()) -> CompressedStore:
    """Prompts of three lengths and four steps each."""
    make, store = torch.Generator().manual_seed(0), store_of(policy, backend, places)
    for length in PROMPTS:
        read_random(store, length, make)
    for _ in range(STEPS):
        step_random(store, [0, 1, 2], make)
    return store


def test_layers_in_two_places_look_like_one():
    """The fields of slots, the counts, and the means over the queries that count."""
    rows, cpu = torch.tensor([2, 0, 1]), torch.device("cpu")
    one, two = (
        filled(Scattered(queries=3), places=places).view(rows)
        for places in ((), (DeviceSpan(cpu, 1), DeviceSpan(cpu, 1)))
    )
    for tier in range(2):
        assert torch.equal(one.num_slots(tier), two.num_slots(tier))
        there, also = one.slots(tier).valid, two.slots(tier).valid
        for found, same in (
            (one.slots(tier).pos, two.slots(tier).pos),
            (one.slots(tier).score, two.slots(tier).score),
            (one.mean_score(tier), two.mean_score(tier)),
        ):
            assert torch.equal(found[there], same[also]) and there.any()


def plain(view, tier: int, row: int, layer: int, head: int, queries: int) -> list[tuple[int, int, float, float]]:
    """(slot, position, score, mean) of the slots that a list holds."""
    arrays, seen, prompt = view.slots(tier), int(view.tokens_seen[row]), int(view.prompt_tokens[row])
    found = []
    for slot in range(int(view.num_slots(tier)[row, layer, head])):
        assert bool(arrays.valid[row, layer, head, slot])
        pos, score = int(arrays.pos[row, layer, head, slot]), float(arrays.score[row, layer, head, slot])
        counted = seen - (pos if queries == ALL_QUERIES else max(pos, prompt - queries))
        found.append((slot, pos, score, score / max(1, counted)))
    assert int(arrays.valid[row, layer, head].sum()) == len(found)
    return found


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("queries", [ALL_QUERIES, 3])
def test_searches_equal_plain_loops(backend, queries):
    """The smallest score, mean or position among the slots that are asked for, of equal ones the earlier position; and
    any position, the first and the last as well."""
    rows = torch.tensor([2, 0, 1])
    view = filled(Scattered(queries=queries), backend).view(rows)
    assert view.tokens_seen.tolist() == [PROMPTS[row] + STEPS for row in rows.tolist()]
    lists = [(row, layer, head) for row in range(3) for layer in range(LAYERS) for head in range(HEADS)]
    asked = [
        {},
        {"first": 3},
        {"before": view.tokens_seen - 4},
        {"first": 2, "before": torch.tensor([3, 9, 30])},
        {"before": torch.zeros(3, dtype=torch.int64)},
    ]
    for tier in range(2):
        for number, by in enumerate(("pos", "score", "mean"), 1):
            for rule in asked:
                found = view.argmin(tier, by=by, **rule)
                for row, layer, head in lists:
                    least, most = rule.get("first", 0), int(rule["before"][row]) if "before" in rule else math.inf
                    slots = [s for s in plain(view, tier, row, layer, head, queries) if least <= s[1] < most]
                    if not slots:
                        assert not found.exists[row, layer, head] and int(found.pos[row, layer, head]) == -1
                        continue
                    best = min(slots, key=lambda s: (s[number], s[1]))
                    assert (int(found.slot[row, layer, head]), int(found.pos[row, layer, head])) == best[:2]
                    assert (
                        float(found.value[row, layer, head]) == pytest.approx(best[number])
                        and found.exists[row, layer, head]
                    )
        for position in ([0, 0, 0], [1, 2, 3], [12, 16, 27], [5, 0, 24]):
            found = view.find(tier, torch.tensor(position))
            for row, layer, head in lists:
                there = [s for s in plain(view, tier, row, layer, head, queries) if s[1] == position[row]]
                assert int(found.slot[row, layer, head]) == (there[0][0] if there else -1)
                if there:
                    assert float(found.value[row, layer, head]) == pytest.approx(there[0][3])


def test_a_layer_decides_as_one():
    """Over a layer the mean of its heads' scores counts, slot by slot."""
    view = filled(TOVA(budget=8), "torch").view(torch.tensor([1, 0]))
    arrays, found = view.slots(0), view.argmin(0, by="score", over_layer=True)
    for row in range(2):
        for layer in range(LAYERS):
            count = int(view.num_slots(0)[row, layer, 0])
            mean = [float(arrays.score[row, layer, :, slot].mean()) for slot in range(count)]
            slot = min(range(count), key=lambda i: (round(mean[i], 7), int(arrays.pos[row, layer, 0, i])))
            assert found.slot[row, layer].tolist() == [slot] * HEADS


def test_what_is_not_tracked_cannot_be_searched():
    """Each reduction names the field that is missing."""
    store = filled(SnapKV(budget=8, window=4))
    view = store.view(torch.tensor([0]))
    for by, name in (("score", "score"), ("mean", "score"), ("pos", "pos")):
        with refused("method-broken", None, name):
            view.argmin(0, by=by)
    for rule in ({"first": 1}, {"before": torch.tensor([3])}):
        with pytest.raises(ValueError, match="needs the tracked field 'pos'"):
            view.argmin(0, by="score", **rule)
    with pytest.raises(ValueError, match="needs the tracked field 'pos'"):
        view.find(0, torch.tensor([1]))
    assert view.slots(0).pos.unique().tolist() == [-1] and view.slots(0).score.unique().tolist() == [0.0]


def test_later_segments_are_for_methods_that_leave_tokens_alone():
    """A method that acts in steps, or evicts in bulk, gets a question token by token."""
    assert store_of(SnapKV(budget=8, window=4), "torch").takes_chunks
    assert not store_of(TOVA(budget=8), "torch").takes_chunks
    assert not store_of(SnapKV(budget=8, window=4, decode_every=4), "torch").takes_chunks
