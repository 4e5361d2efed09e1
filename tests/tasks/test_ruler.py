"""RULER on this machine: lengths, seeds, protocols, who reads it right and who guesses, and data that is not there."""

import json
import re
from types import SimpleNamespace

import pytest
from loaded import loader, records_of, scores_of
from refusals import refused

from kvbench.tasks import haystack
from kvbench.tasks.ruler import GROUPS, words
from kvbench.tasks.ruler.definitions import DEFINITIONS, GENERATED

LENGTHS = [640, 1536]


@pytest.fixture(scope="module")
def qa_folder(tmp_path_factory):
    """Gives a folder with small files in the form of SQuAD and HotpotQA, and one with essays."""
    folder = tmp_path_factory.mktemp("qa")
    parts = [
        {
            "context": f"Fact {n}. " + "It is so. " * 8,
            "qas": [{"question": f"Is it {n}?", "answers": [{"text": f"yes {n}"}]}],
        }
        for n in range(12)
    ]
    (folder / "dev-v2.0.json").write_text(json.dumps({"data": [{"paragraphs": parts[:6]}, {"paragraphs": parts[6:]}]}))
    rows = [
        {"question": f"Who is {n}?", "answer": f"name {n}", "context": [[f"T{n}", ["A. "] * (400 if n == 3 else 9)]]}
        for n in range(9)
    ]
    (folder / "hotpot_dev_distractor_v1.json").write_text(json.dumps(rows))
    (folder / "PaulGrahamEssays.json").write_text(json.dumps({"text": "An  essay\nbegins here. It is short. " * 30}))
    return str(folder)


load = loader("ruler", lengths=LENGTHS, items=2)


@pytest.fixture(scope="module")
def everything(tokenizer, qa_folder):
    """Gives all 13 tasks at two lengths."""
    model = SimpleNamespace(tokenizer=tokenizer, max_tokens=1536, name="stand-in", chat_template=True)
    return load(model, tasks="all", data_dir=qa_folder)


def test_lengths_are_hit(everything) -> None:
    """Prompt, chat template and room for the answer are never longer than asked and at most a unit shorter; the units
    are sentences of noise, needles, or documents. A model as short as the length takes the prompt whole."""
    units = {"niah_single_1": 40, "niah_multikey_2": 40, "niah_multikey_3": 110, "vt": 60, "qa_1": 60, "qa_2": 60}
    assert {request.meta["task"] for request in everything.requests} == set(DEFINITIONS)
    for request in everything.requests:
        task, length = request.meta["task"], request.meta["length"]
        total = request.num_prompt_tokens + request.max_new_tokens
        assert total <= length and not request.truncated, request.sample_id
        if task in GENERATED:  # the files of the test have few documents
            assert total >= length - units.get(task, 20), request.sample_id


def test_the_prompt_is_the_original_s_with_a_chat_around_it(everything, tokenizer) -> None:
    """The user's turn ends with the question, and the answer has begun behind its header, without a space there."""
    for request in everything.requests:
        text = tokenizer.decode([token for part in request.segments for token in part])
        assert text.startswith("<s><|user|>\n") and text.count("</s><|assistant|>\n") == 1
        begun = text.partition("</s><|assistant|>\n")[2]
        assert begun and not begun[0].isspace()
        assert re.match(r"The special magic|Answer:", begun), begun


@pytest.mark.parametrize("query_aware", [True, False])
def test_the_question_is_apart(model, query_aware: bool) -> None:
    """Without the question, the context holds the needle and not what is asked; the tokens are the same."""
    some = {"tasks": ["niah_multikey_1", "vt", "cwe", "fwe"], "lengths": [640], "items": 1}
    aware, blind = load(model, **some), load(model, protocol={"query_aware": query_aware}, **some)
    for one, other in zip(aware.requests, blind.requests, strict=True):
        assert sum(one.segments, ()) == sum(other.segments, ())
        assert len(other.segments) == (1 if query_aware else 2)
        if not query_aware:
            question = model.tokenizer.decode(other.segments[1])
            # A worked example has a question of its own, which belongs to the context.
            assert re.search(r"What (is|are)|Find all variables", question)
            assert "hidden within" not in question and "1. " not in question.partition("</s>")[0]


def test_who_copies_scores_all_and_who_guesses_nothing(everything, tokenizer) -> None:
    """An oracle that writes the gold answer scores 100. One that writes what is right elsewhere does not."""
    last: dict[str, list[str]] = {}
    guessed = []
    for request in everything.requests:
        assert request.meta["answers"][0] in tokenizer.decode(request.gold)  # what is forced
        gold = "".join(f"{answer}, " for answer in request.meta["answers"])
        assert everything.score(request, gold) == {"score": 1.0}
        assert everything.score(request, gold.upper() + "\nand more") == {"score": 1.0}
        assert everything.score(request, "") == {"score": 0.0}
        other = last.get(request.meta["task"])
        if other and other != request.meta["answers"]:
            guessed.append(everything.score(request, " ".join(other))["score"])
        last[request.meta["task"]] = request.meta["answers"]
    assert len(guessed) > 20 and sum(guessed) / len(guessed) < 0.02


def test_the_needles_are_there_once(everything, tokenizer) -> None:
    """Every answer of a needle task stands in its context once, and in no question."""
    for request in everything.requests:
        if request.meta["task"].startswith("niah"):
            text = tokenizer.decode(request.segments[0])
            context, _, question = text.rpartition("\nWhat ")
            for answer in request.meta["answers"]:
                assert context.count(f"is: {answer}.") == 1 and answer not in question


def test_seed_decides_and_facts_do_not_depend_on_the_length(everything, model, qa_folder) -> None:
    """Same seed, same prompts; another seed, others. An item asks for the same fact at every length where the task has
    one that fits."""
    some = {"tasks": ["niah_single_1", "vt"], "items": 1, "lengths": [640]}
    again, other = load(model, **some), load(model, seed=1, **some)
    by_id = {request.sample_id: request for request in everything.requests}
    assert [request.meta["answers"] for request in again.requests] == [
        by_id[request.sample_id].meta["answers"] for request in again.requests
    ]
    assert again.fingerprint == load(model, **some).fingerprint != other.fingerprint
    for request in everything.requests:
        if request.meta["task"] != "fwe":  # its number of coded words goes with the length
            twin = by_id.get(request.sample_id.replace(f"/{LENGTHS[1]}/", f"/{LENGTHS[0]}/"))
            assert twin is None or twin.meta["answers"] == request.meta["answers"]


def test_the_record_says_what_the_haystack_is(everything, model, qa_folder) -> None:
    """Text of the original or of kvbench's own: row and fingerprint tell, and so does the prompt."""
    assert everything.protocol["essays"] == "PaulGrahamEssays.json"
    own = load(model, tasks=["niah_single_2"], items=1, lengths=[512])
    assert own.protocol["essays"] == "kvbench" and own.protocol["words"] == words.vocabulary().origin
    theirs = load(model, tasks=["niah_single_2"], items=1, lengths=[512], data_dir=qa_folder)
    assert own.fingerprint != theirs.fingerprint
    assert "An essay begins here." in model.tokenizer.decode(theirs.requests[0].segments[0])


def test_questions_whose_documents_do_not_fit_are_named(everything) -> None:
    """The others are asked."""
    assert {row["line"] for row in everything.quarantined} <= {4}
    asked = [request.meta["index"] for request in everything.requests if request.meta["task"] == "qa_2"]
    assert asked and all(row["reason"].startswith("question: its documents take") for row in everything.quarantined)


def test_missing_files_are_named(model, tmp_path) -> None:
    """Only where they are asked for; the other 11 tasks need none."""
    assert set(GROUPS["generated"]) == set(DEFINITIONS) - {"qa_1", "qa_2"}
    with refused("data-missing", None, "qa_1", "dev-v2.0.json", "squad.json"):
        load(model, tasks="all")
    with refused("data-missing", None, "qa_2", "hotpot_dev_distractor_v1.json"):
        load(model, tasks=["qa_2"], data_dir=str(tmp_path))
    (tmp_path / "squad.json").write_text('{"data": 3}')
    with refused("file-content", None, "squad.json", "qa_1"):
        load(model, tasks=["qa_1"], data_dir=str(tmp_path))
    (tmp_path / "PaulGrahamEssays.json").write_text('["text"]')
    with refused("file-content", None, "PaulGrahamEssays.json"):
        load(model, tasks=["vt"], data_dir=str(tmp_path))


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"tasks": ["niah"]}, ("setting-value", "task.tasks", "task.tasks=['niah']", "mean niah_")),
        ({"lengths": [100]}, ("setting-value", "task.lengths", "task.lengths=[100]", "256")),
        ({"lengths": [512, 512]}, ("setting-value", "task.lengths", "task.lengths=[512, 512]")),
        ({"lengths": 8192}, ("setting-value", "task.lengths", "8192", "4096")),
        ({"lengths": [256], "tasks": ["cwe"]}, ("setting-value", "task.lengths", "task.lengths=256")),
        ({"items": 0}, ("setting-value", "task.items", "task.items=0")),
        ({"answer_prefix": "no"}, ("setting-value", "task.answer_prefix", "task.answer_prefix='no'")),
        ({"length": 512}, ("name-unknown", None, "key=length ")),
    ],
)
def test_wrong_settings_are_named(model, settings: dict, error: tuple) -> None:
    """Before anything runs."""
    with refused(*error):
        load(model, **settings)


def test_limit_and_tables(model) -> None:
    """A limit is items of each task and length; scores are also given by task and by length."""
    task = load(model, tasks=["vt", "fwe"], items=5, limit=1)
    assert [request.subset for request in task.requests] == ["vt/640", "vt/1536", "fwe/640", "fwe/1536"]
    found = task.aggregate(records_of(task, lambda request: request.meta["length"] == 640))["by"]
    assert scores_of(found["length"]) == {"640": 1.0, "1536": 0.0}
    assert scores_of(found["task"]) == {"vt": 0.5, "fwe": 0.5}


def test_thoughts_are_not_graded(make_model, tokenizer) -> None:
    """A template that opens thoughts cannot have the answer begun inside them; without the prefix, thoughts go."""
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}<|assistant|>\n<think>\n"
    thinker = make_model()
    thinker.tokenizer = type(tokenizer)(tokenizer_object=tokenizer.backend_tokenizer, chat_template=template)
    with refused("unsupported", "task.answer_prefix", "task.answer_prefix=false"):
        load(thinker, tasks=["niah_single_1"], items=1)
    task = load(thinker, tasks=["niah_single_1"], items=1, answer_prefix=False)
    request = task.requests[0]
    answer = request.meta["answers"][0]
    assert task.score(request, f"maybe {answer}") == {"score": 0.0}
    assert task.score(request, f"maybe</think> {answer}") == {"score": 1.0}


def test_essays_begin_again_when_they_are_too_short() -> None:
    """A haystack longer than the essays repeats them."""
    short = words.Essays(("One", "is.", "Two", "are."), "x")
    assert short.sentences(3) == ["One is.", "Two"]
    assert short.sentences(10) == ["One is.", "Two are.", "One is.", "Two are.", "One is."]
    assert words.essays(None).words[:3] == tuple(" ".join(haystack.paragraphs()).split()[:3])


def test_words_of_our_own_are_many_and_distinct(monkeypatch) -> None:
    """Enough for a list of 128k tokens and for keys that do not collide; wonderwords' where it is installed."""
    monkeypatch.setattr(words, "_wonderwords", lambda: None)
    own = words.vocabulary.__wrapped__()
    assert own.origin == "kvbench" and len(own.singles) == len(set(own.singles)) > 5000
    assert len(own.adjectives) ** own.parts * len(own.nouns) > 100_000
