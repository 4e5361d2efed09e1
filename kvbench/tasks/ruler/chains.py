"""Variable tracking: a chain of assignments in noise, and every name that ends up with one value."""

import string
from random import Random

from kvbench.tasks.ruler.document import Document, Job
from kvbench.tasks.ruler.needles import NOISE

HOPS = 4
NAME_LETTERS, EXAMPLE_LETTERS = 5, 3
# What the worked example may take: RULER's limit, and in short prompts a third.
EXAMPLE_TOKENS = 500


def chain_text(rng: Random, units: int, letters: int) -> tuple[Document, str]:
    """One chain in noise, with its question.

    Args:
        rng: Decides the names, the value and the places.
        units: Times that the noise is repeated, >= 1.
        letters: Length of a name.

    Returns:
        The document, and the value that is asked for.
    """
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
    for moved, place in enumerate(sorted(rng.sample(range(len(sentences)), len(chain)))):
        sentences.insert(place + moved, chain[moved])
    context = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
    context += " ".join(sentences).replace(". \n", ".\n")
    question = f"\nQuestion: Find all variables that are assigned the value {value} in the text above."
    # The misspelt word is RULER's; published scores contain it.
    prefix = " Answer: According to the chain(s) of variable assignment in the text above, "
    prefix += f"{HOPS + 1} variables are assgined the value {value}, they are: "
    return Document(context, question, prefix, tuple(names), " ".join(names)), value


def example(job: Job, units: int) -> str:
    """The worked example that stands before the text."""
    found, _ = chain_text(Random(f"{job.seed}/example"), units, EXAMPLE_LETTERS)
    return f"{found.prompt} {found.gold}\n\n"


def variable_tracking(job: Job, units: int) -> Document:
    """Write one document of `vt`.

    Args:
        job: What decides its content; `example_units` is the noise in the worked example.
        units: Times that the noise is repeated.

    Source: lm-eval 0.4.13, tasks/ruler/vt_utils.py.
    Differs: names are distinct; every item has a worked example of its own, where RULER puts other names into the same
        one; the example takes at most a third of a short prompt.
    """
    found, _ = chain_text(job.rng(), units, NAME_LETTERS)
    context = f"{example(job, job.example_units)}\n\n{found.context}"
    return Document(context, found.question, found.prefix, found.answers, found.gold)
