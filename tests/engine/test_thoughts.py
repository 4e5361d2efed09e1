"""Thoughts: they have a budget of their own, stop rules do not reach into them, and what follows is the answer."""

import pytest
from engine_helpers import NATIVE_METHODS, answers, engine, random_tokens, request

from kvbench.engine.answer import Answer
from kvbench.engine.requests import Thoughts, Turn

END = 0


def said(loaded, text: str, *, thoughts: Thoughts | None, room: int = 1 << 30, **fields) -> Answer:
    """An answer to which the model says a text and then its end, as far as it is let."""
    asked = request("a", (1,), thoughts=thoughts, min_new_tokens=0, **fields)
    answer = Answer(asked, loaded.tokenizer, (END,), room)
    tokens = [*loaded.tokenizer.encode(text, add_special_tokens=False), END]
    while not answer.finish:
        due = answer.due
        answer.add(tokens.pop(0) if due is None else due)
    return answer


def end_of(loaded) -> tuple[int, ...]:
    """What is put behind thoughts."""
    return tuple(loaded.tokenizer.encode("\n</think>\n\n", add_special_tokens=False))


@pytest.mark.parametrize("opened", [True, False])
def test_thoughts_do_not_count_as_the_answer(loaded, opened):
    """With a budget, the answer has its whole length behind them; without one, it is what they leave."""
    text = ("" if opened else "<think>") + "hm hm</think>abcdefghijkl"
    found = said(loaded, text, thoughts=Thoughts(opened=opened, budget_tokens=40, end=end_of(loaded)), max_new_tokens=8)
    assert found.text.endswith("hm hm</think>abcdefgh") and found.finish == "length"
    found = said(loaded, text, thoughts=Thoughts(opened=opened), max_new_tokens=20)
    assert found.text == text[:20] and found.finish == "length"
    plain = said(loaded, text, thoughts=None, max_new_tokens=20)
    assert plain.text == text[:20] and plain.num_thought_tokens == 0


def test_thoughts_that_use_up_their_budget_are_ended(loaded):
    """The mark is put behind them, and the answer begins; it is as long as any."""
    thoughts = Thoughts(opened=True, budget_tokens=6, end=end_of(loaded))
    found = said(loaded, "one two three four", thoughts=thoughts, max_new_tokens=5)
    assert found.text == "one tw\n</think>\n\no thr" and found.finish == "length"
    assert found.request.answer_tokens == 5 + 6 + len(end_of(loaded)) >= len(found.token_ids)


@pytest.mark.parametrize("budget", [None, 100])
def test_stop_strings_and_tokens_wait_for_the_answer(loaded, budget):
    """A line break in thoughts ends nothing; the same behind them does. The end of the text ends thoughts, too."""
    thoughts = Thoughts(opened=True, budget_tokens=budget, end=end_of(loaded))
    found = said(loaded, "a\nb\n\n</think>c\nd", thoughts=thoughts, stop=("\n",), max_new_tokens=90)
    assert (found.text, found.finish) == ("a\nb\n\n</think>c", "stop")
    newline = loaded.tokenizer.encode("\n", add_special_tokens=False)
    found = said(loaded, "a\nb</think>c\nd", thoughts=thoughts, stop_token_ids=tuple(newline), max_new_tokens=90)
    assert (found.text, found.finish) == ("a\nb</think>c", "stop")
    assert said(loaded, "a\nb", thoughts=thoughts, stop=("\n",), max_new_tokens=90).finish == "eos"


def test_a_model_that_does_not_think_has_no_budget_for_it(loaded):
    """An answer without thoughts has the length that it would have, and a mark in its middle opens none."""
    thoughts = Thoughts(budget_tokens=50, end=end_of(loaded))
    found = said(loaded, "abcdefghijkl<think>mnopq", thoughts=thoughts, max_new_tokens=21)
    assert found.text == "abcdefghijkl<think>mn" and found.num_thought_tokens == 0


def test_the_models_context_ends_thoughts_and_answer(loaded):
    """Whatever the budget says."""
    thoughts = Thoughts(opened=True, budget_tokens=50, end=end_of(loaded))
    found = said(loaded, "thinking and thinking", thoughts=thoughts, max_new_tokens=5, room=8)
    assert (found.text, found.finish) == ("thinking", "length")


@pytest.mark.parametrize("method", ["full", "kivi", "streaming_llm"])
def test_in_the_engine(loaded, method):
    """The end that is put there is read like any token: the rest is what the model says behind that text."""
    end, prompt = end_of(loaded), random_tokens(40)
    thoughts = Thoughts(opened=True, budget_tokens=5, end=end)
    asked = request("a", prompt, thoughts=thoughts, max_new_tokens=6, min_new_tokens=0)
    outcome = answers(loaded, NATIVE_METHODS[method], [asked, request("b", random_tokens(30), max_new_tokens=9)])[
        "a", 0
    ]
    assert outcome.finish == "length" and len(outcome.token_ids) == 5 + len(end) + 6
    with engine(loaded, NATIVE_METHODS[method], batch_size=1) as running:
        runner = running.runner
        runner.reserve(rows=1, prompt_tokens=40, new_tokens=40)
        row, logits = runner.read(prompt)
        found, logits = [], logits[0]
        for step in range(5 + len(end) + 6):
            token = end[step - 5] if 5 <= step < 5 + len(end) else int(logits.argmax())
            found.append(token)
            logits = runner.step([row], [token])[0]
        runner.close(row)
    assert outcome.token_ids == found


def test_every_turn_has_its_own_budget(loaded):
    """In a conversation, thoughts begin anew with each answer."""
    end = end_of(loaded)
    turns = (Turn(tokens=random_tokens(6, seed=3)),)
    asked = request(
        "a",
        random_tokens(30),
        turns=turns,
        thoughts=Thoughts(opened=True, budget_tokens=4, end=end),
        max_new_tokens=5,
        min_new_tokens=0,
    )
    outcome = answers(loaded, NATIVE_METHODS["full"], [asked])["a", 0]
    for tokens in (outcome.turns[0]["token_ids"], outcome.token_ids):
        assert len(tokens) == 4 + len(end) + 5 and tuple(tokens[4 : 4 + len(end)]) == end
