"""`task=longbench_v2`: 503 questions with four choices about texts of 8,000 to two million words.

The model answers in words, and the letter is taken from "The correct answer is (A)", as the authors do; or with
`task.form=choices` the four letters are scored after these words, which small models can do, too. Scores are reported
by difficulty, length and domain.

Source: Bai et al., "LongBench v2", 2024 (arXiv 2412.15204); prompts/0shot.txt of THUDM/LongBench. Its pred.py was not
    at hand: the rule for the letter and the 128 tokens of an answer were not compared with it.
Differs: answers are greedy where the protocol does not sample (the authors sample at a temperature of 0.1); an answer
    without a letter scores 0 (their `compensated` gives it 0.25). With `protocol.query_aware=false` the prompt is
    divided after the text.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from kvbench.errors import SettingsConflict
from kvbench.rules import Choice
from kvbench.tasks.choices import ChoiceSet, with_choices
from kvbench.tasks.files import DataFile, find_rows
from kvbench.tasks.prompts import PromptBuilder, PromptRules
from kvbench.tasks.protocol import Protocol
from kvbench.tasks.rows import Rows, text_field
from kvbench.tasks.task import Ask, DataDir, MaxPromptTokens, Task
from kvbench.tasks.taskset import MetricInfo, TaskSet

FORMS = ("answer", "choices")
LETTERS = ("A", "B", "C", "D")
LENGTHS = ("short", "medium", "long")
ANSWER_TOKENS = 128
_BEGIN = "Please read the following text and answer the question below.\n\n<text>\n"
_SAYING = "The correct answer is"
_FORMAT = f'Format your response as follows: "{_SAYING} (insert answer here)".'
_ANSWER = re.compile(rf"{_SAYING} (?:\(([A-D])\)|([A-D]))")


@dataclass(frozen=True, kw_only=True)
class LongBenchV2(Task):
    """The task.

    Args:
        form: The model answers, or its log-likelihoods of the choices decide.
        data_dir: Folder with the file; None for the local caches, then the hub.
        max_prompt_tokens: Longer prompts lose their middle; None for what the model takes, `fit:N` for N at most.
    """

    metrics: ClassVar = {"score": MetricInfo(True, "the right one of four choices")}
    kind: ClassVar = ChoiceSet

    form: Annotated[str, Choice(FORMS)] = "answer"
    data_dir: DataDir = None
    max_prompt_tokens: MaxPromptTokens = None

    def files(self) -> list[DataFile]:
        return [FILE]

    def data(self, seed: int, protocol: Protocol) -> Rows:
        if self.form == "choices" and (protocol.num_samples > 1 or protocol.chat_setting):
            raise SettingsConflict(
                "task.form=choices scores choices, and nothing is thought or sampled; leave protocol.num_samples=1, "
                "protocol.thinking=null and protocol.thinking_tokens=null, or take task.form=answer",
                setting="task.form",
            )
        return find_rows(FILE, self.data_dir)

    def load(self, ask: Ask) -> TaskSet:
        rows, scored = self.data(ask.seed, ask.protocol), self.form == "choices"
        rules = PromptRules(max_new_tokens=ANSWER_TOKENS, chat_template=True)
        builder = PromptBuilder(ask.model, ask.protocol, rules, self.max_prompt_tokens)
        answers: dict[str, str] = {}
        requests = []
        for row in ask.drawn(rows, self.name):
            answer = row["answer"]
            request = builder.build(
                sample_id=f"longbench_v2/{row['index']}",
                subset="longbench_v2",
                context=_BEGIN + row["context"],
                question=question_of(row["question"], row["choices"]),
                gold=f"({answer})" if scored else f"{_SAYING} ({answer})",
                answers=[answer],
                prefix=f"\n\n{_SAYING}" if scored else "",
                meta={key: row[key] for key in ("index", "difficulty", "length", "domain")},
            )
            if scored:
                continuations = [f" ({letter})" for letter in LETTERS]
                request = with_choices(request, ask.model, continuations, LETTERS.index(answer))
            requests.append(request)
            answers[request.sample_id] = answer
        return self.task_set(
            ask,
            requests,
            builder.protocol_notes() | {"form": self.form, "split": "after the text"},
            answers,
            lambda sample_id, text: {"score": float(letter_of(text) == answers[sample_id])},
            rows=[rows],
            by=("difficulty", "length", "domain"),
            right={key: LETTERS.index(answer) for key, answer in answers.items()},
        )


def question_of(question: str, choices: Sequence[str]) -> str:
    """The prompt after the text."""
    listed = "".join(f"({letter}) {choice}\n" for letter, choice in zip(LETTERS, choices, strict=True))
    return f"\n</text>\n\nWhat is the correct answer to this question: {question}\nChoices:\n{listed}\n{_FORMAT}"


def letter_of(answer: str) -> str | None:
    """The letter that an answer gives; asterisks do not count, and a letter in brackets goes before one without.

    Source: extract_answer of LongBench v2's pred.py, written from memory and not compared with the file.
    """
    matches = list(_ANSWER.finditer(answer.replace("*", "")))
    return next((match[1] for match in matches if match[1]), next((match[2] for match in matches), None))


def check_row(row: Mapping[str, object]) -> dict[str, Any]:
    """Check a row; its choices are a list then, and there is no white space around texts, as they are asked."""
    texts = {name: text_field(row, name).strip() for name in ("context", "question", "answer", "domain")}
    if texts["answer"] not in LETTERS:
        raise ValueError(f"field answer must be one of {', '.join(LETTERS)}, it is {texts['answer'][:40]!r}")
    for name, known in (("difficulty", ("easy", "hard")), ("length", LENGTHS)):
        if row.get(name) not in known:
            raise ValueError(f"field {name} must be one of {', '.join(known)}, it is {str(row.get(name))[:40]!r}")
    choices = [text_field(row, f"choice_{letter}").strip() for letter in LETTERS]
    return texts | {"choices": choices, "difficulty": row["difficulty"], "length": row["length"]}


FILE = DataFile(
    task="longbench_v2",
    stems=("longbench_v2", "data"),
    rows=503,
    check=check_row,
    list_file="data.json",
    hub=(("THUDM/LongBench-v2", "data.json"), ("zai-org/LongBench-v2", "data.json")),
    prepared=("LongBench-v2", "default", "train"),
    by_hand="run `hf download THUDM/LongBench-v2 data.json --repo-type dataset --local-dir FOLDER`",
)
