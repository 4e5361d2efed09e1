"""`task=needle`: one fact at every depth of prompts of every length, which `report view=heatmap` shows.

The needle, the question and the answer's beginning are RULER's. An item has the same fact and the same text around it
in every cell, so what differs between two cells is where the fact lies and how much lies around it. With several
needles the one that is asked for lies at the cell's depth and the others, with keys of their own, anywhere.

Source: Kamradt, "Needle In A Haystack - Pressure Testing LLMs", 2023: depth times length, needles between sentences.
Differs: keys and values are drawn anew for every item, so that no model knows them; the answer is matched, not judged.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from kvbench.errors import SettingValue
from kvbench.rules import Choice, Several, Whole
from kvbench.tasks.fill import TooShort
from kvbench.tasks.prompts import PromptBuilder
from kvbench.tasks.protocol import Protocol
from kvbench.tasks.ruler.definitions import match_all
from kvbench.tasks.ruler.document import Document, check_lengths, longest, uncut
from kvbench.tasks.ruler.makers import Needles, among_sentences, ask_for, draw, needle
from kvbench.tasks.ruler.words import ESSAYS, Essays, essays, has_files, vocabulary
from kvbench.tasks.task import Ask, DataDir, Items, Lengths, Task, listed
from kvbench.tasks.taskset import MetricInfo, TaskSet

if TYPE_CHECKING:
    from kvbench.engine.requests import Request

VALUES = ("numbers", "uuids")
MOST_NEEDLES = 64
# A UUID takes most; the answer begins with it.
ANSWER_TOKENS = {"numbers": 32, "uuids": 64}


@dataclass(frozen=True, kw_only=True)
class Needle(Task):
    """The task.

    Args:
        lengths: Tokens of prompt, chat template and answer together.
        depths: Number of depths, evenly from the beginning to the end of the text, or a list of them, in percent of it.
        items: Items per cell.
        needles: Needles per prompt.
        values: Kind of the needles' values.
        answer_prefix: The prompt ends with the beginning of the answer.
        data_dir: Folder with the essays; None for text of kvbench's own.
    """

    metrics: ClassVar = {"score": MetricInfo(True, "the value that was asked for stands in the answer")}

    lengths: Lengths = (1024, 2048, 4096)
    depths: Annotated[
        int | Sequence[int], Several(Whole(0, 100, unit="percent"), alone=Whole(2, 101, unit="depths"))
    ] = 5
    items: Items = 2
    needles: Annotated[int, Whole(1, MOST_NEEDLES, unit="facts")] = 1
    values: Annotated[str, Choice(VALUES)] = "numbers"
    answer_prefix: bool = True
    data_dir: DataDir = None

    def data(self, seed: int, protocol: Protocol) -> Essays:
        return essays(self.data_dir)

    @classmethod
    def reads_folder(cls, folder: str) -> bool:
        return has_files(folder, ESSAYS)

    def load(self, ask: Ask) -> TaskSet:
        lengths, depths, items = listed(self.lengths), depths_of(self.depths), ask.items(self.items)
        check_lengths(lengths, ask)
        text, prefix = self.data(ask.seed, ask.protocol), self.answer_prefix
        builder = uncut(ask, ANSWER_TOKENS[self.values])
        spec = Needles("essay", values="uuids" if self.values == "uuids" else "numbers", num_keys=self.needles)
        requests: list[Request] = []
        answers: dict[str, tuple[str, ...]] = {}
        for length in lengths:
            for depth in depths:
                guess = None
                for index in range(items):
                    document, guess = write(spec, text, f"{ask.seed}/{index}", length, depth, builder, guess, prefix)
                    sample_id, meta = f"{length}/{depth}/{index}", {"length": length, "depth": depth, "index": index}
                    requests.append(document.request(builder, sample_id, str(length), meta))
                    answers[sample_id] = document.answers
        notes: dict[str, Any] = {"lengths": lengths, "depths": depths, "items": items, "needles": self.needles}
        notes |= {"values": self.values, "seed": ask.seed, "split": "before the question", "chat": builder.chat}
        return self.task_set(
            ask,
            requests,
            notes | {"answer_prefix": prefix, "essays": text.origin, "words": vocabulary().origin},
            {key: list(texts) for key, texts in answers.items()},
            lambda sample_id, answer: {"score": match_all(answer, answers[sample_id])},
            by=("length", "depth"),
        )


def depths_of(depths: int | Sequence[int]) -> list[int]:
    """The depths of a setting `task.depths`, in percent: so many from the beginning to the end, or those listed."""
    if isinstance(depths, Sequence):
        return sorted(depths)
    return [round(100 * step / (depths - 1)) for step in range(depths)]


def write(
    spec: Needles,
    text: Essays,
    item: str,
    length: int,
    depth: int,
    builder: PromptBuilder,
    guess: int | None,
    with_prefix: bool,
) -> tuple[Document, int]:
    """Write the longest prompt of a cell that fits; as `definitions.write`.

    Args:
        item: Decides keys, values, where the text begins, and where other needles lie.
        depth: Position of the needle in question, in percent of the sentences.
    """
    rng, keys = Random(f"kvbench/needle/{item}"), dict[str, str]()
    while len(keys) < spec.num_keys:
        keys.setdefault(draw(spec.keys, rng), draw(spec.values, rng))
    start = rng.randrange(len(text.words))
    # From a sentence's beginning on: after the next word that ends one.
    ends = (at for at in range(start, start + len(text.words)) if text.words[at % len(text.words)].endswith("."))
    start = (next(ends, start) + 1) % len(text.words)
    rotated = replace(text, words=text.words[start:] + text.words[:start])
    others = [rng.randrange(101) for _ in range(spec.num_keys - 1)]
    placed = sorted(zip([depth, *others], [needle(spec.values, *fact) for fact in keys.items()], strict=True))
    key, value = next(iter(keys.items()))

    def make(words: int) -> Document:
        context = among_sentences(rotated.sentences(words), [insert for _, insert in placed], [at for at, _ in placed])
        document = ask_for(spec, context, [key], [value])
        return document if with_prefix else document.unbegun()

    try:
        return longest(make, builder, length, 4 * length, 1, guess)
    except TooShort as error:
        raise SettingValue(
            f"task.lengths={length} is too short for task.needles={spec.num_keys}: the shortest prompt and the room "
            f"for the answer take {error.needed} tokens; raise the length, or take fewer",
            setting="task.lengths",
        ) from error
