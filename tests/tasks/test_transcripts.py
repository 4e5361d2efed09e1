"""Long transcripts: what is asked can be found once and at its depth, lengths hold, and right calls and lines alone
score."""

import json
import re

import pytest
from loaded import loader, text_of
from refusals import refused
from selection import in_turn

from kvbench.tasks.transcripts import NAMES
from kvbench.tasks.transcripts.similar import NUMBERS, graded_line
from kvbench.tasks.transcripts.tools import SERVICES, graded_call

LOAD = {"tools": loader("tools", lengths=[4000], items=4), "similar": loader("similar", lengths=[2048], items=4)}
RIGHT = {"name": "refund_order", "arguments": {"code": "K-12345", "amount": 35.25, "reason": "late"}}


def test_names_are_no_two_the_same() -> None:
    """A person has one record."""
    assert len(set(NAMES)) == len(NAMES) >= 1000


@pytest.mark.parametrize(("name", "query_aware"), in_turn([*LOAD], [True, False]))
def test_prompts(model, name, query_aware) -> None:
    """As long as asked, within a request; the last request is the question; the right answer scores 1."""
    load, length = LOAD[name], {"tools": 4000, "similar": 2048}[name]
    task = load(model, protocol={"query_aware": query_aware})
    for request in task.requests:
        size = request.num_prompt_tokens + request.max_new_tokens
        assert length - 450 < size <= length and not request.truncated
        assert len(request.segments) == 2 - query_aware
        scores = task.score(request, model.tokenizer.decode(list(request.gold)))
        assert scores["score"] == 1.0 and set(scores) == set(task.metrics)
        assert task.score(request, "")["score"] == 0.0
    assert [request.meta["quarter"] for request in task.requests] == [f"{n} of 4" for n in (1, 2, 3, 4)]
    assert load(model, seed=1).fingerprint != task.fingerprint


def test_a_call_needs_what_was_looked_up_at_its_depth(model) -> None:
    """The record that is asked for stands once, where the item says; each tool was called in the trace before, and
    nothing was done with the record yet."""
    for request in LOAD["tools"](model).requests:
        text = text_of(model, request)
        call = json.loads(request.answers[0])
        (service,) = [one for one in SERVICES if one.act == call["name"]]
        head, trace = text.split("\n\n", 1)
        assert all(f'"{tool}"' in head for one in SERVICES for tool in (one.find, one.act))
        person = re.findall(r"(?:of) (\w+ \w+)", trace.rsplit("Request: ", 1)[1])[0]
        (found,) = re.finditer(rf"Look up the {service.thing} of {person}\.\nCall: .*\nResult: (.*)\n", trace)
        values = json.loads(found[1])
        assert {call["arguments"][argument] for _, argument in service.taken} == set(values.values())
        assert text.count(request.answers[0]) == 0 and trace.count(f'"{service.act}"') >= 1
        depth = (request.meta["index"] + 0.5) / 4
        assert abs(found.start() / len(trace) - depth) < 0.35  # behind one case of each tool, and then evenly


def test_a_line_is_told_by_its_number(model) -> None:
    """The kind and the thing are asked for as often as is said, each with a line of its own, and the number says which;
    the right one lies in the quarter of the item."""
    for copies in (2, 8):
        for request in LOAD["similar"](model, copies=copies).requests:
            text = text_of(model, request)
            number, kind, thing, code = re.findall(r"Repeat the (\w+) (\w+) about (\w+), with (\d+) before it\.", text)[
                -1
            ]
            lines = re.findall(rf"Write a {kind} about {thing}\.\nAnswer: (.*)\n", text)
            assert len(lines) == copies and len(set(lines)) == copies
            right = lines[NUMBERS.index(number)]
            assert request.answers == (f"{code} {right}",)
            assert abs(text.index(right) / len(text) - (request.meta["index"] + 0.5) / 4) < 0.2
            others = [graded_line(f"{code} {line}", request.answers[0]) for line in lines if line != right]
            assert all(scores["exact"] == 0.0 and scores["score"] < 1.0 for scores in others)


@pytest.mark.parametrize(
    ("answer", "scores"),
    [
        (json.dumps(RIGHT), (1, 1, 1, 1)),
        (f" {json.dumps(RIGHT, indent=1)}\nResult: {{}}", (1, 1, 1, 1)),
        (f"Sure!\n```json\n{json.dumps(RIGHT)}\n```", (1, 1, 1, 1)),
        (json.dumps(RIGHT | {"arguments": RIGHT["arguments"] | {"amount": "35.25"}}), (0, 1, 2 / 3, 0)),
        (json.dumps(RIGHT | {"arguments": RIGHT["arguments"] | {"amount": 35}}), (0, 1, 2 / 3, 1)),
        (json.dumps(RIGHT | {"arguments": RIGHT["arguments"] | {"reason": "cold"}}), (0, 1, 2 / 3, 0)),
        (json.dumps(RIGHT | {"arguments": RIGHT["arguments"] | {"note": "x"}}), (0, 1, 1, 0)),
        (json.dumps({"name": "find_order", "arguments": {"person": "Ada Abel"}}), (0, 0, 0, 1)),
        (json.dumps({"name": "refund_order", "arguments": ["K-12345"]}), (0, 1, 0, 0)),
        (json.dumps(RIGHT)[:-3], (0, 0, 0, 0)),
        ("[1, 2]", (0, 0, 0, 0)),
        ('{"a": ' * 20_000, (0, 0, 0, 0)),
        ("refund_order(K-12345)", (0, 0, 0, 0)),
    ],
)
def test_calls_are_compared_as_json(answer, scores) -> None:
    """Spaces and words around it do not matter; each value and its type do; a cut or broken call is none."""
    found = graded_call(answer, RIGHT)
    assert [found[name] for name in ("score", "tool", "arguments", "valid")] == pytest.approx(scores)


def test_whole_numbers_are_numbers_and_truth_is_none() -> None:
    """3.0 is 3, true is not 1, and text is no number."""
    right = {"name": "extend_booking", "arguments": {"room": 1, "nights": 3, "rate": "saver"}}
    for room, nights, same in ((1, 3.0, True), (True, 3, False), ("1", 3, False)):
        call = {"name": "extend_booking", "arguments": {"room": room, "nights": nights, "rate": "saver"}}
        assert graded_call(json.dumps(call), right)["score"] == same


def test_lines_are_scored_as_mrcr_scores_them() -> None:
    """Nothing without the code; else the ratio of difflib, of the first line alone."""
    right = "12345 A tired nurse sold 7 lamps on the pier at noon."
    assert graded_line(f"\n{right}\nRequest: more", right) == {"score": 1.0, "exact": 1.0}
    assert graded_line(right.removeprefix("12345 "), right) == {"score": 0.0, "exact": 0.0}
    found = graded_line("12345 A tired nurse sold 8 pears on the pier at noon.", right)
    assert found["exact"] == 0.0 and 0.8 < found["score"] < 1.0


@pytest.mark.parametrize("name", LOAD)
def test_too_short(model, name) -> None:
    """A length that no transcript fits into says what would do; one that the model does not hold is refused."""
    with refused("setting-value", "task.lengths", "task.lengths=300"):
        LOAD[name](model, lengths=[300])
    with refused("setting-value", "task.lengths", "1000000", "stand-in"):
        LOAD[name](model, lengths=[10**6])
