"""What every method must do at the settings of its YAML file; conf/method/*.yaml is the list, nothing else to edit.

Declarations, losslessness, determinism, batches, protected tokens, long answers. test_conformance_budget.py has
budgets, tiers and granularity; conformance_helpers.py says which names have a meaning.
"""

import copy
import dataclasses
import inspect
import re
from functools import cache
from typing import get_args, get_type_hints

import pytest
import torch
from conformance_helpers import (
    FOLDER,
    METHODS,
    SHAPES,
    cases,
    distinct,
    fields_of,
    having,
    listed_of,
    lossless_of,
    own_fields_of,
    policy_of,
    protected,
    watched,
)
from engine_helpers import answers, comparable, forced_logits, random_tokens, request
from selection import FULL, by_path, few, in_turn, per_path, those_of

from kvbench.cache import ledger
from kvbench.cache.buffered import Buffered
from kvbench.cli import method_table
from kvbench.methods.full import Full
from kvbench.policy import Compaction, Policy, ReadSpec, Residual, ScoreSpec, Tier
from kvbench.runs.verdict import complaint


@pytest.fixture
def loaded(tiny_model):
    """The tiny Llama with three query heads per KV head, in fp32."""
    return tiny_model("llama", "gqa3", 64)


# Files and declarations ----


def test_methods_are_found():
    """The list is not empty, or these files would pass without testing anything; an alias is the method it stands
    for."""
    assert {"full", "snapkv", "kivi", "diffkv", "streaming_llm"} <= set(METHODS)
    assert policy_of("leankv") == policy_of("diffkv")
    assert set(METHODS) - set(distinct()) <= {"leankv"}


@pytest.mark.parametrize("name", METHODS)
def test_settings_file_is_complete(name):
    """The file says what the method is and where it comes from, and lists every hyper-parameter of its own; the class,
    or the one that it has a setting from, explains it."""
    text, policy = (FOLDER / f"{name}.yaml").read_text(), policy_of(name)
    assert text.startswith("# ") and re.search(r"^# source: \S", text, re.MULTILINE)
    assert isinstance(policy, Policy)
    assert own_fields_of(name) <= listed_of(name) <= fields_of(name)
    explained = method_table.meanings(type(policy))
    for word in ("Source:", "Differs:"):
        assert word in type(policy).__doc__, f"the docstring of {type(policy).__name__} lacks {word!r}"
    assert set(explained) >= fields_of(name)


@pytest.mark.parametrize("path", sorted((FOLDER.parents[1] / "methods").glob("*.py")), ids=lambda path: path.stem)
def test_method_files_are_short(path):
    """A method only decides: its file stays under 150 lines."""
    assert len(path.read_text().splitlines()) < 150


@pytest.mark.parametrize("case", [case for case in cases() if " " in case])
def test_further_settings_change_the_method(case):
    """A line `# also:` names settings that the method has, and other values than the file's."""
    name, _, also = case.partition(" ")
    changed, plain = policy_of(case), policy_of(name)
    for setting in also.split():
        key = setting.split("=")[0]
        assert getattr(changed, key) != getattr(plain, key)
    with pytest.raises(AssertionError, match=rf"conf/method/{name}.yaml has no setting \['typo'\]"):
        policy_of(f"{name} typo=1")


@pytest.mark.parametrize("name", sorted({*METHODS, *cases()}))
def test_declarations_fit_together(name):
    """What a method declares has the type that the contract names, stays as `declare` left it, and is the same
    for a policy that is made again from its fields."""
    policy, types = policy_of(name), get_type_hints(Policy)
    assert 1 <= len(policy.tiers) <= 4 and all(isinstance(tier, Tier) for tier in policy.tiers)
    assert isinstance(policy.score, ScoreSpec)
    assert isinstance(policy.residual, Residual | None) and isinstance(policy.reading, ReadSpec | None)
    for item in ("scope", "position_mode", "granularity"):
        assert getattr(policy, item) in get_args(types[item])
    assert isinstance(policy.acts_in_decode, bool) and isinstance(policy.compaction, Compaction | None)
    assert not any(isinstance(inspect.getattr_static(policy, item), property) for item in types)
    again = type(policy)(**{f.name: getattr(policy, f.name) for f in dataclasses.fields(policy) if f.init})
    assert again == policy and again is not policy
    assert {item: getattr(again, item) for item in types} == {item: getattr(policy, item) for item in types}


# What comes out ----


@pytest.fixture(scope="module")
def full_logits(tiny_model):
    """Gives, per head shape and tier, the logits of the full cache on the prompts and continuations of
    `test_lossless_settings_equal_full`."""

    @cache
    def build(heads, tier):
        prompts, forced = [random_tokens(n, seed=4) for n in (1, 90)], [random_tokens(9, seed=5)] * 2
        loaded = tiny_model("llama", heads, 64)
        return loaded, prompts, forced, forced_logits(loaded, Full(tier=tier), prompts, forced)

    return build


# Settings of `# also:` lines are exhaustive here and below; the long answers of the default run take every one.
@pytest.mark.every(3)
@pytest.mark.parametrize(("name", "heads"), those_of(distinct(), in_turn(cases(), SHAPES)))
def test_lossless_settings_equal_full(full_logits, name, heads):
    """With its lossless settings a method gives the full cache's logits (1e-4 in fp32) after 1 and 90 tokens and along
    9 more, with 1, 3 or 7 query heads per KV head."""
    check_lossless(name, heads, lossless_of(name), *full_logits(heads, tier_of(name)))


@pytest.mark.parametrize("name", having("granularity"))
def test_copies_per_query_head_lose_nothing_either(full_logits, name):
    """With the KV heads repeated, as official code does, the lossless settings give the same logits."""
    check_lossless(name, "gqa7", lossless_of(name) | {"granularity": "q_head"}, *full_logits("gqa7", tier_of(name)))


def tier_of(name) -> str:
    """The tier that the lossless settings of a method store, `native` wherever it can."""
    return "native" if policy_of(name, **lossless_of(name)).tiers[0].native else "fp16"


def check_lossless(name, heads, changes, loaded, prompts, forced, want) -> None:
    """A method at the given settings keeps every token and gives the wanted logits (1e-4 in fp32)."""
    assert changes or name == "full", f"conf/method/{name}.yaml needs a line '# lossless: key=value ...'"
    reports = []
    got = forced_logits(loaded, policy_of(name, heads, **changes), prompts, forced, reports)
    for a, b, prompt, (_, kept) in zip(want, got, prompts, reports, strict=True):
        assert (a - b).abs().max() < 1e-4
        assert sum(kept["slots_per_tier"]) == (len(prompt) + 9) * kept["lists"]


@pytest.mark.every(3)
@pytest.mark.parametrize("name", few(cases(), *distinct()))
def test_runs_repeat_themselves(loaded, name):
    """The same seed gives the same tokens and the same bytes."""
    requests = [request(str(n), random_tokens(n), gold=random_tokens(3), max_new_tokens=9) for n in (1, 200)]
    first, second = (answers(loaded, policy_of(name), requests) for _ in range(2))
    assert {k: comparable(o) for k, o in first.items()} == {k: comparable(o) for k, o in second.items()}


# Methods at the settings of their files are compared bit by bit in tests/engine (test_batch.py, test_request_alone.py).
ALSO = [case for case, *_ in (each.values for each in per_path(cases(), policy_of) if not each.marks) if " " in case]


@pytest.mark.parametrize("name", few(cases(), *ALSO))
def test_a_ragged_batch_equals_single_rows(tiny_model, name):
    """Rows fed the same tokens in one batch and alone: the same slots, and logits that only rounding tells apart.

    Tolerance: matrix products differ in the last bit between batch sizes, and where that crosses a rounding boundary of
    a tier, one stored element by a step. Another row's cache would move the logits by whole standard deviations.
    """
    loaded, policy = tiny_model("llama", "gqa7", 64), policy_of(name)
    prompts = [random_tokens(n) for n in (1, 70, 200)]
    forced = [random_tokens(10, seed=i) for i in range(len(prompts))]
    reports = []
    together = forced_logits(loaded, policy, prompts, forced, reports)
    for prompt, tokens, logits, (_, kept) in zip(prompts, forced, together, reports, strict=True):
        own = []
        alone = forced_logits(loaded, policy, [prompt], [tokens], own)[0]
        assert (logits - alone).abs().max() < 0.1 * alone.std()
        assert kept["prompt_slots"] == own[0][1]["prompt_slots"]
        assert kept["slots_per_tier"] == pytest.approx(own[0][1]["slots_per_tier"], rel=0.01, abs=4)


@pytest.mark.every(2)
@pytest.mark.parametrize("name", per_path(cases(), policy_of))
def test_the_context_can_come_before_the_question(loaded, name):
    """A prompt in two segments is answered, and every token of it is seen once."""
    asked = request("a", random_tokens(300), random_tokens(20, seed=1), gold=random_tokens(5), max_new_tokens=9)
    outcome = answers(loaded, policy_of(name), [asked])["a", 0]
    assert (outcome.status, len(outcome.token_ids)) == ("ok", 9)
    assert (outcome.kept["tokens_seen"], outcome.kept["prompt_tokens"]) == (328, 300)
    assert outcome.fidelity["num_tokens"] == 5


# What stays ----


@pytest.mark.every(2)
@pytest.mark.parametrize(("name", "heads"), those_of(distinct(), in_turn(cases(), SHAPES)))
def test_protected_tokens_are_never_evicted(tiny_model, name, heads):
    """At every step, sinks, window and the newest token are there, and no position is held twice or made up."""
    loaded, policy, plans, steps = tiny_model("llama", heads, 64), policy_of(name, heads), [], [0]
    lengths = [10, 300]

    def check(running, step):
        steps[0] += 1
        store = running.store
        for row, length in zip(running.runner.open_rows, lengths, strict=True):
            seen = int(store.counters.tokens_seen[row])
            assert seen == length + steps[0]
            if isinstance(store.holding, Buffered):  # tokens behind it are immutable: a step adds one to every list
                counts = store.holding.ring.num_tokens[store.pages.lists_of(torch.tensor([row]))].tolist()
                prompt = store.ledger.meters[row].prompt["prompt_slots"]
                assert sum(counts) == prompt + steps[0] * len(counts) and max(counts) <= seen
            else:
                view = store.view(torch.tensor([row]))
                arrays = [view.slots(tier) for tier in range(len(store.pages.formats))]
                check_positions(arrays, seen, protected(policy, length, seen) | {seen - 1})

    requests = [request(str(n), random_tokens(n), max_new_tokens=11) for n in lengths]
    track = ("pos",) if policy.residual is None else ()
    answers(loaded, watched(policy, plans), requests, on_step=check, track=track)
    assert steps[0] == 10
    for _, tier_of in plans:
        length = tier_of.shape[-1]
        must = sorted(protected(policy, length, length))
        assert (tier_of[..., must] >= 0).all()


def check_positions(arrays, seen: int, must: set[int]) -> None:
    """Every list of a row holds all of `must`, and each position below `seen` at most once, over all tiers."""
    layers, heads = arrays[0].pos.shape[1:3]
    for layer in range(layers):
        for head in range(heads):
            fields = [(a.pos[0, layer, head], a.valid[0, layer, head]) for a in arrays]
            held = [p for pos, valid in fields for p in pos[valid].tolist()]
            assert len(held) == len(set(held)) and set(held) <= set(range(seen))
            assert must <= set(held)


@pytest.mark.parametrize("name", per_path(cases(), policy_of))
def test_a_nan_is_reported_not_hidden(loaded, name):
    """A model that gives NaN fails with its layer, whatever the method does with the numbers."""
    model = copy.deepcopy(loaded.model)
    model.model.layers[1].self_attn.k_proj.weight.data[0, 0] = float("nan")
    broken = dataclasses.replace(loaded, model=model)
    for segments in ((random_tokens(100),), (random_tokens(100), random_tokens(3))):
        outcome = answers(broken, policy_of(name), [request("a", *segments)])["a", 0]
        assert (outcome.status, outcome.nan_layer) == ("nan", 1)


# Along long answers ----

# Prompt tokens and decode steps; five tokens are fewer than any window. The long one needs more than one chunk of the
# C++ kernels, 2,048 slots, and both residual buffers of 128 tokens overflow: that of the long row, which begins with
# 116, twice. In the default run two methods alone have so long a prompt, which has 756 tokens elsewhere (and 116 in the
# ring too), and those alone that have a buffer take so many steps.
SHORT = {"one": (1, 40), "five": (5, 40), "some": (300, 40)} if FULL else {"five": (5, 18), "some": (300, 18)}
LONG = {"one": (1, 40), "five": (5, 40), "ten": (10, 142), "long": (2164, 142)}
ANSWERS = by_path(cases(), policy_of, {"long": LONG}, {"short": SHORT})


def check_ledger(store, rows) -> None:
    """What the ledger says of the rows is what the pool and the tables hold, page by page and in sum."""
    pages = store.pages.table.used_page_ids()
    assert len(pages.unique()) == len(pages) == store.pages.pool.num_used
    assert store.pages.pool.num_used + store.pages.pool.num_free == store.pages.pool.num_pages
    items = [store.ledger.itemise(row) for row in rows]
    parts = ("payload_bytes", "quant_meta_bytes", "track_bytes", "slack_bytes")
    assert (
        sum(item[part] for item in items for part in parts) == store.pages.pool.num_used * store.pages.pool.page_bytes
    )
    held = store.ledger.resident_bytes(torch.tensor(rows)).tolist()
    assert held == [item["resident_bytes"] for item in items]


@pytest.mark.every(5)
@pytest.mark.timeout(240)
@pytest.mark.parametrize(("name", "prompts"), ANSWERS)
def test_long_answers_to_short_and_long_prompts(tiny_model, name, prompts):
    """Prompts in one batch, shorter than the window and far longer: full answers, a ledger that always adds up,
    and a method that finds its own work done."""
    loaded = dataclasses.replace(tiny_model("llama", "gqa3", 64), max_tokens=4096)
    policy, seen = policy_of(name), []
    if not FULL:
        most, last = (2164 if name in ("full", "kivi") else 756), (44 if policy.residual is None else 142)
        prompts = {key: (min(n, most), min(steps, last)) for key, (n, steps) in prompts.items()}
    requests = [request(key, random_tokens(n), max_new_tokens=steps + 1) for key, (n, steps) in prompts.items()]

    def check(running, step):
        seen.append(step)
        if len(seen) % 17 == 1:
            check_ledger(running.store, running.runner.open_rows)

    outcomes = answers(loaded, policy, requests, on_step=check)
    assert len(seen) == max(steps for _, steps in prompts.values())
    for key, (num_tokens, steps) in prompts.items():
        outcome = outcomes[key, 0]
        assert (outcome.status, outcome.finish, len(outcome.token_ids)) == ("ok", "length", steps + 1)
        held, kept = outcome.ledger, outcome.kept
        assert kept["tokens_seen"] == num_tokens + steps and kept["prompt_tokens"] == num_tokens
        assert held["resident_bytes"] == sum(held[item] for item in ledger.ITEMS)
        assert min(held[item] for item in ledger.ITEMS) >= 0
        assert held["peak_bytes"] >= held["resident_bytes"] and held["peak_bytes"] >= held["average_bytes"] > 0
        assert held["fp16_bytes"] == (num_tokens + steps) * 4 * 64 * 4
        assert 0 < kept["slot_ratio"] <= 1 and sum(kept["slots_per_tier"]) <= (num_tokens + steps) * kept["lists"]
        fields = 4 * len(policy.score.track)  # score and position, four bytes each
        if policy.reading is None:  # bounds of pages are counted with the tracked fields
            assert held["track_bytes"] == fields * sum(kept["slots_per_tier"])
        assert complaint(policy, vars(outcome)) is None
