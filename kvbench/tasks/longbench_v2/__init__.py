"""`task=longbench_v2`: 503 questions with four choices about texts of 8,000 to two million words.

The model answers in words, and the letter is taken from "The correct answer is (A)", as the authors do; or with
`task.form=choices` the four letters are scored behind these words, which small models can do, too. Scores are reported
by difficulty, length and domain.

Source: Bai et al., "LongBench v2", 2024 (arXiv 2412.15204); prompts/0shot.txt of THUDM/LongBench. Its pred.py was not
    at hand: the rule for the letter and the 128 tokens of an answer were not compared with it.
Differs: answers are greedy where the protocol does not sample (the authors sample at a temperature of 0.1); an answer
    without a letter scores 0 (their `compensated` gives it 0.25). With `protocol.query_aware=false` the prompt is
    divided behind the text.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from kvbench.rules import Choice, Whole
from kvbench.tasks.choices import with_choices
from kvbench.tasks.draw import Limit, drawn
from kvbench.tasks.longbench_v2.dataset import LETTERS, PLACE, check_row
from kvbench.tasks.problem_source import find_rows
from kvbench.tasks.prompts import PromptBuilder, PromptRules
from kvbench.tasks.protocol import Protocol
from kvbench.tasks.settings import DataDir, TaskSettings
from kvbench.tasks.taskset import MetricInfo, TaskSet, fingerprint

if TYPE_CHECKING:
    from kvbench.engine.requests import Request
    from kvbench.models.load import LoadedModel

FORMS = ("answer", "choices")
METRICS = {"score": MetricInfo(True, "the right one of four choices")}
ANSWER_TOKENS = 128
_FOLDER = Path(__file__).resolve().parent
_BEGIN = "Please read the following text and answer the question below.\n\n<text>\n"
_SAYING = "The correct answer is"
_FORMAT = f'Format your response as follows: "{_SAYING} (insert answer here)".'
_ANSWER = re.compile(rf"{_SAYING} (?:\(([A-D])\)|([A-D]))")


@dataclass(frozen=True, kw_only=True)
class Settings(TaskSettings):
    """What is set of the task.

    Args:
        form: The model answers, or its log-likelihoods of the choices decide.
        data_dir: Folder with the file; None for the local caches, then the hub.
        max_prompt_tokens: Longer prompts lose their middle; None for what the model takes.
    """

    form: Annotated[str, Choice(FORMS)] = "answer"
    data_dir: DataDir = None
    max_prompt_tokens: Annotated[int | None, Whole(2, unit="tokens")] = None


SETTINGS = {"longbench_v2": Settings}


@dataclass(kw_only=True)
class QuestionSet(TaskSet):
    """The task; `right` is the place of each question's right choice."""

    right: dict[str, int]

    def score_choices(self, request: "Request", choices: list[dict]) -> dict[str, float]:
        """See `TaskSet`: 1 when no other choice is as likely as the right one."""
        likely = [choice["loglikelihood"] for choice in choices]
        place = self.right[request.sample_id]
        return {"score": float(all(likely[place] > other for at, other in enumerate(likely) if at != place))}


def load(cfg: Settings, model: "LoadedModel", *, limit: Limit | None, seed: int, protocol: Protocol) -> TaskSet:
    """Load the questions.

    Args:
        cfg: The settings.
        model: Tokenizes the prompts; its context length limits them.
        limit: Which questions; None for all.
        seed: Not used: nothing here is random.
        protocol: How they are asked.

    Raises:
        MissingDataError: No place has them.
        ValueError: All rows are broken, or the protocol does not fit the form.
    """
    scored = cfg.form == "choices"
    if scored and (protocol.num_samples > 1 or protocol.chat_setting):
        raise ValueError(
            "task.form=choices scores choices, and nothing is thought or sampled; leave protocol.num_samples=1, "
            "protocol.thinking=null and protocol.thinking_tokens=null, or take task.form=answer"
        )
    rows = find_rows(PLACE, cfg.data_dir, check_row)
    rules = PromptRules(max_new_tokens=ANSWER_TOKENS, chat_template=True)
    builder = PromptBuilder(model, protocol, rules, cfg.max_prompt_tokens)
    asked: dict[str, dict[str, Any]] = {}
    requests = []
    for row in (rows[at] for at in drawn(len(rows), limit, "longbench_v2")):
        gold = LETTERS.index(row["answer"])
        request = builder.build(
            sample_id=f"longbench_v2/{row['index']}",
            subset="longbench_v2",
            context=_BEGIN + row["context"],
            question=question_of(row["question"], row["choices"]),
            gold=f"({row['answer']})" if scored else f"{_SAYING} ({row['answer']})",
            answers=[row["answer"]],
            prefix=f"\n\n{_SAYING}" if scored else "",
            meta={key: row[key] for key in ("index", "difficulty", "length", "domain")},
        )
        if scored:
            request = with_choices(request, model, [f" ({letter})" for letter in LETTERS], gold)
        requests.append(request)
        asked[request.sample_id] = row
    told = {"form": cfg.form, "chat": builder.chat, "max_prompt_tokens": builder.max_prompt_tokens}
    told |= {"truncation": "middle", "split": "after the text", "thinking": builder.thinking, "thoughts": "not graded"}
    return QuestionSet(
        name="longbench_v2",
        protocol=protocol.to_dict() | told,
        fingerprint=fingerprint(requests, {key: row["answer"] for key, row in asked.items()}, _FOLDER),
        requests=requests,
        metrics=METRICS,
        primary="score",
        scorer=lambda sample_id, answer: {"score": float(letter_of(answer) == asked[sample_id]["answer"])},
        quarantined=rows.quarantined,
        copies=rows.copies,
        by=("difficulty", "length", "domain"),
        right={key: LETTERS.index(row["answer"]) for key, row in asked.items()},
    )


def question_of(question: str, choices: Sequence[str]) -> str:
    """What stands behind the text."""
    listed = "".join(f"({letter}) {choice}\n" for letter, choice in zip(LETTERS, choices, strict=True))
    return f"\n</text>\n\nWhat is the correct answer to this question: {question}\nChoices:\n{listed}\n{_FORMAT}"


def letter_of(answer: str) -> str | None:
    """The letter that an answer gives; asterisks do not count, and a letter in brackets goes before one without.

    Source: extract_answer of LongBench v2's pred.py, written from memory and not compared with the file.
    """
    found = list(_ANSWER.finditer(answer.replace("*", "")))
    return next((match[1] for match in found if match[1]), next((match[2] for match in found), None))
