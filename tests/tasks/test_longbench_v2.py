"""LongBench v2 and LongBench's categories, on rows made here: prompts, letters, choices, tables, broken rows."""

import json

import pytest
from loaded import records_of, scores_of
from longbench_rows import row as old_row
from longbench_rows import write
from refusals import refused

from kvbench.tasks import data_files, load_task
from kvbench.tasks.fetch import check_file
from kvbench.tasks.longbench import CATEGORIES, ENGLISH
from kvbench.tasks.longbench_v2 import letter_of

ROW = {
    "_id": "66f3",
    "domain": "Single-Document QA",
    "sub_domain": "Literary",
    "difficulty": "hard",
    "length": "medium",
    "question": "Who keeps the key? ",
    "choice_A": "the cook",
    "choice_B": " the gardener",
    "choice_C": "the smith",
    "choice_D": "nobody",
    "answer": "B",
    "context": "\nThe gardener keeps the key of the gate in a box.\n",
}
PROMPT = """Please read the following text and answer the question below.

<text>
The gardener keeps the key of the gate in a box.
</text>

What is the correct answer to this question: Who keeps the key?
Choices:
(A) the cook
(B) the gardener
(C) the smith
(D) nobody

Format your response as follows: "The correct answer is (insert answer here)"."""


@pytest.fixture
def load(tmp_path, model):
    """Gives a function that writes rows and loads the task."""

    def load(*rows, name="longbench_v2.jsonl", protocol=None, limit=None, **settings):
        text = json.dumps(rows) if name.endswith(".json") else "\n".join(map(json.dumps, rows))
        (tmp_path / name).write_text(text)
        cfg = {"name": "longbench_v2", "data_dir": str(tmp_path)} | settings
        return load_task(cfg, model, limit=limit, seed=0, protocol=protocol)

    return load


@pytest.mark.parametrize("name", ["longbench_v2.jsonl", "data.json", "data.jsonl"])
@pytest.mark.parametrize("query_aware", [True, False])
def test_prompts_are_the_authors(load, model, query_aware, name):
    """In a chat, to the character, from the file of the authors or from lines; divided behind the text."""
    (request,) = load(ROW, name=name, protocol={"query_aware": query_aware}).requests
    text = model.tokenizer.decode(list(request.prompt))
    assert text == f"<s><|user|>\n{PROMPT}</s><|assistant|>\n"
    assert model.tokenizer.decode(list(request.gold)).strip() == "The correct answer is (B)"
    assert len(request.segments) == 2 - query_aware and request.max_new_tokens == 128
    if not query_aware:
        assert model.tokenizer.decode(list(request.segments[1])).startswith("\n</text>")


@pytest.mark.parametrize(
    ("answer", "letter"),
    [
        ("The correct answer is (B)", "B"),
        ("**The correct answer is (C).** Because", "C"),
        ("The correct answer is D.", "D"),
        ("The correct answer is A, or: The correct answer is (C)", "C"),
        ("The correct answer is (insert answer here)", None),
        ("B", None),
        ("the correct answer is (B)", None),
        ("", None),
    ],
)
def test_letters(load, answer, letter):
    """As the authors take them; what is thought counts nothing."""
    assert letter_of(answer) == letter
    task = load(ROW)
    assert task.score(task.requests[0], answer) == {"score": float(letter == "B")}
    assert task.score(task.requests[0], f"<think>The correct answer is (B){answer}") == {"score": 0.0}


@pytest.mark.parametrize("query_aware", [True, False])
@pytest.mark.parametrize("chat", ["auto", "never"])
def test_choices(load, model, chat, query_aware):
    """The letters behind the same words; the last token of the prompt is read after compression."""
    task = load(ROW, form="choices", protocol={"chat_template": chat, "query_aware": query_aware})
    (request,) = task.requests
    assert [model.tokenizer.decode(list(choice)) for choice in request.choices] == [f" ({x})" for x in "ABCD"]
    assert request.gold == request.choices[1] and len(request.segments) == 2 and request.max_new_tokens == 1
    text = model.tokenizer.decode(list(request.prompt))
    assert text.endswith(
        "<|assistant|>\nThe correct answer is" if chat == "auto" else 'answer here)".\n\nThe correct answer is'
    )
    if query_aware:
        assert len(request.segments[1]) == 1
    likely = [{"loglikelihood": value} for value in (-2.0, -1.0, -3.0, -2.5)]
    assert task.score_choices(request, likely) == {"score": 1.0}
    assert task.score_choices(request, likely[::-1]) == {"score": 0.0}
    with refused("settings-conflict", "task.form", "task.form=choices"):
        load(ROW, form="choices", protocol={"num_samples": 2, "temperature": 1.0})


def test_long_texts_lose_their_middle(load):
    """The question stays, and the record says that the text was cut."""
    (request,) = load(ROW | {"context": "word " * 9000}, max_prompt_tokens=500).requests
    assert request.truncated and request.num_prompt_tokens < 560


def test_tables_by_difficulty_length_and_domain(load):
    """As the authors report."""
    rows = [ROW | {"_id": str(n), "difficulty": ("easy", "hard")[n % 2], "question": f"{n}?"} for n in range(4)]
    task = load(*rows, ROW | {"_id": "x", "length": "long", "domain": "Code"})
    by = task.aggregate(records_of(task, lambda request: request.meta["index"] < 2))["by"]
    assert scores_of(by["difficulty"]) == {"easy": 0.5, "hard": pytest.approx(1 / 3)}
    assert {name: group["num_samples"] for name, group in by["length"].items()} == {"medium": 4, "long": 1}
    assert set(by["domain"]) == {"Single-Document QA", "Code"}


def test_broken_rows_are_named(load, tmp_path, model):
    """Each with its line; a file that is no list at all is named whole; without any, the command that gets it."""
    broken = {
        "field answer must be one of A, B, C, D, it is 'E'": {"answer": "E"},
        "field difficulty must be one of easy, hard, it is 'None'": {"difficulty": None},
        "field length must be one of short, medium, long, it is '12'": {"length": 12},
        "field choice_C must be a text, it is missing": {"choice_C": None},
        "field context must be a text, it is empty": {"context": " \n"},
    }
    task = load(ROW, *(ROW | change for change in broken.values()), name="data.json")
    assert [one["reason"] for one in task.quarantined] == list(broken)
    assert [one["line"] for one in task.quarantined] == [2, 3, 4, 5, 6]
    write(tmp_path / "longbench_v2.jsonl", ROW, ROW | {"_id": "2", "answer": "F"})
    (file,) = data_files({"name": "longbench_v2"})
    report = check_file(file, tmp_path, {}, partial_data=True)  # looks at rows as the task does
    assert (report.rows, report.wanted, len(report.broken)) == (1, 503, 1)
    (tmp_path / "longbench_v2.jsonl").unlink()
    (tmp_path / "data.json").write_text('{"a": 1}')
    cfg = {"name": "longbench_v2", "data_dir": str(tmp_path)}
    with refused("file-content", None, "data.json", "dict"):
        load_task(cfg, model, limit=None, seed=0)
    (tmp_path / "data.json").unlink()
    with refused("data-missing", None, "longbench_v2", "data.json", "task=longbench_v2"):
        load_task(cfg, model, limit=None, seed=0)


def test_longbench_has_its_categories(tmp_path, model):
    """Every subset is in one; a category is the mean of its subsets, however many samples they have."""
    assert sorted(name for names in CATEGORIES.values() for name in names) == sorted(ENGLISH)
    category_of = pytest.importorskip("kvbench.extensions.views.table_content").category_of
    assert all(category_of("longbench", name) == title for title, names in CATEGORIES.items() for name in names)
    write(tmp_path / "qasper.jsonl", *(old_row(answers=["box"], _id=str(n)) for n in range(3)))
    for name in ("narrativeqa", "lcc", "hotpotqa_e"):
        write(tmp_path / f"{name}.jsonl", old_row(answers=["box"], length=5000))
    cfg = {"name": "longbench", "subsets": ["qasper", "narrativeqa", "lcc", "hotpotqa_e"], "data_dir": str(tmp_path)}
    task = load_task(cfg, model, limit=None, seed=0)
    by = task.aggregate(records_of(task, lambda request: request.subset == "qasper"))["by"]["category"]
    assert scores_of(by) == {"Single-document QA": 0.5, "Code": 0.0, "Multi-document QA": 0.0}
    assert by["Single-document QA"]["num_samples"] == 4
