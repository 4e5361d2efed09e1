"""`task=infinitebench`: the three retrieval subsets of InfiniteBench, each in texts of 100,000 tokens and more.

A pass key, a string of repeated digits, and a value of a JSON object of UUIDs. Prompts that the model does not hold
lose their middle, as with the authors, and with it often the answer: `max_prompt_tokens` and `counts.truncated` say so.

Source: Zhang et al., "InfiniteBench: Extending Long Context Evaluation Beyond 100K Tokens", 2024; src/prompt.py
    (yarn_mistral_templates), src/eval_utils.py, src/compute_scores.py of OpenBMB/InfiniteBench at 220fd2e and 0ce4c97.
Differs: in a chat, what their templates end with begins the model's answer.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from kvbench.rules import Whole
from kvbench.tasks.draw import Limit, drawn
from kvbench.tasks.infinitebench.dataset import SUBSETS, check_row, place
from kvbench.tasks.problem_source import find_rows
from kvbench.tasks.prompts import PromptBuilder, PromptRules
from kvbench.tasks.protocol import Protocol
from kvbench.tasks.settings import DataDir, TaskSettings, name_list, names_of
from kvbench.tasks.taskset import MetricInfo, TaskSet, fingerprint

if TYPE_CHECKING:
    from kvbench.engine.requests import Request
    from kvbench.models.load import LoadedModel

GROUPS = {"retrieval": tuple(SUBSETS)}
METRICS = {"score": MetricInfo(True, "the first number is the right one; kv_retrieval: the value stands in the answer")}
# A chat model that begins its answer itself needs more than the few tokens behind the prefix.
WHOLE_ANSWER_TOKENS = 50
_FOLDER = Path(__file__).resolve().parent


@dataclass(frozen=True, kw_only=True)
class Settings(TaskSettings):
    """What is set of the task.

    Args:
        subsets: Subsets, or `retrieval` for all three.
        answer_prefix: The prompt ends with the beginning of the answer.
        data_dir: Folder with their files; None for the local caches, then the hub.
        max_prompt_tokens: Longer prompts lose their middle; None for what the model takes.
    """

    subsets: Annotated[str | Sequence[str], names_of(tuple(SUBSETS), GROUPS)] = "retrieval"
    answer_prefix: bool = True
    data_dir: DataDir = None
    max_prompt_tokens: Annotated[int | None, Whole(2, unit="tokens")] = None


SETTINGS = {"infinitebench": Settings}


def load(cfg: Settings, model: "LoadedModel", *, limit: Limit | None, seed: int, protocol: Protocol) -> TaskSet:
    """Load the subsets.

    Args:
        cfg: The settings.
        model: Tokenizes the prompts; its context length limits them.
        limit: Which samples of each subset; None for all.
        seed: Not used: nothing here is random.
        protocol: How they are asked.

    Raises:
        MissingDataError: No place has a subset.
        ValueError: All rows of a subset are broken, or the answer's beginning would stand inside thoughts.
    """
    names = name_list(cfg.subsets, GROUPS)
    found = {name: find_rows(place(name), cfg.data_dir, check_row) for name in names}
    requests: list[Request] = []
    right: dict[str, tuple[str, str]] = {}
    for name, rows in found.items():
        subset = SUBSETS[name]
        prefix = f"\n\n{subset.prefix}" if cfg.answer_prefix and subset.prefix else ""
        tokens = subset.answer_tokens if prefix else WHOLE_ANSWER_TOKENS
        rules = PromptRules(max_new_tokens=tokens, chat_template=True)
        builder = PromptBuilder(model, protocol, rules, cfg.max_prompt_tokens)
        if prefix:
            builder.check_prefix()
        for row in (rows[at] for at in drawn(len(rows), limit, name)):
            request = builder.build(
                sample_id=f"{name}/{row['index']}",
                subset=name,
                context=subset.begin + row["context"],
                question=f"\n\n{row['input']}",
                gold=row["answer"],
                prefix=prefix,
                meta={"index": row["index"]},
            )
            requests.append(request)
            right[request.sample_id] = name, row["answer"]
    told: dict[str, Any] = {
        "chat": builder.chat,
        "answer_prefix": cfg.answer_prefix,
        "max_prompt_tokens": builder.max_prompt_tokens,
    }
    told |= {"truncation": "middle", "split": "after the text", "thinking": builder.thinking, "thoughts": "not graded"}
    return TaskSet(
        name="infinitebench",
        protocol=protocol.to_dict() | told,
        fingerprint=fingerprint(requests, {key: list(value) for key, value in right.items()}, _FOLDER),
        requests=requests,
        metrics=METRICS,
        primary="score",
        scorer=lambda sample_id, answer: {"score": float(is_right(*right[sample_id], answer))},
        quarantined=[row for rows in found.values() for row in rows.quarantined],
        copies=[row for rows in found.values() for row in rows.copies],
    )


def is_right(subset: str, wanted: str, answer: str) -> bool:
    """The official scores: the first run of digits, or for kv_retrieval any of the words.

    Args:
        subset: Name of the subset.
        wanted: The right answer.
        answer: What the model wrote.
    """
    if subset == "kv_retrieval":
        return wanted in re.split(r"[\s:\"'.,?!{}]+", answer)
    digits = re.search(r"[0-9]+", answer)
    return digits is not None and digits[0] == wanted
