"""One prompt of RULER in its parts, what its makers are given, and how it is filled to its length."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from kvbench.engine.requests import Request
from kvbench.errors import SettingValue
from kvbench.tasks.fill import TooShort, fill_length
from kvbench.tasks.prompts import RETOKENISE_SLACK_TOKENS, PromptBuilder, PromptRules
from kvbench.tasks.ruler.words import Documents, Essays
from kvbench.tasks.task import Ask

# RULER shuffles needles, documents and coded words with this seed whatever the seed of the run.
ORDER_SEED = 42


@dataclass(frozen=True)
class Document:
    """A prompt: `context + question`, and the beginning of the answer."""

    context: str  # instruction and haystack: all that is seen before compression when the question is not
    question: str  # the rest of what the user says
    prefix: str  # how the answer begins; the model goes on from there
    answers: tuple[str, ...]  # what a right answer holds
    gold: str  # an answer that continues the prefix, for teacher forcing

    @property
    def prompt(self) -> str:
        """The text without any chat template."""
        return self.context + self.question + self.prefix

    def unbegun(self) -> "Document":
        """Copy in which the model also writes the beginning of the answer."""
        return replace(self, prefix="", gold=self.prefix + self.gold)

    def request(self, builder: PromptBuilder, sample_id: str, subset: str, meta: dict[str, Any]) -> Request:
        """The request of its question."""
        if self.prefix:
            builder.check_prefix()
        return builder.build(
            sample_id=sample_id,
            subset=subset,
            context=self.context,
            question=self.question,
            prefix=self.prefix,
            gold=self.gold,
            answers=self.answers,
            meta=meta | {"answers": list(self.answers)},
        )


@dataclass(frozen=True)
class Job:
    """Everything that decides a document, except the units of filler."""

    seed: str  # seeds everything random
    length: int  # tokens of prompt and answer
    essays: Essays  # text for haystacks of prose
    documents: Documents | None = None  # for question answering
    index: int = 0  # of the item, and of the question
    example_units: int = 1  # in the worked example of variable tracking

    @property
    def source(self) -> Documents:
        """The documents of a task of question answering."""
        assert self.documents is not None
        return self.documents

    def rng(self) -> Random:
        """A new generator: the same job draws the same facts however long its haystack is."""
        return Random(self.seed)


def longest(
    make: Callable[[int], Document], builder: PromptBuilder, length: int, most: int, least: int, guess: int | None
) -> tuple[Document, int]:
    """The longest document that fits, and its units: `least` to `most`, at first `guess`, that of a similar one.

    Prompt, chat template and room for the answer have `length` tokens together.

    Raises:
        TooShort: Not even the shortest document fits; its `needed` is the length that would do.
    """

    def tokens(units: int) -> int:
        document = make(units)
        return builder.count(document.context + document.question, document.prefix)

    try:
        units = fill_length(tokens, length - builder.max_new_tokens, most, least=least, guess=guess)
    except TooShort as error:
        raise TooShort(length, error.needed + builder.max_new_tokens) from error
    return make(units), units


def check_lengths(lengths: list[int], ask: Ask, answers: int = 1) -> None:
    """Raises ValueError for a length that the model does not hold with the thoughts of so many answers."""
    model, thoughts = ask.model, answers * (ask.protocol.thinking_tokens or 0)
    if max(lengths) + thoughts > model.max_tokens:
        extra = f" beside {thoughts} of thoughts (protocol.thinking_tokens)" if thoughts else ""
        raise SettingValue(
            f"task.lengths={lengths}: {max(lengths)}{extra} does not fit model {model.name}, which holds "
            f"{model.max_tokens} tokens; take shorter lengths",
            setting="task.lengths",
        )


def uncut(ask: Ask, answer_tokens: int) -> PromptBuilder:
    """A builder for prompts that were made to fit: none is cut while it does."""
    rules = PromptRules(max_new_tokens=answer_tokens, chat_template=True)
    usual = PromptBuilder(ask.model, ask.protocol, rules).max_prompt_tokens
    return PromptBuilder(ask.model, ask.protocol, rules, usual + RETOKENISE_SLACK_TOKENS)
