"""Question answering: the documents that hold the answer among others."""

from random import Random

from kvbench.tasks.ruler.document import ORDER_SEED, Document, Job

_INSTRUCTION = (
    "Answer the question based on the given documents. Only give me the answer and do not output any other words."
)


def answer_question(job: Job, units: int) -> Document:
    """Write one document of `qa_1` or `qa_2`.

    Args:
        job: `documents`, and the question's `index` in them.
        units: Documents in the prompt; at least those that the question needs.

    Source: lm-eval 0.4.13, tasks/ruler/qa_utils.py.
    """
    asked, texts = job.source.questions[job.index], job.source.texts
    rng, missing = job.rng(), units - len(asked.documents)
    if units >= len(texts):
        chosen = list(range(len(texts)))
    elif missing > len(asked.near):
        near = {*asked.documents, *asked.near}
        others = [place for place in range(len(texts)) if place not in near]
        chosen = [*asked.documents, *asked.near, *rng.sample(others, missing - len(asked.near))]
    else:
        chosen = [*asked.documents, *rng.sample(asked.near, max(0, missing))]
    shown = [texts[place] for place in chosen]
    Random(ORDER_SEED).shuffle(shown)
    body = "\n\n".join(f"Document {place}:\n{text}" for place, text in enumerate(shown, 1))
    return Document(
        f"{_INSTRUCTION}\n\nThe following are given documents.\n\n{body}",
        f"\n\n{_INSTRUCTION}\n\nQuestion: {asked.query}",
        " Answer:",
        asked.answers,
        " " + asked.answers[0],
    )
