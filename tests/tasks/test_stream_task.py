"""Streams: what is a prompt and what is forced, what cannot be asked, and what the texts cost by word and byte."""

import math

import pytest
from loaded import loader
from refusals import refused

from kvbench.engine.requests import Outcome
from kvbench.tasks.passages import read_text

load = loader("stream", prompt_tokens=30, tokens=50, items=3)


def test_streams_are_consecutive(model, tmp_path) -> None:
    """Each begins with the tokenizer's first token; prompt and forced tokens lie one behind the other in the text, and
    so do the streams; all of the text without `items`."""
    text = read_text(None)
    task = load(model)
    joined = []
    for request in task.requests:
        (prompt,) = request.segments
        assert (len(prompt), len(request.gold), request.max_new_tokens) == (30, 50, 0)
        assert prompt[0] == model.tokenizer.bos_token_id and request.meta["seen"] == 30
        forced = model.tokenizer.decode(request.gold)
        assert (request.meta["words"], request.meta["bytes"]) == (len(forced.split()), len(forced.encode()))
        joined += [*prompt[1:], *request.gold]
    assert joined == model.tokenizer.encode(text.content, add_special_tokens=False)[: len(joined)]
    (tmp_path / "my.txt").write_text("one two three four five six. " * 100)
    whole = load(model, items=None, file=str(tmp_path / "my.txt"))
    ids = model.tokenizer.encode("one two three four five six. " * 100, add_special_tokens=False)
    assert len(whole.requests) == len(ids) // 79 > 3
    assert len(load(model, limit=1, items=None, file=str(tmp_path / "my.txt")).requests) == 1


@pytest.mark.parametrize(
    ("settings", "protocol", "error"),
    [
        (
            {"tokens": 5000},
            {},
            ("setting-value", "task.tokens", "task.tokens=5000", "task.prompt_tokens=30", "task.past_context=true"),
        ),
        (
            {"prompt_tokens": 4096, "past_context": True},
            {},
            ("setting-value", "task.tokens", "task.prompt_tokens=4096"),
        ),
        ({"past_context": 1}, {}, ("setting-value", "task.past_context", "task.past_context=1")),
        ({"items": 0}, {}, ("setting-value", "task.items", "task.items=0", "1048576")),
        ({}, {"temperature": 0.5}, ("settings-conflict", None, "task=stream")),
        ({}, {"query_aware": False}, ("settings-conflict", "protocol.query_aware", "task=stream")),
    ],
)
def test_what_cannot_be_asked(model, settings, protocol, error) -> None:
    """Each is refused with its remedy."""
    with refused(*error):
        load(model, protocol=protocol, **settings)


def test_beyond_the_context(model) -> None:
    """Only where it is asked for, and every request says so."""
    (request,) = load(model, tokens=5000, items=1, past_context=True).requests
    assert request.past_context and len(request.gold) == 5000
    assert not any(request.past_context for request in load(model).requests)


def test_words_and_bytes(model) -> None:
    """All forced tokens count, the first one too; failed streams do not; there are no answers to count."""
    task = load(model, items=2)
    tokens = {"nll": [8.0, 1.0, 3.0], "nll_full": [8.0, 1.0, 1.0], "kl": [5.0, 0.0, 0.5], "exact": [1.0]}
    tokens |= {"same_first_choice": [1.0, 1.0, 0.0], "right_first_choice": [0.0, 1.0, 0.0]}
    outcome = Outcome(sample_id="stream/0", fidelity={"gold_argmax_share": 0.5})
    scores = task.score_outcome(task.requests[0], outcome)
    assert scores == {"accuracy": 0.5}
    done = {
        "sample_id": "stream/0",
        "subset": "stream",
        "repeat": 0,
        "status": "ok",
        "finish": "none",
        "scores": scores,
    }
    done |= {"per_token": tokens, "meta": {"words": 4, "bytes": 24}, "token_ids": []}
    failed = done | {"sample_id": "stream/1", "status": "oom", "scores": {}, "per_token": None}
    found = task.aggregate([done, failed])
    assert found["tokens"]["word_perplexity"]["value"] == pytest.approx(math.exp(12 / 4))
    assert found["tokens"]["bits_per_byte"]["value"] == pytest.approx(12 / 24 / math.log(2))
    assert found["tokens"]["perplexity"]["value"] == pytest.approx(math.exp(2.0))
    assert "answers" not in found and found["overall"]["accuracy"] == 0.5
    assert "tokens" not in task.aggregate([failed])
