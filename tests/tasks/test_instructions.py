"""Two instructions: an answer that follows them scores 1, the one that everybody would give and garbage score 0."""

from random import Random

import pytest
from loaded import loader
from refusals import refused

from kvbench.tasks.instructions.rules import FORMATS, LEAST, PAIRS, Forbidden, Format, Instructions, Language, draw
from kvbench.tasks.instructions.topics import LANGUAGES, TOPICS, named

load = loader("instructions", lengths=512, items=2)


@pytest.mark.parametrize("name", TOPICS)
def test_lists_are_lists(name):
    """Every language has as many items, each one word, and no two the same."""
    counts = {language: len(items) for language, items in TOPICS[name].items.items()}
    assert tuple(counts) == LANGUAGES and len(set(counts.values())) == 1
    for items in TOPICS[name].items.values():
        assert len(set(items)) == len(items) and named(items, " - ".join(items).upper()) == 1.0


@pytest.mark.parametrize("pair", PAIRS)
def test_no_floor_and_no_ceiling(pair):
    """Over all lists: the right answer follows both, the usual one neither, and nor do garbage and silence."""
    seen = set()
    for index in range(60):
        topics = Random(index).sample(sorted(TOPICS), 2)
        given = draw(pair, topics, index, Random(index))
        seen |= {type(rule).__name__ for rule in given.rules} | {
            rule.kind for rule in given.rules if isinstance(rule, Format)
        }
        for name in topics:
            topic = TOPICS[name]
            assert given.follow(topic, given.right(topic)) == (True, True, 1.0)
            usual = ", ".join(topic.items["English"]) + "."
            if pair == "forbidden+language":  # the words are of the other language, and English breaks that rule
                assert given.follow(topic, usual)[:2].count(True) <= 1
            else:
                assert given.follow(topic, usual)[:2] == (False, False)
            in_language = ", ".join(topic.items[given.language])
            assert not all(given.follow(topic, in_language)[:2])
            one = topic.items[given.language][0]
            for garbage in ("", "the the the the", given.text, "1. 2. 3.", f"{one} " * 30):
                assert given.follow(topic, garbage)[:2] == (False, False), (given, garbage)
    assert seen >= (set(FORMATS) if "format" in pair else {"Forbidden", "Language"})


@pytest.mark.parametrize(
    ("rule", "good", "bad"),
    [
        (Format("begin", "Memo"), "**Memo:** red, green, blue, yellow", "red, green, blue, yellow. Memo: that"),
        (
            Format("end", "that is all"),
            "red, green, blue, yellow. That is all!",
            "That is all: red, green, blue, yellow",
        ),
        (Format("capitals"), "RED, GREEN, BLUE, 4", "RED, GREEN, Blue, 4"),
        (Format("bars"), "red | green | blue | yellow", "red, green, blue | yellow"),
        (Forbidden(("green", "May")), "red, blue, yellow, orange", "red, blue, Green, orange"),
        (Language("French"), "Rouge, vert, bleu, jaune", "red, green, blue, yellow (rouge, vert)"),
        (Language("German"), "1. Rot\n2. Grun\n3. Blau\n4. Gelb", "rot"),
    ],
)
def test_each_rule(rule, good, bad):
    """As a model may write it: bold, another case, without accents; and nearly so."""
    given = Instructions((rule, Forbidden(("zebra",))))
    assert given.follow(TOPICS["colours"], good)[0] and not given.follow(TOPICS["colours"], bad)[0]


def test_the_two_are_told_apart():
    """Either may be followed alone; half of the list is an answer, less is none."""
    given = Instructions((Forbidden(("Tuesday",)), Format("capitals")))
    days = TOPICS["days"]
    assert given.follow(days, "Monday, Wednesday, Thursday") == (True, False, 0.5)
    assert given.follow(days, "MONDAY, TUESDAY, THURSDAY, FRIDAY") == (False, True, 0.5)
    assert given.follow(days, "MONDAY, FRIDAY")[:2] == (False, False) and LEAST == 0.5


@pytest.mark.parametrize("query_aware", [True, False])
@pytest.mark.parametrize("chat", ["auto", "never"])
def test_prompts(model, chat, query_aware):
    """System, text, question; as long as asked and not longer; the instruction is known to methods that keep it."""
    task = load(model, protocol={"chat_template": chat, "query_aware": query_aware, "system": "Be kind."})
    assert [request.subset for request in task.requests] == [pair for pair in PAIRS for _ in range(2)]
    for request in task.requests:
        text = model.tokenizer.decode(list(request.prompt))
        first, second = request.meta["instructions"]
        head = "<s><|system|>\n" if chat == "auto" else "<s>"
        assert text.startswith(f"{head}Be kind.\n\nYou are a helpful assistant.") and text.count("Be kind.") == 1
        assert f"\n1. {first}\n2. {second}" in text
        assert text.rstrip().endswith("<|assistant|>" if chat == "auto" else "Answer:")
        assert 440 < request.num_prompt_tokens + 96 <= 512 and not request.truncated
        kept = model.tokenizer.decode(list(request.prompt[: request.instruction_tokens]))
        assert second in kept and "Here is" not in kept
        assert len(request.segments) == 2 - query_aware
        if not query_aware:
            asked = model.tokenizer.decode(list(request.segments[1]))
            assert asked.lstrip().startswith("That was the text.")
        assert task.score(request, model.tokenizer.decode(list(request.gold)))["score"] == 1.0


def test_conversations(model):
    """Each turn asks for another list, and all answers count; a table by turn says where instructions get lost."""
    task = load(model, turns=4, items=3, pairs=["format+forbidden"], lengths=[1024])
    right = []
    for request in task.requests:
        golds = [request.answers[0], *(turn.answers[0] for turn in request.turns)]
        texts = [model.tokenizer.decode(list(turn.tokens)) for turn in request.turns]
        assert all(text.startswith("</s><|user|>\n") and text.endswith("<|assistant|>\n") for text in texts)
        assert len(set(texts)) == 3 and request.num_prompt_tokens + request.conversation_tokens <= 1024
        assert [task.score_turn(request, place, gold)["score"] for place, gold in enumerate(golds)] == [1.0] * 4
        right.append(golds)
    records = [
        {
            "sample_id": request.sample_id,
            "subset": request.subset,
            "status": "ok",
            "meta": request.meta,
            "repeat": 0,
            "text": golds[3] if number else "what?",
            "turns": [{"text": text, "finish": "eos"} for text in (golds[0], "", golds[2])],
            "scores": dict.fromkeys(task.metrics, 0.0),
            "finish": "eos",
        }
        for number, (request, golds) in enumerate(zip(task.requests, right, strict=True))
    ]
    by_turn = task.aggregate(records)["by"]["turn"]
    assert [by_turn[str(turn)]["score"] for turn in range(1, 5)] == [1.0, 0.0, 1.0, pytest.approx(2 / 3)]


def test_the_same_facts_at_every_length_and_thoughts_are_not_graded(model):
    """A longer prompt has more text and the same rules; what is thought follows nothing."""
    task = load(model, lengths=[512, 768], items=1)
    short, long = task.requests[:2]
    assert short.meta["instructions"] == long.meta["instructions"] and short.gold == long.gold
    assert long.num_prompt_tokens > short.num_prompt_tokens + 200
    right = model.tokenizer.decode(list(short.gold))
    assert task.score(short, f"<think>{right}")["score"] == 0.0
    assert task.score(short, f"<think>so</think>\n{right}")["score"] == 1.0


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"lengths": 256}, ("setting-value", "task.lengths", "task.lengths=256")),
        ({"lengths": 8192}, ("setting-value", "task.lengths", "8192", "stand-in")),
        ({"turns": 7}, ("setting-value", "task.turns", "task.turns=7")),
        ({"pairs": "format+formta"}, ("setting-value", "task.pairs", "'format+formta'")),
    ],
)
def test_what_does_not_fit_is_named(model, settings, error):
    """Before anything runs."""
    with refused(*error):
        load(model, turns=settings.pop("turns", 3), **settings)
