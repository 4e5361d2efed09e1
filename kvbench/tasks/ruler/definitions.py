"""The 13 tasks of RULER: how each document is made, how long its answer may be, and how it is scored.

Source: RULER's synthetic.yaml and constants.py, as lm-eval 0.4.13 carries them in tasks/ruler.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from kvbench.tasks.fit import TooShort, most_units
from kvbench.tasks.prompts import PromptBuilder
from kvbench.tasks.ruler import chains, counts, needles
from kvbench.tasks.ruler.document import Document, Job
from kvbench.tasks.ruler.needles import Needles
from kvbench.tasks.ruler.questions import answer_question
from kvbench.tasks.ruler.scores import match_all, match_any

# What a coded text needs so that its fourth word is seen less often than its third.
FEWEST_CODED_WORDS = 60


def _one_document(job: Job) -> int:
    return 1


def _question_documents(job: Job) -> int:
    assert job.documents is not None
    return len(job.documents.questions[job.index].documents)


def _as_long(job: Job) -> int:
    return 4 * job.length


def _all_words(job: Job) -> int:
    return len(job.vocabulary.singles)


def _all_documents(job: Job) -> int:
    assert job.documents is not None
    return len(job.documents.texts)


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
    least: Callable[[Job], int] = _one_document
    most: Callable[[Job], int] = _as_long
    score: Callable[[str, tuple[str, ...]], float] = match_all


def _needles(spec: Needles) -> Definition:
    return Definition(partial(needles.make, spec), 128, lambda job: spec.least)


_QUESTIONS = Definition(answer_question, 32, _question_documents, _all_documents, match_any)
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
    "cwe": Definition(counts.common_words, 120, lambda job: counts.NUM_COMMON + 1, _all_words),
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

    def tokens(document: Document) -> int:
        return builder.count(document.context + document.question, document.prefix if with_prefix else "")

    room = job.length - builder.max_new_tokens
    if name == "vt":
        job = replace(job, example_units=_example_units(job, builder))
    try:
        units = most_units(
            lambda count: tokens(task.make(job, count)), room, task.most(job), least=task.least(job), guess=guess
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
        return most_units(count, room, chains.EXAMPLE_TOKENS, least=1)
    except TooShort:
        return 1
