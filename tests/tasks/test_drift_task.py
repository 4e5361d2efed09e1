"""Long answers: prompts, what ends an answer, how repetition is counted, and what the aggregate says."""

import pytest
from loaded import loader
from refusals import refused

from kvbench.engine.requests import Outcome
from kvbench.tasks.haystack import paragraphs
from kvbench.tasks.passages import passages, read_text

load = loader("drift", tokens=40, prompt_tokens=30, items=3)


def test_prompts_are_consecutive_pieces_of_the_text(model, tmp_path) -> None:
    """Each begins with the tokenizer's first token; nothing is left out between them; a file of one's own is read."""
    (tmp_path / "my.txt").write_bytes(b"\xef\xbb\xbf" + " ".join(f"word{n} and" for n in range(400)).encode())
    for file in (None, str(tmp_path / "my.txt")):
        text = read_text(file)
        task = load(model, file=file)
        begin = model.tokenizer.bos_token_id
        parts = [request.segments[0] for request in task.requests]
        assert [len(part) for part in parts] == [30] * 3 and {part[0] for part in parts} == {begin}
        joined = [token for part in parts for token in part[1:]]
        whole = model.tokenizer.encode(text.content, add_special_tokens=False)
        assert joined == whole[: len(joined)]
        assert task.protocol["text"] == ("my.txt" if file else "kvbench")
    assert read_text(None).content.startswith(paragraphs()[0])


def test_answers_have_one_length_and_are_drawn(model) -> None:
    """Nothing ends them before; the task's temperature stands in for a greedy protocol; limits hold."""
    for request in load(model).requests:
        assert (request.min_new_tokens, request.max_new_tokens) == (40, 40)
        assert (request.temperature, request.top_p) == (0.7, 0.95)
        assert request.gold == () and request.stop == ()
    (one,) = load(model, limit=1, protocol={"temperature": 0.3, "num_samples": 2, "max_new_tokens": 9}).requests
    assert (one.min_new_tokens, one.max_new_tokens, one.temperature, one.top_p, one.num_samples) == (9, 9, 0.3, 1.0, 2)
    assert load(model, temperature=0).requests[0].temperature == 0


@pytest.mark.parametrize(
    ("settings", "protocol", "error"),
    [
        ({"tokens": 5000}, {}, ("setting-value", "task.tokens", "task.tokens=5000", "task.prompt_tokens=30")),
        ({"items": 10**6}, {}, ("setting-value", "task.items", "1000000 pieces of 29")),
        ({"file": "nowhere.txt"}, {}, ("file-missing", "task.file", "task.file=nowhere.txt")),
        ({"temperature": -1}, {}, ("setting-value", "task.temperature", "task.temperature=-1")),
        ({"prompt_tokens": 1}, {}, ("setting-value", "task.prompt_tokens", "task.prompt_tokens=1")),
        ({}, {"query_aware": False}, ("settings-conflict", "protocol.query_aware", "query_aware=false", "task=drift")),
        ({}, {"chat_template": "always"}, ("settings-conflict", None, "task=drift")),
    ],
)
def test_what_cannot_be_asked(model, settings, protocol, error) -> None:
    """Each is refused with its remedy."""
    with refused(*error):
        load(model, protocol=protocol, **settings)


def test_files_that_hold_no_text(tmp_path) -> None:
    """Bytes that are no UTF-8, and an empty file."""
    for content, value in ((b"\xff\xfe\x00", "byte 0xff in position 0"), (b" \n", "my.txt holds no text")):
        (tmp_path / "my.txt").write_bytes(content)
        with refused("file-content", "task.file", value):
            read_text(str(tmp_path / "my.txt"))


def test_words_and_bytes_of_the_second_part(model) -> None:
    """They are counted in the text behind the first part, without the special token."""
    (one,) = passages(model, read_text(None), 10, 25, 1, start=2)
    text = model.tokenizer.decode(one.ids[10:])
    assert len(one.ids) == 35 and (one.num_words, one.num_bytes) == (len(text.split()), len(text.encode()))


def test_scores_and_aggregate(model) -> None:
    """By tokens and by where the answer wanted to end; every score with its interval, every token in the statistics."""
    task = load(model, items=2)
    first, second = task.requests
    looped = Outcome(sample_id=first.sample_id, token_ids=[7] * 10, first_end=4)
    assert task.score_outcome(first, looped) == {"repetition": pytest.approx(6 / 7), "loop": 1.0, "early_stop": 1.0}
    plain = Outcome(sample_id=second.sample_id, token_ids=list(range(10)))
    assert task.score_outcome(second, plain) == {"repetition": 0.0, "loop": 0.0, "early_stop": 0.0}
    tokens = {"nll": [9.0, 1.0, 3.0], "nll_full": [9.0, 1.0, 1.0], "kl": [5.0, 0.0, 0.5], "exact": [1.0]}
    tokens |= {"same_first_choice": [1.0, 1.0, 0.0], "right_first_choice": [0.0, 1.0, 0.0]}
    records = [
        {"sample_id": request.sample_id, "subset": "text", "repeat": 0, "status": "ok", "finish": "length"}
        | {"scores": task.score_outcome(request, outcome), "meta": request.meta, "token_ids": outcome.token_ids}
        | {"per_token": tokens}
        for request, outcome in ((first, looped), (second, plain))
    ]
    found = task.aggregate(records)
    assert found["free"]["loop"]["value"] == 0.5 and found["free"]["early_stop"]["interval"] == "wilson"
    assert found["tokens"]["perplexity"]["value"] == pytest.approx(2.718281828**2)
    assert found["tokens"]["log_ratio"]["value"] == 1.0 and found["tokens"]["kl_mean"]["value"] == 0.25
    assert found["tokens"]["kl_max"]["value"] == 0.5 and found["tokens"]["same_first_choice"]["value"] == 0.5
    failed = [record | {"status": "oom", "scores": {}, "per_token": None} for record in records]
    assert task.aggregate(failed)["free"] == {} and "tokens" not in task.aggregate(failed)
