"""`task=gsm8k`: grade-school mathematics, in the three forms that papers use.

`cot8`: eight fixed worked examples, "Q: ... A:"; `fewshot5`: five examples of the train file, "Question: ... Answer:",
with its calculator annotations and `####`; `zeroshot`: the question alone, in the chat template where there is one.
"""

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated, Any, ClassVar

from kvbench.errors import SettingValue
from kvbench.rules import Choice
from kvbench.tasks.answers import NUMBER, TERM, final_answer, graded, last_boxed, to_number
from kvbench.tasks.files import DataFile, find_rows
from kvbench.tasks.problems import LAST, Instruction, Problems
from kvbench.tasks.rows import Rows, text_field
from kvbench.tasks.taskset import MetricInfo

FORMS = ("cot8", "fewshot5", "zeroshot")
HUB = "openai/gsm8k"
NUM_SHOTS = 5
# Rows, and the SHA-256 of the file of openai/grade-school-math at 3101c7d.
SPLITS = {"test": (1319, ""), "train": (7473, "6043ef64147b59871f4fd3adf669c306fe0a4c27e5a5c4bfb761f3f084895a13")}
_ANNOTATION = re.compile(r"<<[^<>]*>>")  # of the calculator: <<48/2=24>>
# A sum that is written out stands for what it comes to: 3 + 4 = 7 is 7.
_VALUE = rf"(?:{NUMBER}(?:\s?(?:[-+*/\u2212\u00d7\u00f7]|\\times|\\cdot)\s?{NUMBER}){{1,20}}+\s?=\s?)?+({TERM})"
_HASHES = re.compile(rf"####\s*+(?:\*\*)?({TERM})")
_SENTENCE = re.compile(rf"\bThe answer is\s*+{_VALUE}")
# Marks that chat models put between the phrase and the number: a colon, bold, mathematics.
_PHRASE = re.compile(
    r"\banswer\s*+(?:is|:)[\s:*]*+(?:(?:approximately|about)[\s:*]*+)?(?:\\[(\[]|\\boxed\{|\$|\s)*+" + _VALUE,
    re.IGNORECASE,
)
_TERM = re.compile(TERM)
_MARKS = (_HASHES, _SENTENCE, _PHRASE)
# Source: Wei et al. 2022 (arXiv 2201.11903), appendix G, table 20: question, reasoning, answer.
COT8 = (
    (
        "There are 15 trees in the grove. Grove workers will plant trees in the grove today. After they are done, there"
        " will be 21 trees. How many trees did the grove workers plant today?",
        "There are 15 trees originally. Then there were 21 trees after some more were planted. So there must have been"
        " 21 - 15 = 6.",
        "6",
    ),
    (
        "If there are 3 cars in the parking lot and 2 more cars arrive, how many cars are in the parking lot?",
        "There are originally 3 cars. 2 more cars arrive. 3 + 2 = 5.",
        "5",
    ),
    (
        "Leah had 32 chocolates and her sister had 42. If they ate 35, how many pieces do they have left in total?",
        "Originally, Leah had 32 chocolates. Her sister had 42. So in total they had 32 + 42 = 74. After eating 35,"
        " they had 74 - 35 = 39.",
        "39",
    ),
    (
        "Jason had 20 lollipops. He gave Denny some lollipops. Now Jason has 12 lollipops. How many lollipops did Jason"
        " give to Denny?",
        "Jason started with 20 lollipops. Then he had 12 after giving some to Denny. So he gave Denny 20 - 12 = 8.",
        "8",
    ),
    (
        "Shawn has five toys. For Christmas, he got two toys each from his mom and dad. How many toys does he have"
        " now?",
        "Shawn started with 5 toys. If he got 2 toys each from his mom and dad, then that is 4 more toys. 5 + 4 = 9.",
        "9",
    ),
    (
        "There were nine computers in the server room. Five more computers were installed each day, from monday to"
        " thursday. How many computers are now in the server room?",
        "There were originally 9 computers. For each of 4 days, 5 more computers were added. So 5 * 4 = 20 computers"
        " were added. 9 + 20 is 29.",
        "29",
    ),
    (
        "Michael had 58 golf balls. On tuesday, he lost 23 golf balls. On wednesday, he lost 2 more. How many golf"
        " balls did he have at the end of wednesday?",
        "Michael started with 58 golf balls. After losing 23 on tuesday, he had 58 - 23 = 35. After losing 2 more, he"
        " had 35 - 2 = 33 golf balls.",
        "33",
    ),
    (
        "Olivia has $23. She bought five bagels for $3 each. How much money does she have left?",
        "Olivia had 23 dollars. 5 bagels for 3 dollars each will be 5 x 3 = 15 dollars. So she has 23 - 15 dollars"
        " left. 23 - 15 is 8.",
        "8",
    ),
)


@dataclass(frozen=True, kw_only=True)
class Gsm8k(Problems):
    """The task.

    Args:
        form: Form of the prompts.
    """

    metrics: ClassVar = {
        "correct": MetricInfo(True, "the final number is right"),
        "parsed": MetricInfo(True, "the answer holds a number to grade; a wrong answer is not a parse failure"),
    }
    instructions: ClassVar = {"zeroshot": Instruction(LAST)}

    form: Annotated[str, Choice(FORMS)] = FORMS[0]

    def files(self) -> list[DataFile]:
        return [data_file(split) for split in SPLITS]

    def yamls(self) -> list[str]:
        return [f"kvbench_gsm8k_{self.form}"]

    def metadata(self, seed: int) -> dict[str, Any]:
        return {"data_dir": self.data_dir, "seed": seed}

    def protocol_notes(self) -> dict[str, Any]:
        return {"form": self.form, "split": "after the examples"}


def data_file(split: str) -> DataFile:
    """The file of a split."""
    rows, official = SPLITS[split]
    return DataFile(
        task="gsm8k",
        stems=(split,),
        rows=rows,
        check=check_row,
        hub=((HUB, f"main/{split}-00000-of-00001.parquet"),),
        prepared=("gsm8k", "main", split),
        official=official,
        by_hand=f"put {split}.jsonl of the repository openai/grade-school-math (grade_school_math/data) into a folder",
        has_questions=split == "test",
    )


def check_row(row: Mapping[str, object]) -> dict[str, Any]:
    """Check a line: gives `question`, `solution` (without its last line) and `answer` (the number as text)."""
    question = text_field(row, "question")
    solution, marker, answer = text_field(row, "answer").rpartition("####")
    if not marker or to_number(answer) is None:
        raise ValueError("field answer must end with '#### ' and a number")
    return {"question": question.strip(), "solution": solution.strip(), "answer": answer.strip()}


def load(form: str, data_dir: str | None = None, seed: int = 0, **_: object) -> dict[str, Rows]:
    """The test split in one form, for lm-eval, as the YAMLs' `custom_dataset`.

    The seed chooses the five examples of `fewshot5`, the same for every question: they are the `context`.
    """
    rows = find_rows(data_file("test"), data_dir)
    context, skipped = "", []
    if form == "cot8":
        context = "".join(f"Q: {question}\nA: {why} The answer is {answer}.\n\n" for question, why, answer in COT8)
    elif form == "fewshot5":
        train = find_rows(data_file("train"), data_dir)
        skipped = train.quarantined
        if len(train) < NUM_SHOTS:
            raise SettingValue(
                f"task.form=fewshot5 draws {NUM_SHOTS} examples, and the train file has {len(train)}; copy it "
                "again or take task.form=cot8",
                setting="task.form",
            )
        shots = random.Random(seed).sample(list(train), NUM_SHOTS)
        context = "".join(
            f"Question: {row['question']}\nAnswer: {row['solution']}\n#### {row['answer']}\n\n" for row in shots
        )
    documents = [row | {"context": context, "gold": _gold(form, row)} for row in rows]
    return {"test": rows.made_into(documents, skipped=skipped)}


def _gold(form: str, row: Mapping[str, Any]) -> str:
    """The reference solution as an answer in this form would read."""
    if form == "fewshot5":
        return f"{row['solution']}\n#### {row['answer']}"
    joint = " " if form == "cot8" else "\n"
    return f"{_ANNOTATION.sub('', row['solution']).replace(chr(10), joint)}{joint}The answer is {row['answer']}."


def find_answer(text: str, last: bool = False) -> Decimal | None:
    """The number after `####`, else after "The answer is" or a looser form of it, in the last box, or the last one.

    Args:
        text: The answer, thoughts removed.
        last: Take the last marked number where there are several, and not the first: after few-shot prompts a base
            model goes on with other problems.

    Source: lm-eval 0.4.13 gsm8k (strict and flexible filters) and gsm8k_cot, joined; the original's `####`.
    Differs: one rule for all forms; currency signs, marks for the thousands and trailing dots do not matter; 18.00 is
        18; the minus of typesetting is one; after the phrase, 3 + 4 = 7 is 7. Anything more than a number is none:
        1/2, 15 or 16, 15^2. lm-eval's strict filters take 1, 15 and 15 of these, its flexible one 2, 16 and 2: a right
        answer by where a pattern ends, which a broken cache finds often.
    """
    for pattern in _MARKS:
        matches = pattern.findall(text)
        if matches:
            return to_number(matches[-1 if last else 0])
    boxed = last_boxed(text)
    matches = _TERM.findall(boxed if boxed is not None else text) or _TERM.findall(text)
    return to_number(matches[-1]) if matches else None


def is_marked(text: str) -> bool:
    """Tell whether a text says which number is its answer; of others, the last number is graded."""
    return any(pattern.search(text) for pattern in _MARKS) or bool(_TERM.search(last_boxed(text) or ""))


def has_several(text: str) -> bool:
    """Tell whether a text has unlike numbers after the mark that its answer is read from."""
    marked = next(filter(None, (pattern.findall(text) for pattern in _MARKS)), [])
    return len({to_number(number) for number in marked}) > 1


def grade(reference: str, text: str, *, last: bool) -> dict[str, float]:
    """Score one answer; for `last` see `find_answer`."""
    value = final_answer(text, lambda rest: find_answer(rest, last))
    marked, several = (bool(final_answer(text, tell)) for tell in (is_marked, has_several))
    return graded(value, lambda number: number == to_number(reference), marked, several)


def process_few_shot(doc: dict, results: list[str]) -> dict[str, float]:
    """Score for lm-eval: the few-shot forms."""
    return grade(doc["answer"], results[0], last=False)


def process_chat(doc: dict, results: list[str]) -> dict[str, float]:
    """Score for lm-eval: the zero-shot form."""
    return grade(doc["answer"], results[0], last=True)
