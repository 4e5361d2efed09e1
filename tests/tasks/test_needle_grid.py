"""Needles over depth and length: where they lie, what stays the same between cells, and who scores."""

import re

import pytest
from loaded import loader, records_of, scores_of, text_of
from refusals import refused

from kvbench.tasks.ruler.grid import depths_of
from kvbench.tasks.ruler.words import Essays

load = loader("needle", lengths=[512, 1200], depths=3, items=2)


def context_of(model, request) -> str:
    """The text between instruction and question."""
    return text_of(model, request).partition("afterwards.\n")[2].rpartition("\nWhat is the special")[0]


@pytest.mark.parametrize("values", ["numbers", "uuids"])
@pytest.mark.parametrize("needles", [1, 5])
def test_every_cell_is_as_deep_and_as_long_as_it_says(model, values: str, needles: int) -> None:
    """The needle that is asked for lies at its depth, between sentences; the prompt has its length."""
    task = load(model, values=values, needles=needles)
    assert len(task.requests) == 2 * 3 * 2
    for request in task.requests:
        context, (answer,) = context_of(model, request), request.meta["answers"]
        total = request.num_prompt_tokens + request.max_new_tokens
        assert request.meta["length"] - 20 <= total <= request.meta["length"] and not request.truncated
        found = re.findall(rf"One of the special magic {values} for (\S+) is: (\S+)\.", context)
        assert len(found) == needles == len(dict(found)) and answer in dict(found).values()
        before = context[: context.index(f"is: {answer}.")].rpartition("One of the special magic")[0]
        counts = [
            len(sentences(re.sub(rf"One of the special magic {values} for \S+ is: \S+\.", "", part)))
            for part in (before, context)
        ]
        assert counts[0] == int(counts[1] * request.meta["depth"] / 100)


def sentences(text: str) -> list[str]:
    """The sentences of a text."""
    return Essays(tuple(text.split()), "").sentences(len(text.split())) if text.strip() else []


def test_cells_differ_in_depth_and_length_only(model) -> None:
    """An item asks for the same fact in every cell; items ask for different ones."""
    facts: dict[int, set] = {}
    for request in load(model).requests:
        facts.setdefault(request.meta["index"], set()).add(tuple(request.meta["answers"]))
    assert [len(found) for found in facts.values()] == [1, 1] and facts[0] != facts[1]
    (one, two) = (next(r for r in load(model).requests if r.sample_id == f"512/0/{item}") for item in (0, 1))
    assert context_of(model, one).split()[-20:] != context_of(model, two).split()[-20:]


def test_who_copies_scores_and_who_guesses_does_not(model) -> None:
    """An oracle scores 100, one that names another value 0; scores come by length and by depth."""
    task = load(model, items=1)
    for request in task.requests:
        assert task.score(request, f" {request.meta['answers'][0]}.") == {"score": 1.0}
        assert task.score(request, "1234567") == {"score": 0.0}
    by = task.aggregate(records_of(task, lambda request: request.meta["depth"] > 0))["by"]
    assert scores_of(by["depth"]) == {"0": 0.0, "50": 1.0, "100": 1.0} and set(by["length"]) == {"512", "1200"}


def test_the_question_can_be_apart(model) -> None:
    """The context ends before the question."""
    request = load(model, items=1, depths=[50], lengths=512, protocol={"query_aware": False}).requests[0]
    context, question = map(model.tokenizer.decode, request.segments)
    assert request.meta["answers"][0] in context and "What is the special magic" not in context
    assert "What is the special magic number for" in question


def test_depths() -> None:
    """A number of them, or a list."""
    assert depths_of(5) == [0, 25, 50, 75, 100] and depths_of(2) == [0, 100]
    assert depths_of([90, 10]) == [10, 90]


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"depths": 1}, ("setting-value", "task.depths", "task.depths=1", "101")),
        ({"depths": [0, 101]}, ("setting-value", "task.depths", "task.depths=[0, 101]", "0 to 100")),
        ({"depths": "five"}, ("setting-value", "task.depths", "task.depths='five'")),
        ({"values": "letters"}, ("setting-value", "task.values", "task.values='letters'", "'numbers'", "'uuids'")),
        ({"needles": 0}, ("setting-value", "task.needles", "task.needles=0")),
        ({"needles": 40, "lengths": 512}, ("setting-value", "task.lengths", "task.lengths=512", "task.needles=40")),
        ({"lengths": 9000}, ("setting-value", "task.lengths", "9000", "stand-in")),
    ],
)
def test_wrong_settings_are_named(model, settings: dict, error: tuple) -> None:
    """Before anything runs."""
    with refused(*error):
        load(model, **settings)
