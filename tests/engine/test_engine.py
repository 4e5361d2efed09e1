"""Answers: stop rules, samples and forks, numbers that are not finite, and what is refused."""

import copy
import dataclasses

import pytest
import torch
from engine_helpers import NATIVE_METHODS, answers, comparable, engine, own_greedy, random_tokens, request
from refusals import refused
from selection import in_turn

from kvbench.methods.full import Full

NATIVE = NATIVE_METHODS["full"]
METHODS = list(NATIVE_METHODS.values())
METHOD_NAMES = list(NATIVE_METHODS)


def poisoned(loaded, change):
    """A copy of a model whose weights `change` has spoiled."""
    model = copy.deepcopy(loaded.model)
    with torch.no_grad():
        change(model.model)
    return dataclasses.replace(loaded, model=model)


# Stop rules and samples ---------------------------------------------------------------------------------------------


def prompt_with_readable_answer(loaded):
    """A prompt, its 20 greedy tokens without repetition, and the place of two neighbours that decode to letters."""
    for seed in range(200):
        prompt = random_tokens(40, seed=seed)
        free = own_greedy(loaded, [prompt], 20)[0]
        for place in range(2, 17):
            word = loaded.tokenizer.decode(free[place : place + 2])
            if len(set(free)) == 20 and len(word) == 2 and word.isprintable() and word.isascii():
                return prompt, free, place
    raise AssertionError("no prompt gives a readable answer")


def test_answers_end_as_they_were_asked_to(loaded):
    """Length, end token, stop token and a stop string over two tokens end the answers of one batch, each on its own."""
    prompt, free, place = prompt_with_readable_answer(loaded)
    decode = loaded.tokenizer.decode
    word = decode(free[place : place + 2])
    spoiled = poisoned(loaded, lambda model: None)
    spoiled.model.generation_config.eos_token_id = [0, free[19]]
    fields = {"max_new_tokens": 30, "min_new_tokens": 0}
    got = answers(
        spoiled,
        NATIVE,
        [
            request("length", prompt, max_new_tokens=4),
            request("eos", prompt, **fields),
            request("token", prompt, stop_token_ids=(free[5],), **fields),
            request("string", prompt, stop=(word, "no such text"), **fields),
        ],
    )
    got = {name: (o.finish, o.token_ids, o.text) for (name, _), o in got.items()}
    assert got == {
        "length": ("length", free[:4], decode(free[:4])),
        "eos": ("eos", free[:19], decode(free[:19])),
        "token": ("stop", free[:5], decode(free[:5])),
        "string": ("stop", free[: place + 2], decode(free[:place])),
    }


def test_min_new_tokens_keeps_the_end_token_away(loaded):
    """Until min_new_tokens the end token cannot come, as with generate()'s option of that name."""
    prompt = random_tokens(40)
    first = own_greedy(loaded, [prompt], 12)[0][0]
    spoiled = poisoned(loaded, lambda model: None)
    spoiled.model.generation_config.eos_token_id = first
    requests = [
        request("free", prompt, max_new_tokens=12, min_new_tokens=0),
        request("held", prompt, max_new_tokens=12, min_new_tokens=12),
    ]
    got = answers(spoiled, NATIVE, requests)
    assert (got["free", 0].finish, got["free", 0].token_ids) == ("eos", [])
    assert got["held", 0].token_ids == own_greedy(spoiled, [prompt], 12)[0]
    assert first not in got["held", 0].token_ids


@pytest.mark.every(2)
@pytest.mark.parametrize("policy", METHODS, ids=METHOD_NAMES)
def test_samples_of_one_prompt_are_independent_rows(loaded, policy):
    """Three answers share one prefill, and each is what a run of it alone gives, in tokens and in bytes."""
    fields = {"temperature": 0.8, "top_p": 0.9, "num_samples": 3}
    both = [request("a", random_tokens(90), **fields), request("b", random_tokens(33), gold=random_tokens(6), **fields)]
    together = answers(loaded, policy, both, seed=3)
    for asked in both:
        apart = answers(loaded, policy, [asked], seed=3, batch_size=1, sizing=both)
        for repeat in range(3):
            fields, want = (comparable(x[asked.sample_id, repeat]) for x in (together, apart))
            for side in (fields, want):
                side.pop("fidelity")
            assert fields == want
    assert {o.ledger["resident_bytes"] > 0 for o in together.values()} == {True}


@pytest.mark.every(2)
@pytest.mark.parametrize("policy", METHODS, ids=METHOD_NAMES)
def test_a_forked_row_goes_on_like_its_source(loaded, policy):
    """After a fork in mid-answer, source and copy fed the same token give the same logits, and part when fed others."""
    requests = [request("a", random_tokens(70), max_new_tokens=30)]
    with engine(loaded, policy) as running:
        seen = {}

        def fork(step):
            if seen or running.store.counters.tokens_seen[running.runner.open_rows[0]] < 90:
                return
            source = running.runner.open_rows[0]
            other = running.runner.fork(source)
            seen["same"], _ = running.runner.try_step([source, other], [5, 5])
            seen["parted"], _ = running.runner.try_step([source, other], [6, 7])
            seen["again"], _ = running.runner.try_step([source, other], [8, 8])
            running.runner.close(other)

        two_rows = [dataclasses.replace(requests[0], num_samples=2), *requests]  # sizes the store for the fork
        running.run(requests, on_outcome=lambda outcome: None, on_step=fork, sizing=two_rows)
    assert torch.allclose(seen["same"][0], seen["same"][1], atol=1e-5)
    assert not torch.allclose(seen["parted"][0], seen["parted"][1], atol=1e-2)
    assert not torch.allclose(seen["again"][0], seen["again"][1], atol=1e-3)  # each remembers its own token


# Numbers that are not finite ------------------------------------------------------------------------------------------


@pytest.mark.every(2)
@pytest.mark.parametrize("policy", METHODS, ids=METHOD_NAMES)
@pytest.mark.parametrize(
    ("name", "at", "layer"), [("k_proj", 1, 1), ("v_proj", 1, 1), ("q_proj", 0, 0), ("o_proj", 1, 2), ("o_proj", 2, -1)]
)
def test_nan_names_the_first_bad_attention(tiny_model, policy, name, at, layer):
    """A NaN in a projection is reported with the first layer whose attention output it spoils: behind o_proj the next
    one, and behind the last one none."""

    def spoil(model):
        getattr(model.layers[at].self_attn, name).weight[3, 5] = float("nan")

    loaded = poisoned(tiny_model("llama", "gqa3", 64, num_layers=3), spoil)
    outcome = answers(loaded, policy, [request("a", random_tokens(30), num_samples=2, temperature=1.0)])["a", 1]
    assert (outcome.status, outcome.nan_layer, outcome.finish) == ("nan", layer, "none")
    assert f"first bad attention layer: {'none' if layer < 0 else layer}" in outcome.message
    assert outcome.token_ids == [] and outcome.ledger == {}


@pytest.mark.every(2)
@pytest.mark.parametrize(("name", "batch_size"), in_turn(METHOD_NAMES, (1, 2, 3)))
def test_nan_in_one_prompt_leaves_the_others_alone(loaded, name, batch_size):
    """A prompt with a token whose embedding is NaN fails; its neighbours, on recycled pages too, answer as before."""
    policy = NATIVE_METHODS[name]
    good = [request(str(i), random_tokens(n), gold=random_tokens(4)) for i, n in enumerate([60, 33, 90])]
    blank = request("bad", (*random_tokens(70, seed=9), 1, 3))
    want = answers(loaded, policy, good, batch_size=batch_size, sizing=[*good, blank])
    used = {token for r in good for token in r.segments[0] + r.gold}
    used |= {token for outcome in want.values() for token in outcome.token_ids}
    bad_token = min(set(range(1, 320)) - used)
    bad = request("bad", (*random_tokens(70, seed=9), bad_token, 3))

    def spoil(model):
        model.embed_tokens.weight[bad_token] = float("nan")

    got = answers(poisoned(loaded, spoil), policy, [good[0], bad, *good[1:]], batch_size=batch_size)
    assert (got["bad", 0].status, got["bad", 0].nan_layer) == ("nan", 0)
    for key, outcome in want.items():
        assert comparable(got[key])["token_ids"] == outcome.token_ids
        assert got[key].status == "ok" and got[key].ledger == outcome.ledger
        assert got[key].fidelity == pytest.approx(outcome.fidelity, abs=1e-4)


@pytest.mark.every(2)
@pytest.mark.parametrize("policy", METHODS, ids=METHOD_NAMES)
def test_nan_while_decoding_ends_that_sample_only(loaded, policy):
    """A row that generates a token whose embedding is NaN ends as nan; the other rows of the batch go on as before."""
    requests = [request(str(i), random_tokens(n), max_new_tokens=16) for i, n in enumerate([60, 33, 90])]
    want = answers(loaded, policy, requests)
    others = {token for key, outcome in want.items() if key != ("1", 0) for token in outcome.token_ids}
    prompts = {token for r in requests for token in r.segments[0]}
    bad_token = next(t for t in want["1", 0].token_ids[2:14] if t not in others | prompts)

    def spoil(model):
        model.embed_tokens.weight[bad_token] = float("nan")

    got = answers(poisoned(loaded, spoil), policy, requests)
    assert (got["1", 0].status, got["1", 0].nan_layer) == ("nan", 0)
    for key in (("0", 0), ("2", 0)):
        assert comparable(got[key]) == comparable(want[key])


# What is refused -----------------------------------------------------------------------------------------------------


def test_prompts_that_cannot_run_are_refused_before_anything_runs(loaded):
    """Empty prompts, empty segments and prompts as long as the context are named with the rule; none at all is fine."""
    with engine(loaded, Full()) as running:
        running.run([], on_outcome=lambda outcome: pytest.fail("an outcome came"))
    for asked in (request("e", ()), request("s", (1, 2), ()), request("l", random_tokens(2048))):
        with engine(loaded, Full()) as running, refused("prompt-length", None, asked.sample_id):
            running.run([asked], on_outcome=lambda outcome: pytest.fail("an outcome came"))


def test_bad_batch_size_and_backend_are_refused(loaded):
    """Both are named with their value and what is allowed."""
    with refused("setting-value", "batch_size", "batch_size=0"), engine(loaded, Full(), batch_size=0):
        pass
    with refused("unsupported", "backend", "backend='cuda'", "torch"), engine(loaded, Full(), backend="cuda"):
        pass


def test_progress_is_reported_every_step(loaded):
    """Each decode step reports a rate, the bytes of the pages in use and the rows that were live."""
    steps = []
    requests = [request("a", random_tokens(50), max_new_tokens=5), request("b", random_tokens(9), max_new_tokens=8)]
    answers(loaded, Full(), requests, on_step=lambda running, step: steps.append(step))
    assert [step["live_rows"] for step in steps] == [2] * 4 + [1] * 3  # the first token comes from the prompt
    assert all(step["decode_tokens_per_s"] > 0 and step["cache_bytes"] > 0 for step in steps)


def test_answers_end_where_the_context_does(loaded):
    """An answer that would run past the last position ends there, as `length`; gold tokens are cut there too."""
    small = dataclasses.replace(loaded, max_tokens=50)
    asked = request("a", random_tokens(40), max_new_tokens=30, gold=random_tokens(30, seed=1))
    outcome = answers(small, Full(), [asked])["a", 0]
    assert (outcome.finish, len(outcome.token_ids), outcome.kept["tokens_seen"]) == ("length", 11, 50)
    assert outcome.fidelity["num_tokens"] == 10  # gold tokens all have a position
