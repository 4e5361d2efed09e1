"""`task=math500` and `task=math`: competition mathematics, graded by math-verify.

`boxed`: the problem alone, as a chat, with the request for a boxed answer; `minerva4`: four worked examples in front,
as plain text, the form that base models are asked in.

The score is the share of all problems that are right; `run.json` also has it by subject.
"""

import ast
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from kvbench.rules import Choice
from kvbench.tasks.answers import GROUP, MINUS, found_in, graded, last_boxed
from kvbench.tasks.files import DataFile, find_rows
from kvbench.tasks.latex import judge, normalise
from kvbench.tasks.lmeval import lmeval_tasks_folder
from kvbench.tasks.problems import Problems
from kvbench.tasks.rows import Rows, text_field
from kvbench.tasks.task import Draws, name_list, names_of
from kvbench.tasks.taskset import MetricInfo

FORMS = ("boxed", "minerva4")
MATH500 = "math500"
SUBJECTS = {
    "algebra": 1187,
    "counting_and_probability": 474,
    "geometry": 479,
    "intermediate_algebra": 903,
    "number_theory": 540,
    "prealgebra": 871,
    "precalculus": 546,
}
"""Subject -> problems of its test file."""
GROUPS = {"all": tuple(SUBJECTS)}
# Longer than any reference by far; keeps sympy away from runaway answers, which it would chew on for minutes.
MAX_ANSWER_CHARS = 1000
_FINAL = re.compile(r"answer\s*+(?:is|:|=)\s*+(?::\s*+)?", re.IGNORECASE)
_MATH = re.compile(r"\\[(\[]|\\.|\$\$?", re.DOTALL)
_DOLLARS = re.compile(r"((?:[^$\\]|\\.)++)\$\$?", re.DOTALL)
_LAST_NUMBER = re.compile(rf"[{MINUS}]?\d++(?:(?:,|{GROUP})\d{{3}}(?!\d))*+(?:\.\d++)?(?:/\d++)?")
_HOPE = "I hope it is correct"  # how the examples of Minerva's prompt end
HUB_500, HUB_MATH = "HuggingFaceH4/MATH-500", "EleutherAI/hendrycks_math"


@dataclass(frozen=True, kw_only=True)
class Math500(Problems):
    """MATH-500.

    Args:
        form: How the problems are asked.
        k: Of how many answers pass@k and maj@k are reported; None for 1, 2, 4, ... and `protocol.num_samples`.
    """

    metrics: ClassVar = {
        "correct": MetricInfo(True, "the last boxed or final answer equals the reference (math-verify)"),
        "parsed": MetricInfo(True, "the answer holds a final answer to grade; a wrong one is not a parse failure"),
    }
    meta_keys: ClassVar = ("answer", "subject", "level")
    group_by: ClassVar = "subject"
    votes: ClassVar = True

    form: Annotated[str, Choice(FORMS)] = FORMS[0]
    k: Draws = None

    def parts(self) -> list[str]:
        """The groups of problems."""
        return [MATH500]

    def files(self) -> list[DataFile]:
        return [data_file(part) for part in self.parts()]

    def yamls(self) -> list[str]:
        end = "" if self.form == FORMS[0] else f"_{self.form}"
        return [f"kvbench_{part if part == MATH500 else f'math_{part}'}{end}" for part in self.parts()]

    def told(self) -> dict[str, Any]:
        return {"form": self.form} | ({} if self.form == FORMS[0] else {"split": "after the examples"})

    def vote(self, text: str, opened: bool) -> str | None:
        answer = found_in(text, find_answer, opened)
        return None if answer is None else normalise(answer)


@dataclass(frozen=True, kw_only=True)
class Math(Math500):
    """MATH.

    Args:
        subjects: Some of them, or `all`.
    """

    subjects: Annotated[str | Sequence[str], names_of(tuple(SUBJECTS), GROUPS)] = "all"

    def parts(self) -> list[str]:
        return name_list(self.subjects, GROUPS)


def data_file(subset: str) -> DataFile:
    """The test file of MATH-500 or of a subject."""
    if subset == MATH500:
        return DataFile(
            task=MATH500,
            stems=("test", "math500", "math_500"),
            rows=500,
            check=check_row,
            hub=((HUB_500, "test.jsonl"),),
            prepared=("MATH-500", "default", "test"),
            by_hand=f"run `hf download {HUB_500} test.jsonl --repo-type dataset --local-dir {MATH500}`",
        )
    return DataFile(
        task="math",
        stems=(subset,),
        rows=SUBJECTS[subset],
        check=check_row,
        key="subjects",
        hub=((HUB_MATH, f"{subset}/test-00000-of-00001.parquet"),),
        prepared=("hendrycks_math", subset, "test"),
        by_hand=f"put {subset}.jsonl with the fields problem and solution into a folder",
    )


def check_row(row: Mapping[str, object]) -> dict[str, Any]:
    """Check a line: gives `problem`, `solution`, `answer` (else of the solution's last box), `subject` and `level`."""
    problem, solution = text_field(row, "problem", "question"), text_field(row, "solution", required=False)
    answer = text_field(row, "answer", required=False).strip() or last_boxed(solution)
    if not answer:
        raise ValueError("field answer is missing, and the solution has no \\boxed{} either")
    digits = "".join(sign for sign in str(row.get("level") or "") if sign.isdigit())
    return {
        "problem": problem.strip(),
        "solution": solution.strip(),
        "answer": answer,
        "subject": text_field(row, "subject", "type", required=False) or None,
        "level": int(digits) if digits else None,
    }


def minerva_shots() -> list[dict[str, str]]:
    """The four public worked examples, read from the lm-eval package: `problem` and `solution` each.

    Its module is read and not imported, because it refuses the antlr4 that Hydra needs.

    Source: Lewkowycz et al. 2022 (arXiv 2206.14858), appendix D; lm-eval tasks/minerva_math/utils.py.
    """
    path = lmeval_tasks_folder() / "minerva_math" / "utils.py"
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        (function,) = (node for node in tree.body if getattr(node, "name", "") == "list_fewshot_samples")
        (returned,) = (node.value for node in ast.walk(function) if isinstance(node, ast.Return) and node.value)
        shots = ast.literal_eval(returned)
        return [{"problem": shot["problem"], "solution": shot["solution"]} for shot in shots[:4]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"task.form=minerva4 takes its examples from lm-eval, and {path} does not have them ({error}); install "
            "lm-eval 0.4.13, or take task.form=boxed"
        ) from error


def load(subset: str, data_dir: str | None = None, form: str = "boxed", **_: object) -> dict[str, Rows]:
    """The problems of MATH-500 or of a subject, for lm-eval, as the YAMLs' `custom_dataset`."""
    rows = find_rows(data_file(subset), data_dir)
    context = ""
    if form == "minerva4":
        # Source: lm-eval tasks/minerva_math/utils.py, doc_to_text.
        shots = minerva_shots()
        context = "".join(f"Problem:\n{shot['problem']}\n\nSolution: {shot['solution']}\n\n" for shot in shots)
    documents = [
        row
        | {
            "context": context,
            "gold": row["solution"] or f"\\boxed{{{row['answer']}}}",
            "subject": row["subject"] or subset,
        }
        for row in rows
    ]
    return {"test": rows.made_into(documents)}


def find_answer(text: str) -> str | None:
    """The final answer as LaTeX: the last box, what follows the last "answer is", or the last mathematics or number.

    None where the text has none of these, or one that is absurdly long.
    """
    found = last_boxed(text)
    if found is None:
        phrase = next(iter(deque(_FINAL.finditer(text), maxlen=1)), None)
        tail = text[phrase.end() :].partition("\n")[0].partition(_HOPE)[0] if phrase else text
        spans = list(_mathematics(tail))
        words = tail.rstrip(" .*").lstrip(" *")
        if spans:
            found = spans[0] if phrase else spans[-1]
        elif phrase and words:
            found = words
        else:
            numbers = _LAST_NUMBER.findall(tail)
            found = numbers[-1] if numbers else None
    if found is None or not found.strip() or len(found) > MAX_ANSWER_CHARS:
        return None
    return found.strip()


def _mathematics(text: str) -> Iterator[str]:
    """The text between dollars, `\\(` and `\\)`, or `\\[` and `\\]`, in order; an escaped dollar is none."""
    place, ends = 0, {"\\(": "\\)", "\\[": "\\]"}
    while sign := _MATH.search(text, place):
        place = sign.end()
        if sign[0].startswith("$"):
            if found := _DOLLARS.match(text, place):
                place = found.end()
                yield found[1]
        elif close := ends.get(sign[0]):
            end = text.find(close, place + 1)
            if end < 0:
                del ends[sign[0]]  # nothing closes the others either
            else:
                yield text[place:end]
                place = end + len(close)


def is_marked(text: str) -> bool:
    """Tell whether a text says what its answer is; of others, the last mathematics or number is graded."""
    return last_boxed(text) is not None or bool(_FINAL.search(text))


def grade(reference: str, text: str) -> dict[str, float]:
    """Score one answer."""
    answer, marked = found_in(text, find_answer), bool(found_in(text, is_marked))
    return graded(answer, lambda found: judge(reference, found), marked)


def process(doc: dict, results: list[str]) -> dict[str, float]:
    """Score for lm-eval."""
    return grade(doc["answer"], results[0])
