"""DiffKV's forms: the ablation's bit pairs with their bytes, quantisation and pruning alone, each option on its own."""

import pytest
import torch
from golden_helpers import read_prompt
from hydra import compose, initialize_config_dir
from store_helpers import golden, held_positions, held_scores, make_store
from test_diffkv_artifact import store_of
from test_golden import ALL_LATER, LAST_FOUR

from kvbench.config import files as listing
from kvbench.methods.diffkv import DiffKV
from kvbench.runs.parts import make_policy

# Bytes of a token and KV head at d=128, score and position included: methods.md 10.4, where the released code has the
# pair; the mirrors follow from the same formula.
RAW_BYTES = {"k8v4": 208, "k4v2": 112, "k8v2": 176, "k4v1": 96, "k4v8": 208, "k2v4": 112}


def preset(name: str, **changes) -> DiffKV:
    """The policy of a published protocol."""
    changed = [f"method.{key}={value}" for key, value in changes.items()]
    with initialize_config_dir(str(listing.conf_folder()), version_base="1.3"):
        return make_policy(compose("config", overrides=[f"experiment={name}", *changed]).method)


def answered(policy, prompt: int, steps: int, head_dim: int):
    """A store of two layers and KV heads after a random prompt and some steps, and its row."""
    torch.manual_seed(0)
    store = make_store(policy, num_layers=2, num_q_heads=6, num_kv_heads=2, head_dim=head_dim)
    row = store.open_row()
    for layer in range(2):
        q, k, v = 3 * torch.randn(6, prompt, head_dim), *torch.randn(2, 2, prompt, head_dim)
        store.prefill_layer(row, layer, q, k, v, head_dim**-0.5)
    for _ in range(steps):
        store.begin_step(torch.tensor([row]))
        for layer in range(2):
            q, k, v = 3 * torch.randn(1, 6, head_dim), *torch.randn(2, 1, 2, head_dim)
            store.attend(layer, q, k, v, head_dim**-0.5)
        store.end_step()
    return store, row


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("pair", RAW_BYTES)
def test_bit_pairs_store_the_bytes_of_their_formula(pair, head_dim):
    """All tokens of prompt and answer at the pair's bits: codes, a scale and a zero per side, score and position."""
    store, row = answered(preset(f"diffkv_ablation_{pair}"), 150, 10, head_dim)
    k_bits, v_bits = int(pair[1]), int(pair[3])
    items, slots = store.ledger.itemise(row), 160 * 4
    assert items["payload_bytes"] == slots * head_dim * (k_bits + v_bits) // 8
    assert items["quant_meta_bytes"] == slots * 8 and items["track_bytes"] == slots * 8
    if head_dim == 128:
        assert store.pages.formats[0].slot.slot_bytes == RAW_BYTES[pair]
    assert int(store.pages.table.num_slots[1].sum()) == 0  # the low tier is never used
    page, where = store.pages.table.lookup(torch.zeros(1, dtype=torch.int64), 0, torch.tensor([3]))
    key, value = store.pages.backend.read_slots(store.pages.pool.pages, store.pages.formats[0], page, where)
    assert 1 < len(key.unique()) <= 2**k_bits and 1 < len(value.unique()) <= 2**v_bits


def test_quantisation_alone_prunes_nothing():
    """With alpha_l = 0 every token of prompt and answer is in one of the two tiers."""
    store, row = answered(preset("diffkv_ablation_quantise_only"), 200, 60, 64)
    counts = store.holding.slots_per_tier(store.pages.lists_of(torch.tensor([row])))
    assert (counts[0] + counts[1]).tolist() == [260] * 4 and all(0 < low < 260 for low in counts[1].tolist())


def test_pruning_alone_keeps_16_bits():
    """With equal thresholds the low tier stays empty, tokens are pruned, and what is left costs 16 bits."""
    store, row = answered(preset("diffkv_ablation_prune_only", alpha_h=0.8, alpha_l=0.8), 200, 60, 64)
    counts = store.holding.slots_per_tier(store.pages.lists_of(torch.tensor([row])))
    assert counts[1].tolist() == [0] * 4 and all(64 <= high < 255 for high in counts[0].tolist())
    assert store.ledger.itemise(row)["payload_bytes"] == int(counts[0].sum()) * 64 * 4


# Each difference between paper and released code, alone ----


def test_scored_queries_are_an_option_of_their_own():
    """The same attention: the paper counts all later queries, `queries=4` only those the released code scores."""
    stored = {}
    for queries in (-1, 4):
        store = make_store(DiffKV(alpha_h=0, alpha_l=0, window=2, queries=queries), num_q_heads=2)
        stored[queries] = held_scores(store, read_prompt(store, ALL_LATER))[0]
    assert stored[-1][0] == pytest.approx(3.6, abs=1e-4)
    assert stored[4][0] == pytest.approx(3.6 - 1 - 0.875, abs=1e-4)  # without the queries of tokens 0 and 1
    assert stored[4][5] == stored[-1][5]


@pytest.mark.parametrize(("rule", "demoted"), [("released", 3), ("algorithm1", 4)])
def test_the_decode_rule_is_an_option_of_its_own(rule, demoted):
    """The golden state on which the two rules part: the released code demotes token 3, Algorithm 1 the candidate 4."""
    assert golden("diffkv_decode")["code_vs_alg1"]["action"] == "demote 3 new slot"
    policy = DiffKV(alpha_h=1.5, alpha_l=0.2, window=2, queries=4, decode_rule=rule)
    store, row = store_of(policy, high={0: 2.4, 3: 0.6, 4: 0.44, 5: 0.5})
    store.begin_step(torch.tensor([row]))
    assert sorted(held_positions(store, row, 1)[0]) == sorted([2, demoted])


def test_the_score_bug_is_an_option_of_its_own():
    """The bug changes the stored scores, not the tiers, under the paper's rule too."""
    stored = []
    for bug in (False, True):
        store = make_store(DiffKV(alpha_h=1, alpha_l=0.2, window=2, queries=4, emulate_score_bug=bug), num_q_heads=2)
        row = read_prompt(store, LAST_FOUR)
        stored.append([held_scores(store, row, tier)[0] for tier in (0, 1)])
    assert [list(tier) for tier in stored[0]] == [list(tier) for tier in stored[1]]
    assert stored[0][0][0] == pytest.approx(2.4, abs=1e-5) and stored[1][0][0] == pytest.approx(0.6, abs=1e-5)
