"""`task=longctx`: generated long prompts whose answers are known, at any length, without any data.

Four kinds, each one lm-eval task: `multikey` (eight needles in prose, one asked for), `kv` (a table of keys and 4-digit
values), `recall` (continue a sentence of the document, 16 tokens), `passkey` (one needle of 6 digits). Prompts end
where the answer continues them, so the reference is natural to teacher-force, and no chat template is put around them.

The prose is the documentation that ships with the running Python (`pydoc_data.topics`), read at run time. It differs
between Python versions, and so do the prompts: the fingerprint hashes the prompts themselves, so such runs are never
taken for the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from kvbench.tasks.draw import Limit
from kvbench.tasks.fit import TooShort
from kvbench.tasks.lmeval import load_lmeval_tasks, scorer_of
from kvbench.tasks.longctx.dataset import DEFAULT_ITEMS, DEFAULT_LENGTH
from kvbench.tasks.longctx.generate import KINDS, tokens_needed
from kvbench.tasks.prompts import PromptBuilder, PromptRules
from kvbench.tasks.protocol import Protocol
from kvbench.tasks.settings import Items, Length, TaskSettings, name_list, names_of
from kvbench.tasks.taskset import MetricInfo, TaskSet, fingerprint

if TYPE_CHECKING:
    from lm_eval.api.task import Task

    from kvbench.engine.requests import Request
    from kvbench.models.load import LoadedModel

METRICS = {
    "score": MetricInfo(True, "multikey, kv, passkey: the number is right; recall: words in common, in order, as F1"),
    "exact": MetricInfo(True, "the number is right; recall: all words are right"),
    "partial": MetricInfo(True, "share of the digits that are right, each in its place; recall: as score"),
}
_FOLDER = Path(__file__).resolve().parent


@dataclass(frozen=True, kw_only=True)
class Settings(TaskSettings):
    """What is set of the task.

    Args:
        kinds: The kinds of questions.
        length: Of each prompt.
        items: Of each kind.
    """

    kinds: Annotated[str | Sequence[str], names_of(KINDS)] = KINDS
    length: Length = DEFAULT_LENGTH
    items: Items = DEFAULT_ITEMS


SETTINGS = {"longctx": Settings}


def load(cfg: Settings, model: "LoadedModel", *, limit: Limit | None, seed: int, protocol: Protocol) -> TaskSet:
    """Generate the documents and their requests.

    Args:
        cfg: The settings.
        model: Its tokenizer counts; its context must hold prompt and answer.
        limit: Items per kind when that is fewer.
        seed: Decides the content.
        protocol: How the samples are asked.

    Raises:
        ValueError: a setting does not fit the model.
    """
    kinds, length, items = name_list(cfg.kinds), cfg.length, cfg.items
    names = {kind: f"kvbench_longctx_{kind}" for kind in kinds}
    items = min(items, limit.count) if limit else items
    metadata = {"tokenizer": model.tokenizer, "length": length, "items": items, "seed": seed}
    if length >= model.max_tokens:
        raise ValueError(
            f"task.length={length} does not fit model {model.name}, which holds {model.max_tokens} tokens; lower it"
        )
    try:
        tasks = load_lmeval_tasks(_FOLDER, list(names.values()), metadata)
    except TooShort as error:
        needed = max(tokens_needed(kind, items, model.tokenizer, length, seed) for kind in kinds)
        raise TooShort(length, needed) from error
    requests: list[Request] = []
    scored: dict[str, tuple[Task, dict]] = {}
    for kind, name in names.items():
        task = tasks[name]
        builder = PromptBuilder(model, protocol, PromptRules.from_yaml(task.config))
        if length > builder.max_prompt_tokens:
            raise ValueError(
                f"task.length={length} leaves model {model.name} no room: it holds {model.max_tokens} tokens, of which "
                f"a prompt can take {builder.max_prompt_tokens}; lower task.length or protocol.max_new_tokens"
            )
        for _, doc in task.doc_iterator():
            request = builder.build(
                sample_id=f"{kind}/{doc['index']}",
                subset=kind,
                context=doc["context"],
                question=doc["question"],
                gold=doc["answer"],
                meta={
                    "index": doc["index"],
                    "depth": doc["depth"],
                    "answer": doc["answer"],
                    "prompt_sha256": doc["sha256"],
                },
            )
            requests.append(request)
            scored[request.sample_id] = (task, doc)
    return TaskSet(
        name="longctx",
        protocol=protocol.to_dict()
        | {
            "length": length,
            "items": metadata["items"],
            "seed": seed,
            "split": "before the question",
            "chat": builder.chat,
        },
        fingerprint=fingerprint(requests, {key: doc["answer"] for key, (_, doc) in scored.items()}, _FOLDER),
        requests=requests,
        metrics=METRICS,
        primary="score",
        scorer=scorer_of(scored),
    )
