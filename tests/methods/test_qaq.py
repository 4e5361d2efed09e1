"""QAQ: bits by the published formulas in a loop, and each side of each token at the bits it asks for."""

import math

import pytest
from store_helpers import causal_probabilities, filled, held_positions, random_layer

from kvbench.methods.qaq import QAQ
from kvbench.runs.verdict import complaint, remark

HEADS, GROUP, LENGTH, DIM = 2, 2, 40, 16


def read(policy, length=LENGTH):
    """A store of one layer that has read a random prompt; also its row and the prompt."""
    q, k, v = (2 * x for x in random_layer(3, HEADS, GROUP, length, DIM))
    k[:, ::3] *= 4  # keys of different ranges
    v[:, ::4] *= 5
    return *filled(policy, [(q, k, v)], scale=0.5, track=("pos",)), (q, k, v)


def needed(policy, q, k, v, head):
    """Bits of each key and value of a head, from the largest error that each may have."""
    length = k.shape[1]
    rows = causal_probabilities(q, k, 0.5)[head * GROUP : (head + 1) * GROUP, -policy.window :]
    a = [float(rows[..., i].max()) for i in range(length)]
    keys, values = [], []
    for i in range(length):
        moved = max(abs((a[i] if i == j else 0.0) - a[i] * a[j]) for j in range(length))
        key_error = math.sqrt(policy.key_error / DIM) / length / (policy.largest_query * moved)
        value_error = math.sqrt(policy.value_error) / length / a[i]
        for x, error, found in ((k, key_error, keys), (v, value_error, values)):
            spread = float(x[head, i].max() - x[head, i].min())
            found.append(math.log2(spread / (2 * error) + 1))
    return keys, values


@pytest.mark.parametrize(
    "settings",
    [
        {"key_error": 1e4, "value_error": 10.0},
        {"key_error": 1e3, "value_error": 300.0, "key_high": 8, "value_low": 1, "window": 1},
        {"key_error": 1e6, "value_error": 1.0, "window": 9},
    ],
)
def test_each_side_has_the_bits_that_attention_asks_for(settings):
    """Four formats, one per pair of bits; the tokens behind the first deciding query have the higher ones."""
    policy = QAQ(**settings)
    store, row, prompt = read(policy)
    found = [held_positions(store, row, tier) for tier in range(4)]
    for head in range(HEADS):
        keys, values = needed(policy, *prompt, head)
        want = [[], [], [], []]
        for i in range(LENGTH):
            newest = i > LENGTH - policy.window
            low_key = keys[i] <= policy.key_low and not newest
            low_value = values[i] <= policy.value_low and not newest
            want[2 * low_key + low_value].append(i)
        assert [tier[head] for tier in found] == want
        assert sum(map(bool, want)) > 1, "the prompt tells formats apart"


def test_formats_and_bytes_follow_from_the_pairs():
    """Keys and values are billed apart: payload is the sum of both sides' bits over the tokens of each format."""
    policy = QAQ(key_high=8, value_high=4)
    assert [(t.k_bits, t.v_bits) for t in policy.tiers] == [(8, 4), (8, 2), (2, 4), (2, 2)]
    store, row, _ = read(policy)
    held = [sum(map(len, held_positions(store, row, tier))) for tier in range(4)]
    items = store.ledger.itemise(row)
    assert items["payload_bytes"] == sum(n * DIM * bits // 8 for n, bits in zip(held, (12, 10, 6, 4), strict=True))
    assert items["quant_meta_bytes"] == 8 * HEADS * LENGTH and sum(held) == HEADS * LENGTH
    kept = store.ledger.report(row)[1]
    assert complaint(policy, {"kept": kept}) is None
    wrong = kept | {"slots_per_tier": [kept["slots_per_tier"][0] - 1, *kept["slots_per_tier"][1:]]}
    assert "nothing is evicted" in complaint(policy, {"kept": wrong})
    keys = (8 * (held[0] + held[1]) + 2 * (held[2] + held[3])) / sum(held)
    assert f"keys have {keys:.2f} and values" in remark(policy, [{"kept": kept}])


def test_a_prompt_of_one_token():
    """Its attention is 1, and it is among the newest."""
    store, row, _ = read(QAQ(), length=1)
    assert held_positions(store, row, 0) == [[0], [0]]


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_each_number_of_bits_below_the_highest_may_be_the_lower_one(bits):
    """Three bits, too: the tiers are named by what they hold."""
    policy = QAQ(key_high=8, key_low=bits, value_high=8, value_low=bits)
    assert [(t.k_bits, t.v_bits) for t in policy.tiers] == [(8, 8), (8, bits), (bits, 8), (bits, bits)]
