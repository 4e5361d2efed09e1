"""Aggregation: the words of a list that appear most often, and the coded words of a text that do."""

import string
from random import Random

from kvbench.tasks.ruler.document import ORDER_SEED, Document, Job

NUM_COMMON = 10
CODED_LETTERS = 6
NUM_FREQUENT = 3
ZETA_POWER = 2.0
# Below these lengths a list repeats its words less often, or ten common words alone would fill the prompt.
LONG, SHORT = 4096, 1024


def common_words(job: Job, units: int) -> Document:
    """Write one document of `cwe`.

    Args:
        job: What decides its content.
        units: Different words in the list, more than 10.

    Source: lm-eval 0.4.13, tasks/ruler/cwe_utils.py.
    Differs: below 1,024 tokens a common word comes 3 times; the original has no list that short.
    """
    rng = job.rng()
    words = rng.sample(job.vocabulary.singles, units)
    common, others = words[:NUM_COMMON], words[NUM_COMMON:]
    often, seldom = (30, 3) if job.length >= LONG else (6, 1) if job.length >= SHORT else (3, 1)
    listed = common * often + others * seldom
    rng.shuffle(listed)
    context = "Below is a numbered list of words. In these words, some appear more often than others. "
    context += "Memorize the ones that appear most often.\n" + _numbered(listed)
    return Document(
        context,
        "\nQuestion: What are the 10 most common words in the above list?",
        " Answer: The top 10 words that appear most often in the list are:",
        tuple(common),
        " " + _numbered(common),
    )


def _numbered(words: list[str]) -> str:
    return " ".join(f"{place}. {word}" for place, word in enumerate(words, 1))


def frequent_words(job: Job, units: int) -> Document:
    """Write one document of `fwe`.

    Args:
        job: What decides its content.
        units: Words of the text, before counts are rounded down.

    Source: lm-eval 0.4.13, tasks/ruler/fwe_utils.py.
    Differs: the length counts the room for the answer, as it does in the other tasks.
    """
    import numpy as np
    from scipy.special import zeta

    rng, size = job.rng(), job.length // 50
    coded = [_coded(rng) for _ in range(size)]
    while len(set(coded)) < size:
        coded.append(_coded(rng))
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


def _coded(rng: Random) -> str:
    return "".join(rng.choices(string.ascii_lowercase, k=CODED_LETTERS))
