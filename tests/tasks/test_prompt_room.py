"""Prompts that do not fit a model without any of their text: refused, and cutting always ends."""

import json
import re

import pytest
from refusals import refused

from kvbench.tasks import load_task
from kvbench.tasks.prompts import PromptBuilder

ROUNDS = 100  # of cutting; each one takes a token of the text at least


@pytest.fixture(autouse=True)
def bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ends a prompt that is cut again and again."""
    cut, rounds = PromptBuilder._cut, []

    def counted(self, *given):
        rounds.append(given[-1])
        assert len(rounds) < ROUNDS, f"cut {ROUNDS} times, the last time to {rounds[-1]} tokens"
        return cut(self, *given)

    monkeypatch.setattr(PromptBuilder, "_cut", counted)


@pytest.fixture
def load(tmp_path):
    """Gives a function that loads one question of a file."""
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"context": "word " * 40, "question": "Which?", "answers": ["it"]}) + "\n")

    def load(model, chat="never", **settings):
        cfg = {"name": "custom", "file": str(path), "max_new_tokens": 100} | settings
        return load_task(cfg, model, limit=None, seed=0, protocol={"chat_template": chat})

    return load


@pytest.mark.parametrize("chat", ["never", "always"])
def test_a_beginning_of_the_answer_that_leaves_no_room_is_refused(load, make_model, chat: str) -> None:
    """By its setting, its length and the room; one that just fits leaves two tokens of the text."""
    model = make_model(256)
    words = "".join(f" {number}" for number in range(400))
    with refused("prompt-length", None, "all/0", "room for 156") as caught:
        load(model, chat, answer_prefix=words)
    assert re.search(r"task\.answer_prefix \d{3,}", str(caught.value))
    (request,) = load(model, chat, answer_prefix=words[:150]).requests
    assert request.truncated and request.num_prompt_tokens <= 156


def test_tokens_that_a_tokenizer_adds_to_every_text_are_refused_where_they_fill_the_model(load, make_model) -> None:
    """They are no part of the text, and cutting does not make them fewer."""
    from tokenizers import processors
    from transformers import PreTrainedTokenizerFast

    model = make_model(256)
    start = model.tokenizer.convert_tokens_to_ids("<s>")
    inner = type(model.tokenizer.backend_tokenizer).from_str(model.tokenizer.backend_tokenizer.to_str())
    inner.post_processor = processors.TemplateProcessing(single="<s> " * 300 + "$A", special_tokens=[("<s>", start)])
    model.tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")
    with refused("prompt-length", None, "all/0", "special tokens 300", "room for 156"):
        load(model)
