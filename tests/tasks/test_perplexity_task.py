"""Perplexity in llama.cpp's protocol: which chunks, which tokens are measured, and what cannot be asked."""

import math

import pytest
from loaded import loader
from refusals import refused

from kvbench.engine.requests import Outcome
from kvbench.tasks.passages import read_text

load = loader("perplexity", chunk_tokens=32, chunks=3)


def llama_chunks(tokens: list[int], begin: int, size: int, count: int) -> list[tuple[list[int], list[int]]]:
    """Of each chunk its tokens, and those whose likelihoods count, as tools/perplexity/perplexity.cpp has it: the first
    token of a chunk is replaced, and from size/2 on each logit is asked about the token behind it."""
    chunks = []
    for start in range(0, count * size, size):
        chunk = [begin, *tokens[start + 1 : start + size]]
        chunks.append((chunk, [chunk[place + 1] for place in range(size // 2, size - 1)]))
    return chunks


@pytest.mark.parametrize("size", [32, 33])
def test_chunks_and_measured_tokens_are_llama_cpps(model, size) -> None:
    """Each chunk begins with the tokenizer's first token, in the place of one of the text."""
    text = read_text(None)
    begin = model.tokenizer.bos_token_id
    tokens = [begin, *model.tokenizer.encode(text.content, add_special_tokens=False)]
    found = []
    for asked in load(model, chunk_tokens=size).requests:
        assert asked.max_new_tokens == 0 and asked.num_prompt_tokens == 1
        found.append(([*asked.prompt, *asked.gold], list(asked.gold[asked.warmup_tokens :])))
    assert found == llama_chunks(tokens, begin, size, 3)
    assert len(found[0][1]) == size - 1 - size // 2


def test_all_of_a_text(model, tmp_path) -> None:
    """`chunks=null` takes what the text has, a limit fewer; a rest is left out, as there."""
    (tmp_path / "my.txt").write_text("one two three four five six. " * 40)
    ids = model.tokenizer.encode("one two three four five six. " * 40, add_special_tokens=False)
    file = str(tmp_path / "my.txt")
    assert len(load(model, chunks=None, file=file).requests) == (len(ids) + 1) // 32 > 2
    assert len(load(model, limit=1, chunks=None, file=file).requests) == 1
    with refused("setting-value", "task.chunks", "my.txt", "500 chunks of 32", "16000"):
        load(model, chunks=500, file=file)


@pytest.mark.parametrize(
    ("settings", "protocol", "error"),
    [
        ({"chunk_tokens": 5000}, {}, ("setting-value", "task.chunk_tokens", "task.chunk_tokens=5000")),
        ({"chunk_tokens": 3}, {}, ("setting-value", "task.chunk_tokens", "task.chunk_tokens=3")),
        ({}, {"temperature": 0.5}, ("settings-conflict", None, "task=perplexity")),
        ({}, {"query_aware": False}, ("settings-conflict", "protocol.query_aware", "task=perplexity")),
    ],
)
def test_what_cannot_be_asked(model, settings, protocol, error) -> None:
    """Each is refused with its remedy."""
    with refused(*error):
        load(model, protocol=protocol, **settings)


def test_the_statistics_are_of_measured_tokens(model) -> None:
    """What was fed before them counts in none, and nothing is said of words."""
    task = load(model, chunks=1)
    tokens = {"nll": [9.0, 9.0, 1.0, 3.0], "nll_full": [9.0, 9.0, 1.0, 1.0], "kl": [9.0, 9.0, 0.0, 0.5], "exact": [2.0]}
    tokens |= {"same_first_choice": [0.0, 0.0, 1.0, 0.0], "right_first_choice": [0.0] * 4}
    outcome = Outcome(sample_id="chunk/0", fidelity={"gold_argmax_share": 0.0})
    record = {"sample_id": "chunk/0", "subset": "chunk", "repeat": 0, "status": "ok", "finish": "none", "meta": {}}
    record |= {"scores": task.score_outcome(task.requests[0], outcome), "per_token": tokens, "token_ids": []}
    found = task.aggregate([record])
    assert found["tokens"]["perplexity"]["value"] == pytest.approx(math.exp(2.0))
    assert found["tokens"]["kl_max"]["value"] == 0.5 and found["tokens"]["same_first_choice"]["value"] == 0.5
    assert "word_perplexity" not in found["tokens"] and "answers" not in found
