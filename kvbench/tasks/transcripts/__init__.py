"""Long transcripts of many requests that were answered, and one more that only an earlier part of them can answer.

The needed facts lie at a depth of the transcript that goes evenly from its beginning to its end over the items, so that
a cache of the newest quarter answers about a quarter of them.
"""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from kvbench.engine.requests import Request
from kvbench.errors import SettingValue
from kvbench.tasks.fill import TooShort
from kvbench.tasks.ruler.document import Document, check_lengths, longest, uncut
from kvbench.tasks.task import Ask, Items, Lengths, Task, listed
from kvbench.tasks.taskset import TaskSet

_FIRST = (
    "Ada Ben Cleo Dora Emil Faye Gus Hana Ivo Jana Karl Lena Milo Nora Otto Pia Quin Rosa Sven Tara Ugo Vera Wim Xenia "
    "Yara Zeno Anton Bella Carl Daria Edgar Fiona"
).split()
_LAST = (
    "Abel Brandt Costa Duval Egger Fabre Gomez Holm Ito Jansen Kaya Lund Moreau Novak Okoye Perez Quist Rossi Sato "
    "Toth Ueda Vogel Weber Xu Yilmaz Zeller Amari Berg Conti Dahl Engel Falk"
).split()
NAMES = tuple(f"{first} {last}" for first in _FIRST for last in _LAST)


@dataclass(frozen=True, kw_only=True)
class Transcript(Task):
    """A task of transcripts.

    Args:
        lengths: Tokens of prompt, chat template and answer together.
        items: Items per length.
    """

    answer_tokens: ClassVar[int]
    least: ClassVar[int]
    """Fewest requests in a transcript."""
    most: ClassVar[int] = 1 << 14

    lengths: Lengths = (4096,)
    items: Items = 16

    @abstractmethod
    def write(self, seed: str, depth: float, count: int) -> Document:
        """A transcript of `count` requests, and one more; its subject is at `depth`, 0 to 1.

        The same seed gives the same facts whatever the count.
        """

    @abstractmethod
    def grade(self, document: Document, answer: str) -> Mapping[str, float]:
        """The scores of an answer."""

    def load(self, ask: Ask) -> TaskSet:
        lengths, items = listed(self.lengths), ask.items(self.items)
        check_lengths(lengths, ask)
        builder = uncut(ask, self.answer_tokens)
        requests: list[Request] = []
        documents: dict[str, Document] = {}
        for length in lengths:
            guess = None
            for index in range(items):
                seed, depth = f"kvbench/{self.name}/{ask.seed}/{index}", (index + 0.5) / items

                def make(count: int, seed: str = seed, depth: float = depth) -> Document:
                    return self.write(seed, depth, count)

                try:
                    document, guess = longest(make, builder, length, self.most, self.least, guess)
                except TooShort as error:
                    raise SettingValue(
                        f"task.lengths={length} is too short: the shortest transcript and the room for the answer take "
                        f"{error.needed} tokens; raise it",
                        setting="task.lengths",
                    ) from error
                sample_id = f"{length}/{index}"
                meta = {"length": length, "index": index, "quarter": f"{int(4 * depth) + 1} of 4"}
                requests.append(document.request(builder, sample_id, str(length), meta))
                documents[sample_id] = document
        notes = {"lengths": lengths, "items": items, "seed": ask.seed, "split": "before the question"}
        return self.task_set(
            ask,
            requests,
            notes | {"chat": builder.chat},
            {key: list(document.answers) for key, document in documents.items()},
            lambda sample_id, answer: self.grade(documents[sample_id], answer),
            by=("length", "quarter"),
        )
