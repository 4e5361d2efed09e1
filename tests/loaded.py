"""Tasks of the tests: loaded with the settings of a test, and their prompts as text."""

from collections.abc import Callable

from kvbench.tasks import TaskSet, load_task


def loader(name: str, **defaults: object) -> Callable[..., TaskSet]:
    """A function that loads a task for a model, with these settings unless a test has others."""

    def load(model, *, limit=None, seed: int = 0, protocol=None, **settings) -> TaskSet:
        return load_task({"name": name} | defaults | settings, model, limit=limit, seed=seed, protocol=protocol)

    return load


def text_of(model, request) -> str:
    """The prompt of a request."""
    return model.tokenizer.decode([token for segment in request.segments for token in segment])


def records_of(task: TaskSet, right: Callable[..., bool]) -> list[dict]:
    """A journal record for each request, of an answer that is right or wrong."""
    return [
        {"sample_id": r.sample_id, "subset": r.subset, "meta": r.meta, "scores": {"score": float(right(r))}, "text": ""}
        for r in task.requests
    ]


def scores_of(groups: dict[str, dict]) -> dict[str, float]:
    """The score of each group of an aggregate."""
    return {name: numbers["score"] for name, numbers in groups.items()}
