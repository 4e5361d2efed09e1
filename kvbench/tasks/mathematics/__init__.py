"""`task=math500` and `task=math`: competition mathematics, graded by math-verify.

`boxed`: the problem alone, as a chat, with the request for a boxed answer; `minerva4`: four worked examples in front,
as plain text, the form that base models are asked in.

The score is the share of all problems that are right; `run.json` also has it by subject.
"""

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from kvbench.errors import PackageMissing
from kvbench.rules import Choice, Several
from kvbench.tasks.answers import final_answer, graded, last_boxed
from kvbench.tasks.files import DataFile, find_rows
from kvbench.tasks.latex import judge, normalise
from kvbench.tasks.lmeval import lmeval_tasks_folder
from kvbench.tasks.mathematics.final import find_answer, is_marked
from kvbench.tasks.problems import LAST, Instruction, Problems
from kvbench.tasks.rows import Rows, text_field
from kvbench.tasks.task import Draws, listed, name_list, names_of
from kvbench.tasks.taskset import MetricInfo

FORMS = ("boxed", "minerva4")
LEVEL = Choice((1, 2, 3, 4, 5))
MATH500 = "math500"
SPLITS = ("test", "train")
SUBJECTS = {
    "algebra": (1187, 1744),
    "counting_and_probability": (474, 771),
    "geometry": (479, 870),
    "intermediate_algebra": (903, 1295),
    "number_theory": (540, 869),
    "prealgebra": (871, 1205),
    "precalculus": (546, 746),
}
"""Subject -> problems of its file in each split."""
GROUPS = {"all": tuple(SUBJECTS)}
HUB_500, HUB_MATH = "HuggingFaceH4/MATH-500", "EleutherAI/hendrycks_math"


@dataclass(frozen=True, kw_only=True)
class Math500(Problems):
    """MATH-500.

    Args:
        form: Form of the prompts.
        levels: Those of some levels of difficulty alone; None for all of them.
        k: Numbers of answers for which pass@k and maj@k are reported; None for 1, 2, 4, ... and `protocol.num_samples`.
    """

    metrics: ClassVar = {
        "correct": MetricInfo(True, "the last boxed or final answer equals the reference (math-verify)"),
        "parsed": MetricInfo(True, "the answer holds a final answer to grade; a wrong one is not a parse failure"),
    }
    meta_keys: ClassVar = ("answer", "subject", "level")
    group_by: ClassVar = "subject"
    votes: ClassVar = True
    instructions: ClassVar = {"boxed": Instruction(LAST)}

    form: Annotated[str, Choice(FORMS)] = FORMS[0]
    levels: Annotated[int | Sequence[int] | None, Several(LEVEL, alone=LEVEL, ordered=False)] = None
    k: Draws = None

    def parts(self) -> list[str]:
        """The groups of problems."""
        return [MATH500]

    def files(self) -> list[DataFile]:
        return [data_file(part) for part in self.parts()]

    def yamls(self) -> list[str]:
        end = "" if self.form == FORMS[0] else f"_{self.form}"
        return [f"kvbench_{part if part == MATH500 else f'math_{part}'}{end}" for part in self.parts()]

    def protocol_notes(self) -> dict[str, Any]:
        notes = {"form": self.form} | ({} if self.form == FORMS[0] else {"split": "after the examples"})
        return notes | ({} if self.levels is None else {"levels": sorted(listed(self.levels))})

    def asks(self, doc: dict) -> bool:
        return self.levels is None or doc["level"] in listed(self.levels)

    def vote(self, text: str, opened: bool) -> str | None:
        answer = final_answer(text, find_answer, opened)
        return None if answer is None else normalise(answer)


@dataclass(frozen=True, kw_only=True)
class Math(Math500):
    """MATH.

    Args:
        subjects: Some of them, or `all`.
        split: Test problems, or those for training, which a calibration may see.
    """

    subjects: Annotated[str | Sequence[str], names_of(tuple(SUBJECTS), GROUPS)] = "all"
    split: Annotated[str, Choice(SPLITS)] = SPLITS[0]

    def parts(self) -> list[str]:
        return name_list(self.subjects, GROUPS)

    def files(self) -> list[DataFile]:
        return [data_file(part, self.split) for part in self.parts()]

    def metadata(self, seed: int) -> dict[str, Any]:
        return super().metadata(seed) | {"split": self.split}

    def protocol_notes(self) -> dict[str, Any]:
        return super().protocol_notes() | ({} if self.split == SPLITS[0] else {"problems": self.split})


def data_file(subset: str, split: str = SPLITS[0]) -> DataFile:
    """The file of MATH-500, or of a subject and split."""
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
    is_test = split == SPLITS[0]
    stems = (subset,) if is_test else (f"{subset}_{split}", f"{split}/{subset}")
    return DataFile(
        task="math",
        stems=stems,
        rows=SUBJECTS[subset][SPLITS.index(split)],
        check=check_row,
        key="subjects",
        part=subset,
        words="" if is_test else f"task.split={split}",
        hub=((HUB_MATH, f"{subset}/{split}-00000-of-00001.parquet"),),
        prepared=("hendrycks_math", subset, split),
        by_hand=f"put {stems[0]}.jsonl with the fields problem and solution into a folder",
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
        raise PackageMissing(
            f"task.form=minerva4 takes its examples from lm-eval, and {path} does not have them ({error}); install "
            "lm-eval 0.4.13, or take task.form=boxed",
            setting="task.form",
        ) from error


def load(
    subset: str, data_dir: str | None = None, form: str = "boxed", split: str = SPLITS[0], **_: object
) -> dict[str, Rows]:
    """The problems of MATH-500 or of a subject, for lm-eval, as the YAMLs' `custom_dataset`."""
    rows = find_rows(data_file(subset, split), data_dir)
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


def grade(reference: str, text: str) -> dict[str, float]:
    """Score one answer."""
    answer, marked = final_answer(text, find_answer), bool(final_answer(text, is_marked))
    return graded(answer, lambda other: judge(reference, other), marked)


def process(doc: dict, results: list[str]) -> dict[str, float]:
    """Score for lm-eval."""
    return grade(doc["answer"], results[0])
