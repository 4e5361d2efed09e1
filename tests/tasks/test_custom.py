"""A file of the user's own: broken rows, prompts, messages, choices, conversations, and every metric by hand."""

import json
from types import SimpleNamespace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from loaded import text_of
from refusals import refused

from kvbench.engine.requests import Outcome
from kvbench.tasks import load_task
from kvbench.tasks.custom.dataset import FIELDS, unused_fields

GOOD = {"context": "The door is red. The car is blue.", "question": "What is red?", "answers": ["the door", "door"]}
TALK = GOOD | {
    "turns": [{"question": "And blue?", "answers": "car"}, {"question": "What was first?", "answers": ["red", "Red"]}]
}


@pytest.fixture
def load(tmp_path, model):
    """Gives a function that writes rows (objects, or raw lines) and loads the task."""

    def load(*rows, limit=None, protocol=None, using=model, **settings):
        lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
        (tmp_path / "my.jsonl").write_bytes(b"\n".join(lines) + b"\n")
        cfg = {"name": "custom", "file": str(tmp_path / "my.jsonl")} | settings
        return load_task(cfg, using, limit=limit, seed=0, protocol=protocol)

    return load


def test_broken_rows_are_named_and_the_rest_run(load) -> None:
    """A byte-order mark and Windows line ends are no fault; each broken row has its line and its reason."""
    broken = {
        "field question must be a text, it is missing": {"context": "c", "answers": ["a"]},
        "field answers must be a text or a list of texts, it is missing": {"question": "q"},
        "field answers must be a text or a list of texts, it is empty": {"question": "q", "answers": []},
        "field answers must be a text, it is int": {"question": "q", "answers": [3]},
        "field context holds a NUL character, at character 3": GOOD | {"context": "ab\0"},
        "field question holds half of a character pair": b'{"question": "\\ud800", "answers": "a"}',
        "a line of 10000": b'{"question": "q", "answers": "a", "context": "' + b"x" * 10_000_000 + b'"}',
        "not UTF-8": b'{"question": "\xff"}',
        "not JSON": b'{"question": "q"',
        "a row must be a JSON object, this is a list": b"[]",
        "field messages has the role 'tool'": {"messages": [{"role": "tool", "content": "x"}], "answers": "a"},
        "the last of the messages must be the user's": {
            "messages": [{"role": "assistant", "content": "x"}],
            "answers": "a",
        },
        "a row has either messages, or context and question": GOOD | {"messages": [{"role": "user", "content": "x"}]},
        "field id must be a text or a whole number, it is list": GOOD | {"id": []},
    }
    first = b"\xef\xbb\xbf" + json.dumps(GOOD | {"id": 1}).encode() + b"\r"
    twin = GOOD | {"id": 1, "question": "What is blue?"}
    task = load(first, *broken.values(), twin, b"", GOOD | {"question": "And?"})
    assert [request.sample_id for request in task.requests] == ["all/0", "all/15", "all/17"]
    assert [row["line"] for row in task.quarantined] == list(range(2, 2 + len(broken)))
    for row, reason in zip(task.quarantined, broken, strict=True):
        assert row["reason"].startswith(reason), (row["reason"], reason)
        assert row["file"].endswith("my.jsonl")
    (copy,) = task.copies
    assert (copy["line"], copy["reason"]) == (16, "the same id as in line 1")


def test_fields_that_nothing_reads_are_named(load) -> None:
    """Once per file, also those of turns and messages, what another metric reads, and a second form of the answers."""
    turn = {"question": "And?", "answers": "x", "answer": "y", "level": 3}
    rows = [
        GOOD | {"source": "web", "choices": ["a", "b"], "question_id": 3, "meta": None},
        GOOD | {"source": "book", "date": "2024-01-01", "name": "x", "answer": "door", "turns": [turn]},
        {"messages": [{"role": "user", "content": "q?", "name": "Bob"}], "answer": "x"},
    ]
    task = load(*rows)
    assert not task.quarantined
    assert task.unused == [
        "my.jsonl: source, choices, question_id, date, name, answer, turns.answer, turns.level, messages.name"
    ]
    chosen = GOOD | {"choices": ["the door", "car"]}
    assert load(GOOD, TALK).unused == load(chosen, metric="choice").unused == []
    plain = [{key: row[key] for key in row if key in ("context", "question", "answers", "turns")} for row in rows[:1]]
    assert load(*plain).fingerprint == load(rows[0]).fingerprint


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"answer_prefix": "It is"}, "task.answer_prefix="),
        ({"max_new_tokens": 3}, "task.max_new_tokens="),
        ({"metric": "exact"}, "task.metric="),
        ({"system": "Be brief."}, "protocol.system="),
        ({"temperature": 1.0}, "protocol.temperature="),
        ({"turn": TALK["turns"]}, "Did you mean turns?"),
        ({"Turns": TALK["turns"]}, "Did you mean turns?"),
        ({"sub_set": "x"}, "Did you mean subset?"),
        ({"context": None, "contxt": "c"}, "Did you mean context?"),
        ({"answers": None, "anwsers": ["x"]}, "Did you mean answers?"),
        ({"turns": [{"question": "q", "answers": "x", "stop": "x"}]}, "task.stop="),
        ({"turns": [{"questions": "q", "answers": "x"}]}, "Did you mean question?"),
    ],
)
def test_misspelt_fields_and_settings_in_rows_are_refused(load, change: dict, words: str) -> None:
    """The row is set aside by its line, with the remedy; a file of nothing else is refused."""
    task = load(GOOD, GOOD | change)
    (row,) = task.quarantined
    assert row["line"] == 2 and words in row["reason"]
    with refused("file-content", None, words):
        load(GOOD | change)


@given(st.text(min_size=1, max_size=14), st.sampled_from(["row", "turns", "messages"]))
def test_no_field_of_a_row_passes_in_silence(name: str, part: str) -> None:
    """Whatever its name, it is read, named or refused."""
    turn, message = {"question": "q", "answers": "a"}, {"role": "user", "content": "q"}
    row = {"context": "c", "question": "q", "answers": "a", "turns": [turn], "messages": [message]}
    target = {"row": row, "turns": turn, "messages": message}[part]
    assume(name not in target)
    target[name] = "value"
    try:
        unused = unused_fields(row, "f1", ["task.stop"])
    except ValueError as error:
        assert name in str(error)
        return
    full = name if part == "row" else f"{part}.{name}"
    assert full in unused or (part == "row" and name in FIELDS)


@pytest.mark.parametrize("query_aware", [True, False])
@pytest.mark.parametrize("chat", ["auto", "never"])
def test_prompt_and_border(load, model, query_aware: bool, chat: str) -> None:
    """Context, then the question, then how the answer begins; a chat or none; the border lies before the question."""
    task = load(
        GOOD, separator="\n---\n", answer_prefix=" It is", protocol={"query_aware": query_aware, "chat_template": chat}
    )
    (request,) = task.requests
    text = "The door is red. The car is blue.\n---\nWhat is red?"
    wanted = f"<s><|user|>\n{text}</s><|assistant|>\nIt is" if chat == "auto" else f"<s>{text} It is"
    assert text_of(model, request) == wanted
    assert model.tokenizer.decode(request.gold) == " the door"
    assert len(request.segments) == (1 if query_aware else 2)
    if not query_aware:
        assert model.tokenizer.decode(request.segments[0]).endswith("The car is blue.")


@pytest.mark.parametrize("chat", ["auto", "never"])
def test_messages(load, model, chat: str) -> None:
    """As the chat template writes them; the last one is the question."""
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "The door is red."},
        {"role": "assistant", "content": "I see."},
        {"role": "user", "content": "What is red?"},
    ]
    row = {"messages": messages, "answers": "door"}
    protocol = {"query_aware": False, "chat_template": chat}
    (request,) = load(row, protocol=protocol).requests
    before, after = map(model.tokenizer.decode, request.segments)
    if chat == "never":
        assert before + after == "<s>Be brief.\n\nThe door is red.\n\nI see.\n\nWhat is red?"
    else:
        told = model.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert before + after == told and after.startswith("What is red?")
    assert "What is red" not in before


def test_rows_without_a_context(load) -> None:
    """They are asked where the whole prompt is seen; else there is nothing to compress, and they are named."""
    row = {"question": "What is red?", "answers": "door"}
    assert len(load(row, GOOD).requests) == 2
    task = load(row, GOOD, protocol={"query_aware": False})
    assert [request.sample_id for request in task.requests] == ["all/1"]
    assert task.quarantined[0]["reason"].startswith("no context, and protocol.query_aware=false")


@pytest.mark.parametrize("query_aware", [True, False])
@pytest.mark.parametrize("chat", ["auto", "never"])
def test_choices_are_scored(load, model, query_aware: bool, chat: str) -> None:
    """By their log-likelihoods, whatever names the right one; a tie is no right answer."""
    rows = [GOOD | {"choices": ["door", "car", "tree"], "answers": answer} for answer in ("car", 1)]
    task = load(*rows, metric="choice", protocol={"query_aware": query_aware, "chat_template": chat})
    for request in task.requests:
        space = "\n" if chat == "auto" else " "  # white space behind the prompt belongs to the choice
        assert [model.tokenizer.decode(choice) for choice in request.choices] == [
            space + word for word in ("door", "car", "tree")
        ]
        assert request.gold == request.choices[1]
        prompt = text_of(model, request)
        assert prompt.startswith("<s>") and prompt.count("<s>") == 1 and "What is red?" in prompt
        if not query_aware:
            assert "What is red" not in model.tokenizer.decode(request.segments[0])
        likely = [{"loglikelihood": value} for value in (-2.0, -1.0, -3.0)]
        assert task.score_choices(request, likely) == {"score": 1.0}
        assert task.score_choices(request, [likely[1], likely[1], likely[0]]) == {"score": 0.0}
    bad = [GOOD | {"choices": ["a", "b"], "answers": 2}, GOOD | {"choices": ["a"], "answers": "a"}, GOOD]
    named = load(*bad, rows[0], metric="choice").quarantined
    assert ["places" in named[0]["reason"], "two or more" in named[1]["reason"], "choices" in named[2]["reason"]]
    assert [row["line"] for row in named] == [1, 2, 3]


@pytest.mark.parametrize(
    ("metric", "text", "answers", "score"),
    [
        ("exact", " The Door. ", ["a door"], 1.0),
        ("exact", "red door", ["door", "Red, door"], 1.0),
        ("exact", "red door", ["door"], 0.0),
        ("contains", "it is THE\n door!", ["window", "the door"], 1.0),
        ("contains", "it is", ["door"], 0.0),
        ("contains_all", "a door and a car", ["door", "tree", "CAR", "x y"], 0.5),
        ("f1", "the red door", ["door"], 2 * 0.5 * 1 / 1.5),
        ("f1", "", ["door"], 0.0),
        ("rouge_l", "a b c", ["a x c"], 2 / 3),
        ("code", "\n# note\nreturn x", ["return x"], 1.0),
        ("absent", "I may not say it", ["7431", "seven"], 1.0),
        ("absent", "Well,  SEVEN  four", ["7431", "seven four"], 0.0),
        ("regex", "it costs 12.50 EUR", [r"\b12[.,]50\b"], 1.0),
        ("regex", "twelve", [r"^\d+$", "l{2}"], 0.0),
    ],
)
def test_metrics(load, metric: str, text: str, answers: list, score: float) -> None:
    """The best over the answers, for contains_all the share of them; thoughts are not graded."""
    task = load(GOOD | {"answers": answers}, metric=metric)
    request = task.requests[0]
    assert task.score(request, text)["score"] == pytest.approx(score, abs=1e-6)
    assert task.score(request, f"<think>{text}")["score"] == float(metric == "absent")  # nothing was said
    assert task.score(request, f"<think>hm</think>{text}")["score"] == pytest.approx(score, abs=1e-6)
    assert bool(request.gold) == (metric not in ("regex", "absent"))


def test_fingerprint_and_subsets(load) -> None:
    """What is asked and what it is graded by decide; a limit counts in each subset."""
    rows = [GOOD | {"subset": name, "question": f"{name} {n}?"} for n in range(4) for name in ("b", "a")]
    task = load(*rows, limit=2)
    assert [request.subset for request in task.requests] == ["b", "b", "a", "a"]
    same = load(*rows, limit=2)
    assert same.fingerprint == task.fingerprint
    assert load(*rows, limit=2, metric="exact").fingerprint != task.fingerprint
    assert load(*(row | {"answers": "x"} for row in rows), limit=2).fingerprint != task.fingerprint
    assert task.protocol["file"] == "my.jsonl"


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"file": None}, ("setting-value", "task.file", "task.file=None")),
        ({"file": "/nowhere.jsonl"}, ("file-missing", "task.file", "task.file=/nowhere.jsonl")),
        ({"metric": "f2"}, ("setting-value", "task.metric", "task.metric='f2'", "mean f1")),
        ({"max_new_tokens": 0}, ("setting-value", "task.max_new_tokens", "task.max_new_tokens=0")),
        ({"stop": [""]}, ("setting-value", "task.stop", "task.stop=['']")),
        ({"separator": 3}, ("setting-value", "task.separator", "task.separator=3")),
        ({"template": "x"}, ("name-unknown", None, "key=template")),
    ],
)
def test_wrong_settings_are_named(load, settings: dict, error: tuple) -> None:
    """Before anything runs."""
    with refused(*error):
        load(GOOD, **settings)


def test_a_bad_pattern_is_a_broken_row(load) -> None:
    """Found before the model runs."""
    task = load(GOOD | {"answers": "("}, GOOD | {"answers": "d.or"}, metric="regex")
    assert task.quarantined[0]["reason"].startswith("field answers has no regular expression")


def test_a_model_without_a_template(load, tokenizer) -> None:
    """Messages are joined as texts."""
    plain = SimpleNamespace(tokenizer=tokenizer, max_tokens=512, name="plain", chat_template=False)
    row = {"messages": [{"role": "user", "content": "One."}, {"role": "user", "content": "Two?"}], "answers": "a"}
    (request,) = load(row, using=plain).requests
    assert text_of(plain, request) == "<s>One.\n\nTwo?"


@pytest.mark.parametrize("messages", [False, True])
@pytest.mark.parametrize("chat", ["auto", "never"])
def test_turns_are_what_the_template_writes_between_answers(load, model, chat, messages) -> None:
    """Prompt, answers and turns one behind the other are the conversation as the template renders it whole."""
    row = {"messages": [{"role": "user", "content": "What is red?"}], "answers": "x", "turns": TALK["turns"]}
    (request,) = load(row if messages else TALK, protocol={"chat_template": chat}, answer_prefix=" It is").requests
    first = "What is red?" if messages else f"{TALK['context']}\n\nWhat is red?"
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


def test_scores_are_means_over_the_answers(load) -> None:
    """Each by its own right answers; thoughts are not graded in any of them; the table has a score for each turn."""
    task = load(TALK, TALK | {"turns": []}, metric="contains")
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
        load(TALK, metric="contains").fingerprint
        != load(TALK | {"turns": TALK["turns"][:1]}, metric="contains").fingerprint
    )


def test_broken_turns_are_named(load) -> None:
    """Each row with its reason; the others run."""
    broken = {
        "field turns must be a list of objects with question and answers": {"turns": ["And?"]},
        "field turns.question must be a text, it is missing": {"turns": [{"answers": "a"}]},
        "field turns.answers must be a text or a list of texts, it is missing": {"turns": [{"question": "a"}]},
    }
    task = load(*(TALK | change for change in broken.values()), TALK)
    assert [row["reason"] for row in task.quarantined] == list(broken) and len(task.requests) == 1
    task = load(TALK | {"turns": [{"question": "a", "answers": "("}]}, TALK, metric="regex")
    assert task.quarantined[0]["reason"].startswith("field answers has no regular expression")
    assert not any(turn.gold for turn in task.requests[0].turns), "no model would write a pattern"
    task = load(
        TALK | {"choices": ["the door", "car"]}, TALK | {"choices": ["the door", "car"], "turns": None}, metric="choice"
    )
    assert task.quarantined[0]["reason"].startswith("field turns goes on behind an answer, and with metric=choice")


def test_there_is_room_for_all_of_it(load, make_model) -> None:
    """A long context loses its middle, so that every turn still fits; turns that leave no room are refused."""
    small = make_model(300)
    (request,) = load(TALK | {"context": "word " * 900}, using=small, max_new_tokens=20).requests
    assert request.truncated and request.num_prompt_tokens + request.conversation_tokens <= 300
    with refused("prompt-length", None, "all/0"):
        load(TALK, using=small, max_new_tokens=100)


def test_a_template_without_a_place_for_answers(load, tokenizer, monkeypatch) -> None:
    """One that leaves answers out has no conversations."""
    monkeypatch.setattr(
        tokenizer, "chat_template", "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    )
    with refused("unsupported", "protocol.chat_template", "stand-in"):
        load(TALK)
    plain = SimpleNamespace(tokenizer=tokenizer, max_tokens=512, name="plain", chat_template=False)
    assert len(load(TALK, using=plain).requests[0].turns) == 2
