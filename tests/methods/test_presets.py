"""Methods that are settings of others: the same statistics, and the same tokens of every head; HeadKV's division of a
budget; and which methods act on prompts alone."""

import pytest
import torch
from conformance_helpers import METHODS, policy_of
from store_helpers import prefill_view

from kvbench.methods.headkv import HeadKV
from kvbench.methods.kv_compress import KVCompress
from kvbench.methods.snapkv import SnapKV
from kvbench.policy import Scored, ScoreSpec

LAYERS, LENGTH = 4, 61
SAME = [
    ("pyramidkv", "snapkv", {"allocation": "pyramid"}, 2),
    ("ada_snapkv", "snapkv", {"allocation": "ada"}, 2),
    ("ada_pyramidkv", "snapkv", {"allocation": "ada_pyramid"}, 3),
    ("ada_pyramidkv", "pyramidkv", {"allocation": "ada_pyramid"}, 3),
    ("critical", "snapkv", {"value_aware": True}, 2),
    ("chunkkv", "snapkv", {"chunk": 10, "pool": "none"}, 1),  # with more heads, all of a layer choose together
    ("h2o_factory", "h2o", {"one_shot": True, "group": "mean", "window": 8}, 2),
]


def kept(policy, heads: int, seed: int = 0) -> torch.Tensor:
    """bool [L, H, N]: what a policy keeps of a random prompt, in the views that the cache makes."""
    torch.manual_seed(seed)
    score, norm = torch.rand(2, LAYERS, heads, LENGTH)
    layers = torch.arange(LAYERS)
    plans = [
        policy.plan_prefill(
            prefill_view(score[own], LENGTH, heads, layers=own, num_layers=LAYERS, extra={"norm": norm[own]})
        ).tier_of
        for own in (layers[None] if policy.scope == "model" else layers[:, None])
    ]
    return torch.cat(plans) >= 0


@pytest.mark.parametrize(("preset", "base", "settings", "heads"), SAME)
def test_a_preset_is_its_base_with_settings(preset, base, settings, heads):
    """At six budgets, from below the window to nearly all, before and behind the prompt."""
    for budget in (0.05, 0.25, 0.5, 0.98, 40, 60):
        one, other = policy_of(preset, budget=budget), policy_of(base, budget=budget, **settings)
        assert one.score == other.score and one.scope == other.scope
        assert torch.equal(kept(one, heads), kept(other, heads))
        assert one.budget_is_mean == other.budget_is_mean


def test_random_traces_are_random_choices_behind_a_whole_prompt():
    """The preset is the control, with the prompt protected."""
    settings = {"protect": "prompt", "sinks": 0, "window": 8, "decode_every": 16}
    assert policy_of("random_trace") == policy_of("random", **settings)


def test_official_rounding_is_where_official_code_differs():
    """Released PyramidKV spends more than its budget, released AdaKV may; without it the presets keep to theirs."""
    for name in ("pyramidkv", "ada_pyramidkv"):
        exact, official = (kept(policy_of(name, budget=47, official_rounding=x), 3).sum() for x in (False, True))
        assert exact == 47 * LAYERS * 3 < official


class Squares(Scored):
    """Ranks by the score that a view has; the last seven tokens stay."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.rank_by(ScoreSpec(prefill_queries=8))

    def always(self, budget):
        return 0, 7


@pytest.mark.parametrize("seed", range(4))
def test_kv_compress_in_blocks_of_one_is_a_global_allocation(seed):
    """Without blocks, KV-Compress's schedule is one ranking of all heads: its window of 8 counts the incoming token."""
    blocks = KVCompress(budget=0.4, block=1)
    assert torch.equal(kept(blocks, 2, seed), kept(Squares(budget=0.4, allocation="global", alpha=0.0), 2, seed))
    assert not torch.equal(kept(blocks, 2, seed), kept(KVCompress(budget=0.4, block=4), 2, seed))


TABLE = [[0.5, 0.1], [0.02, 0.2], [0.13, 0.05]]


@pytest.mark.parametrize("beta", [1.005, 1.2, 2.0, 5.0])
def test_heads_get_the_paper_s_budgets_and_snapkv_s_tokens(beta):
    """Each head keeps base - base / beta, and its share of the pool of base / beta from every head; which tokens, is
    SnapKV's choice at that budget."""
    torch.manual_seed(0)
    window, budget, length = 4, 64, 400
    score = torch.rand(3, 2, length)
    policy = HeadKV(budget=budget, window=window, alpha=1 - 1 / beta, table=TABLE)
    base, pool = budget - window, (budget - window) / beta * 6
    total = sum(map(sum, TABLE))
    counts = []
    for layer in range(3):
        view = prefill_view(score[layer], length, 2, layers=[layer], num_layers=3)
        keep = policy.plan_prefill(view).tier_of[0] >= 0
        for head in range(2):
            exact = base - base / beta + pool * TABLE[layer][head] / total
            count = int(keep[head].sum())
            assert abs(count - window - exact) < 1
            counts.append(count)
            plain = SnapKV(budget=count, window=window).plan_prefill(prefill_view(score[layer, head], length))
            assert torch.equal(plain.tier_of[0, 0] >= 0, keep[head])
    assert sum(counts) == 6 * budget and len(set(counts)) > 3


# What acts on prompts alone: streams and whole texts say so, or refuse what does more.

# By the papers: these choose among the prompt's tokens once, and store all tokens in 16 bits.
PROMPT_ONLY = {
    *("cake", "fastgen", "headkv", "pyramid_infer"),
    *("ada_pyramidkv", "ada_snapkv", "chunkkv", "critical", "expected_attention", "full", "h2o_factory", "keydiff"),
    *("knorm", "kv_compress", "kvpress", "kvzip", "lagkv", "pyramidkv", "random", "snapkv", "think", "vatp"),
}


def test_which_methods_act_on_the_prompt_alone() -> None:
    """Evicting while decoding, lower precision, a buffer before it, and reading in part are all more than that."""
    assert {name for name in METHODS if policy_of(name).prompt_only} == PROMPT_ONLY


def test_settings_decide_too() -> None:
    """The same method acts on the answer once it evicts every so many steps, or stores it at a lower precision."""
    assert policy_of("snapkv", tier="native").prompt_only and not policy_of("snapkv", tier="k8v4").prompt_only
    assert (
        not policy_of("snapkv", decode_every=64).prompt_only
        and not policy_of("kv_compress", continual=True).prompt_only
    )
    assert policy_of("h2o", one_shot=True).prompt_only and not policy_of("full", tier="int8").prompt_only
