"""SCBench's shared contexts, on rows made here: prompts, both forms, scores, broken rows."""

import json

import pytest
from loaded import loader, text_of

from kvbench.tasks import data_files
from kvbench.tasks.scbench import SUBSETS, check_row, grade

load = loader("scbench")
CONTEXT = 'JSON data:\n{"a1": "Bx", "c2": "Dy"}'
ROW = {
    "id": 3,
    "context": CONTEXT,
    "multi_turns": [{"input": 'Key: "a1"', "answer": "Bx"}, {"input": 'Key: "c2"', "answer": ["Dy"]}],
}
BOOK = {"input": "A short book. Ann came.", "multi_turns": [{"input": "Who came?", "answer": ["Ann", "Anna"]}]}


@pytest.fixture
def folder(tmp_path):
    """Two subsets: one context with two questions each, and one with one."""
    (tmp_path / "scbench_kv.jsonl").write_text("".join(json.dumps(ROW | {"id": n}) + "\n" for n in range(2)))
    (tmp_path / "scbench_qa_eng.jsonl").write_text(json.dumps(BOOK) + "\n")
    return str(tmp_path)


def test_a_conversation_for_each_context(folder, model):
    """The first question behind the context, the others as turns; the score is the mean over answers."""
    task = load(model, data_dir=folder, subsets=["kv"], protocol={"chat_template": "never"})
    first, _ = task.requests
    begin = "Extract the value corresponding to the specified key in the JSON object below.\n\n"
    assert text_of(model, first) == f'<s>{begin}{CONTEXT}\n\nKey: "a1"'
    assert model.tokenizer.decode(list(first.turns[0].tokens)) == '\n\nKey: "c2"'
    assert first.max_new_tokens == 150 and first.sample_id == "kv/0"
    said = [task.score_turn(first, place, "it is Dy, not bx") for place in (0, 1)]
    assert said == [{"score": 0.0}, {"score": 1.0}]


def test_requests_that_share_a_context(folder, model):
    """Each question by itself, behind one context that is compressed before any of them is seen."""
    protocol = {"chat_template": "never", "query_aware": False}
    task = load(model, data_dir=folder, subsets="kv", form="requests", protocol=protocol)
    assert [request.sample_id for request in task.requests] == ["kv/0/0", "kv/0/1", "kv/1/0", "kv/1/1"]
    contexts = {request.segments[0] for request in task.requests}
    questions = [model.tokenizer.decode(list(request.segments[1])) for request in task.requests[:2]]
    assert len(contexts) == 1 and questions == ['\n\nKey: "a1"', '\n\nKey: "c2"']
    assert task.score(task.requests[1], "Dy") == {"score": 1.0} and not task.requests[0].turns


def test_scores_are_the_authors(folder, model):
    """Case counts for values alone; names of a chain count each; a question about a book is asked as they do."""
    assert grade(SUBSETS["kv"], ["Bx"], "bx") == 0 and grade(SUBSETS["qa_eng"], ["Ann"], "it was ANN") == 1
    assert grade(SUBSETS["vt"], ["AB", "CD", "EF"], "ab and ef") == pytest.approx(2 / 3)
    assert grade(SUBSETS["many_shot"], ["(A)", "(B)"], "(b)") == 1 and grade(SUBSETS["many_shot"], ["(A)"], "a") == 0
    (request,) = load(model, data_dir=folder, subsets="qa_eng", protocol={"chat_template": "never"}).requests
    assert text_of(model, request).endswith("Ann came.\n\nQuestion: Who came?\nAnswer:")
    assert request.answers == ("Ann", "Anna") and request.max_new_tokens == 40


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (ROW | {"multi_turns": []}, "field multi_turns must be a list"),
        (ROW | {"multi_turns": [{"input": "x", "answer": []}]}, "field multi_turns.answer must be a text"),
        (ROW | {"multi_turns": [{"input": "x", "answer": [" "]}]}, "field multi_turns.answer must be a text"),
        (ROW | {"multi_turns": [{"answer": "x"}]}, "input"),
        ({"multi_turns": ROW["multi_turns"]}, "context"),
    ],
)
def test_broken_rows_are_named(row, message):
    """By the field."""
    with pytest.raises(ValueError, match=message):
        check_row(row)


def test_files_are_the_authors():
    """One for each subset, by the name that it has on the hub."""
    files = data_files({"name": "scbench", "subsets": ["vt", "kv"]})
    assert [file.hub for file in files] == [
        (("microsoft/SCBench", "data/scbench_vt.jsonl"),),
        (("microsoft/SCBench", "data/scbench_kv.jsonl"),),
    ]
