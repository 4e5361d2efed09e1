"""`task=longctx`: generated long prompts whose answers are known, at any length, without any data.

Four kinds, each one lm-eval task: `multikey` (eight needles in prose, one asked for), `kv` (a table of keys and 4-digit
values), `recall` (continue a sentence of the document, 16 tokens), `passkey` (one needle of 6 digits). Prompts end
where the answer continues them, so the reference is natural to teacher-force, and no chat template is put around them.

The prose is the documentation that ships with the running Python (`pydoc_data.topics`), read at run time. It differs
between Python versions, and so do the prompts: the fingerprint hashes the prompts themselves, so such runs are never
taken for the same.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from kvbench.errors import SettingMissing, SettingValue
from kvbench.tasks.fill import TooShort
from kvbench.tasks.lmeval import load_lmeval_tasks, scorer_of
from kvbench.tasks.longctx.generate import KINDS, make_doc, tokens_needed
from kvbench.tasks.prompts import PromptBuilder, PromptRules
from kvbench.tasks.rows import Rows
from kvbench.tasks.task import Ask, Items, Length, Task, name_list, names_of
from kvbench.tasks.taskset import MetricInfo, TaskSet

if TYPE_CHECKING:
    from lm_eval.api.task import Task as LmEvalTask
    from transformers import PreTrainedTokenizerBase

    from kvbench.engine.requests import Request

DEFAULT_LENGTH = 1024
DEFAULT_ITEMS = 6
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3})")


@dataclass(frozen=True, kw_only=True)
class LongContext(Task):
    """The task.

    Args:
        kinds: The kinds of questions.
        length: Tokens of each prompt.
        items: Items per kind.
    """

    metrics: ClassVar = {
        "score": MetricInfo(
            True, "multikey, kv, passkey: the number is right; recall: words in common, in order, as F1"
        ),
        "exact": MetricInfo(True, "the number is right; recall: all words are right"),
        "partial": MetricInfo(True, "share of the digits that are right, each in its place; recall: as score"),
    }

    kinds: Annotated[str | Sequence[str], names_of(KINDS)] = KINDS
    length: Length = DEFAULT_LENGTH
    items: Items = DEFAULT_ITEMS

    def load(self, ask: Ask) -> TaskSet:
        kinds, length, items, model = name_list(self.kinds), self.length, ask.items(self.items), ask.model
        if length >= model.max_tokens:
            raise SettingValue(
                f"task.length={length} does not fit model {model.name}, which holds {model.max_tokens} tokens; "
                "lower it",
                setting="task.length",
            )
        metadata = {"tokenizer": model.tokenizer, "length": length, "items": items, "seed": ask.seed}
        try:
            tasks = load_lmeval_tasks(self.folder(), [f"kvbench_longctx_{kind}" for kind in kinds], metadata)
        except TooShort as error:
            needed = max(tokens_needed(kind, items, model.tokenizer, length, ask.seed) for kind in kinds)
            raise TooShort(length, needed) from error
        requests: list[Request] = []
        scored: dict[str, tuple[LmEvalTask, dict]] = {}
        for kind, task in zip(kinds, tasks.values(), strict=True):
            builder = PromptBuilder(model, ask.protocol, PromptRules.from_yaml(task.config))
            if length > builder.max_prompt_tokens:
                raise SettingValue(
                    f"task.length={length} leaves model {model.name} no room: it holds {model.max_tokens} tokens, of "
                    f"which a prompt can take {builder.max_prompt_tokens}; lower task.length or "
                    "protocol.max_new_tokens",
                    setting="task.length",
                )
            for _, doc in task.doc_iterator():
                meta = {key: doc[key] for key in ("index", "depth", "answer")}
                request = builder.build(
                    sample_id=f"{kind}/{doc['index']}",
                    subset=kind,
                    context=doc["context"],
                    question=doc["question"],
                    gold=doc["answer"],
                    meta=meta | {"prompt_sha256": doc["sha256"]},
                )
                requests.append(request)
                scored[request.sample_id] = (task, doc)
        notes = {"length": length, "items": items, "seed": ask.seed, "split": "before the question"}
        references = {key: doc["answer"] for key, (_, doc) in scored.items()}
        return self.task_set(ask, requests, notes | {"chat": builder.chat}, references, scorer_of(scored))


def load(
    kind: str,
    tokenizer: "PreTrainedTokenizerBase | str | None" = None,
    length: int = DEFAULT_LENGTH,
    items: int = DEFAULT_ITEMS,
    seed: int = 0,
    **_: object,
) -> dict[str, Rows]:
    """The documents of a kind, for lm-eval, as the YAMLs' `custom_dataset`; `tokenizer` may be a folder or a hub id."""
    if tokenizer is None:
        raise SettingMissing(
            "the longctx tasks are made to a length in tokens: pass a tokenizer in the task metadata, for example "
            'TaskManager(metadata={"tokenizer": "FOLDER OR HUB ID", "length": 1024}, ...)'
        )
    if isinstance(tokenizer, str):
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=False)
    docs = (make_doc(kind, index, tokenizer=tokenizer, length=length, seed=seed) for index in range(items))
    return {"test": Rows(docs)}


def number_score(answer: str, reference: str) -> dict[str, float]:
    """Compare the first whole number of the answer, in which `1,234` reads as 1234, with the reference's.

    Returns:
        `score` and `exact`, which are the same here: 1 when the numbers are equal; `partial`: digits that are the
        reference's in the same place, as a share of the longer number.
    """
    match, wanted = re.search(r"\d+", _THOUSANDS.sub("", answer)), reference.strip()
    digits = match[0] if match else ""
    exact = float(digits == wanted)
    same = sum(mine == right for mine, right in zip(digits, wanted, strict=False))
    return {"score": exact, "exact": exact, "partial": same / max(len(digits), len(wanted))}


def recall_score(answer: str, reference: str) -> dict[str, float]:
    """Measure how much of the text that follows the quoted words came back in order.

    Returns:
        `score`: 2 L / (a + r), where L is the length of the longest common subsequence of words, a and r the numbers of
        words; `partial`: the same; `exact`: 1 when the words are the same.
    """
    from rapidfuzz.distance import LCSseq

    words, wanted = answer.split(), reference.split()
    score = 2 * LCSseq.similarity(words, wanted) / (len(words) + len(wanted)) if wanted else 0.0
    return {"score": score, "exact": float(words == wanted), "partial": score}


def process_number(doc: dict, results: list[str]) -> dict[str, float]:
    """Score for lm-eval: multikey, kv and passkey."""
    return number_score(results[0], doc["answer"])


def process_recall(doc: dict, results: list[str]) -> dict[str, float]:
    """Score for lm-eval: recall."""
    return recall_score(results[0], doc["answer"])
