"""One prompt of RULER in its parts, and what its makers are given."""

from dataclasses import dataclass
from random import Random
from typing import Any

from kvbench.engine.requests import Request
from kvbench.tasks.prompts import RETOKENISE_SLACK_TOKENS, PromptBuilder, PromptRules
from kvbench.tasks.ruler.words import Documents, Essays, Vocabulary
from kvbench.tasks.task import Ask

# RULER shuffles needles, documents and coded words with this seed whatever the seed of the run.
ORDER_SEED = 42


@dataclass(frozen=True)
class Document:
    """A prompt: `context + question`, and the beginning of the answer.

    Args:
        context: Instruction and haystack; all that is seen before compression when the question is not.
        question: The rest of what the user says.
        prefix: How the answer begins; the model goes on from there.
        answers: What a right answer holds.
        gold: An answer that continues the prefix, for teacher forcing.
    """

    context: str
    question: str
    prefix: str
    answers: tuple[str, ...]
    gold: str

    @property
    def prompt(self) -> str:
        """The text without any chat template."""
        return self.context + self.question + self.prefix

    def tokens(self, builder: PromptBuilder, with_prefix: bool) -> int:
        """Tokens of its prompt; `with_prefix` says whether the beginning of the answer is part of it."""
        return builder.count(self.context + self.question, self.prefix if with_prefix else "")

    def request(
        self, builder: PromptBuilder, with_prefix: bool, sample_id: str, subset: str, meta: dict[str, Any]
    ) -> Request:
        """The request that asks it."""
        if with_prefix:
            builder.check_prefix()
        return builder.build(
            sample_id=sample_id,
            subset=subset,
            context=self.context,
            question=self.question,
            prefix=self.prefix if with_prefix else "",
            gold=self.gold if with_prefix else self.prefix + self.gold,
            answers=self.answers,
            meta=meta | {"answers": list(self.answers)},
        )


@dataclass(frozen=True)
class Job:
    """Everything that decides a document, beside the units of filler."""

    seed: str  # seeds everything random
    length: int  # tokens of prompt and answer
    vocabulary: Vocabulary
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


def check_lengths(lengths: list[int], ask: Ask, answers: int = 1) -> None:
    """Raises ValueError for a length that the model does not hold, beside the thoughts of so many answers."""
    model, thoughts = ask.model, answers * (ask.protocol.thinking_tokens or 0)
    if max(lengths) + thoughts > model.max_tokens:
        beside = f" beside {thoughts} of thoughts (protocol.thinking_tokens)" if thoughts else ""
        raise ValueError(
            f"task.lengths={lengths}: {max(lengths)}{beside} does not fit model {model.name}, which holds "
            f"{model.max_tokens} tokens; take shorter lengths"
        )


def uncut(ask: Ask, answer_tokens: int) -> PromptBuilder:
    """A builder for prompts that were made to fit: none is cut while it does."""
    rules = PromptRules(max_new_tokens=answer_tokens, chat_template=True)
    usual = PromptBuilder(ask.model, ask.protocol, rules).max_prompt_tokens
    return PromptBuilder(ask.model, ask.protocol, rules, usual + RETOKENISE_SLACK_TOKENS)
