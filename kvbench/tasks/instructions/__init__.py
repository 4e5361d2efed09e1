"""`task=instructions`: two instructions in the system prompt, a long text after them, and whether both still hold.

A cache that drops instructions answers questions about a text as well as ever. Here the system prompt gives two rules
(a format, forbidden words, a language), the user shows a text that has nothing to do with them, and then asks for a
short list that everybody knows. Each answer is checked against both rules. The answer that one would give without the
rules breaks both, and garbage follows none, so a method that loses them falls to 0; see `rules`. With `task.turns`
the conversation goes on in the compressed cache, and every answer is checked.

Source: Chen et al., "The Pitfalls of KV Cache Compression", 2025 (arXiv 2510.00231): two instructions in one prompt,
    of which eviction keeps one better than the other.
Differs: the rules are checked by code and drawn anew, and no judge or data set is needed.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from kvbench.engine.requests import Request
from kvbench.errors import SettingValue, Unsupported
from kvbench.rules import Whole
from kvbench.tasks.chat import NoSystemMessage, check_template
from kvbench.tasks.fill import TooShort, fill_length
from kvbench.tasks.instructions.rules import PAIRS, Instructions, draw
from kvbench.tasks.instructions.topics import TOPICS
from kvbench.tasks.protocol import Protocol
from kvbench.tasks.ruler.document import check_lengths, uncut
from kvbench.tasks.ruler.words import ESSAYS, Essays, essays, has_files
from kvbench.tasks.task import Ask, DataDir, Items, Lengths, Task, listed, name_list, names_of
from kvbench.tasks.taskset import MetricInfo, TaskSet

if TYPE_CHECKING:
    from kvbench.models.load import LoadedModel

ANSWER_TOKENS = 96
_SHOW = "Here is a text. You need not remember it.\n\n"


@dataclass(frozen=True, kw_only=True)
class TwoRules(Task):
    """The task; the protocol's system message stands before the instructions.

    Args:
        pairs: Pairs of kinds of instructions.
        lengths: Tokens of prompt, chat template and answers together.
        items: Items per pair and length.
        turns: Questions in each conversation.
        data_dir: Folder with essays, as for RULER; None for text of kvbench's own.
    """

    metrics: ClassVar = {
        "score": MetricInfo(True, "both instructions were followed"),
        "first": MetricInfo(True, "the first instruction was followed"),
        "second": MetricInfo(True, "the second instruction was followed"),
        "content": MetricInfo(True, "share of the list that was asked for, whatever the instructions"),
    }

    pairs: Annotated[str | Sequence[str], names_of(PAIRS)] = PAIRS
    lengths: Lengths = (1024,)
    items: Items = 10
    turns: Annotated[int, Whole(1, len(TOPICS), unit="questions")] = 1
    data_dir: DataDir = None

    def data(self, seed: int, protocol: Protocol) -> Essays:
        return essays(self.data_dir)

    @classmethod
    def reads_folder(cls, folder: str) -> bool:
        return has_files(folder, ESSAYS)

    def check_chat(self, model: "LoadedModel", protocol: Protocol) -> None:
        """Refuse a chat template without a system message, in which the rules are given."""
        if protocol.chat_template != "never" and model.chat_template:
            with _in_words_of_the_task(model):
                check_template(model, replace(protocol, system=protocol.system or "Answer in capitals."))

    def load(self, ask: Ask) -> TaskSet:
        pairs, lengths, items = name_list(self.pairs), listed(self.lengths), ask.items(self.items)
        check_lengths(lengths, ask, self.turns)
        text = self.data(ask.seed, ask.protocol)
        requests: list[Request] = []
        by_sample: dict[str, tuple[Instructions, list[str]]] = {}
        for pair in pairs:
            for length in lengths:
                for index in range(items):
                    rng = Random(f"kvbench/instructions/{ask.seed}/{pair}/{index}")
                    topics = rng.sample(sorted(TOPICS), self.turns)
                    instructions = draw(pair, topics, index, rng)
                    start = rng.randrange(len(text.words))
                    rotated = replace(text, words=text.words[start:] + text.words[:start])
                    meta: dict[str, Any] = {"pair": pair, "length": length, "index": index}
                    meta["instructions"] = [rule.text for rule in instructions.rules]
                    sample_id = f"{pair}/{length}/{index}"
                    requests.append(_request(ask, instructions, topics, rotated, sample_id, meta))
                    by_sample[sample_id] = instructions, topics

        def score(sample_id: str, turn: int, answer: str) -> dict[str, float]:
            instructions, topics = by_sample[sample_id]
            first, second, content = instructions.follow(TOPICS[topics[turn]], answer)
            return {
                "score": float(first and second),
                "first": float(first),
                "second": float(second),
                "content": content,
            }

        notes: dict[str, Any] = {"pairs": pairs, "lengths": lengths, "items": items, "turns": self.turns}
        notes |= {"seed": ask.seed, "split": "before the question", "chat": requests[0].thoughts is not None}
        return self.task_set(
            ask,
            requests,
            notes | {"essays": text.origin},
            {key: [instructions.text, names] for key, (instructions, names) in by_sample.items()},
            lambda sample_id, answer: score(sample_id, 0, answer),
            turn_scorer=score,
            by=("pair", "length"),
        )


@contextmanager
def _in_words_of_the_task(model: "LoadedModel") -> Iterator[None]:
    """Name the task where a template has no system message: no setting requested one."""
    try:
        yield
    except NoSystemMessage as error:
        raise Unsupported(
            f"task=instructions gives its rules in a system message, and the chat template of model {model.name} "
            f"{error.why}; set protocol.chat_template=never, which puts them before the text, or choose another model",
            setting="protocol.chat_template",
        ) from error


def _request(
    ask: Ask, instructions: Instructions, names: Sequence[str], text: Essays, sample_id: str, meta: dict
) -> Request:
    """A conversation about the lists of these names, with as much text as fits into its length."""
    system = instructions.text if ask.protocol.system is None else f"{ask.protocol.system}\n\n{instructions.text}"
    with _in_words_of_the_task(ask.model):
        builder = uncut(replace(ask, protocol=replace(ask.protocol, system=system)), ANSWER_TOKENS)
    prefix = "" if builder.chat else "\nAnswer:"
    first, *later = (TOPICS[name] for name in names)
    turns = [
        builder.turn(topic.question, gold=instructions.right(topic), answers=[instructions.right(topic)], prefix=prefix)
        for topic in later
    ]
    others = sum(len(turn.tokens) for turn in turns) + builder.max_new_tokens * (len(turns) + 1)
    question = f"\n\nThat was the text. {first.question}"

    def context(words: int) -> str:
        return _SHOW + " ".join(text.sentences(words))

    def count(words: int) -> int:
        return builder.count(context(words) + question, prefix)

    length = meta["length"]
    try:
        words = fill_length(count, length - others, 4 * length, least=1)
    except TooShort as error:
        raise SettingValue(
            f"task.lengths={length} is too short: instructions, questions and the room for the answers take "
            f"{error.needed + others} tokens without any text; raise it, or lower task.turns",
            setting="task.lengths",
        ) from error
    return builder.build(
        sample_id=sample_id,
        subset=meta["pair"],
        context=context(words),
        question=question,
        gold=instructions.right(first),
        prefix=prefix,
        meta=meta,
        turns=turns,
    )
