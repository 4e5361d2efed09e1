"""`task=needle`: one fact at every depth of prompts of every length, which a heat map shows (`kvbench heatmap`).

The needle, the question and the answer's beginning are RULER's. An item has the same fact and the same text around it
in every cell, so what differs between two cells is where the fact lies and how much lies around it. With several
needles the one that is asked for lies at the cell's depth and the others, with keys of their own, anywhere.

Source: Kamradt, "Needle In A Haystack - Pressure Testing LLMs", 2023: depth times length, needles between sentences.
Differs: keys and values are drawn anew for every item, so that no model knows them; the answer is matched, not judged.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Annotated

from kvbench.rules import Choice, Several, Whole
from kvbench.tasks.draw import Limit
from kvbench.tasks.fit import TooShort, most_units
from kvbench.tasks.prompts import PromptBuilder, PromptRules
from kvbench.tasks.protocol import Protocol
from kvbench.tasks.ruler import check_lengths, uncut
from kvbench.tasks.ruler.document import Document
from kvbench.tasks.ruler.needles import Needles, among_sentences, ask, draw, needle
from kvbench.tasks.ruler.scores import match_all
from kvbench.tasks.ruler.words import Essays, essays, vocabulary
from kvbench.tasks.settings import DataDir, Items, Lengths, TaskSettings, listed
from kvbench.tasks.taskset import MetricInfo, TaskSet, fingerprint

if TYPE_CHECKING:
    from kvbench.models.load import LoadedModel

VALUES = ("numbers", "uuids")
MOST_NEEDLES = 64
# A UUID takes most; the answer begins with it.
ANSWER_TOKENS = {"numbers": 32, "uuids": 64}
METRICS = {"score": MetricInfo(True, "the value that was asked for stands in the answer")}
_FOLDER = Path(__file__).resolve().parent


@dataclass(frozen=True, kw_only=True)
class Settings(TaskSettings):
    """What is set of the task.

    Args:
        lengths: Of prompt, chat template and answer together.
        depths: How many depths, evenly from the beginning to the end of the text, or which, in percent of it.
        items: Of each cell.
        needles: In each prompt.
        values: What the needles hold.
        answer_prefix: The prompt ends with the beginning of the answer.
        data_dir: Folder with the essays; None for text of kvbench's own.
    """

    lengths: Lengths = (1024, 2048, 4096)
    depths: Annotated[
        int | Sequence[int], Several(Whole(0, 100, unit="percent"), alone=Whole(2, 101, unit="depths"))
    ] = 5
    items: Items = 2
    needles: Annotated[int, Whole(1, MOST_NEEDLES, unit="facts")] = 1
    values: Annotated[str, Choice(VALUES)] = "numbers"
    answer_prefix: bool = True
    data_dir: DataDir = None


SETTINGS = {"needle": Settings}


def load(cfg: Settings, model: "LoadedModel", *, limit: Limit | None, seed: int, protocol: Protocol) -> TaskSet:
    """Generate the prompts of every cell.

    Args:
        cfg: The settings.
        model: Its tokenizer counts; its context must hold the longest length.
        limit: Items of each cell when that is fewer.
        seed: Decides the content.
        protocol: How the samples are asked.

    Raises:
        ValueError: A setting does not fit the model.
    """
    lengths, depths = listed(cfg.lengths), depths_of(cfg.depths)
    items = min(cfg.items, limit.count) if limit else cfg.items
    count, values, prefix = cfg.needles, cfg.values, cfg.answer_prefix
    check_lengths(lengths, model, protocol)
    text = essays(cfg.data_dir)
    builder = uncut(model, protocol, PromptRules(max_new_tokens=ANSWER_TOKENS[values], chat_template=True))
    spec = Needles("essay", values="uuids" if values == "uuids" else "numbers", num_keys=count)
    requests, answers = [], {}
    for length in lengths:
        for depth in depths:
            guess = None
            for index in range(items):
                document, guess = write(spec, text, f"{seed}/{index}", length, depth, builder, guess, prefix)
                request = builder.build(
                    sample_id=f"{length}/{depth}/{index}",
                    subset=str(length),
                    context=document.context,
                    question=document.question,
                    prefix=document.prefix if prefix else "",
                    gold=document.gold if prefix else document.prefix + document.gold,
                    answers=document.answers,
                    meta={"length": length, "depth": depth, "index": index, "answers": list(document.answers)},
                )
                if prefix:
                    builder.check_prefix()
                requests.append(request)
                answers[request.sample_id] = document.answers

    def score(sample_id: str, answer: str) -> dict[str, float]:
        return {"score": match_all(answer, answers[sample_id])}

    asked = {"lengths": lengths, "depths": depths, "items": items, "needles": count, "values": values, "seed": seed}
    asked |= {"split": "before the question", "chat": builder.chat, "answer_prefix": prefix}
    return TaskSet(
        name="needle",
        protocol=protocol.to_dict() | asked | {"essays": text.origin, "words": vocabulary().origin},
        fingerprint=fingerprint(requests, {key: list(found) for key, found in answers.items()}, _FOLDER),
        requests=requests,
        metrics=METRICS,
        primary="score",
        scorer=score,
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
    """Write the longest prompt of a cell that fits.

    Args:
        spec: How many needles, of what kind.
        text: What lies around them.
        item: Decides keys, values, where the text begins, and where other needles lie.
        length: Tokens of prompt, chat template and answer.
        depth: Where the needle that is asked for lies, in percent of the sentences.
        builder: Counts the tokens.
        guess: Words of a similar prompt; None for none.
        with_prefix: The beginning of the answer is part of the prompt.

    Returns:
        The prompt, and its words of text.

    Raises:
        ValueError: Needles and question alone take more than the length.
    """
    rng, keys = Random(f"kvbench/needle/{item}"), dict[str, str]()
    while len(keys) < spec.num_keys:
        keys.setdefault(draw(spec.keys, rng, vocabulary()), draw(spec.values, rng, vocabulary()))
    start = rng.randrange(len(text.words))
    # From a sentence's beginning on: behind the next word that ends one.
    ends = (at for at in range(start, start + len(text.words)) if text.words[at % len(text.words)].endswith("."))
    start = (next(ends, start) + 1) % len(text.words)
    turned = replace(text, words=text.words[start:] + text.words[:start])
    others = [rng.randrange(101) for _ in range(spec.num_keys - 1)]
    placed = sorted(zip([depth, *others], [needle(spec.values, *fact) for fact in keys.items()], strict=True))
    key, value = next(iter(keys.items()))

    def make(words: int) -> Document:
        context = among_sentences(turned.sentences(words), [insert for _, insert in placed], [at for at, _ in placed])
        return ask(spec, context, [key], [value])

    def tokens(words: int) -> int:
        document = make(words)
        return builder.count(document.context + document.question, document.prefix if with_prefix else "")

    try:
        words = most_units(tokens, length - builder.max_new_tokens, 4 * length, least=1, guess=guess)
    except TooShort as error:
        raise ValueError(
            f"task.lengths={length} is too short for task.needles={spec.num_keys}: the shortest prompt and the room "
            f"for the answer take {error.needed + builder.max_new_tokens} tokens; raise the length, or take fewer"
        ) from error
    return make(words), words
