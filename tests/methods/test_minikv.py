"""MiniKV: golden heavy-hitter counts and buffer states, the variance allocations, and the choice of tokens."""

import pytest
import torch
from store_helpers import golden, make_store, prefill_view

from kvbench.methods.minikv import MiniKV
from kvbench.policy import PrefillView, share_with_cap


def view_of(num_tokens: int, num_layers: int, layers: list[int], score=None) -> PrefillView:
    """A view of some layers of a model with one head."""
    score = torch.zeros(len(layers), 1, num_tokens) if score is None else score
    return PrefillView(
        num_tokens=num_tokens,
        num_layers=num_layers,
        num_kv_heads=1,
        layers=torch.tensor(layers),
        score=score,
        token_bytes=(1.0,),
    )


def test_golden_pyramid_counts():
    """Four layers, 1000 tokens, a quarter heavy: the golden counts, more in lower layers."""
    assert MiniKV().heavy_counts(view_of(1000, 4, [0, 1, 2, 3])) == golden("minikv_counts_L4_n1000")


def test_golden_pyramid_ratios():
    """The heavy share per layer of 32 is the golden one, read off a very long prompt."""
    length = 1_000_000
    view = PrefillView(
        num_tokens=length,
        num_layers=32,
        num_kv_heads=1,
        layers=torch.tensor([0, 1, 15, 16, 30, 31]),
        score=None,
        token_bytes=(1.0,),
    )
    got = [count / length for count in MiniKV().heavy_counts(view)]
    assert got == pytest.approx(golden("minikv_pyramid"), abs=2e-6)


def test_golden_buffer_states():
    """Ten kept tokens, groups of 8 scaled from the golden 4: the state after every step, whole groups quantised, the
    rest in the buffer.

    The golden case has groups of 4 and a buffer of 8; pages hold multiples of 8 slots, so all numbers are doubled here.
    """
    states = [tuple(2 * x for x in state) for state in golden("minikv_state")]
    policy = MiniKV(heavy=0.5, recent=0.5, allocation="uniform", group=8, residual_tokens=16)
    store = make_store(policy)
    row = store.open_row()
    store.prefill_layer(row, 0, torch.randn(1, 20, 8), torch.randn(1, 20, 8), torch.randn(1, 20, 8), 1.0)
    seen = []
    for step in range(len(states) * 2 - 1):
        held = int(store.holding.ring.num_k[0])
        seen.append((held, int(store.holding.ring.num_tokens[0]) - held))
        assert int(store.holding.ring.num_v[0]) == held
        if step % 2 == 0:
            assert seen[-1] == states[step // 2]
        store.begin_step(torch.tensor([row]))
        store.attend(0, torch.randn(1, 1, 8), torch.randn(1, 1, 8), torch.randn(1, 1, 8), 1.0)
        store.end_step()


def test_selection_is_h2os_first_case():
    """Heavy 2 and recent 2 of the golden column sums keep the golden tokens."""
    case = golden("h2o")
    policy = MiniKV(heavy=2 / 6, recent=2 / 6, allocation="uniform", group=8, residual_tokens=8)
    plan = policy.plan_prefill(prefill_view(torch.tensor(case["colsum"]), 6))
    assert (plan.tier_of[0, 0] >= 0).nonzero()[:, 0].tolist() == case["kept"]


def test_three_tokens_keep_at_least_two():
    """Where the released code keeps nothing of a three-token prompt, one heavy and one recent token stay."""
    plan = MiniKV(allocation="uniform").plan_prefill(prefill_view(torch.tensor([0.1, 0.9, 0.3]), 3))
    assert (plan.tier_of[0, 0] >= 0).tolist() == [False, True, True]


@pytest.mark.parametrize(("allocation", "order"), [("var_prop", [0, 1, 2]), ("var_inv", [2, 1, 0])])
def test_variance_allocations(allocation, order):
    """Layers are ranked by the variance of their accumulated attention, and the mean heavy share is the one asked
    for."""
    torch.manual_seed(1)
    score = torch.rand(3, 1, 400) * torch.tensor([3.0, 2.0, 1.0])[:, None, None]
    policy = MiniKV(allocation=allocation, heavy=0.2, recent=0.1)
    assert policy.scope == "model"
    counts = policy.heavy_counts(view_of(400, 3, [0, 1, 2], score))
    assert sum(counts) == 3 * 80
    assert sorted(range(3), key=lambda layer: -counts[layer]) == order
    variance = score.var(-1, unbiased=False)[:, 0]
    weight = variance if allocation == "var_prop" else 1 / variance
    assert counts == pytest.approx((weight / weight.sum() * 240).tolist(), abs=1)


def test_capped_shares_go_to_the_others():
    """What a cap cuts off is shared again; a layer that gets nothing still gets one."""
    assert share_with_cap(torch.tensor([8.0, 1.0, 1.0]), 100, 60) == [60, 20, 20]
    assert share_with_cap(torch.tensor([1.0, 1.0]), 100, 30) == [30, 30]
    assert share_with_cap(torch.tensor([1.0, 0.0]), 10, 60) == [10, 1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"heavy": 0.0}, "heavy=0.0 must be a number in"),
        ({"allocation": "cone"}, "allocation='cone' must be"),
        ({"group": 12}, "group=12 must be a multiple of 8"),
        ({"residual_tokens": 104}, "residual_tokens=104 must be a multiple of group=16"),
        ({"heavy": 0.9}, "heavy=0.9 and recent=0.25 are shares of one prompt"),
    ],
)
def test_bad_settings(settings, message):
    """A bad setting is named with its rule."""
    with pytest.raises(ValueError, match=message):
        MiniKV(**settings)
