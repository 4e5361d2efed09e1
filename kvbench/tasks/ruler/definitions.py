"""The 13 tasks of RULER: how each document is made, how long its answer may be, and how it is scored.

Source: RULER's synthetic.yaml and constants.py, as lm-eval 0.4.13 carries them in tasks/ruler.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from kvbench.tasks.fill import TooShort, fill_length
from kvbench.tasks.prompts import PromptBuilder
from kvbench.tasks.ruler import chains, counts, needles
from kvbench.tasks.ruler.document import Document, Job
from kvbench.tasks.ruler.needles import Needles
from kvbench.tasks.ruler.questions import answer_question

# What a coded text needs so that its fourth word is seen less often than its third.
FEWEST_CODED_WORDS = 60
_CONTROL = re.compile(r"[\x00-\x1f]")


def clean(text: str) -> str:
    """The text without white space around it, its control characters made line breaks."""
    return _CONTROL.sub("\n", text.strip()).strip()


def match_all(text: str, answers: Sequence[str]) -> float:
    """Share of the answers that stand in the text, whatever their case."""
    found = clean(text).lower()
    return sum(answer.lower() in found for answer in answers) / len(answers)


def match_any(text: str, answers: Sequence[str]) -> float:
    """1 when one of the answers stands in the text, whatever its case; the score of question answering."""
    found = clean(text).lower()
    return float(any(answer.lower() in found for answer in answers))


@dataclass(frozen=True)
class Definition:
    """One task.

    Args:
        make: Writes a document of so many units.
        answer_tokens: Most tokens of an answer.
        least: Fewest units that make a document.
        most: Most units there are.
        score: (answer, right answers) -> [0, 1].
    """

    make: Callable[[Job, int], Document]
    answer_tokens: int
    least: Callable[[Job], int] = lambda job: 1
    most: Callable[[Job], int] = lambda job: 4 * job.length
    score: Callable[[str, tuple[str, ...]], float] = match_all


def _needles(spec: Needles) -> Definition:
    return Definition(partial(needles.make, spec), 128, lambda job: spec.least)


_QUESTIONS = Definition(
    answer_question,
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
    **{name: _needles(spec) for name, spec in NEEDLES.items()},
    "vt": Definition(chains.variable_tracking, 30),
    "cwe": Definition(
        counts.common_words, 120, lambda job: counts.NUM_COMMON + 1, lambda job: len(job.vocabulary.singles)
    ),
    "fwe": Definition(counts.frequent_words, 50, lambda job: FEWEST_CODED_WORDS),
    "qa_1": _QUESTIONS,
    "qa_2": _QUESTIONS,
}
GENERATED = tuple(name for name in DEFINITIONS if not name.startswith("qa_"))


def write(name: str, job: Job, builder: PromptBuilder, guess: int | None, with_prefix: bool) -> tuple[Document, int]:
    """Write the longest document that fits.

    Args:
        name: The task.
        job: What decides the content; prompt, chat template and room for the answer have `length` tokens together.
        builder: Counts the tokens.
        guess: Units of a similar document; None for none.
        with_prefix: The beginning of the answer is part of the prompt.

    Returns:
        The document and its units.

    Raises:
        TooShort: Not even the shortest document fits; its `needed` is the length that would do.

    Differs: the original fills a prompt in steps of 10 to 500 units and counts neither the answer's beginning nor, in
        `fwe`, the room for the answer.
    """
    task = DEFINITIONS[name]

    room = job.length - builder.max_new_tokens
    if name == "vt":
        job = replace(job, example_units=_example_units(job, builder))
    try:
        units = fill_length(
            lambda count: task.make(job, count).tokens(builder, with_prefix),
            room,
            task.most(job),
            least=task.least(job),
            guess=guess,
        )
    except TooShort as error:
        raise TooShort(job.length, error.needed + builder.max_new_tokens) from error
    return task.make(job, units), units


def _example_units(job: Job, builder: PromptBuilder) -> int:
    """Noise of the worked example of variable tracking: as much as RULER lets it have, less in a short prompt."""
    room = min(chains.EXAMPLE_TOKENS, job.length // 3) - DEFINITIONS["vt"].answer_tokens

    def count(units: int) -> int:
        return len(builder.tokenizer.encode(chains.example(job, units), add_special_tokens=False))

    try:
        return fill_length(count, room, chains.EXAMPLE_TOKENS, least=1)
    except TooShort:
        return 1
