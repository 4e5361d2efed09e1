"""Conversations in a file of the user's own: turns, their tokens, their scores, and rows that are broken."""

import json
from types import SimpleNamespace

import pytest

from kvbench.engine.requests import Outcome
from kvbench.tasks import load_task

ROW = {
    "context": "The door is red. The car is blue.",
    "question": "What is red?",
    "answers": ["the door", "door"],
    "turns": [{"question": "And blue?", "answers": "car"}, {"question": "What was first?", "answers": ["red", "Red"]}],
}


@pytest.fixture
def load(tmp_path, model):
    """Gives a function that writes rows and loads the task."""

    def load(*rows, protocol=None, using=model, **settings):
        (tmp_path / "my.jsonl").write_text("\n".join(map(json.dumps, rows)))
        cfg = {"name": "custom", "file": str(tmp_path / "my.jsonl")} | settings
        return load_task(cfg, using, limit=None, seed=0, protocol=protocol)

    return load


@pytest.mark.parametrize("messages", [False, True])
@pytest.mark.parametrize("chat", ["auto", "never"])
def test_turns_are_what_the_template_writes_between_answers(load, model, chat, messages):
    """Prompt, answers and turns one behind the other are the conversation as the template renders it whole."""
    row = {"messages": [{"role": "user", "content": "What is red?"}], "answers": "x", "turns": ROW["turns"]}
    (request,) = load(row if messages else ROW, protocol={"chat_template": chat}, answer_prefix=" It is").requests
    first = "What is red?" if messages else f"{ROW['context']}\n\nWhat is red?"
    decode = model.tokenizer.decode
    said = [decode(list(request.prompt)), *(decode(list(turn.tokens)) for turn in request.turns)]
    if chat == "never":
        assert said == [f"<s>{first} It is", "\n\nAnd blue? It is", "\n\nWhat was first? It is"]
    else:
        talk = [("user", first), ("assistant", "It is A."), ("user", "And blue?"), ("assistant", "It is B.")]
        talk.append(("user", "What was first?"))
        whole = model.tokenizer.apply_chat_template(
            [{"role": role, "content": text} for role, text in talk], tokenize=False, add_generation_prompt=True
        )
        assert f"{said[0]} A.{said[1]} B.{said[2]}" == f"{whole}It is"
    golds = [decode(list(ids)).strip() for ids in (turn.gold for turn in request.turns)]
    assert golds == ["car", "red"] and [turn.answers for turn in request.turns] == [("car",), ("red", "Red")]


def test_scores_are_means_over_the_answers(load):
    """Each by its own right answers; thoughts are not graded in any of them; the table has a score for each turn."""
    task = load(ROW, ROW | {"turns": []}, metric="contains")
    long, short = task.requests
    outcome = Outcome(sample_id=long.sample_id, text="It is red.")
    outcome.turns = [{"text": "the door"}, {"text": "<think>car"}]
    assert task.score_outcome(long, outcome) == {"score": pytest.approx(2 / 3)}
    assert task.score_outcome(short, Outcome(sample_id=short.sample_id, text="a door")) == {"score": 1.0}
    told = {"subset": "all", "meta": {}, "scores": {"score": 1.0}}
    records = [
        told | {"sample_id": long.sample_id, "text": "It is red.", "turns": outcome.turns},
        told | {"sample_id": short.sample_id, "text": "a door"},
    ]
    by = task.aggregate(records)["by"]["turn"]
    assert {turn: (group["score"], group["num_samples"]) for turn, group in by.items()} == {
        "1": (1.0, 2),
        "2": (0.0, 1),
        "3": (1.0, 1),
    }
    assert (
        load(ROW, metric="contains").fingerprint
        != load(ROW | {"turns": ROW["turns"][:1]}, metric="contains").fingerprint
    )


def test_broken_turns_are_named(load):
    """Each row with its reason; the others run."""
    broken = {
        "field turns must be a list of objects with question and answers": {"turns": ["And?"]},
        "field turns.question must be a text, it is missing": {"turns": [{"answers": "a"}]},
        "field turns.answers must be a text or a list of texts, it is missing": {"turns": [{"question": "a"}]},
    }
    task = load(*(ROW | change for change in broken.values()), ROW)
    assert [row["reason"] for row in task.quarantined] == list(broken) and len(task.requests) == 1
    task = load(ROW | {"turns": [{"question": "a", "answers": "("}]}, ROW, metric="regex")
    assert task.quarantined[0]["reason"].startswith("field answers has no regular expression")
    assert not any(turn.gold for turn in task.requests[0].turns), "no model would write a pattern"
    task = load(
        ROW | {"choices": ["the door", "car"]}, ROW | {"choices": ["the door", "car"], "turns": None}, metric="choice"
    )
    assert task.quarantined[0]["reason"].startswith("field turns goes on behind an answer, and with metric=choice")


def test_there_is_room_for_all_of_it(load, make_model):
    """A long context loses its middle, so that every turn still fits; turns that leave no room are refused."""
    small = make_model(300)
    (request,) = load(ROW | {"context": "word " * 900}, using=small, max_new_tokens=20).requests
    assert request.truncated and request.num_prompt_tokens + request.conversation_tokens <= 300
    with pytest.raises(ValueError, match="all/0: the turns of the conversation and their answers take up to"):
        load(ROW, using=small, max_new_tokens=100)


def test_a_template_without_a_place_for_answers(load, tokenizer, monkeypatch):
    """One that leaves answers out has no conversations."""
    monkeypatch.setattr(
        tokenizer, "chat_template", "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    )
    with pytest.raises(ValueError, match="does not show what was said before"):
        load(ROW)
    plain = SimpleNamespace(tokenizer=tokenizer, max_tokens=512, name="plain", chat_template=False)
    assert len(load(ROW, using=plain).requests[0].turns) == 2
