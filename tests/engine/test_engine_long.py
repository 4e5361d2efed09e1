"""What long answers and streams ask of the engine: numbers of every token, where an answer wanted to end, and texts
that are forced without an answer."""

import pytest
import torch
from engine_helpers import NATIVE_METHODS, answers, engine, own_logits, random_tokens, request
from refusals import refused

NATIVE = NATIVE_METHODS["full"]


@pytest.fixture
def loaded(tiny_model):
    """The tiny Llama in its full width: in the narrow one a last bit of a score decides about a token's precision."""
    return tiny_model("llama", "gqa3", 64)


@pytest.mark.parametrize("segments", [1, 2])
def test_every_token_has_its_numbers(loaded, segments):
    """They are those of the means and of transformers itself; without the setting there are none."""
    parts = (random_tokens(60),) if segments == 1 else (random_tokens(40), random_tokens(20, seed=1))
    gold = random_tokens(20, seed=2)
    asked = request("a", *parts, gold=gold, max_new_tokens=3)
    outcome = answers(loaded, NATIVE_METHODS["snapkv"], [asked], fidelity_per_token=True)["a", 0]
    found, first = outcome.per_token, int(segments == 1)
    assert found["exact"] == [float(first)] and {len(found[name]) for name in found if name != "exact"} == {20}
    logp = own_logits(loaded, [*asked.prompt, *gold], 59)[:20].log_softmax(-1)
    assert found["nll_full"] == pytest.approx((-logp[torch.arange(20), list(gold)]).tolist(), abs=1e-3)
    means = {"nll": "nll", "kl": "kl_mean", "same_first_choice": "top1_agreement"}
    for name, key in (means | {"right_first_choice": "gold_argmax_share"}).items():
        assert sum(found[name][first:]) / (20 - first) == pytest.approx(outcome.fidelity[key], rel=1e-3)
    assert answers(loaded, NATIVE_METHODS["snapkv"], [asked])["a", 0].per_token is None


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_where_an_answer_wanted_to_end(loaded, temperature, monkeypatch):
    """The place is where the same answer ends when it may, and up to there the two are the same."""
    asked = {"max_new_tokens": 60, "temperature": temperature}
    prompt = random_tokens(50, seed=4)
    plain = answers(loaded, NATIVE, [request("a", prompt, **asked)])["a", 0]
    assert plain.first_end is None
    # The tiny model never ends by itself: a token of its own answer is made an end token.
    end = plain.token_ids[17]
    place = plain.token_ids.index(end)
    monkeypatch.setattr(type(loaded), "eos_token_ids", (end,))
    free = answers(loaded, NATIVE, [request("a", prompt, min_new_tokens=0, **asked)])["a", 0]
    kept = answers(loaded, NATIVE, [request("a", prompt, **asked)])["a", 0]
    assert (free.finish, len(free.token_ids), free.first_end) == ("eos", place, None)
    assert (kept.finish, len(kept.token_ids), kept.first_end) == ("length", 60, place)
    assert kept.token_ids[:place] == free.token_ids and end not in kept.token_ids


@pytest.mark.every(2)
@pytest.mark.parametrize("method", ["full", "streaming_llm", "kivi", "diffkv"])
def test_a_text_that_is_forced_without_an_answer(loaded, method):
    """Its numbers are those beside an answer; its bytes are those at the end of the text, and no row is made for an
    answer."""
    gold = random_tokens(70, seed=5)
    alone = request("a", random_tokens(50), gold=gold, max_new_tokens=0, min_new_tokens=0)
    answering = request("b", random_tokens(50), gold=gold, max_new_tokens=70)
    steps = []
    found = answers(
        loaded,
        NATIVE_METHODS[method],
        [alone],
        fidelity_max_tokens=None,
        on_step=lambda running, step: steps.append(step["live_rows"]),
    )["a", 0]
    other = answers(loaded, NATIVE_METHODS[method], [answering], fidelity_max_tokens=None)["b", 0]
    assert set(steps) == {1} and len(steps) == 69
    assert (found.text, found.token_ids, found.finish, found.status) == ("", [], "none", "ok")
    assert found.fidelity["nll"] == pytest.approx(other.fidelity["nll"], rel=1e-4)
    assert found.ledger["fp16_bytes"] == other.ledger["fp16_bytes"] and found.kept == other.kept
    assert found.ledger["resident_bytes"] == other.ledger["resident_bytes"]
    assert found.timing["decode_tokens"] == 69


def test_nothing_to_do_is_refused(loaded):
    """A request for no answer, where nothing is forced either."""
    asked = request("a", random_tokens(20), gold=random_tokens(5), max_new_tokens=0)
    with engine(loaded, NATIVE, fidelity_max_tokens=0) as running, refused("settings-conflict", "fidelity.max_tokens"):
        running.run([asked], on_outcome=lambda outcome: None)


def test_streams_go_beyond_the_context(loaded):
    """Only where the request says so; sinks and a window keep their size."""
    gold = random_tokens(40, seed=1)
    for past, forced in ((False, 4), (True, 40)):
        asked = request("a", random_tokens(2044), gold=gold, max_new_tokens=0, past_context=past)
        found = answers(loaded, NATIVE_METHODS["streaming_llm"], [asked], fidelity_max_tokens=None)["a", 0]
        assert found.fidelity["num_tokens"] == forced
        assert found.kept["slots_per_tier"][0] == 40 * found.kept["lists"]
