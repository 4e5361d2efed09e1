"""InfiniteBench's retrieval subsets, on rows made here: prompts, scores, files."""

import json
from pathlib import Path

import pytest
from loaded import loader
from refusals import refused

from kvbench.tasks import data_files
from kvbench.tasks.fetch import check_file

ROWS = {
    "passkey": {
        "id": 0,
        "context": "The grass is green. The pass key is 71432. Remember it.",
        "input": "What is the pass key?",
        "answer": ["71432"],
        "options": [],
    },
    "number_string": {
        "id": 0,
        "context": "The sequence of digits is 2200012222. Remember it.",
        "input": "What is the sequence of digits?",
        "answer": "2200012222",
    },
    "kv_retrieval": {
        "id": 0,
        "content": 'JSON data:\n{"a1-f": "b2-0"}',
        "input": 'Key: "a1-f"\nThe value associated with the specified key is: ',
        "answer": ["b2-0"],
    },
}
HIDDEN = "There is an important info hidden inside a lot of irrelevant text. "
QUIZ = " I will quiz you about the important information there."
BEGIN = {
    "passkey": f"{HIDDEN}Find it and memorize them.{QUIZ}",
    "number_string": f"{HIDDEN}Find it.{QUIZ}",
    "kv_retrieval": "Extract the value corresponding to the specified key in the JSON object below.",
}
END = {"passkey": "\n\nThe pass key is", "number_string": "\n\nThe sequence of digits is", "kv_retrieval": ""}


@pytest.fixture
def folder(tmp_path):
    """A folder with a row of each subset."""
    for name, row in ROWS.items():
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    return str(tmp_path)


load = loader("infinitebench")


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("query_aware", [True, False])
def test_prompts_are_the_authors(folder, model, name, query_aware):
    """To the character; in a chat what their template ends with begins the answer."""
    row = ROWS[name]
    context = row.get("context", row.get("content"))
    plain = {"chat_template": "never", "query_aware": query_aware}
    (request,) = load(model, data_dir=folder, subsets=name, protocol=plain).requests
    whole = f"<s>{BEGIN[name]}\n\n{context}\n\n{row['input']}{END[name]}"
    assert model.tokenizer.decode(list(request.prompt)) == whole
    if not query_aware:
        assert row["input"] not in model.tokenizer.decode(list(request.segments[0]))
    (request,) = load(model, data_dir=folder, subsets=name).requests
    said = model.tokenizer.decode(list(request.prompt))
    assert said.endswith(f"<|assistant|>\n{END[name].strip()}")
    assert request.max_new_tokens == {"passkey": 6, "number_string": 12, "kv_retrieval": 50}[name]
    (request,) = load(model, data_dir=folder, subsets=name, answer_prefix=False).requests
    assert model.tokenizer.decode(list(request.prompt)).endswith("<|assistant|>\n") and request.max_new_tokens == 50


@pytest.mark.parametrize(
    ("subset", "right", "wrong"),
    [
        ("passkey", (" 71432.", "<71432>"), ("1 or 71432", "714321", "none")),
        ("number_string", ("It is 2200012222!",), ("220001222",)),
        ("kv_retrieval", ('"b2-0".', "the value:b2-0, yes"), ("b2-01", "")),
    ],
)
def test_scores(folder, model, subset, right, wrong):
    """The first run of digits, or the value as a word; an oracle scores 1, and thoughts nothing."""
    task = load(model, data_dir=folder, subsets=subset)
    request = task.requests[0]
    gold = model.tokenizer.decode(list(request.gold))
    assert [task.score(request, answer)["score"] for answer in (*right, gold)] == [1.0] * (len(right) + 1)
    assert not any(task.score(request, answer)["score"] for answer in (*wrong, f"<think>{gold}"))


def test_files_are_found_checked_and_asked_for(folder, model):
    """Broken rows are named, the others run; a missing file is answered with the command that gets it."""
    with Path(folder, "passkey.jsonl").open("a") as stream:
        stream.write(json.dumps({"context": "a", "input": "b", "answer": []}) + "\n")
    task = load(model, data_dir=folder)
    assert [request.sample_id for request in task.requests] == ["passkey/0", "number_string/0", "kv_retrieval/0"]
    assert [one["reason"] for one in task.quarantined] == ["field answer must be a text, it is list"]
    files = {file.name: file for file in data_files({"name": "infinitebench"})}
    assert {name: file.rows for name, file in files.items()} == dict(zip(ROWS, (590, 590, 500), strict=True))
    report = check_file(files["passkey"], Path(folder), {}, partial_data=True)
    assert (report.rows, len(report.broken)) == (1, 1)
    assert [file.name for file in data_files({"name": "infinitebench", "subsets": "passkey"})] == ["passkey"]
    Path(folder, "kv_retrieval.jsonl").unlink()
    with refused("data-missing", None, "kv_retrieval", "hf download xinrongzhang2022/InfiniteBench"):
        load(model, data_dir=folder)


def test_an_answer_does_not_begin_inside_thoughts(folder, model, tokenizer, monkeypatch):
    """A template that opens thoughts is refused with the answer's beginning, and taken without."""
    monkeypatch.setattr(tokenizer, "chat_template", tokenizer.chat_template + "<think>\n")
    with refused("unsupported", "task.answer_prefix", "task.answer_prefix=false"):
        load(model, data_dir=folder, subsets="passkey")
    (request,) = load(model, data_dir=folder, subsets="passkey", answer_prefix=False).requests
    assert request.thoughts.opened
