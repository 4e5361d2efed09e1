"""The uncompressed cache: nothing is lost but what 16 bits lose, and the bytes are those of the papers."""

import pytest
from store_helpers import filled, golden, held_positions, plain_attention, random_layer, step_at

from kvbench.methods.full import Full


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
