"""One prompt of RULER in its parts, and what its makers are given."""

from dataclasses import dataclass
from random import Random

from kvbench.tasks.ruler.words import Documents, Essays, Vocabulary

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


@dataclass(frozen=True)
class Job:
    """What decides a document, beside the units of filler.

    Args:
        seed: Text that seeds everything random.
        length: Tokens of prompt and answer.
        vocabulary: Words.
        essays: Text for haystacks of prose.
        documents: For question answering.
        index: Which question of them.
        example_units: Units in the worked example of variable tracking.
    """

    seed: str
    length: int
    vocabulary: Vocabulary
    essays: Essays
    documents: Documents | None = None
    index: int = 0
    example_units: int = 1

    def rng(self) -> Random:
        """A new generator: the same job draws the same facts however long its haystack is."""
        return Random(self.seed)
