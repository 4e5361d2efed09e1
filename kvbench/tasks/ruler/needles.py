"""The eight needle tasks: needles in a repeated sentence, in essays, or among other needles."""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal

from kvbench.tasks.ruler.document import ORDER_SEED, Document, Job
from kvbench.tasks.ruler.words import Vocabulary

Haystack = Literal["repeat", "essay", "needle"]
Kind = Literal["words", "numbers", "uuids"]
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NUM_DEPTHS = 40
NUMBER_DIGITS = 7


@dataclass(frozen=True)
class Needles:
    """One needle task."""

    haystack: Haystack  # what lies around the needles
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


def draw(kind: Kind, rng: Random, vocabulary: Vocabulary) -> str:
    """One key or value."""
    if kind == "words":
        return vocabulary.key(rng)
    if kind == "numbers":
        return str(rng.randint(10 ** (NUMBER_DIGITS - 1), 10**NUMBER_DIGITS - 1))
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def needle(kind: Kind, key: str, value: str) -> str:
    """The sentence that holds a fact."""
    return f"One of the special magic {kind} for {key} is: {value}."


def among_sentences(sentences: Sequence[str], inserts: Sequence[str], depths: Sequence[int]) -> str:
    """Prose with its inserts.

    Args:
        sentences: The prose.
        inserts: In the order in which they are to stand.
        depths: Where each goes, in percent of the sentences, ascending.
    """
    stops = [int(len(sentences) * (depth / 100)) for depth in depths]
    starts = [0, *stops]
    parts: list[str] = []
    for start, stop, insert in zip(starts, stops, inserts, strict=False):
        parts += [" ".join(sentences[start:stop]), insert]
    return " ".join([*parts, " ".join(sentences[starts[-1] :])])


def ask_for(spec: Needles, context: str, queries: Sequence[str], answers: Sequence[str]) -> Document:
    """Put instruction, question and answer prefix around a haystack."""
    single = len(queries) * spec.num_values == 1
    one, many = spec.values.removesuffix("s"), spec.values
    query = queries[0] if len(queries) == 1 else f"{', '.join(queries[:-1])}, and {queries[-1]}"
    if single:
        head = f"A special magic {one} is hidden within the following text. "
        head += f"Make sure to memorize it. I will quiz you about the {one} afterwards."
        question = f"What is the special magic {one} for {query} mentioned in the provided text?"
    else:
        head = f"Some special magic {many} are hidden within the following text. "
        head += f"Make sure to memorize it. I will quiz you about the {many} afterwards."
        question = f"What are all the special magic {many} for {query} mentioned in the provided text?"
    prefix = f" The special magic {one if single else many} for {query} mentioned in the provided text"
    prefix += " is" if single else " are"
    return Document(f"{head}\n{context}", f"\n{question}", prefix, tuple(answers), " " + ", ".join(answers))


def make(spec: Needles, job: Job, units: int) -> Document:
    """Write one document.

    Args:
        spec: The task.
        job: What decides its content.
        units: Sentences of filler, or words of an essay.

    Source: lm-eval 0.4.13, tasks/ruler/prepare_niah.py, the port of RULER's niah.py.
    Differs: sentences of essays are found by their punctuation, not by punkt's model; keys are distinct, and filler
        needles never have a key that is asked for.
    """
    rng, words = job.rng(), job.vocabulary
    keys: list[str] = []
    values: list[list[str]] = []
    needles: list[str] = []
    while len(keys) < spec.total_keys:
        key = draw(spec.keys, rng, words)
        if key in keys:
            continue
        keys.append(key)
        values.append([draw(spec.values, rng, words) for _ in range(spec.num_values)])
        needles += [needle(spec.values, key, value) for value in values[-1]]
    Random(ORDER_SEED).shuffle(needles)
    if spec.haystack == "essay":
        depths = sorted(rng.sample(_depths(), len(needles)))
        context = among_sentences(job.essays.sentences(units), needles, depths)
    else:
        lines = [NOISE] * units if spec.haystack == "repeat" else [_other(spec, keys, rng, words) for _ in range(units)]
        places = sorted(rng.sample(range(units), len(needles)), reverse=True)
        for place, text in zip(places, needles, strict=True):
            lines.insert(place, text)
        context = "\n".join(lines)
    asked = rng.sample(range(spec.total_keys), spec.num_queries)
    return ask_for(spec, context, [keys[at] for at in asked], [value for at in asked for value in values[at]])


def _depths() -> list[int]:
    return [round(100 * step / (NUM_DEPTHS - 1)) for step in range(NUM_DEPTHS)]


def _other(spec: Needles, keys: Sequence[str], rng: Random, words: Vocabulary) -> str:
    while (key := draw(spec.keys, rng, words)) in keys:
        pass
    return needle(spec.values, key, draw(spec.values, rng, words))
