"""Filler text for the generated tasks, read from the running Python's own documentation."""

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from kvbench.errors import PackageMissing

# A paragraph shorter than this reads like a heading or a caption and breaks the prose.
MIN_PARAGRAPH_WORDS = 25
# Code, grammars and tables are dropped by their share of characters that prose does not use.
MIN_PROSE_SHARE = 0.93
_PROSE = re.compile(r"[A-Za-z ,.;:'\"()\-]")
_CODE = re.compile(">>>|::=")
_SENTENCE_END = re.compile(r"[.!?][\")]?$")


@functools.cache
def paragraphs() -> tuple[str, ...]:
    """The prose paragraphs of `pydoc_data.topics`, each on one line, in a fixed order.

    The text belongs to the Python Software Foundation (PSF licence); it is read at run time and never stored here.
    Other Python versions ship other texts, so prompts differ between versions; a task's fingerprint hashes the prompts
    and shows it.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise PackageMissing(
            "the text of generated prompts comes from the module pydoc_data of the Python standard library, and "
            "this interpreter has none; install the full standard library (Debian: libpython3-stdlib), or run another "
            "task"
        ) from error
    texts: dict[str, None] = {}
    for name in sorted(topics):
        for block in re.split(r"\n\s*\n", topics[name]):
            text = " ".join(block.split()).removeprefix("* ")
            ends, long = text.endswith((".", ":")), len(text.split()) >= MIN_PARAGRAPH_WORDS
            if ends and long and len(_PROSE.findall(text)) >= MIN_PROSE_SHARE * len(text) and not _CODE.search(text):
                texts.setdefault(text)
    return tuple(texts)


@dataclass(frozen=True)
class Filler:
    """A stream of words that can be cut at any length."""

    words: tuple[str, ...]  # a word that ends a paragraph carries the line break
    sentence_ends: tuple[int, ...]  # sorted counts n such that `words[:n]` ends with a whole sentence

    def render(self, num_words: int, inserts: Sequence[tuple[float, str]] = ()) -> str:
        """Join the first words and put each insert, a pair (depth in [0, 1], sentence), after a whole sentence."""
        stops = [0, *(end for end in self.sentence_ends if end <= num_words)]
        placed = sorted(
            (min(stops, key=lambda end: abs(end - depth * num_words)), depth, text) for depth, text in inserts
        )
        parts: list[str] = []
        last = 0
        for at, _, text in placed:
            parts.extend(self.words[last:at])
            parts.append(text)
            last = at
        parts.extend(self.words[last:num_words])
        return " ".join(parts).replace("\n ", "\n")


def make_filler(rng: Random, num_words: int) -> Filler:
    """Shuffle whole paragraphs into a stream of at least so many words; they come again when there are too few."""
    words: list[str] = []
    ends: list[int] = []
    while len(words) < num_words:
        order = list(paragraphs())
        rng.shuffle(order)
        for paragraph in order:
            for word in paragraph.split():
                words.append(word)
                if _SENTENCE_END.search(word):
                    ends.append(len(words))
            words[-1] += "\n"
            if len(words) >= num_words:
                break
    return Filler(tuple(words), tuple(ends))
