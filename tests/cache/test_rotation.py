"""Rotated channels: nothing changes where nothing is rounded, and outliers cost a quantiser less."""

import dataclasses

import pytest
import torch
from engine_helpers import NATIVE_METHODS, answers, comparable, random_tokens, request
from refusals import refused
from selection import in_turn
from store_helpers import make_store

from kvbench.cache.rotation import Rotation, hadamard
from kvbench.methods.h2o import H2O
from kvbench.methods.keydiff import KeyDiff
from kvbench.methods.kvquant_style import KVQuantStyle
from kvbench.methods.quest import Quest
from kvbench.methods.r_kv import RKV
from kvbench.methods.snapkv import SnapKV
from kvbench.methods.streaming_llm import StreamingLLM
from kvbench.methods.uniform import Uniform
from kvbench.models.load import load_model
from kvbench.policy import Tier

# Every way of holding, ranking and reading tokens, in the model's own type: nothing is rounded.
POLICIES = NATIVE_METHODS | {
    "streaming_llm": StreamingLLM(budget=40, position_mode="absolute", tier="native"),
    "h2o": H2O(budget=30, window=8, tier="native"),
    "keydiff": KeyDiff(budget=40, decode_every=4, tier="native"),
    "r_kv": RKV(budget=40, window=5, decode_every=4, tier="native"),
    # All pages are read: which ones bounds choose does depend on the channels that they are bounds of.
    "quest": Quest(read_budget=1000, page_tokens=8, dense_layers=0, tier="native"),
}


@pytest.mark.parametrize("dim", [1, 2, 8, 24, 64, 80, 96, 128])
def test_the_matrix_is_orthogonal_and_spreads(dim):
    """Every entry of a block has one size; queries and keys keep their products, and the way back is exact."""
    matrix = hadamard(dim)
    assert torch.allclose(matrix @ matrix.T, torch.eye(dim), atol=1e-6)
    block = dim & -dim
    assert matrix[matrix != 0].abs().tolist() == pytest.approx([block**-0.5] * (dim * block))
    turn, x = Rotation(matrix), torch.randn(3, 5, dim)
    assert torch.allclose(turn.back(turn.apply(x)), x, atol=1e-5)
    assert turn.apply(x.half()).dtype == torch.float16
    assert Rotation().apply(x) is x
    assert torch.equal(hadamard(dim), matrix), "every run has the same signs"


@pytest.mark.parametrize(("dim", "kv_heads"), [(80, 1), (96, 2), (112, 1), (128, 1)])
def test_a_row_is_turned_to_the_same_bits_in_any_company(dim, kv_heads):
    """With one KV head or two, whose products of few rows MKL sums in other orders."""
    overrides = {"num_attention_heads": 2, "num_key_value_heads": kv_heads, "head_dim": dim}
    loaded = load_model({"kind": "random", "preset": "tiny", "overrides": overrides, "device": "cpu"})
    if not loaded.rows_are_alone:
        pytest.skip("products are not streamed here")
    asked = [request(str(n), random_tokens(n), gold=random_tokens(7), max_new_tokens=6) for n in (50, 3, 30, 9, 77)]
    alone, joined = (answers(loaded, H2O(budget=0.4), asked, batch_size=n, rotation="hadamard") for n in (1, 8))
    assert {key: comparable(one) for key, one in joined.items()} == {key: comparable(one) for key, one in alone.items()}


@pytest.mark.every(2)
@pytest.mark.parametrize(("name", "backend"), in_turn([*POLICIES], ("torch", "auto")))
def test_without_rounding_nothing_changes(tiny_model, name, backend):
    """The same answers from the same tokens, for prompts, segments and steps, and the same bytes."""
    loaded = tiny_model("llama", "gqa3", 64, narrow=True)
    asked = [
        request("a", random_tokens(70), gold=random_tokens(9, seed=3), max_new_tokens=11),
        request("b", random_tokens(50, seed=1), random_tokens(12, seed=2), max_new_tokens=11),
    ]
    plain, rotated = (
        answers(loaded, POLICIES[name], asked, batch_size=2, backend=backend, rotation=kind)
        for kind in ("none", "hadamard")
    )
    for key, one in plain.items():
        assert (one.token_ids, one.ledger, one.kept) == (rotated[key].token_ids, rotated[key].ledger, rotated[key].kept)
        if one.fidelity is not None:
            assert rotated[key].fidelity["nll"] == pytest.approx(one.fidelity["nll"], abs=1e-4)


@pytest.mark.parametrize("tier", ["int4", "k4v2", "k2v2"])
def test_an_outlier_costs_a_quantiser_less(tier):
    """One channel of the keys and one of the values are twenty times the others: the error of attention shrinks."""
    torch.manual_seed(0)
    layers, heads, dim, tokens = 1, 2, 64, 60
    q, k, v = (torch.randn(heads, tokens + 1, dim) for _ in range(3))
    k[..., 5] *= 20
    v[..., 9] *= 20
    q[..., 5] /= 20
    exact = torch.softmax((q[:, -1:] @ k.transpose(1, 2)) * 0.1, -1) @ v
    errors = {}
    for rotation in ("none", "hadamard"):
        store = make_store(
            Uniform(tier=tier),
            num_q_heads=heads,
            num_kv_heads=heads,
            head_dim=dim,
            num_layers=layers,
            rotation=rotation,
        )
        row = store.open_row()
        store.prefill_layer(row, 0, q[:, :-1], k[:, :-1], v[:, :-1], 0.1)
        store.begin_step(torch.tensor([row]))
        out = store.attend(0, *(x[None, :, -1] for x in (q, k, v)), 0.1)
        store.end_step()
        errors[rotation] = float((out[0] - exact[:, 0]).norm())
    assert errors["hadamard"] < 0.7 * errors["none"], errors


def test_statistics_see_what_the_model_gave():
    """Slots that are measured at a bulk eviction come back in the model's own channels."""
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 40, 16), torch.randn(1, 40, 16), torch.randn(1, 40, 16)
    found = []
    for rotation in ("none", "hadamard"):
        policy = RKV(budget=30, window=5, decode_every=4, tier="native")
        store = make_store(policy, num_q_heads=2, head_dim=16, rotation=rotation)
        row = store.open_row()
        store.prefill_layer(row, 0, q, k, v, 0.3)
        rows = torch.tensor([row])
        found.append(store.holding.scores.of_slots(rows, store.counters.tokens_seen[rows]))
    assert torch.allclose(*found, atol=1e-5) and found[0].abs().sum() > 0


def test_keys_without_positions_are_refused():
    """The rotary embedding is put on in the model's channels, so such keys cannot be rotated before."""
    inv_freq = 10000.0 ** -(torch.arange(4) / 4)
    with refused("settings-conflict", "store.rotation", "StreamingLLM", "position_mode=cache_relative"):
        make_store(StreamingLLM(budget=40, position_mode="cache_relative"), inv_freq=inv_freq, rotation="hadamard")
    with refused("settings-conflict", "store.rotation", "KVQuantStyle", "position_mode=pre_rope"):
        make_store(KVQuantStyle(group=8), inv_freq=inv_freq, rotation="hadamard")
    make_store(dataclasses.replace(KVQuantStyle(group=8), pre_rope=False), rotation="hadamard")
    with refused("setting-value", "store.rotation", "store.rotation='random'"):
        make_store(SnapKV(budget=0.5), rotation="random")


@pytest.mark.parametrize("sides", ["keys", "both"])
def test_a_format_may_turn_keys_alone_or_both_sides(tiny_model, sides):
    """In the model's own type nothing changes: what a tier turns on the way in, the store turns back."""
    loaded = tiny_model("llama", "gqa3", 64)
    asked = [request("a", random_tokens(60), random_tokens(9, seed=2), gold=random_tokens(5, seed=3))]
    plain, other = (
        answers(loaded, Uniform(tier=Tier(native=True, rotated=how)), asked)["a", 0] for how in ("none", sides)
    )
    assert (plain.token_ids, plain.ledger) == (other.token_ids, other.ledger)
    store = make_store(Uniform(tier=Tier(native=True, rotated=sides)), head_dim=64)
    row, (k, v) = store.open_row(), torch.randn(2, 1, 20, 64)
    store.prefill_layer(row, 0, torch.randn(1, 20, 64), k, v, 0.125)
    held_k, held_v = store.pages.read(0, *store.pages.table.lookup(torch.zeros(20, dtype=int), 0, torch.arange(20)))
    assert torch.allclose(held_k, k[0] @ hadamard(64), atol=1e-5)
    assert torch.allclose(held_v, v[0] @ hadamard(64) if sides == "both" else v[0], atol=1e-5)


def test_a_rotated_format_is_refused_where_positions_come_later():
    """Keys without their positions cannot be turned; the message names the format."""
    with refused("settings-conflict", "store.rotation", "turboquant_4bit"):
        make_store(StreamingLLM(budget=40, tier="turboquant_4bit"))
    make_store(StreamingLLM(budget=40, tier="turboquant_4bit"), inv_freq=torch.ones(4), rotation="off")
    with refused("settings-conflict", "store.rotation", "q8_0", "turboquant_4bit"):
        make_store(Uniform(tier="q8_0", tiers_by_layer="0:turboquant_4bit"), num_layers=2, head_dim=64)
