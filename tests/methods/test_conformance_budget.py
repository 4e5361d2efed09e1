"""Every method's budget, tiers and granularity: what was asked is what is held, and a miss fails the run."""

import re

import pytest
from conformance_helpers import distinct, having, idle, keeping, keeps_prompts, policy_of
from engine_helpers import answers, random_tokens, request
from refusals import refused
from selection import FULL, by_path, in_turn, per_path, those_of

from kvbench.cache import ledger
from kvbench.policy import Budget, Tier
from kvbench.runs.verdict import complaint

BUDGETS = (0.2, 0.5, 0.85, 60)
BUDGETED = having("budget")
# Parts of what a budget in bytes may be; the default run has three of five.
FIVE, MOST = {"five": (0.0, 0.13, 0.37, 0.61, 0.88) if FULL else (0.0, 0.37, 0.88)}, {"most": (0.88,)}
TIERS = ("k8v4", "k4v2", "k2v4", "int8", "fp8", "native", "nvfp4")
HEAD_DIM, LAYERS = 64, 2


@pytest.mark.every(3)
@pytest.mark.parametrize(("name", "budget"), those_of(distinct(), in_turn(BUDGETED, BUDGETS)))
def test_the_budget_is_met_at_four_budgets(tiny_model, name, budget):
    """Ratio or tokens: after the prompt and ten steps on, the mean list holds what was asked, within a page."""
    loaded = tiny_model("llama", "gqa3", HEAD_DIM)
    policy = policy_of(name, budget=budget)
    outcome = answers(loaded, policy, [request("0", random_tokens(400), max_new_tokens=11)])["0", 0]
    kept, page = outcome.kept, outcome.kept["page_tokens"]
    asked = Budget.parse(budget).tokens(400, kept["lists"], kept["slot_bytes"])
    asked = 400 if keeps_prompts(policy) else max(asked, getattr(policy, "floor_tokens", 0))
    assert complaint(policy, vars(outcome)) is None
    assert abs(kept["prompt_slots"] / kept["lists"] - asked) <= page
    held = sum(kept["slots_per_tier"]) / kept["lists"]
    assert held <= asked + page + (1 if policy.acts_in_decode else 10)


def smallest(loaded, policy, asked) -> int:
    """The smallest budget in bytes that a method takes for a request, as its refusal of a smaller one says."""
    with refused("setting-value", "method.budget", "budget=1B") as caught:
        answers(loaded, policy, [asked])
    return int(re.search(r"give method.budget=(\d+)B", str(caught.value)).group(1))


@pytest.mark.every(5)
@pytest.mark.parametrize(("name", "parts"), by_path(BUDGETED, policy_of, FIVE, MOST))
def test_a_byte_budget_is_met_at_five_budgets(tiny_model, name, parts):
    """From the smallest that is possible to most of the full cache: at its fullest a sequence holds no more bytes than
    asked, and less than a page per list fewer (a block, where a method keeps whole blocks)."""
    new = 60 if keeps_prompts(policy_of(name)) else 10  # of the answer alone an eviction comes later
    loaded, asked = tiny_model("llama", "gqa3", HEAD_DIM), request("0", random_tokens(250), max_new_tokens=new)
    least, most = smallest(loaded, policy_of(name, budget="1B"), asked), 0
    with refused("setting-value", "method.budget", f"method.budget={least}B"):
        answers(loaded, policy_of(name, budget=f"{least - 1}B"), [asked])
    full = answers(loaded, policy_of(name, budget=10_000), [asked])["0", 0].ledger["resident_bytes"]
    for part in parts:
        budget, fullest = int(least + part * (full - least)), []
        policy = policy_of(name, budget=f"{budget}B")

        def look(running, step):
            fullest.append(running.store.ledger.row_bytes(0))  # noqa: B023

        outcome = answers(loaded, policy, [asked], on_step=look)["0", 0]
        fullest.append(outcome.ledger["peak_bytes"] - outcome.ledger["staging_peak_bytes"])  # or behind the prompt
        page, block = outcome.ledger["page_bytes"] + 4, getattr(policy, "block", 0) * outcome.kept["slot_bytes"]
        assert outcome.status == "ok" and complaint(policy, vars(outcome)) is None
        assert budget - outcome.kept["lists"] * (page + block) < max(fullest) <= budget
        assert outcome.kept["budget_tokens"] >= most
        most = outcome.kept["budget_tokens"]
    assert most > 120


@pytest.mark.parametrize("name", per_path(BUDGETED, policy_of))
def test_a_missed_budget_fails_the_run(tiny_model, name):
    """A method that keeps everything that may go, or far too little of a prompt, does not pass its own check."""
    loaded, asked = tiny_model("llama", "gqa3", HEAD_DIM), [request("0", random_tokens(400), max_new_tokens=1)]
    policy = policy_of(name, budget=0.5)
    said = "protect=prompt keeps all" if keeps_prompts(policy) else "the budget 0.5 ratio allows 200"
    for count in (4,) if keeps_prompts(policy) else (None, 4):
        outcome = answers(loaded, keeping(policy, count), asked)["0", 0]
        assert outcome.kept["prompt_slots_max"] == (count or 400)
        message = complaint(policy, vars(outcome))
        assert message is not None and said in message.replace("208", "200")


def growing() -> list:
    """The budgeted cases that evict while decoding, and methods that would with another setting; what judges them asks
    no method, so that one of each path is enough."""
    acting = [name for name in BUDGETED if policy_of(name).acts_in_decode or policy_of(name).compaction]
    changes = dict.fromkeys(acting, {}) | {
        name: {"decode_every": 8}
        for name in having("decode_every")
        if " " not in name and not any(case.startswith(f"{name} ") for case in acting)
    }
    paths = per_path([*changes], lambda name: policy_of(name, **changes[name]))
    return [pytest.param(*path.values, changes[path.values[0]], id=path.id, marks=path.marks) for path in paths]


@pytest.mark.every(2)
@pytest.mark.parametrize(("name", "changes"), growing())
def test_a_cache_that_only_grows_fails_the_run(tiny_model, name, changes):
    """A method that should evict while decoding passes its own check after 56 steps, but not when it only appends."""
    loaded = tiny_model("llama", "gqa3", HEAD_DIM)
    policy = policy_of(name, budget=50, **changes)
    if keeps_prompts(policy):
        policy = policy_of(name, budget=5, **changes)  # tokens of the answer
    asked = [request("0", random_tokens(120), max_new_tokens=57)]
    assert complaint(policy, vars(answers(loaded, policy, asked)["0", 0])) is None
    message = complaint(policy, vars(answers(loaded, idle(policy), asked)["0", 0]))
    assert message is not None and "held at the end" in message


def test_the_list_of_eviction_methods_is_long():
    """What the next test is about."""
    named = {"snapkv", "pyramidkv", "ada_snapkv", "h2o", "kv_compress", "streaming_llm", "random"}
    assert named <= set(having("budget", "tier"))


@pytest.mark.every(3)
@pytest.mark.parametrize(("name", "tier"), those_of(distinct(), in_turn(having("budget", "tier"), TIERS)))
def test_any_eviction_method_stores_what_it_keeps_in_any_token_tier(tiny_model, name, tier):
    """The same tokens are kept as at 16 bits, and their bytes are those of the tier's closed formula."""
    loaded = tiny_model("llama", "gqa3", HEAD_DIM)
    parsed = Tier.parse(tier)
    element, meta = (64, 0) if parsed.native else (parsed.k_bits + parsed.v_bits, 0 if parsed.fp8 else 8)
    if tier == "nvfp4":
        meta = 2 * HEAD_DIM // 16  # one byte for each block of 16 channels, on both sides
    requests = [request("0", random_tokens(150), max_new_tokens=3)]
    plain, coded = (answers(loaded, policy_of(name, budget=0.4, tier=t), requests)["0", 0] for t in ("fp16", tier))
    slots = sum(coded.kept["slots_per_tier"])
    assert coded.kept["prompt_slots"] == plain.kept["prompt_slots"]
    assert slots < 152 * coded.kept["lists"] or keeps_prompts(policy_of(name))
    assert coded.ledger["payload_bytes"] == slots * HEAD_DIM * element // 8
    assert coded.ledger["quant_meta_bytes"] == slots * meta
    assert coded.ledger["track_bytes"] == slots * 4 * len(policy_of(name).score.track)


@pytest.mark.parametrize("name", per_path(having("granularity"), policy_of))
def test_query_head_copies_are_billed_in_full(tiny_model, name):
    """With granularity=q_head every query head keeps its own set: three times the lists, tokens and payload of kv_head,
    and the ratio to the uncompressed cache of the KV heads says so. A byte budget buys a third of the tokens."""
    loaded, asked = tiny_model("llama", "gqa3", HEAD_DIM), [request("0", random_tokens(200), max_new_tokens=4)]
    own, copies = (
        answers(loaded, policy_of(name, budget=0.5, granularity=g), asked)["0", 0] for g in ("kv_head", "q_head")
    )
    assert copies.kept["lists"] == 3 * own.kept["lists"] == 3 * LAYERS * 2
    assert copies.kept["prompt_slots"] == 3 * own.kept["prompt_slots"]
    assert copies.ledger["fp16_bytes"] == own.ledger["fp16_bytes"]
    for item in ("payload_bytes", "quant_meta_bytes", "track_bytes", "residual_bytes"):
        assert copies.ledger[item] == 3 * own.ledger[item]
    held = [sum(o.ledger[item] for item in ledger.ITEMS[:6]) / o.ledger["fp16_bytes"] for o in (own, copies)]
    assert held[1] > 2.5 * held[0]
    budget = copies.ledger["resident_bytes"]  # enough for half of the prompt three times
    few, many = (
        answers(loaded, policy_of(name, budget=f"{budget}B", granularity=g), asked)["0", 0]
        for g in ("q_head", "kv_head")
    )
    assert max(few.ledger["resident_bytes"], many.ledger["resident_bytes"]) <= budget
    assert few.kept["prompt_slots"] <= copies.kept["prompt_slots"] and many.kept["prompt_slots_min"] > 150
    with refused("setting-value", "method.granularity", "granularity='head'", "kv_head", "q_head"):
        type(policy_of(name))(granularity="head")
