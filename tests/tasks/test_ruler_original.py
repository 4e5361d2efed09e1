"""RULER beside lm-eval's port of it: where both draw the same, every prompt is the same text to the character.

lm-eval's modules are run as they are installed. They draw from Python's global generator; here they are handed the one
that kvbench uses, and kvbench's words, essays and sentences, because the originals are not on this machine.
"""

import importlib
import importlib.metadata
import json
import sys
from dataclasses import replace
from importlib.util import find_spec
from random import Random
from types import ModuleType, SimpleNamespace

import pytest

from kvbench.tasks.ruler import definitions, makers, words
from kvbench.tasks.ruler.definitions import DEFINITIONS, NEEDLES
from kvbench.tasks.ruler.document import Job

LENGTH = 4096
VOCABULARY = words.vocabulary()  # before the stand-in of wonderwords, and kept
JOB = Job(seed="original", length=LENGTH, essays=words.essays(None))
DOCS = words.Documents(
    texts=tuple(sorted(f"Title {place}\nWhat is said of it, {place * place}." for place in range(40))),
    questions=(words.Question("What of seven?", ("49", "forty-nine"), (7,), (5, 6, 8, 9)),),
    file="made up",
)


@pytest.fixture(scope="module")
def original():
    """Gives lm-eval's modules by name, loaded without the packages and downloads that they ask for."""
    assert find_spec("lm_eval.tasks.ruler.common_utils")
    wonder, nltk, tokenize = ModuleType("wonderwords"), ModuleType("nltk"), ModuleType("nltk.tokenize")
    lists = {"nouns": ["a"], "adjectives": ["b"], "verbs": ["c"], "noun": ["a"], "adjective": ["b"], "verb": ["c"]}
    vars(wonder)["RandomWord"] = lambda: SimpleNamespace(_categories=lists)
    vars(nltk).update(
        sent_tokenize=lambda text: words.Essays(tuple(text.split()), "").sentences(len(text.split())),
        data=SimpleNamespace(find=lambda name: name),
    )
    names = ("niah_utils", "prepare_niah", "vt_utils", "cwe_utils", "fwe_utils", "qa_utils", "common_utils")
    before = {name: sys.modules.get(name) for name in ("wonderwords", "nltk", "nltk.tokenize")}
    sys.modules.update({"wonderwords": wonder, "nltk": nltk, "nltk.tokenize": tokenize})
    patch = pytest.MonkeyPatch()
    installed = importlib.metadata.version
    patch.setattr("importlib.metadata.version", lambda name: "3.9.9" if name == "nltk" else installed(name))
    try:
        yield {name: importlib.import_module(f"lm_eval.tasks.ruler.{name}") for name in names}
    finally:
        patch.undo()
        for name in names:
            sys.modules.pop(f"lm_eval.tasks.ruler.{name}", None)
        for name, module in before.items():
            if module is None:
                sys.modules.pop(name)
            else:
                sys.modules[name] = module


def draws(rng: Random) -> SimpleNamespace:
    """What lm-eval's modules use of `random`, drawn from one generator."""
    used = ("randint", "random", "sample", "choices", "choice", "shuffle", "getrandbits")
    return SimpleNamespace(Random=Random, **{name: getattr(rng, name) for name in used})


def tokenizer(text: str) -> SimpleNamespace:
    """What counts tokens for lm-eval: words."""
    return SimpleNamespace(input_ids=text.split())


def arguments(original, name: str) -> dict:
    """What lm-eval's function of a needle task hands to its generator."""
    taken: dict = {}
    module = original["niah_utils"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "generate_samples", lambda haystack, **kwargs: taken.update(kwargs) or [])
        patch.setattr(module, "get_haystack", lambda type_haystack: type_haystack)
        patch.setattr(module, "get_tokenizer", lambda name: None)
        patch.setattr(module, "download_dataset", list)
        getattr(module, name)(max_seq_lengths=[LENGTH])
    return taken


@pytest.mark.parametrize("name", NEEDLES)
@pytest.mark.parametrize("units", [9, 130])
def test_needles(original, monkeypatch, name: str, units: int) -> None:
    """Context, question, beginning of the answer and answers of all eight needle tasks, as lm-eval configures them."""
    module, given = original["prepare_niah"], arguments(original, name)
    rng = JOB.rng()
    monkeypatch.setattr(module, "random", draws(rng))
    monkeypatch.setattr(module, "generate_random_word", lambda: VOCABULARY.key(rng))
    kind = given["type_haystack"]
    haystack = list(JOB.essays.words) if kind == "essay" else module.get_haystack(kind)
    options = {key: given[key] for key in ("type_haystack", "type_needle_k", "type_needle_v", "template")}
    counted = {key: given.get(key, 1) for key in ("num_needle_k", "num_needle_v", "num_needle_q")}
    counted["num_needle_k"] = max(counted["num_needle_k"], counted["num_needle_q"])
    text, answers, query = module.generate_input_output(units, haystack, **options, **counted)
    ours = makers.hide(NEEDLES[name], JOB, units)
    assert ours.context + ours.question == text
    assert list(ours.answers) == answers
    # lm-eval makes the answer's beginning where it writes the row.
    many = counted["num_needle_q"] * counted["num_needle_v"] > 1
    what, verb = (options["type_needle_v"], "are") if many else (options["type_needle_v"][:-1], "is")
    assert ours.prefix == f" The special magic {what} for {query} mentioned in the provided text {verb}"
    assert ours.question.startswith("\nWhat ") and ours.question.endswith("mentioned in the provided text?")


def test_the_answer_begins_as_the_original_begins_it(original, monkeypatch) -> None:
    """One needle and many: lm-eval's rows have the same `gen_prefix`."""
    module = original["prepare_niah"]
    monkeypatch.setattr(module, "random", draws(Random(1)))
    monkeypatch.setattr(module, "generate_random_word", lambda: "quiet-river")

    for name in ("niah_single_1", "niah_multivalue"):
        given = arguments(original, name) | {"num_samples": 1, "TOKENIZER": tokenizer, "max_seq_length": 700}
        kind = given["type_haystack"]
        haystack = list(JOB.essays.words) if kind == "essay" else module.get_haystack(kind)
        (row,) = module.generate_samples(haystack, **given)
        ours = makers.ask_for(NEEDLES[name], "x", ["quiet-river"], ["1"])
        assert ours.prefix == f" {row['gen_prefix']}"


@pytest.mark.parametrize("units", [1, 3, 40])
@pytest.mark.parametrize("letters", [makers.NAME_LETTERS, makers.EXAMPLE_LETTERS])
def test_variable_tracking(original, monkeypatch, units: int, letters: int) -> None:
    """The text, and the worked example's own."""
    module, rng = original["vt_utils"], Random(5)
    monkeypatch.setattr(module, "random", draws(rng))
    monkeypatch.setattr(module, "np", SimpleNamespace(random=SimpleNamespace(randint=rng.randrange)))
    text, answers = module.generate_input_output(units, 1, makers.HOPS, is_icl=letters == makers.EXAMPLE_LETTERS)
    ours = makers.chain_text(Random(5), units, letters)
    assert ours.prompt == text
    assert list(ours.answers) == answers


def test_the_worked_example_stands_where_the_original_puts_it(original, monkeypatch) -> None:
    """Both parts of a row of lm-eval, put together by lm-eval's own code."""
    module = original["vt_utils"]
    job = replace(JOB, example_units=6)
    first, rng = Random(f"{job.seed}/example"), job.rng()
    text = makers.chain_text(first, 6, makers.EXAMPLE_LETTERS)
    monkeypatch.setattr(module, "random", draws(rng))
    monkeypatch.setattr(module, "np", SimpleNamespace(random=SimpleNamespace(randint=rng.randrange)))
    monkeypatch.setattr(module, "randomize_icl", lambda example: example)
    made = []

    def generate(num_noises, num_chains, num_hops, is_icl=False):
        rng.setstate(job.rng().getstate())
        made.append(kept(num_noises, num_chains, num_hops, is_icl=is_icl))
        return made[-1]

    kept = module.generate_input_output
    monkeypatch.setattr(module, "generate_input_output", generate)

    example = {"input": text.prompt, "outputs": list(text.answers)}
    rows = module.sys_vartrack_w_noise_random(tokenizer, 1, 900, icl_example=example)
    noises = made[-1][0].count("The grass is green.")
    ours = makers.variable_tracking(job, noises)
    assert ours.context + ours.question == rows[0]["input"]
    assert ours.prefix.strip() == rows[0]["gen_prefix"]
    assert list(ours.answers) == rows[0]["outputs"] != list(text.answers)
    assert DEFINITIONS["vt"].answer_tokens == 30


@pytest.mark.parametrize(("length", "units"), [(4096, 60), (2048, 30)])
def test_common_words(original, monkeypatch, length: int, units: int) -> None:
    """The list with its repeats for long and for short prompts."""
    module, rng = original["cwe_utils"], JOB.rng()
    monkeypatch.setattr(module, "RNG", SimpleNamespace(shuffle=rng.shuffle))
    examples = [("", ["x"]), None]

    def get_example(*sizes):
        made = examples.pop(0)
        return made or kept(*sizes)  # the example that lm-eval makes first is in no prompt

    kept = module.get_example
    monkeypatch.setattr(module, "get_example", get_example)
    monkeypatch.setattr(module, "random", draws(rng))
    monkeypatch.setattr(module, "WORDS", VOCABULARY.singles)
    _, text, answers = module.generate_input_output(units, length)
    ours = makers.common_words(replace(JOB, length=length), units)
    assert ours.prompt == text
    assert list(ours.answers) == answers


@pytest.mark.parametrize(("length", "units"), [(4096, 600), (512, 80)])
def test_frequent_words(original, monkeypatch, length: int, units: int) -> None:
    """The coded text, whose noise is dots."""
    module, rng = original["fwe_utils"], JOB.rng()
    monkeypatch.setattr(module, "random", SimpleNamespace(Random=Random, choices=rng.choices))

    text, answers, _ = module.generate_input_output(length, tokenizer, num_words=units, vocab_size=length // 50)
    ours = makers.frequent_words(replace(JOB, length=length), units)
    assert ours.prompt == text
    assert list(ours.answers) == answers


@pytest.mark.parametrize("units", [1, 3, 5, 20, 40, 60])
def test_questions(original, monkeypatch, units: int) -> None:
    """Documents of the same article come before others; all there are when as many are wanted."""
    module, job = original["qa_utils"], replace(JOB, documents=DOCS)
    monkeypatch.setattr(module, "random", SimpleNamespace(Random=Random, sample=job.rng().sample))
    asked = DOCS.questions[0]
    row = {"query": asked.query, "outputs": list(asked.answers), "context": [7], "more_context": list(asked.near)}
    text, answers = module.generate_input_output(0, units, [row], list(DOCS.texts))
    ours = makers.answer_question(job, units)
    assert ours.context + ours.question == text
    assert list(ours.answers) == answers
    assert ours.prefix == f" {module.CONFIG['answer_prefix']}"


@pytest.mark.parametrize(("source", "name"), [("read_squad", "qa_1"), ("read_hotpotqa", "qa_2")])
def test_question_files(original, monkeypatch, tmp_path, source: str, name: str) -> None:
    """Questions that have no answer are no questions; documents come sorted, each once."""
    if name == "qa_1":
        asked = [{"question": "Q1", "answers": [{"text": "A"}, {"text": "B"}], "is_impossible": False}]
        asked.append({"question": "none", "answers": [], "is_impossible": True})
        parts = [{"context": "Zeta.", "qas": asked}, {"context": "Alpha.", "qas": []}]
        data: object = {"data": [{"paragraphs": parts}, {"paragraphs": [{"context": "Mid.", "qas": asked[:1]}]}]}
    else:
        context = [["T", ["One. ", "Two."]], ["A", ["Three."]]]
        data = [{"question": "Q", "answer": "yes", "context": context}]
    module = original["qa_utils"]
    monkeypatch.setattr(module, "download_json", lambda url: data)
    rows, texts = getattr(module, source).__wrapped__()
    (tmp_path / words.QA_FILES[name][0]).write_text(json.dumps(data))
    found = words.documents(name, str(tmp_path))
    assert list(found.texts) == texts
    pairs = zip(found.questions, rows, strict=True)
    for ours, theirs in pairs:
        asked = theirs["query"], theirs["outputs"], theirs["context"], theirs.get("more_context", [])
        assert (ours.query, list(ours.answers), list(ours.documents), list(ours.near)) == asked


@pytest.mark.parametrize("text", ["", "12 and 34", "THE answer: Ab\x07c, 12", "\x00\n 34 ", "abc 12 34 56"])
def test_scores(original, text: str) -> None:
    """The share of the answers that are there; one is enough for question answering (RULER's code, one prediction)."""
    module, answers = original["common_utils"], ["12", "34", "ABC"]
    assert definitions.match_all(text, answers) == module.string_match_all(module.postprocess_pred([text]), [answers])
    assert definitions.match_any(text, answers) == float(definitions.match_all(text, answers) > 0)


def test_lengths_of_answers(original) -> None:
    """What lm-eval lets the model write."""
    assert {DEFINITIONS[name].answer_tokens for name in NEEDLES} == {128}
    for module, name in (("cwe_utils", "cwe"), ("fwe_utils", "fwe"), ("qa_utils", "qa_1"), ("qa_utils", "qa_2")):
        assert original[module].CONFIG["tokens_to_generate"] == DEFINITIONS[name].answer_tokens
