"""DiffKV: the classes of prompt tokens, how scores grow, and settings. Algorithm 1 is in test_diffkv_decode.py."""

import math

import pytest
import torch
from store_helpers import causal_probabilities, golden, held_positions, held_scores, make_store, prefill_view

from kvbench.kernels.operands import HeadScores
from kvbench.kernels.reference.prompts import reduce_scores
from kvbench.methods.diffkv import DiffKV

HIGH, LOW = 0, 1

# Prompts ----------------------------------------------------------------------------------------------------------


def golden_view(policy):
    """The golden prompt: its two query heads' sums reduced by the policy's rule, as the kernel would hand them over.

    The golden means count at most 4 queries per token; the policy divides by all N - j, so the sums are rescaled.
    """
    case = golden("diffkv_prompt")
    sums = reduce_scores(
        torch.tensor(case["S"]),
        1,
        policy.score.prefill_queries,
        HeadScores(
            pool=policy.score.pool,
            pool_kernel=1,
            pool_stage=policy.score.pool_stage,
            pool_region=policy.score.pool_region,
            group=policy.score.group_reduce,
        ),
    )
    assert sums[0].tolist() == pytest.approx(case["max"])
    assert (sums[0] / torch.tensor(case["count"])).tolist() == pytest.approx(case["mean"])
    return prefill_view(sums * torch.arange(6, 0, -1) / torch.tensor(case["count"]), 6)


@pytest.mark.parametrize(("threshold", "classes"), [("N", "code_N"), ("i", "paper_i")])
def test_golden_prompt_classes(threshold, classes):
    """With thresholds over N, or over the 1-based position, the golden prompt falls into the golden classes."""
    policy = DiffKV(alpha_h=1, alpha_l=0.2, window=2, threshold=threshold)
    tiers = policy.plan_prefill(golden_view(policy)).tier_of[0, 0].tolist()
    names = {HIGH: "H", LOW: "L", -1: "P"}
    assert [names[tier] for tier in tiers] == [name.rstrip("*") for name in golden("diffkv_prompt")[classes]]


@pytest.mark.parametrize("num_tokens", [1, 5, 64, 65, 150])
def test_prompt_tiers_equal_the_oracle(num_tokens):
    """Through the real kernels: mean over later queries, maximum over the group, thresholds, window, stored scores."""
    torch.manual_seed(num_tokens)
    policy = DiffKV(alpha_h=2.5, alpha_l=1.5, window=10)
    store = make_store(policy, num_q_heads=6, num_kv_heads=2, head_dim=16)
    q, (k, v) = 2 * torch.randn(6, num_tokens, 16), torch.randn(2, 2, num_tokens, 16)
    row = store.open_row()
    store.prefill_layer(row, 0, q, k, v, 0.25)
    sums = causal_probabilities(q, k, 0.25).sum(1).unflatten(0, (2, 3)).amax(1)
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


# Scores -----------------------------------------------------------------------------------------------------------


def logits(prob, width=8):
    """A query vector whose products with unit vectors are the logarithms of the probabilities; 0 becomes -60."""
    return torch.tensor([math.log(p) if p else -60.0 for p in prob] + [0.0] * (width - len(prob)))


def test_golden_decode_scores_sum_the_maxima():
    """Each decode step adds the maximum over the group of that step's probabilities."""
    case = golden("diffkv_score")
    store = make_store(DiffKV(window=4, high="native", low="native"), num_q_heads=2)
    keys, row = torch.eye(8), store.open_row()
    store.prefill_layer(row, 0, torch.zeros(2, 1, 8), keys[None, :1], keys[None, :1], 1.0)
    assert held_scores(store, row)[0] == {0: 1.0}  # the prompt's only token attends to itself
    for number, heads in enumerate(case["p"]):
        q = torch.stack([logits([*p, 0, 0][: number + 2]) for p in heads])
        store.begin_step(torch.tensor([row]))
        store.attend(0, q[None], keys[None, number + 1 :][:, :1], keys[None, number + 1 :][:, :1], 1.0)
        store.end_step()
    first, second = case["sum_of_max"]
    assert held_scores(store, row)[0] == pytest.approx({0: 1.0 + first, 1: second, 2: 0.0}, abs=1e-6)


def test_golden_prompt_scores_take_the_maximum_of_sums():
    """In the prompt each head's probabilities are summed over queries first, then the group's maximum is taken."""
    case = golden("diffkv_score")
    store = make_store(DiffKV(window=4, high="native", low="native"), num_q_heads=2)
    # Tokens 0 and 1 ask for token 0 only; tokens 2 and 3 ask with the golden probabilities and ignore themselves.
    asked = [[[1.0], [1.0, 0.0], [*case["p"][0][h], 0.0], [*case["p"][1][h], 0.0, 0.0]] for h in range(2)]
    q = torch.stack([torch.stack([logits(p) for p in head]) for head in asked])
    row = store.open_row()
    store.prefill_layer(row, 0, q, torch.eye(8)[None, :4], torch.eye(8)[None, :4], 1.0)
    first, second = case["max_of_sum"]
    assert held_scores(store, row)[0] == pytest.approx({0: 2.0 + first, 1: second, 2: 0.0, 3: 0.0}, abs=1e-6)


# Settings ----------------------------------------------------------------------------------------------------------


def test_chain_of_thought_groups_follow_the_bits():
    """cot=true splits metadata as the released code does: 8 bits in 1 group, 4 bits in 2, 2 bits in 4."""
    high, low = DiffKV(cot=True).tiers
    assert (high.k_splits, high.v_splits, low.k_splits, low.v_splits) == (1, 2, 2, 4)
    high, low = DiffKV().tiers
    assert (high.k_splits, high.v_splits, low.k_splits, low.v_splits) == (1, 1, 1, 1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"alpha_l": -0.1}, r"alpha_l=-0.1 must be a number in \[0, 1e\+09\]"),
        ({"alpha_l": 0.5, "alpha_h": 0.4}, r"alpha_l=0.5 and alpha_h=0.4 must satisfy"),
        ({"window": 0}, r"window=0 must be a whole number of tokens from 1"),
        ({"queries": 0}, r"queries=0 must be a whole number of tokens from 1 to 16777216, or -1"),
        ({"decode_rule": "paper"}, r"decode_rule='paper' must be 'algorithm1' or 'released'"),
        ({"threshold": "n"}, r"threshold='n' must be 'N' or 'i'"),
        ({"high": "k2v8"}, r"low=k4v2 must not hold more bits per key or value than high=k2v8"),
        ({"high": "k4v2"}, r"high=k4v2 and low=k4v2 are one precision"),
        ({"high": "k5v3"}, r"k_bits=5 is not one of"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    """Each bad setting is named with its value and the rule."""
    with pytest.raises(ValueError, match=message):
        DiffKV(**settings)
