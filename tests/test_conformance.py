"""What every method must do at the settings of its YAML file; conf/method/*.yaml is the list, nothing else to edit.

Names with a meaning: `sinks` first tokens are never evicted; `window` or `recent` last tokens of a prompt are kept (as
far as a `budget` allows), and a method that acts in decode keeps that many last tokens at every step.
"""

import copy
import dataclasses
import re
from functools import cache
from pathlib import Path

import pytest
import torch
from engine_helpers import answers, comparable, forced_logits, random_tokens, request
from hydra.utils import instantiate
from omegaconf import OmegaConf

from kvbench import ledger
from kvbench.policy import Budget, Policy
from kvbench.views import StoreDecodeView

FOLDER = Path(__file__).resolve().parent.parent / "conf" / "method"
METHODS = sorted(path.stem for path in FOLDER.glob("*.yaml"))


def settings_of(name):
    """The YAML file of a method as a config."""
    return OmegaConf.load(FOLDER / f"{name}.yaml")


@cache
def policy_of(name) -> Policy:
    """The method at the settings of its YAML file."""
    return instantiate(settings_of(name))


@pytest.fixture
def loaded(tiny_model):
    """The tiny Llama with three query heads per KV head, in fp32."""
    return tiny_model("llama", "gqa3", 64)


def test_methods_are_found():
    """The list is not empty, or this file would pass without testing anything."""
    assert {"full", "snapkv", "kivi", "diffkv", "streaming_llm"} <= set(METHODS)


@pytest.mark.parametrize("name", METHODS)
def test_settings_file_is_complete(name):
    """The file says what the method is and where it comes from, and lists every hyper-parameter; so does the class."""
    text, policy = (FOLDER / f"{name}.yaml").read_text(), policy_of(name)
    assert text.startswith("# ") and re.search(r"^# source: \S", text, re.MULTILINE)
    assert isinstance(policy, Policy)
    listed = set(settings_of(name)) - {"_target_"}
    assert listed == {field.name for field in dataclasses.fields(policy) if field.init}
    documentation = type(policy).__doc__
    for word in ("Args:", "Source:", "Differs:", *(f"{field}:" for field in sorted(listed))):
        assert word in documentation, f"the docstring of {type(policy).__name__} lacks {word!r}"


@pytest.mark.parametrize("name", METHODS)
def test_declarations_fit_together(name):
    """Tiers, score and residual are stable from call to call, and a policy can be made again from its fields."""
    policy = policy_of(name)
    assert 1 <= len(policy.tiers) <= 3
    assert policy.tiers == policy.tiers and policy.score == policy.score and policy.residual == policy.residual
    again = type(policy)(**{f.name: getattr(policy, f.name) for f in dataclasses.fields(policy) if f.init})
    assert again == policy and again.tiers == policy.tiers


@pytest.mark.parametrize("name", METHODS)
def test_100_steps_from_short_and_long_prompts(loaded, name):
    """From 1, 5, 10 and 600 tokens, 100 decode steps in one batch: full answers, and a ledger that always adds up."""
    policy = policy_of(name)
    prompts = {"one": 1, "five": 5, "ten": 10, "long": 600}
    requests = [request(key, random_tokens(n), max_new_tokens=101) for key, n in prompts.items()]
    steps = []

    def check(running, step):
        steps.append(step)
        if len(steps) % 10 == 1:
            store, rows = running.store, running._open
            pages = store.table.used_page_ids()
            assert len(pages.unique()) == len(pages) == store.pool.num_used
            items = [ledger.itemise(store, row) for row in rows]
            parts = ("payload_bytes", "quant_meta_bytes", "track_bytes", "slack_bytes")
            assert sum(item[part] for item in items for part in parts) == store.pool.num_used * store.pool.page_bytes
            held = ledger.resident_bytes(store, torch.tensor(rows)).tolist()
            assert held == [item["resident_bytes"] for item in items]

    outcomes = answers(loaded, policy, requests, on_step=check)
    assert len(steps) == 100
    for key, num_tokens in prompts.items():
        outcome = outcomes[key, 0]
        assert (outcome.status, outcome.finish, len(outcome.token_ids)) == ("ok", "length", 101)
        held, kept = outcome.ledger, outcome.kept
        assert kept["tokens_seen"] == num_tokens + 100 and kept["prompt_tokens"] == num_tokens
        assert held["resident_bytes"] == sum(held[item] for item in ledger.ITEMS)
        assert min(held[item] for item in ledger.ITEMS) >= 0
        assert held["peak_bytes"] >= held["resident_bytes"] and held["peak_bytes"] >= held["average_bytes"] > 0
        assert held["fp16_bytes"] == (num_tokens + 100) * 4 * 64 * 4
        assert 0 < kept["slot_ratio"] <= 1 and sum(kept["slots_per_tier"]) <= (num_tokens + 100) * kept["lists"]
        assert policy.check_outcome(vars(outcome)) is None


@pytest.mark.parametrize("name", METHODS)
def test_runs_repeat_themselves(loaded, name):
    """The same seed gives the same tokens and the same bytes."""
    requests = [request(str(n), random_tokens(n), gold=random_tokens(4)) for n in (1, 40, 200)]
    first, second = (answers(loaded, policy_of(name), requests) for _ in range(2))
    assert {k: comparable(o) for k, o in first.items()} == {k: comparable(o) for k, o in second.items()}


@pytest.mark.parametrize("name", METHODS)
def test_a_ragged_batch_equals_single_rows(loaded, name):
    """Rows fed the same tokens in one batch and alone: the same slots, and logits that only rounding tells apart.

    Tolerance: matrix products differ in the last bit between batch sizes, and where that crosses a rounding boundary of
    a tier, one stored element by a step. Another row's cache would move the logits by whole standard deviations.
    """
    policy = policy_of(name)
    prompts = [random_tokens(n) for n in (1, 10, 70, 300)]
    forced = [random_tokens(16, seed=i) for i in range(len(prompts))]
    reports = []
    together = forced_logits(loaded, policy, prompts, forced, reports)
    for prompt, tokens, logits, (_, kept) in zip(prompts, forced, together, reports, strict=True):
        own = []
        alone = forced_logits(loaded, policy, [prompt], [tokens], own)[0]
        assert (logits - alone).abs().max() < 0.1 * alone.std()
        assert kept["prompt_slots"] == own[0][1]["prompt_slots"]
        assert kept["slots_per_tier"] == pytest.approx(own[0][1]["slots_per_tier"], rel=0.01, abs=4)


@pytest.mark.parametrize("name", METHODS)
def test_the_context_can_come_before_the_question(loaded, name):
    """A prompt in two segments is answered, and every token of it is seen once."""
    asked = request("a", random_tokens(300), random_tokens(20, seed=1), gold=random_tokens(5))
    outcome = answers(loaded, policy_of(name), [asked])["a", 0]
    assert (outcome.status, len(outcome.token_ids)) == ("ok", 24)
    assert (outcome.kept["tokens_seen"], outcome.kept["prompt_tokens"]) == (343, 300)
    assert outcome.fidelity["num_tokens"] == 5


def protected(policy, num_prompt_tokens, tokens_seen) -> set[int]:
    """Positions that the method's own fields promise to keep, by the names in this file's first lines."""
    sinks = getattr(policy, "sinks", 0)
    last = getattr(policy, "window", getattr(policy, "recent", 0))
    end = tokens_seen if policy.acts_in_decode else num_prompt_tokens
    last = min(last, end) if isinstance(last, int) else 0
    if hasattr(policy, "budget"):
        budget = Budget.parse(policy.budget)
        if budget.unit == "bytes" or budget.tokens(num_prompt_tokens, 1, 1.0) < sinks + last:
            return set()  # what yields to so small a budget is the method's own business
    return {*range(min(sinks, tokens_seen)), *range(end - last, end)}


@pytest.mark.parametrize("num_tokens", [10, 300])
@pytest.mark.parametrize("name", METHODS)
def test_protected_tokens_are_never_evicted(loaded, name, num_tokens):
    """At every step, sinks, window and the newest token are there, and no position is held twice or made up."""
    policy, steps = policy_of(name), [0]
    asked = request("a", random_tokens(num_tokens), max_new_tokens=41)

    def check(running, step):
        steps[0] += 1
        store, row = running.store, running._open[0]
        seen = int(store.tokens_seen[row])
        assert seen == num_tokens + steps[0]
        if store.residual is not None:  # tokens behind a buffer are immutable: a step only adds one to every list
            counts = store.residual.num_tokens[store.lists_of(torch.tensor([row]))].tolist()
            lists, prompt = len(counts), store.meters[row].prompt_slots["prompt_slots"]
            assert sum(counts) == prompt + steps[0] * lists and max(counts) <= seen
            return
        must = protected(policy, num_tokens, seen) | {seen - 1}
        view = StoreDecodeView(store, torch.tensor([row]))
        arrays = [view.slots(tier) for tier in range(len(store.formats))]
        for layer in range(2):
            for head in range(store.num_heads):
                fields = [(a.pos[0, layer, head], a.valid[0, layer, head]) for a in arrays]
                held = [p for pos, valid in fields for p in pos[valid].tolist()]
                assert len(held) == len(set(held)) and set(held) <= set(range(seen))
                assert must <= set(held)

    answers(loaded, policy, [asked], on_step=check, track=("pos",) if policy.residual is None else ())
    assert steps[0] == 40


@pytest.mark.parametrize("name", METHODS)
def test_a_nan_is_reported_not_hidden(loaded, name):
    """A model that gives NaN fails with its layer, whatever the method does with the numbers."""
    model = copy.deepcopy(loaded.model)
    model.model.layers[1].self_attn.k_proj.weight.data[0, 0] = float("nan")
    broken = dataclasses.replace(loaded, model=model)
    for segments in ((random_tokens(100),), (random_tokens(100), random_tokens(3))):
        outcome = answers(broken, policy_of(name), [request("a", *segments)])["a", 0]
        assert (outcome.status, outcome.nan_layer) == ("nan", 1)
