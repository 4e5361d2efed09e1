"""DiffKV: the classes of prompt tokens, how scores grow, and the ablation's forms. test_diffkv_decode.py has steps."""

import pytest
import torch
from golden_helpers import attend_as, read_prompt
from refusals import refused
from selection import in_turn
from store_helpers import (
    causal_probabilities,
    filled,
    golden,
    held_positions,
    held_scores,
    make_store,
    prefill_view,
    random_layer,
    step_at,
)

from kvbench.config.compose import compose
from kvbench.methods.diffkv import DiffKV
from kvbench.runs.parts import make_policy

HIGH, LOW = 0, 1


@pytest.mark.parametrize("num_tokens", [1, 5, 64, 65, 150])
def test_prompt_tiers_equal_the_oracle(num_tokens):
    """Through the real kernels: mean over later queries, maximum over the group, thresholds, window, stored scores."""
    q, k, v = random_layer(num_tokens, 2, 3, num_tokens, 16)
    store, row = filled(DiffKV(alpha_h=2.5, alpha_l=1.5, window=10), [(2 * q, k, v)], scale=0.25)
    sums = causal_probabilities(2 * q, k, 0.25).sum(1).unflatten(0, (2, 3)).amax(1)
    tiers = []
    for head in range(2):
        high, low = [], []
        for j in range(num_tokens):
            mean = sums[head, j].item() / (num_tokens - j)
            if j >= num_tokens - 10 or mean >= 2.5 / num_tokens:
                high.append(j)
            elif mean >= 1.5 / num_tokens:
                low.append(j)
        tiers.append((high, low))
        for tier, positions in enumerate((high, low)):
            stored = held_scores(store, row, tier)[head]
            assert stored == pytest.approx({j: sums[head, j].item() for j in positions}, abs=1e-4)
    assert list(zip(held_positions(store, row, HIGH), held_positions(store, row, LOW), strict=True)) == tiers
    if num_tokens == 150:
        assert all(low and len(high) + len(low) < 150 for high, low in tiers)  # all three classes occur


def section_4(prob, alpha_h, alpha_l, window):
    """The prompt phase as the section words it: tiers (-1 pruned) of tokens i = 1 .. N of one KV head, from
    probabilities [query heads, N, N]; the mean of the N - i scores from later tokens, its maximum over the query heads,
    alpha / i, and the last `window` tokens in high precision."""
    length, tiers = prob.shape[-1], []
    for i in range(1, length + 1):
        later = [max(float(head[i:, i - 1].sum()) / (length - i) for head in prob)] if i < length else [0.0]
        tier = HIGH if later[0] >= alpha_h / i else LOW if later[0] >= alpha_l / i else -1
        tiers.append(HIGH if i > length - window else tier)
    return tiers


@pytest.mark.parametrize("num_tokens", [1, 2, 65, 150])
def test_section_4_to_the_letter(num_tokens):
    """`threshold=i queries=later` is the text's own rule; the default counts a token's attention to itself and N."""
    q, k, v = random_layer(num_tokens, 2, 3, num_tokens, 16)
    prob = causal_probabilities(4 * q, k, 0.25).unflatten(0, (2, 3))
    want = [section_4(prob[head], 1.5, 0.8, 10) for head in range(2)]

    def tiers(**settings):
        store, row = filled(DiffKV(alpha_h=1.5, alpha_l=0.8, window=10, **settings), [(4 * q, k, v)], scale=0.25)
        found = torch.full((2, num_tokens), -1)
        for tier in (HIGH, LOW):
            for head, positions in enumerate(held_positions(store, row, tier)):
                found[head, positions] = tier
        return found.tolist()

    assert tiers(threshold="i", queries="later") == want
    if num_tokens == 150:
        assert {tier for head in want for tier in head} == {HIGH, LOW, -1}
        others = [tiers(threshold="i"), tiers(queries="later"), tiers()]
        assert all(other != want for other in others) and others[1] != others[2]


@pytest.mark.parametrize("value", ["all", "", 0, -2, 1.5, True])
def test_queries_of_no_meaning_are_refused(value):
    """A number of queries, -1 or `later`."""
    with refused("setting-value", "method.queries"):
        DiffKV(queries=value)


def test_a_threshold_by_position_counts_from_one():
    """With threshold=i the first token's threshold is alpha / 1 and the third's alpha / 3, equality included."""
    policy = DiffKV(alpha_h=0.75, alpha_l=0.375, window=1, threshold="i")
    for scores, want in (
        ([0.75 * 4, 0.375 * 3, 0.25 * 2, 0], [HIGH, HIGH, HIGH, HIGH]),
        ([0.74 * 4, 0.374 * 3, 0.249 * 2, 0], [LOW, LOW, LOW, HIGH]),
        ([0.375 * 4, 0.1875 * 3, 0.125 * 2, 0], [LOW, LOW, LOW, HIGH]),
        ([0.374 * 4, 0.187 * 3, 0.124 * 2, 0], [-1, -1, -1, HIGH]),
    ):
        assert policy.plan_prefill(prefill_view(torch.tensor(scores), 4)).tier_of[0, 0].tolist() == want


@pytest.mark.parametrize(("score", "want"), [(0.25, HIGH), (0.24, LOW), (0.12, -1)])
def test_the_last_token_but_one_is_seen_by_one_later_query(score, want):
    """Its mean is its score: at four tokens the thresholds are 1 / 4 and 0.5 / 4."""
    policy = DiffKV(alpha_h=1.0, alpha_l=0.5, window=1, queries="later")
    plan = policy.plan_prefill(prefill_view(torch.tensor([0.0, 0.0, score, 0.0]), 4))
    assert plan.tier_of[0, 0].tolist() == [-1, -1, want, HIGH]


def test_golden_decode_scores_sum_the_maxima():
    """Each decode step adds the maximum over the group of that step's probabilities."""
    case = golden("diffkv_score")
    store = make_store(DiffKV(window=4, high="native", low="native"), num_q_heads=2)
    row = read_prompt(store, [[[1.0]]] * 2)
    assert held_scores(store, row)[0] == {0: 1.0}  # the prompt's only token attends to itself
    for number, heads in enumerate(case["p"]):
        attend_as(store, row, number + 1, heads)
    first, second = case["sum_of_max"]
    assert held_scores(store, row)[0] == pytest.approx({0: 1.0 + first, 1: second, 2: 0.0}, abs=1e-6)


def test_golden_prompt_scores_take_the_maximum_of_sums():
    """In the prompt each head's probabilities are summed over queries first, then the group's maximum is taken."""
    case = golden("diffkv_score")
    store = make_store(DiffKV(window=4, high="native", low="native"), num_q_heads=2)
    # Tokens 0 and 1 ask for token 0 only; tokens 2 and 3 ask with the golden probabilities and ignore themselves.
    row = read_prompt(store, [[[1.0], [1.0], case["p"][0][head], case["p"][1][head]] for head in range(2)])
    first, second = case["max_of_sum"]
    assert held_scores(store, row)[0] == pytest.approx({0: 2.0 + first, 1: second, 2: 0.0, 3: 0.0}, abs=1e-6)


def test_chain_of_thought_groups_follow_the_bits():
    """cot=true splits metadata as the released code does: 8 bits in 1 group, 4 bits in 2, 2 bits in 4."""
    for cot, splits in ((True, [1, 2, 2, 4]), (False, [1, 1, 1, 1])):
        assert [x for tier in DiffKV(cot=cot).tiers for x in (tier.k_splits, tier.v_splits)] == splits


# Published protocols ----

# Bytes of a token and KV head at d=128, score and position included: methods.md 10.4, where the released code has the
# pair; the mirrors follow from the same formula.
RAW_BYTES = {"k8v4": 208, "k4v2": 112, "k8v2": 176, "k4v1": 96, "k4v8": 208, "k2v4": 112}


def answered(prompt: int, steps: int, head_dim: int, **settings):
    """A store of two layers and KV heads after a random prompt and some steps; its row, and the slots per tier and
    list."""
    policy = make_policy(
        compose(["method=diffkv", *(f"method.{key}={value}" for key, value in settings.items())]).method
    )
    layers = [random_layer(layer, 2, 3, prompt + steps, head_dim) for layer in range(2)]
    layers = [(3 * q, k, v) for q, k, v in layers]
    store, row = filled(policy, layers, prompt, head_dim**-0.5)
    for at in range(prompt, prompt + steps):
        step_at(store, row, layers, at, head_dim**-0.5)
    return store, row, store.holding.slots_per_tier(store.pages.lists_of(torch.tensor([row])))


@pytest.mark.parametrize(("pair", "head_dim"), in_turn([*RAW_BYTES], [128, 64]))
def test_bit_pairs_store_the_bytes_of_their_formula(pair, head_dim):
    """All tokens of prompt and answer at the pair's bits: codes, a scale and a zero per side, score and position."""
    store, row, _ = answered(150, 10, head_dim, alpha_h=0.0, alpha_l=0.0, high=pair, low=pair)
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
    _, _, counts = answered(200, 60, 64, alpha_h=1.0, alpha_l=0.0)
    assert (counts[0] + counts[1]).tolist() == [260] * 4 and all(0 < low < 260 for low in counts[1].tolist())


def test_pruning_alone_keeps_16_bits():
    """With equal thresholds the low tier stays empty, tokens are pruned, and what is left costs 16 bits."""
    store, row, counts = answered(200, 60, 64, alpha_h=0.8, alpha_l=0.8, high="fp16", low="fp16")
    assert counts[1].tolist() == [0] * 4 and all(64 <= high < 255 for high in counts[0].tolist())
    assert store.ledger.itemise(row)["payload_bytes"] == int(counts[0].sum()) * 64 * 4
