"""Uniform quantisation, the random control, and the uncompressed cache."""

from types import SimpleNamespace

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType
from scipy import linalg
from store_helpers import (
    filled,
    golden,
    held_positions,
    make_store,
    plain_attention,
    prefill_view,
    random_layer,
    step_at,
)

from kvbench.kernels.backend import REFERENCE
from kvbench.methods.full import Full
from kvbench.methods.random_control import RandomControl
from kvbench.methods.uniform import Uniform
from kvbench.policy import SlotArrays

GGML = {"q8_0": 136, "q5_1": 96, "q5_0": 88, "q4_1": 80, "q4_0": 72, "iq4_nl": 72}  # of a pair: two blocks each
TIERS = {"int8": 136, "int4": 72, "fp8": 128, "fp8_per_token_head": 132, "nvfp4": 72, "lloyd-k3v2": 44} | {
    "turboquant_k8v4": 100,
    "turboquant_4bit": 70,
    "turboquant_k3v4": 62,
    "turboquant_3bit": 54,
    "fp8_e5m2": 128,
    "int4_per_token_head": 72,
    "nvfp4_4over6": 72,
    "fp4_mx_block16": 72,
    "q8_0-q4_0": 104,
    "f16-q8_0": 196,
}
TIERS |= GGML


@pytest.mark.parametrize(
    ("settings", "slot_bytes"),
    [
        ({"tier": "int4", "symmetric": True}, 68),
        ({"tier": "int4", "splits": 2}, 80),
        *(({"tier": tier}, size) for tier, size in TIERS.items()),
    ],
)
def test_bytes_per_token(settings, slot_bytes):
    """A token of one KV head with 64 channels takes the bytes of the closed formula."""
    assert make_store(Uniform(**settings), head_dim=64).pages.formats[0].slot.slot_bytes == slot_bytes


@pytest.mark.parametrize(
    ("settings", "bound"),
    [
        ({"tier": "int8"}, 0.02),
        ({"tier": "int4"}, 0.3),
        ({"tier": "fp8"}, 0.13),
        ({"tier": "int8_per_token_head"}, 0.009),
        ({"tier": "fp8_per_token_head"}, 0.13),
        ({"tier": "nvfp4"}, 0.36),
        ({"tier": "mxfp4"}, 0.51),
    ],
)
def test_stored_values_are_rounded_and_no_worse(settings, bound):
    """What comes back differs from what went in, by at most half a step (fp8: half of 2^-3 of the value)."""
    q, k, v = (x.clamp(-2, 2) for x in random_layer(0, 1, 1, 30, 64))
    store, _ = filled(Uniform(**settings), [(q, k, v)])
    page, slot = store.pages.table.lookup(torch.zeros(30, dtype=torch.int64), 0, torch.arange(30))
    for got, want in zip(
        REFERENCE.read_slots(store.pages.pool.pages, store.pages.formats[0], page, slot), (k[0], v[0]), strict=True
    ):
        error = (got - want).abs().max()
        assert 1e-4 < error < bound


def through_gguf(x: torch.Tensor, name: str) -> torch.Tensor:
    """What numbers come back as from a type of llama.cpp, by the gguf package."""
    if name == "f16":
        return x.half().float()
    kind = GGMLQuantizationType[name.upper()]
    return torch.from_numpy(gguf.dequantize(gguf.quantize(x.numpy(), kind), kind))


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize(
    ("tier", "dim", "rotation"),
    [("q8_0-q4_0", 128, "none"), ("q5_1-q5_0", 192, "none"), ("f16-q8_0", 64, "none"), ("q4_1", 96, "none")]
    + [("q4_0-f16", 64, "none"), ("q8_0-q4_0", 64, "off")],
)
def test_a_step_over_llama_cpp_s_cache_equals_an_oracle(tier: str, dim: int, rotation: str, backend: str):
    """Hadamard matrices of scipy, blocks of the gguf package, a softmax in fp64. Keys turn by the largest power of
    two that divides the head dim, values by 64, what is no multiple of 64 or not coded not at all."""
    make = torch.Generator().manual_seed(dim)
    q, k, v = (torch.randn(heads, 61, dim, generator=make) for heads in (4, 2, 2))
    if dim == 192:  # by 64 channels; on a grid these sums are exact in any order, on which a scale's last bit depends
        k, v = ((x * 64).round() / 64 for x in (k, v))
    keys, _, values = tier.partition("-")
    values = values or keys
    turn_k, turn_v = torch.eye(dim), torch.eye(dim)
    if dim % 64 == 0 and rotation == "none":
        block = max(size for size in (64, 128) if dim % size == 0)
        for turn, size, name in ((turn_k, block, keys), (turn_v, 64, values)):
            if name != "f16":
                turn[:] = torch.block_diag(*[torch.from_numpy(linalg.hadamard(size)) / size**0.5] * (dim // size))
    store = make_store(
        Uniform(tier=tier), num_q_heads=4, num_kv_heads=2, head_dim=dim, backend=backend, rotation=rotation
    )
    row = store.open_row()
    store.prefill_layer(row, 0, q[:, :-1], k[:, :-1], v[:, :-1], 0.1)
    store.begin_step(torch.tensor([row]))
    out = store.attend(0, *(x[None, :, -1] for x in (q, k, v)), 0.1)[0]
    want = plain_attention(q[:, -1] @ turn_k, through_gguf(k @ turn_k, keys), through_gguf(v @ turn_v, values), 0.1)
    assert torch.allclose(out, want @ turn_v.T, atol=2e-5)


def test_random_keeps_sinks_window_and_budget():
    """The control holds exactly its budget, with the sinks and the window, a different choice per layer and head."""

    def plan(seed: int) -> torch.Tensor:
        policy = RandomControl(budget=60, window=10, seed=seed)
        return policy.plan_prefill(prefill_view(None, 200, num_heads=3)).tier_of

    kept = [(row >= 0).nonzero()[:, 0].tolist() for row in plan(0)[0]]
    assert all(len(k) == 60 and k[:4] == [0, 1, 2, 3] and k[-10:] == list(range(190, 200)) for k in kept)
    assert kept[0] != kept[1]
    assert torch.equal(plan(0), plan(0)) and not torch.equal(plan(0), plan(1))


def test_random_is_spread_over_the_prompt():
    """Over many heads every unprotected position is kept about equally often."""
    plan = RandomControl(budget=60, sinks=0, window=0).plan_prefill(prefill_view(None, 200, num_heads=2000))
    share = (plan.tier_of[0] >= 0).float().mean(0)
    assert (share - 0.3).abs().max() < 0.05  # 0.3 +- 5 standard errors of sqrt(.21 / 2000)


def test_random_keeps_its_sinks_and_no_further_token_while_decoding():
    """Over many steps each of the tokens behind the sinks goes in some list."""
    keep = kept_of_trace(torch.arange(40).expand(20, 1, 3, 40), torch.arange(40, 60))
    assert keep[..., :2].all() and not keep[..., 2:].all(dim=(0, 1, 2)).any()
    assert len({tuple(mask.tolist()) for mask in keep.flatten(0, 2)}) == 60  # each list of each step draws for itself


def test_what_goes_at_random_does_not_depend_on_other_rows():
    """Nor on where in its list a token lies, nor on how many slots are shown that hold none."""
    seen = torch.tensor([40, 47])
    keep = kept_of_trace(torch.arange(40).expand(2, 1, 3, 40), seen)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    padded = torch.cat([order, torch.zeros(9, dtype=torch.int64)]).expand(1, 1, 3, 49)
    alone = kept_of_trace(padded, seen[1:], held=40)
    assert torch.equal(alone[..., :40], keep[1:, ..., order])


def kept_of_trace(pos: torch.Tensor, seen: torch.Tensor, held: int | None = None) -> torch.Tensor:
    """What an eviction keeps of slots with such positions, of which the first `held` hold tokens."""
    rows, layers, heads, width = pos.shape
    valid = (torch.arange(width) < (held or width)).expand(pos.shape)
    view = SimpleNamespace(
        shape=(rows, layers, heads),
        tokens_seen=seen,
        prompt_tokens=torch.full((rows,), 30),
        prompt_slots=torch.full((rows, layers, heads), 10),
        slots=lambda tier: SlotArrays(score=torch.zeros(pos.shape), pos=pos, valid=valid),
        budget_tokens=lambda budget: torch.full((rows,), 10),
    )
    (keep,) = RandomControl(budget=10, sinks=2, window=1, decode_every=1).plan_compact(view).keep
    return keep


def test_two_bits_may_be_symmetric():
    """The fewest that have a code on either side of zero."""
    (tier,) = Uniform(tier="k2v8", symmetric=True).tiers
    assert (tier.symmetric, tier.k_bits, tier.v_bits) == (True, 2, 8)


# The full cache: nothing is lost but what 16 bits lose, and the bytes are those of the papers ----


@pytest.mark.parametrize(("tier", "tolerance"), [("native", 1e-6), ("fp16", 3e-3), ("k8v8", 3e-2)])
@pytest.mark.parametrize(("num_q_heads", "num_kv_heads", "num_tokens"), [(3, 1, 1), (4, 4, 37), (6, 2, 65)])
def test_full_attends_to_every_token(tier, tolerance, num_q_heads, num_kv_heads, num_tokens):
    """Decode attention over the store equals attention over all keys and values, within what the tier rounds off."""
    q, k, v = prompt = random_layer(num_tokens, num_kv_heads, num_q_heads // num_kv_heads, num_tokens + 4, 16)
    store, row = filled(Full(tier=tier), [prompt], num_tokens, 0.25, track=("pos",))
    for step in range(num_tokens, num_tokens + 4):
        (out,) = step_at(store, row, [prompt], step, 0.25)
        want = plain_attention(q[:, step], k[:, : step + 1], v[:, : step + 1], 0.25)
        assert (out - want).abs().max() < tolerance
    assert held_positions(store, row) == [list(range(num_tokens + 4))] * num_kv_heads


@pytest.mark.parametrize(("head_dim", "group"), [(64, "bytes64"), (128, "bytes128")])
@pytest.mark.parametrize(("tier", "name"), [("fp16", "fp16"), ("int8", "int8_tok"), ("int4", "int4_tok")])
def test_full_costs_the_golden_bytes_per_token(head_dim, group, tier, name):
    """Codes and metadata of a token and KV head cost what the papers' formulas say, and 16 bits are 100 %."""
    store, row = filled(Full(tier=tier), [random_layer(0, 2, 1, 50, head_dim)])
    items = store.ledger.itemise(row)
    assert items["payload_bytes"] + items["quant_meta_bytes"] == 50 * 2 * golden(group)[name]
    if tier == "fp16":
        assert items["payload_bytes"] == store.shape.fp16_bytes(50)
