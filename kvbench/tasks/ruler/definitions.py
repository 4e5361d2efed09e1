"""The 13 tasks of RULER: how each document is made, how long its answer may be, and how it is scored.

Source: RULER's synthetic.yaml and constants.py, as lm-eval 0.4.13 carries them in tasks/ruler.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean

from kvbench.tasks.fill import TooShort, fill_length
from kvbench.tasks.prompts import PromptBuilder
from kvbench.tasks.ruler import makers
from kvbench.tasks.ruler.document import Document, Job, longest
from kvbench.tasks.ruler.makers import Needles
from kvbench.tasks.ruler.words import vocabulary

# Least length of a coded text in which the fourth word occurs less often than the third.
FEWEST_CODED_WORDS = 60
_CONTROL = re.compile(r"[\x00-\x1f]")


def _contained(text: str, answers: Sequence[str]) -> list[bool]:
    """Tell which answers stand in the text, whatever their case; control characters are line breaks, as in RULER."""
    clean = _CONTROL.sub("\n", text.strip()).strip().lower()
    return [answer.lower() in clean for answer in answers]


def match_all(text: str, answers: Sequence[str]) -> float:
    """Share of the answers that stand in the text."""
    return fmean(_contained(text, answers))


def match_any(text: str, answers: Sequence[str]) -> float:
    """1 when one of the answers stands in the text; the score of question answering."""
    return float(any(_contained(text, answers)))


@dataclass(frozen=True)
class Definition:
    """One task."""

    make: Callable[[Job, int], Document]  # writes a document of so many units
    answer_tokens: int  # most of an answer
    least: Callable[[Job], int] = lambda job: 1  # fewest units that make a document
    most: Callable[[Job], int] = lambda job: 4 * job.length  # most units there are
    score: Callable[[str, tuple[str, ...]], float] = match_all  # of an answer, by the right ones


_QUESTIONS = Definition(
    makers.answer_question,
    32,
    lambda job: len(job.source.questions[job.index].documents),
    lambda job: len(job.source.texts),
    match_any,
)
NEEDLES = {
    "niah_single_1": Needles("repeat"),
    "niah_single_2": Needles("essay"),
    "niah_single_3": Needles("essay", values="uuids"),
    "niah_multikey_1": Needles("essay", num_keys=4),
    "niah_multikey_2": Needles("needle"),
    "niah_multikey_3": Needles("needle", keys="uuids", values="uuids"),
    "niah_multivalue": Needles("essay", num_values=4),
    "niah_multiquery": Needles("essay", num_queries=4),
}
DEFINITIONS: Mapping[str, Definition] = {
    **{
        name: Definition(partial(makers.hide, spec), 128, lambda job, least=spec.least: least)  # type: ignore[misc]
        for name, spec in NEEDLES.items()
    },
    "vt": Definition(makers.variable_tracking, 30),
    "cwe": Definition(
        makers.common_words, 120, lambda job: makers.NUM_COMMON + 1, lambda job: len(vocabulary().singles)
    ),
    "fwe": Definition(makers.frequent_words, 50, lambda job: FEWEST_CODED_WORDS),
    "qa_1": _QUESTIONS,
    "qa_2": _QUESTIONS,
}
GENERATED = tuple(name for name in DEFINITIONS if not name.startswith("qa_"))


def write(name: str, job: Job, builder: PromptBuilder, guess: int | None, with_prefix: bool) -> tuple[Document, int]:
    """Write the longest document of a task that fits; as `longest`. `with_prefix` begins the answer.

    Differs: the original fills a prompt in steps of 10 to 500 units and counts neither the answer's beginning nor, in
        `fwe`, the room for the answer.
    """
    task = DEFINITIONS[name]
    if name == "vt":
        job = replace(job, example_units=_example_units(job, builder))

    def make(units: int) -> Document:
        document = task.make(job, units)
        return document if with_prefix else document.unbegun()

    return longest(make, builder, job.length, task.most(job), task.least(job), guess)


def _example_units(job: Job, builder: PromptBuilder) -> int:
    """Noise of the worked example of variable tracking: as much as RULER lets it have, less in a short prompt."""
    room = min(makers.EXAMPLE_TOKENS, job.length // 3) - DEFINITIONS["vt"].answer_tokens

    def count(units: int) -> int:
        return len(builder.tokenizer.encode(makers.example(job, units), add_special_tokens=False))

    try:
        return fill_length(count, room, makers.EXAMPLE_TOKENS, least=1)
    except TooShort:
        return 1
