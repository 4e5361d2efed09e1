"""Writers of RULER's documents: needles, variable tracking, counted words, and questions about documents.

Source: lm-eval 0.4.13, tasks/ruler, the port of RULER's scripts.
"""

import string
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal

from kvbench.tasks.ruler.document import ORDER_SEED, Document, Job
from kvbench.tasks.ruler.words import vocabulary

Kind = Literal["words", "numbers", "uuids"]
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NUM_DEPTHS = 40
NUMBER_DIGITS = 7
# Variable tracking; its worked example may take RULER's limit, and in short prompts a third.
HOPS = 4
NAME_LETTERS, EXAMPLE_LETTERS = 5, 3
EXAMPLE_TOKENS = 500
# Common words. Below these lengths a list repeats its words less often, or ten of them alone would fill the prompt.
NUM_COMMON = 10
LONG, SHORT = 4096, 1024
# Coded words.
CODED_LETTERS = 6
NUM_FREQUENT = 3
ZETA_POWER = 2.0
_ANSWER_ONLY = (
    "Answer the question based on the given documents. Only give me the answer and do not output any other words."
)


@dataclass(frozen=True)
class Needles:
    """One needle task."""

    haystack: Literal["repeat", "essay", "needle"]  # what lies around the needles
    keys: Kind = "words"
    values: Kind = "numbers"
    num_keys: int = 1  # with needles
    num_values: int = 1  # needles of each key
    num_queries: int = 1  # keys that are asked for; with more than one, all keys are

    @property
    def total_keys(self) -> int:
        """Keys that have needles."""
        return max(self.num_keys, self.num_queries)

    @property
    def least(self) -> int:
        """Units of filler below which the needles have no place."""
        return self.total_keys * self.num_values if self.haystack != "essay" else 1


def draw(kind: Kind, rng: Random) -> str:
    """One key or value."""
    if kind == "words":
        return vocabulary().key(rng)
    if kind == "numbers":
        return str(rng.randint(10 ** (NUMBER_DIGITS - 1), 10**NUMBER_DIGITS - 1))
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def needle(kind: Kind, key: str, value: str) -> str:
    """The sentence that holds a fact."""
    return f"One of the special magic {kind} for {key} is: {value}."


def among_sentences(sentences: Sequence[str], inserts: Sequence[str], depths: Sequence[int]) -> str:
    """Prose with its inserts, each at its depth in percent of the sentences; depths ascend."""
    stops = [int(len(sentences) * (depth / 100)) for depth in depths]
    starts = [0, *stops]
    parts: list[str] = []
    for start, stop, insert in zip(starts, stops, inserts, strict=False):
        parts += [" ".join(sentences[start:stop]), insert]
    return " ".join([*parts, " ".join(sentences[starts[-1] :])])


def ask_for(spec: Needles, context: str, queries: Sequence[str], answers: Sequence[str]) -> Document:
    """Put instruction, question and answer prefix around a haystack."""
    one, many = spec.values.removesuffix("s"), spec.values
    query = queries[0] if len(queries) == 1 else f"{', '.join(queries[:-1])}, and {queries[-1]}"
    if len(queries) * spec.num_values == 1:
        what, head, asks, verb = one, f"A special magic {one} is", "What is the", "is"
    else:
        what, head, asks, verb = many, f"Some special magic {many} are", "What are all the", "are"
    head += f" hidden within the following text. Make sure to memorize it. I will quiz you about the {what} afterwards."
    fact = f"special magic {what} for {query} mentioned in the provided text"
    prefix = f" The {fact} {verb}"
    return Document(f"{head}\n{context}", f"\n{asks} {fact}?", prefix, tuple(answers), " " + ", ".join(answers))


def hide(spec: Needles, job: Job, units: int) -> Document:
    """Write one document of a needle task; units are sentences of filler, or words of an essay.

    Differs: sentences of essays are found by their punctuation, not by punkt's model; keys are distinct, and filler
        needles never have a key that is asked for.
    """
    rng = job.rng()
    values: dict[str, list[str]] = {}
    while len(values) < spec.total_keys:
        key = draw(spec.keys, rng)
        if key not in values:
            values[key] = [draw(spec.values, rng) for _ in range(spec.num_values)]
    needles = [needle(spec.values, key, value) for key, hidden in values.items() for value in hidden]
    Random(ORDER_SEED).shuffle(needles)
    if spec.haystack == "essay":
        depths = [round(100 * step / (NUM_DEPTHS - 1)) for step in range(NUM_DEPTHS)]
        context = among_sentences(job.essays.sentences(units), needles, sorted(rng.sample(depths, len(needles))))
    else:
        lines = [NOISE if spec.haystack == "repeat" else _other(spec, values, rng) for _ in range(units)]
        positions = sorted(rng.sample(range(units), len(needles)), reverse=True)
        for position, text in zip(positions, needles, strict=True):
            lines.insert(position, text)
        context = "\n".join(lines)
    keys = list(values)
    queried = [keys[at] for at in rng.sample(range(spec.total_keys), spec.num_queries)]
    return ask_for(spec, context, queried, [value for key in queried for value in values[key]])


def _other(spec: Needles, keys: dict[str, list[str]], rng: Random) -> str:
    while (key := draw(spec.keys, rng)) in keys:
        pass
    return needle(spec.values, key, draw(spec.values, rng))


def chain_text(rng: Random, units: int, letters: int) -> Document:
    """One chain of names of so many letters, in noise that is repeated `units` times, with its question."""
    names: list[str] = []
    while len(names) < HOPS + 1:
        if (name := "".join(rng.choices(string.ascii_uppercase, k=letters))) not in names:
            names.append(name)
    value = str(rng.randrange(10_000, 99_999))
    chain = [f"VAR {names[0]} = {value}"]
    chain += [f"VAR {later} = VAR {earlier} " for earlier, later in zip(names, names[1:], strict=False)]
    sentences = [NOISE + "\n"] * units
    if len(sentences) <= len(chain):
        pieces = [piece for noise in sentences for piece in noise.split(".")]
        sentences = [f"{piece}." if piece.strip() else piece for piece in pieces]
    for moved, position in enumerate(sorted(rng.sample(range(len(sentences)), len(chain)))):
        sentences.insert(position + moved, chain[moved])
    context = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
    context += " ".join(sentences).replace(". \n", ".\n")
    question = f"\nQuestion: Find all variables that are assigned the value {value} in the text above."
    # The misspelt word is RULER's; published scores contain it.
    prefix = " Answer: According to the chain(s) of variable assignment in the text above, "
    prefix += f"{HOPS + 1} variables are assgined the value {value}, they are: "
    return Document(context, question, prefix, tuple(names), " ".join(names))


def example(job: Job, units: int) -> str:
    """The worked example that stands before the text of variable tracking."""
    chain = chain_text(Random(f"{job.seed}/example"), units, EXAMPLE_LETTERS)
    return f"{chain.prompt} {chain.gold}\n\n"


def variable_tracking(job: Job, units: int) -> Document:
    """Write one document of `vt`; units are times that the noise is repeated.

    Differs: names are distinct; every item has a worked example of its own, where RULER puts other names into the same
        one; the example takes at most a third of a short prompt.
    """
    chain = chain_text(job.rng(), units, NAME_LETTERS)
    context = f"{example(job, job.example_units)}\n\n{chain.context}"
    return Document(context, chain.question, chain.prefix, chain.answers, chain.gold)


def common_words(job: Job, units: int) -> Document:
    """Write one document of `cwe`; units are different words in the list, more than 10.

    Differs: below 1,024 tokens a common word comes 3 times; the original has no list that short.
    """
    rng = job.rng()
    words = rng.sample(vocabulary().singles, units)
    common, others = words[:NUM_COMMON], words[NUM_COMMON:]
    often, seldom = (30, 3) if job.length >= LONG else (6, 1) if job.length >= SHORT else (3, 1)
    listed = common * often + others * seldom
    rng.shuffle(listed)
    context = "Below is a numbered list of words. In these words, some appear more often than others. "
    context += "Memorize the ones that appear most often.\n" + _numbered(listed)
    question = "\nQuestion: What are the 10 most common words in the above list?"
    prefix = " Answer: The top 10 words that appear most often in the list are:"
    return Document(context, question, prefix, tuple(common), " " + _numbered(common))


def _numbered(words: list[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, 1))


def frequent_words(job: Job, units: int) -> Document:
    """Write one document of `fwe`; units are words of the text, before counts are rounded down.

    Differs: the length counts the room for the answer, as it does in the other tasks.
    """
    import numpy as np
    from scipy.special import zeta

    rng, coded = job.rng(), list[str]()
    while len(set(coded)) < job.length // 50:
        coded.append("".join(rng.choices(string.ascii_lowercase, k=CODED_LETTERS)))
    coded = sorted(set(coded))
    Random(ORDER_SEED).shuffle(coded)
    coded[0] = "..."  # what appears most often is noise
    rank = np.arange(1, len(coded) + 1)
    counts = (units * rank**-ZETA_POWER / zeta(ZETA_POWER)).astype(int)
    text = [word for word, count in zip(coded, counts, strict=True) for _ in range(count)]
    Random(ORDER_SEED).shuffle(text)
    answers = coded[1 : 1 + NUM_FREQUENT]
    context = "Read the following coded text and track the frequency of each coded word. "
    context += f"Find the three most frequently appeared coded words. {' '.join(text)}"
    question = "\nQuestion: Do not provide any explanation. Please ignore the dots '....'. "
    question += "What are the three most frequently appeared words in the above coded text?"
    prefix = " Answer: According to the coded text above, the three most frequently appeared words are:"
    return Document(context, question, prefix, tuple(answers), " " + ", ".join(answers))


def answer_question(job: Job, units: int) -> Document:
    """Write one document of `qa_1` or `qa_2`; units are documents in the prompt, at least those of the question."""
    item, texts = job.source.questions[job.index], job.source.texts
    rng, missing = job.rng(), units - len(item.documents)
    if units >= len(texts):
        chosen = list(range(len(texts)))
    elif missing > len(item.near):
        near = {*item.documents, *item.near}
        others = [number for number in range(len(texts)) if number not in near]
        chosen = [*item.documents, *item.near, *rng.sample(others, missing - len(item.near))]
    else:
        chosen = [*item.documents, *rng.sample(item.near, max(0, missing))]
    shown = [texts[number] for number in chosen]
    Random(ORDER_SEED).shuffle(shown)
    body = "\n\n".join(f"Document {number}:\n{text}" for number, text in enumerate(shown, 1))
    context = f"{_ANSWER_ONLY}\n\nThe following are given documents.\n\n{body}"
    question = f"\n\n{_ANSWER_ONLY}\n\nQuestion: {item.query}"
    return Document(context, question, " Answer:", item.answers, " " + item.answers[0])
