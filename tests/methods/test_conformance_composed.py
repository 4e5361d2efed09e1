"""Every method that ranks tokens, under every setting that composes: generated, so that a new method is covered."""

import pytest
import torch
from conformance_helpers import distinct, fields_of, keeps_prompts, policy_of
from engine_helpers import answers, random_tokens, request
from hydra.errors import InstantiationException
from open_settings import open_settings
from refusals import refused

from kvbench.cache import ledger
from kvbench.config.files import SHARED
from kvbench.policy import Ranked, Scored
from kvbench.rules import declared
from kvbench.runs.verdict import complaint

PROMPTS, NEW_TOKENS, BUDGET = (7, 60), 13, 0.4
LAYERS = HEADS = 2
ALLOCATIONS = ("uniform", "pyramid", "ada", "ada_pyramid", "global", "table")
COMPOSED = {
    **{allocation: {"allocation": allocation} for allocation in ALLOCATIONS},
    "table": {"allocation": "table", "table": [[3.0, 1.0], [0.0, 2.0]]},
    "chunk": {"chunk": 4, "value_aware": False},
    "whole_chunks": {"chunk": 4, "cut_chunk": False, "value_aware": False},
    "value_aware": {"value_aware": True, "chunk": 1},
    "sinks": {"protect": "sinks", "protect_tokens": 5, "decode_every": 4},
    "instruction": {"protect": "instruction", "decode_every": 4},
    "prompt": {"protect": "prompt", "decode_every": 4},
    "answer": {"protect": "answer", "decode_every": 4},
    "threshold": {
        "threshold": -1e9,
        "budget": None,
        "allocation": "uniform",
        "value_aware": False,
    },  # every score reaches it
}
# TOVA keeps one set per layer, which nothing that tells heads apart can share; random has no score to weigh.
REFUSED = {("tova", setting): "set per_head=true" for setting in ("ada", "ada_pyramid", "global", "table")}
REFUSED |= {("tova", "value_aware"): "set per_head=true", ("random", "value_aware"): "random has none"}
REFUSED |= {("random_trace", "value_aware"): "random has none"}
RANKED = [name for name in distinct() if isinstance(policy_of(name), Ranked)]
# What decides about prompts alone has no answer to compress, and nothing to evict for one.
REFUSED |= {
    (name, setting): "is about evictions while decoding, and these settings make none"
    for name in RANKED
    if "decode_every" not in fields_of(name) and not policy_of(name).acts_in_decode
    for setting in ("prompt", "answer")
}


def composed(name: str, setting: str, **changes):
    """The method under a setting."""
    wanted = COMPOSED[setting]
    if "decode_every" not in fields_of(name):
        wanted = {key: value for key, value in wanted.items() if key != "decode_every"}
    if wanted.get("allocation", "table") != "table" and "table" in open_settings(name):
        changes["table"] = None  # that a method's own allocation goes by
    return policy_of.__wrapped__(name, **wanted, **changes)


def run(loaded, policy) -> dict:
    """Two prompts in one batch, the one shorter than any window."""
    asked = [request(str(n), random_tokens(n), max_new_tokens=NEW_TOKENS, instruction_tokens=5) for n in PROMPTS]
    return answers(loaded, policy, asked)


def test_the_list_is_long():
    """The methods that the settings are for, and the names that the command line knows are those of the classes."""
    assert {"h2o", "snapkv", "keydiff", "lagkv", "vatp", "r_kv", "random", "knorm", "tova"} <= set(RANKED)
    kinds = set(declared(Ranked)) | set(declared(Scored))
    assert set(SHARED) == kinds - {"budget", "tier", "decode_every"}


def pairs() -> list:
    """Every setting with four methods (a window, sums, keys, one set per layer), every method with one setting in
    turn, and every refusal; the other pairs are exhaustive."""
    found = []
    for index, name in enumerate(RANKED):
        for place, setting in enumerate(COMPOSED):
            taken = name in ("snapkv", "h2o", "keydiff", "tova") or (name, setting) in REFUSED
            taken = taken or (place - index) % len(COMPOSED) == 0
            found.append(pytest.param(name, setting, marks=() if taken else pytest.mark.exhaustive))
    return found


@pytest.mark.every(3)
@pytest.mark.parametrize(("name", "setting"), pairs())
def test_a_composed_method_keeps_its_budget(tiny_model, name, setting):
    """The mean list keeps what the budget says, to the token; every list keeps something; the method finds its work
    done; the ledger adds up; a run that is made again is the same."""
    loaded = tiny_model("llama", "gqa3", 64)
    budget = {} if setting == "threshold" else {"budget": BUDGET}
    changes = budget | ({"window": 2} if getattr(policy_of(name), "window", 0) > 2 else {})  # of 60 tokens
    if (said := REFUSED.get((name, setting))) is not None:
        with pytest.raises((ValueError, InstantiationException), match=said):
            composed(name, setting, **changes)
        return
    policy = composed(name, setting, **changes)
    short = COMPOSED[setting]["chunk"] - 1 if setting == "whole_chunks" else 0
    for outcome in run(loaded, policy).values():
        kept, length = outcome.kept, outcome.num_prompt_tokens
        asked = max(1, int(BUDGET * length + 1e-9))
        if setting in ("sinks", "instruction"):
            asked = max(asked, 5)
        if setting == "threshold" or keeps_prompts(policy):
            asked = length
        assert outcome.status == "ok" and complaint(policy, vars(outcome)) is None
        lists = LAYERS * HEADS
        assert (asked - short) * lists <= kept["prompt_slots"] <= asked * lists and kept["prompt_slots_min"] >= 1
        assert kept["prompt_slots_max"] - kept["prompt_slots_min"] <= short or policy.allocation != "uniform"
        assert outcome.ledger["resident_bytes"] == sum(outcome.ledger[item] for item in ledger.ITEMS)
        held, new = sum(kept["slots_per_tier"]) / kept["lists"], NEW_TOKENS - 1
        if setting == "prompt":
            assert length + int(BUDGET * new) <= held <= length + max(2, int(BUDGET * new)) + 4


@pytest.mark.parametrize("allocation", ALLOCATIONS)
@pytest.mark.parametrize("name", ["h2o", "keydiff"])
def test_a_composed_method_keeps_to_its_shares_while_decoding(tiny_model, name, allocation):
    """After 16 steps each list holds its share of the prompt's plan again, and what came in since the last eviction."""
    loaded, given = tiny_model("llama", "gqa3", 64), COMPOSED[allocation]
    every = {"decode_every": 8} if name == "keydiff" else {}
    policy = policy_of.__wrapped__(name, budget=30, **given, **every)
    asked = request("0", random_tokens(120), max_new_tokens=18)
    counts = []

    def look(running, step):
        lists = running.store.pages.lists_of(running.store.counters.tokens_seen.new_tensor([0]))
        counts.append(running.store.holding.slots_per_tier(lists)[0].tolist())

    outcome = answers(loaded, policy, [asked], on_step=look)["0", 0]
    assert complaint(policy, vars(outcome)) is None
    at_first = [count - 1 for count in counts[0]]
    assert sum(at_first) == 30 * LAYERS * HEADS
    assert counts[16] == [count + 1 for count in at_first]
    # The tiny model's queries attend so evenly that its heads' sums are all but the same.
    if allocation != "uniform" and not (name == "h2o" and allocation == "ada"):
        assert len(set(at_first)) > 1


def first_held(loaded, policy, **fields) -> list[set[int]]:
    """Per list, the positions that are held after 14 steps behind a prompt of 60 tokens."""
    found = []

    def look(running, step):
        slots = running.store.view(torch.tensor([0])).slots(0)
        rows = zip(slots.pos[0].flatten(0, 1), slots.valid[0].flatten(0, 1), strict=True)
        found[:] = [set(pos[valid].tolist()) for pos, valid in rows]

    asked = request("0", random_tokens(60), max_new_tokens=15, **fields)
    assert complaint(policy, vars(answers(loaded, policy, [asked], on_step=look)["0", 0])) is None
    return found


@pytest.mark.parametrize("name", ["random", "h2o", "tova"])
def test_what_is_protected_is_never_evicted(tiny_model, name):
    """A tenth of the tokens, chosen at random or at every step: the protected ones are there in every head, and what
    is not protected goes."""
    loaded = tiny_model("llama", "gqa3", 64)
    own = {"sinks": 0, "window": 1, "decode_every": 3} if name == "random" else {}
    must = {
        "sinks": set(range(7)),
        "instruction": set(range(11)),
        "prompt": set(range(60)),
        "answer": set(range(60, 74)),
    }
    for protect, positions in must.items():
        settings = {"budget": 0.1, "protect": protect, "protect_tokens": 7} | own
        always = set(range(70))  # the newest wait for the next eviction
        for held in first_held(loaded, policy_of(name, **settings), instruction_tokens=11):
            assert positions <= held and len(held) < 74
            assert len(held - positions) <= 10
            always &= held
        if name == "random":
            assert always == positions & set(range(70))
        plain = first_held(loaded, policy_of(name, **settings | {"protect": "none"}), instruction_tokens=11)
        assert not any(positions <= held for held in plain)


def test_an_instruction_that_is_not_there_cannot_be_protected(tiny_model):
    """A task whose prompts have none is refused before anything is read."""
    policy = policy_of("snapkv", protect="instruction")
    with refused("settings-conflict", "method.protect"):
        run = [request("0", random_tokens(60), instruction_tokens=3), request("1", random_tokens(60))]
        answers(tiny_model("llama", "gqa3", 64), policy, run)


@pytest.mark.parametrize("name", ["h2o", "tova"])
def test_bytes_beside_a_protected_prompt_are_kept_to(tiny_model, name):
    """Where one token goes at every step, too: prompt and answer together hold at most the bytes that were asked for,
    and the answer alone gives way."""
    policy = policy_of.__wrapped__(name, budget="75KiB", protect="prompt")
    asked = request("0", random_tokens(60), max_new_tokens=40)
    outcome = answers(tiny_model("llama", "gqa3", 64), policy, [asked])["0", 0]
    kept, lists = outcome.kept, LAYERS * HEADS
    assert outcome.ledger["resident_bytes"] <= 75 << 10 and complaint(policy, vars(outcome)) is None
    assert kept["prompt_slots"] == 60 * lists and 60 * lists < sum(kept["slots_per_tier"]) < kept["tokens_seen"] * lists
