"""When the angles of all layers are the same, and what they are then."""

from types import SimpleNamespace

import pytest
import torch
from refusals import refused

from kvbench.cache.layout import ModelShape
from kvbench.cache.rope import Rope
from kvbench.policy import Compaction, Policy

INV_FREQ = torch.tensor([1.0, 0.25])
SHAPE = ModelShape(
    num_layers=2,
    num_q_heads=2,
    num_kv_heads=2,
    head_dim=4,
    dtype=torch.float32,
    device=torch.device("cpu"),
    inv_freq=INV_FREQ,
)


def rope_of(mode: str, **where) -> Rope:
    """The rotation of a method whose slots lie in the order of their age."""

    class Aged(Policy):
        """Numbers slots as they lie."""

        position_mode = mode

        def cache_positions(self, view, num_slots):
            return torch.arange(num_slots).expand(len(view.tokens_seen), -1)

    return Rope(Aged(), SHAPE, **where)


def tier_of(held: list) -> SimpleNamespace:
    """Lists of so many slots, in two pages of 4."""
    num_k = torch.tensor(held)
    fmt = SimpleNamespace(tokens_per_page=4)
    return SimpleNamespace(num_k=num_k, ids=torch.zeros(*num_k.shape, 2, dtype=torch.int64), fmt=fmt, rotation=None)


VIEW = SimpleNamespace(tokens_seen=torch.tensor([20, 30]))
VIEW.shown = lambda: VIEW
EQUAL, UNEQUAL = [[[5, 5], [5, 5]], [[7, 7], [7, 7]]], [[[5, 5], [5, 6]], [[7, 7], [7, 7]]]


def test_lists_of_one_length_share_their_angles():
    """The newest of 5 slots lies at token 20 and the others right before it, in every layer; row by row."""
    tier = tier_of(EQUAL)
    assert rope_of("cache_relative").attach_all_layers([tier], VIEW)
    places = torch.stack([torch.arange(8) + 20 - 4, torch.arange(8) + 30 - 6])
    assert torch.equal(tier.rotation, places[..., None] * INV_FREQ)
    one_layer = tier_of([rows[0] for rows in EQUAL])
    rope_of("cache_relative").attach([one_layer], VIEW)
    assert torch.equal(one_layer.rotation, tier.rotation)


@pytest.mark.parametrize(
    ("mode", "held", "view", "answer"),
    [
        ("cache_relative", UNEQUAL, VIEW, False),
        ("cache_relative", EQUAL, None, False),
        ("pre_rope", EQUAL, VIEW, False),
        ("absolute", UNEQUAL, VIEW, True),
    ],
)
def test_where_layers_need_their_own_angles_none_are_given(mode, held, view, answer):
    """Lists of different lengths, no plan, or true positions; keys with their position need none."""
    tier = tier_of(held)
    assert rope_of(mode).attach_all_layers([tier], view) is answer and tier.rotation is None
    if mode == "cache_relative":
        assert not rope_of(mode).attach_all_layers([tier_of(EQUAL), tier_of(EQUAL)], VIEW)


def test_a_later_tier_holds_the_earlier_tokens_of_a_single_head():
    """Behind 3 tokens of tier 1, slot i of tier 0 is token 3 + i."""
    tiers = [tier_of([[5]]), tier_of([[3]])]
    rope_of("pre_rope").attach(tiers, None)
    for tier, first in zip(tiers, (3, 0), strict=True):
        assert tier.rotation.first.tolist() == [first]
        assert torch.equal(tier.rotation.angles(8), ((torch.arange(8.0) + first)[:, None] * INV_FREQ)[None])


@pytest.mark.parametrize("on_device", [False, True])
def test_positions_are_compared_in_main_memory_alone(on_device):
    """Steps of one position share an object there; on a device its numbers would have to be read back."""
    rope, found = rope_of("pre_rope", on_device=on_device), []
    for held in (3, 3, 4):
        tiers = [tier_of([[5]]), tier_of([[held]])]
        rope.attach(tiers, None)
        found.append(tiers[0].rotation)
    assert (found[1] is found[0], found[2] is found[1]) == (not on_device, False)
    assert [turn.first.tolist() for turn in found] == [[3], [3], [4]]


@pytest.mark.parametrize("rule", [{"acts_in_decode": True}, {"compaction": Compaction(8)}])
def test_tokens_that_leave_their_slots_cannot_be_turned_by_them(rule):
    """Eviction and positions that are read off the slot do not go together."""
    policy = type("Moving", (Policy,), {"position_mode": "pre_rope", **rule})()
    with refused("method-broken", None, "position_mode='pre_rope'"):
        Rope(policy, SHAPE)


def test_keys_lose_their_positions_and_get_them_back():
    """Before the rotation slot i is token i; a stripped key turned by its angle is the key."""
    rope, k = rope_of("pre_rope"), torch.randn(3, 4)
    tier = tier_of([[5, 5], [5, 5]])
    rope.attach([tier], None)
    assert torch.equal(tier.rotation.angles(8), (torch.arange(8.0)[:, None] * INV_FREQ).expand(2, -1, -1))
    bare = rope.strip(k, torch.tensor([0, 3, 7]))
    assert bare[0].equal(k[0]) and not torch.allclose(bare[1], k[1])
    angle = torch.tensor([0.0, 3.0, 7.0])[:, None] * INV_FREQ
    cos, sin = angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)
    half = torch.cat([-bare[:, 2:], bare[:, :2]], -1)
    assert torch.allclose(bare * cos + half * sin, k, atol=1e-5)
    assert rope_of("absolute").strip(k, torch.arange(3)) is k
