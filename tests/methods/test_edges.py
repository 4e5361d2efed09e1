"""The edges of the methods' rules, one token or one bit to either side: what a mutation run found unwatched."""

import pytest
import torch
from conformance_helpers import METHODS
from store_helpers import filled, held_positions, make_store, prefill_view, random_layer, step_at

from kvbench.config.methods import method_settings
from kvbench.methods.ada_snapkv import AdaSnapKV
from kvbench.methods.critical import Critical
from kvbench.methods.h2o import H2O
from kvbench.methods.keydiff import KeyDiff
from kvbench.methods.knorm import KeyNorm
from kvbench.methods.kv_compress import KVCompress
from kvbench.methods.minikv import MiniKV
from kvbench.methods.pyramidkv import PyramidKV
from kvbench.methods.random_control import RandomControl
from kvbench.methods.scissorhands import Scissorhands
from kvbench.methods.snapkv import SnapKV
from kvbench.methods.streaming_llm import StreamingLLM
from kvbench.methods.tova import TOVA
from kvbench.policy import Budget, Policy, keep_blocks
from kvbench.runs.verdict import complaint

# Constants of the methods' sources, read in the code that the YAML names; `make docs` would follow any change.
CONSTANTS = {
    "ada_pyramidkv": {"window": 32, "pool": "max", "pool_kernel": 7, "alpha": 0.2, "beta": 20},
    "ada_snapkv": {"window": 32, "pool": "max", "pool_kernel": 7, "alpha": 0.2},
    "cake": {"window": 32, "gamma": 200.0, "allocation": "preference"},
    "dms": {"window": 256},
    "fastgen": {"recovery": 0.95, "frequent": 0.3, "local": 0.3},
    "keyformer": {"budget": 0.6, "recent_share": 0.3, "tau_init": 1.0, "tau_delta": 0.01},
    "pyramid_infer": {"decay": 0.9, "recent_share": 0.2, "distance_weight": 1.2, "sinks": 4},
    "q_hitter": {"budget": 0.2, "sure_share": 0.35, "bits": 4, "tier": "int4"},
    "simlayerkv": {"threshold": 0.9, "sinks": 4, "recent": 1024, "queries": 1},
    "triattention": {"reach": 65536, "protect": "prompt"},
    "zipcache": {"salient": 0.6, "high": "k4v4", "low": "k2v2", "window": 100, "probes": 0.05},
    "diffkv": {"alpha_h": 1.0, "alpha_l": 0.02, "window": 64, "high": "k8v4", "low": "k4v2"},
    "diffkv_artifact": {"alpha_h": 1.0, "alpha_l": 0.02, "window": 64, "queries": 64, "decode_rule": "released"},
    "duo_attention": {"sinks": 64, "recent": 256, "sparsity": 0.5},
    "h2o": {"budget": 0.2, "recent_share": 0.5, "group": "sum", "one_shot": False},
    "h2o_factory": {"window": 8, "group": "mean", "one_shot": True},
    "kivi": {"bits": 2, "group": 32, "residual_tokens": 128},
    "kv_compress": {"power": 2, "obs_window": 8, "skip_near": 10, "protected": 32, "block": 16},
    "minikv": {"heavy": 0.25, "recent": 0.25, "bits": 2, "group": 16, "residual_tokens": 128, "depth": 7},
    "pyramidkv": {"window": 32, "beta": 20, "pool": "max", "pool_kernel": 7},
    "quest": {"page_tokens": 16, "min_pages": 3, "dense_layers": 2, "group": "max"},
    "scissorhands": {"history": 400, "recent": 10, "drop": 0.5},
    "snapkv": {"window": 32, "pool": "max", "pool_kernel": 7},
    "streaming_llm": {"sinks": 4, "budget": 516, "position_mode": "cache_relative"},
}


@pytest.mark.parametrize("name", sorted(CONSTANTS))
def test_the_files_have_the_sources_constants(name):
    """The settings file gives the numbers that stand in the source it names."""
    listed = method_settings(name)
    assert name in METHODS and {key: listed[key] for key in CONSTANTS[name]} == CONSTANTS[name]


# Budgets ----


def test_a_ratio_means_the_same_before_a_step_as_for_the_prompt():
    """For every percentage and prompts up to 400 tokens the whole tokens agree: 0.29 of 100 is 29, not 28."""
    store, budgets = make_store(Policy()), [Budget(percent / 100, "ratio") for percent in range(1, 101)]
    row = store.open_row()
    for length in range(1, 401):
        store.counters.prompt_tokens[row] = length
        prompt, step = prefill_view(None, length), store.view(torch.tensor([row]))
        asked = [int(step.budget_tokens(budget)) for budget in budgets]
        assert asked == [max(1, percent * length // 100) for percent in range(1, 101)]
        assert asked == [prompt.budget_tokens(budget) for budget in budgets]


def test_blocks_of_equal_price_leave_the_lower_list():
    """Blocks of equal price leave the earlier list."""
    evict = ~keep_blocks(torch.ones(3, 2), torch.tensor([2, 2, 2]), 2, 2)
    assert evict.tolist() == [[True, True], [True, True], [False, False]]


def test_a_share_below_the_window_keeps_the_window():
    """Evicting while decoding never goes below the observation window, however small the budget is."""
    tensors = random_layer(0, 1, 1, 140, 8)
    store, row = filled(SnapKV(budget=0.05, window=16, decode_every=4), [tensors], 100, track=("pos",))
    assert held_positions(store, row) == [list(range(95, 100))]
    for step in range(40):
        step_at(store, row, [tensors], 100 + step)
        held = set(held_positions(store, row)[0])
        assert held >= set(range(max(95, 85 + step), 101 + step))
        assert len(held) <= 16 + 4


# MiniKV ----


def test_minikv_reads_what_it_flushes_and_holds_back_no_group():
    """Of 22 prompt tokens and groups of 8, two whole groups are quantised at once and 6 tokens wait; the step that
    fills the buffer attends over its tokens quantised, not in 16 bits."""
    policy = MiniKV(heavy=0.5, recent=0.5, allocation="uniform", group=8, residual_tokens=16)
    tensors = random_layer(0, 1, 1, 32, 8)
    store, row = filled(policy, [tensors], 22)
    ring = store.holding.ring
    assert (int(ring.num_k[0]), int(ring.num_v[0]), int(ring.num_tokens[0])) == (16, 16, 22)
    for at in range(22, 32):
        (out,) = step_at(store, row, [tensors], at)
    assert int(ring.num_k[0]) == 32
    tiers, ring = store.holding.layer(torch.tensor([row]), 0)
    keys, values, live = store.pages.backend.gather_dense(store.pages.pool.pages, tiers, ring)
    assert int(live.sum()) == 32  # everything is quantised now, the newest token included
    weight = torch.softmax(tensors[0][0, 31] @ keys[live].float().T, -1)
    assert torch.allclose(out[0], weight @ values[live].float(), atol=1e-4)


# Records of four lists that kept `most` and on average `average` of a prompt of 100 tokens, and at the end `end` each.
def complained(policy: Policy, most: float, average: float, end: float = 0.0) -> str | None:
    """What the method's own check says to such a record."""
    kept = {"lists": 4, "prompt_tokens": 100, "tokens_seen": 100, "page_tokens": 8, "slot_bytes": 2.0}
    slots = {"prompt_slots_max": most, "prompt_slots": 4 * average, "slots_per_tier": [4 * end]}
    return complaint(policy, {"kept": kept | slots})


@pytest.mark.parametrize(
    ("policy", "spare"),
    [
        (H2O(budget=40), 1),
        (TOVA(budget=40), 1),
        (Scissorhands(budget=40), 0),
        (StreamingLLM(budget=40), 0),
        (KVCompress(budget=48, continual=True), 1),
    ],
)
def test_what_a_method_holds_at_the_end_is_checked_to_the_token(policy, spare):
    """The budget, and the one token that a step adds where the victim goes when the next one begins."""
    limit = int(Budget.parse(policy.budget).value)
    assert complained(policy, limit, limit, limit + spare) is None
    assert "held at the end" in complained(policy, limit, limit, limit + spare + 0.25)


@pytest.mark.parametrize(
    ("policy", "mean"),
    [
        (AdaSnapKV(budget=40, window=8), True),
        (Critical(budget=40, window=8, allocation="ada"), True),
        (Critical(budget=40, window=8), False),
        (KeyNorm(budget=40, skip_layers=1), True),
        (KeyNorm(budget=40), False),
        (KVCompress(budget=48), True),
        (MiniKV(budget=40), True),
        (PyramidKV(budget=40, window=8), True),
        (SnapKV(budget=40, window=8), False),
        (KeyDiff(budget=40), False),
        (H2O(budget=40), False),
        (RandomControl(budget=40), False),
    ],
)
def test_a_budget_is_of_every_list_or_of_their_mean(policy, mean):
    """One list with more than the budget is wrong, unless lists share one."""
    limit = int(Budget.parse(policy.budget).value)
    assert complained(policy, limit, limit) is None
    assert (complained(policy, limit + 20, limit) is None) == mean
    assert complained(policy, limit + 20, limit + 0.25) is not None


def test_one_shot_methods_may_hold_what_they_like_at_the_end():
    """Only what the prompt left is held to the budget where nothing is evicted later."""
    for policy in (H2O(budget=40, one_shot=True), KVCompress(budget=48), SnapKV(budget=40, window=8)):
        limit = int(Budget.parse(policy.budget).value)
        assert complained(policy, limit, limit, 99) is None
