"""Seeded long-context documents: multikey needle, key-value table, quoted recall, passkey."""

import hashlib
from random import Random
from typing import TYPE_CHECKING

from kvbench.tasks.fill import TooShort, fill_length
from kvbench.tasks.haystack import Filler, make_filler, paragraphs
from kvbench.tasks.prompts import decode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KINDS = ("multikey", "kv", "recall", "passkey")
NUM_NEEDLES = 8
RECALL_TOKENS = 16
RECALL_PREFIX_WORDS = 10

_CITIES = (
    "Lisbon Oslo Cairo Lima Quito Delhi Tokyo Paris Rome Madrid Vienna Athens Dublin Prague Warsaw Berlin Havana "
    "Ottawa Seoul Hanoi Nairobi Accra Tunis Dakar Sofia Riga Bern Boston Denver Chicago Sydney Manila"
).split()
ADJECTIVES = (
    "amber brave calm clever crisp deep early empty fair fancy final fresh gentle giant golden grand green happy "
    "heavy hidden icy jolly kind large late light little lucky mild modern narrow noble old pale plain proud quick "
    "quiet rapid royal rusty sharp shy silent silver small soft warm wild young"
).split()
NOUNS = (
    "anchor apple arrow basket bell bird boat book bottle bridge bucket button candle castle chair cloud coin door "
    "drum engine farmer feather field flag forest garden glass hammer harbor island kettle ladder lamp leaf lion "
    "market mirror mountain needle ocean orange paper pencil pillow river rocket saddle spoon table tower"
).split()


def make_doc(kind: str, index: int, *, tokenizer: "PreTrainedTokenizerBase", length: int, seed: int) -> dict:
    """Write one document whose prompt has the requested length.

    Kind, index and seed decide everything; items do not depend on how many others are made, and the facts asked for do
    not depend on the length, which is the most tokens of the prompt, special ones included.

    Returns:
        `context` and `question` (the prompt is their concatenation), `answer` (continues the prompt, leading space
        included), `kind`, `index`, `depth` (share of the context before the answer), `sha256` of the prompt.

    Raises:
        TooShort: The prompt does not fit into the length.
    """
    rng = Random(f"kvbench/longctx/{seed}/{kind}/{index}")
    # Multiples of the golden ratio spread any number of items evenly over the depths.
    depth = 0.02 + 0.96 * ((0.5 + index * 0.6180339887) % 1.0)
    doc = _WRITERS[kind](rng, depth, length, tokenizer)
    doc |= {"kind": kind, "index": index, "depth": round(depth, 4)}
    doc["sha256"] = hashlib.sha256((doc["context"] + doc["question"]).encode()).hexdigest()
    return doc


def tokens_needed(kind: str, items: int, tokenizer: "PreTrainedTokenizerBase", length: int, seed: int) -> int:
    """Tokens that the longest prompt of a kind takes without filler, or 0 when all fit; as `make_doc` otherwise."""
    needed = 0
    for index in range(items):
        try:
            make_doc(kind, index, tokenizer=tokenizer, length=length, seed=seed)
        except TooShort as error:
            needed = max(needed, error.needed)
    return needed


def _fill(
    inserts: list[tuple[float, str]],
    head: str,
    question: str,
    filler: Filler,
    length: int,
    tokenizer: "PreTrainedTokenizerBase",
) -> str:
    """The context: head, then as much filler with its inserts as the length allows."""

    def context(units: int) -> str:
        return head + filler.render(units, inserts).rstrip("\n")

    return context(
        fill_length(lambda units: len(tokenizer.encode(context(units) + question)), length, len(filler.words))
    )


def _multikey(rng: Random, depth: float, length: int, tokenizer: "PreTrainedTokenizerBase") -> dict:
    cities = rng.sample(_CITIES, NUM_NEEDLES)
    numbers = rng.sample(range(1_000_000, 10_000_000), NUM_NEEDLES)
    # The needle asked for takes the item's depth, the others lie at random.
    depths = [depth, *(rng.random() for _ in range(NUM_NEEDLES - 1))]
    inserts = [
        (at, f"The special number of {city} is {number}.")
        for at, city, number in zip(depths, cities, numbers, strict=True)
    ]
    question = f"\n\nQuestion: What is the special number of {cities[0]}?\nAnswer: The special number of {cities[0]} is"
    filler = make_filler(rng, length)
    context = _fill(
        inserts, "Read the text and remember the special numbers in it.\n\n", question, filler, length, tokenizer
    )
    return {"context": context, "question": question, "answer": f" {numbers[0]}"}


def _passkey(rng: Random, depth: float, length: int, tokenizer: "PreTrainedTokenizerBase") -> dict:
    key = rng.randrange(100_000, 1_000_000)
    question = "\n\nWhat was the pass key mentioned in the text above? The pass key is"
    head = "There is a pass key hidden in the text. Find it and remember it.\n\n"
    context = _fill([(depth, f"The pass key is {key}.")], head, question, make_filler(rng, length), length, tokenizer)
    return {"context": context, "question": question, "answer": f" {key}"}


def _kv(rng: Random, depth: float, length: int, tokenizer: "PreTrainedTokenizerBase") -> dict:
    keys = [f"{adjective}-{noun}" for adjective in ADJECTIVES for noun in NOUNS]
    rng.shuffle(keys)
    value_of = Random(rng.random())
    rows: list[tuple[str, int]] = []

    def grow(num_rows: int) -> None:
        while len(rows) < num_rows:
            turn, index = divmod(len(rows), len(keys))
            rows.append((keys[index] + (f"-{turn + 1}" if turn else ""), value_of.randrange(1000, 10_000)))

    def context(num_rows: int) -> str:
        grow(num_rows)
        return "The table lists a value for every key.\n\n" + "\n".join(
            f"{key}: {value}" for key, value in rows[:num_rows]
        )

    # The longest key stands in for the one that is asked for until the number of rows is known.
    longest = max(keys, key=lambda key: len(tokenizer.encode(key, add_special_tokens=False)))
    question = f"\n\n{longest}-99:"
    num_rows = fill_length(lambda rows: len(tokenizer.encode(context(rows) + question)), length, length)
    key, value = rows[min(int(depth * num_rows), num_rows - 1)]
    return {"context": context(num_rows), "question": f"\n\n{key}:", "answer": f" {value}"}


def _recall(rng: Random, depth: float, length: int, tokenizer: "PreTrainedTokenizerBase") -> dict:
    """Quote the first words of a sentence of the context; the next 16 tokens are the answer."""
    order = list(paragraphs())
    rng.shuffle(order)
    text, prefix, answer = next((text, *quote) for text in order if (quote := _quote(text, tokenizer)))
    question = f"\n\n{prefix}"
    # The paragraph may also be part of the filler, which would put the answer at a second depth.
    filler = _without(make_filler(rng, length), prefix)
    context = _fill([(depth, text)], "Read the text.\n\n", question, filler, length, tokenizer)
    return {"context": context, "question": question, "answer": answer}


def _quote(text: str, tokenizer: "PreTrainedTokenizerBase") -> tuple[str, str] | None:
    """The first words of a paragraph and the next 16 tokens; None when the paragraph is too short for both."""
    words = text.split()
    prefix, rest = " ".join(words[:RECALL_PREFIX_WORDS]), " " + " ".join(words[RECALL_PREFIX_WORDS:])
    ids = tokenizer.encode(rest, add_special_tokens=False)
    answer = decode(tokenizer, ids[:RECALL_TOKENS])
    # A cut inside a character would not decode to the text again.
    return (prefix, answer) if len(ids) > RECALL_TOKENS and rest.startswith(answer) else None


def _without(filler: Filler, prefix: str) -> Filler:
    """The stream without the words of every paragraph that starts with the prefix."""
    drop = prefix.split()
    words: list[str] = []
    ends: list[int] = []
    sentence_ends = set(filler.sentence_ends)
    skipping = False
    for position, word in enumerate(filler.words):
        starts = position == 0 or filler.words[position - 1].endswith("\n")
        if starts:
            skipping = list(filler.words[position : position + len(drop)]) == drop
        if not skipping:
            words.append(word)
            if position + 1 in sentence_ends:
                ends.append(len(words))
    return Filler(tuple(words), tuple(ends))


_WRITERS = {"multikey": _multikey, "kv": _kv, "recall": _recall, "passkey": _passkey}
