"""`task=math500` and `task=math`: competition mathematics, asked for a boxed answer, graded by math-verify.

The score is the share of all problems that are right; `run.json` also has it by subject.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbench.tasks.mathematics.dataset import MATH500, SUBJECTS
from kvbench.tasks.problem_set import load_problems
from kvbench.tasks.protocol import Protocol
from kvbench.tasks.settings import check_keys, name_list
from kvbench.tasks.taskset import MetricInfo, TaskSet

if TYPE_CHECKING:
    from kvbench.models import LoadedModel

METRICS = {
    "correct": MetricInfo(True, "the last boxed or final answer equals the reference (math-verify)"),
    "parsed": MetricInfo(True, "the answer holds a final answer to grade; a wrong one is not a parse failure"),
}
_FOLDER = Path(__file__).resolve().parent


def load(cfg: Mapping[str, Any], model: "LoadedModel", *, limit: int | None, seed: int, protocol: Protocol) -> TaskSet:
    """Load MATH-500, or subjects of MATH.

    Args:
        cfg: `name` (`math500` or `math`), `data_dir`; for `math` also `subjects`, of `SUBJECTS`.
        model: Tokenizes the prompts.
        limit: Problems, for `math` per subject, from the start of the file; None for all.
        seed: Not used: nothing here is random.
        protocol: How the problems are asked.

    Raises:
        ValueError: An unknown subject or key, or data that is missing or broken.
    """
    name = cfg["name"]
    if name == MATH500:
        check_keys(cfg, ("data_dir",))
        yaml_names = ["kvbench_math500"]
    else:
        check_keys(cfg, ("data_dir", "subjects"))
        subjects = name_list("task.subjects", cfg.get("subjects") or "all", SUBJECTS, {"all": SUBJECTS})
        yaml_names = [f"kvbench_math_{subject}" for subject in subjects]
    return load_problems(
        name=name,
        folder=_FOLDER,
        yaml_names=yaml_names,
        metadata={"data_dir": cfg.get("data_dir")},
        model=model,
        limit=limit,
        protocol=protocol,
        metrics=METRICS,
        primary="correct",
        describe={"form": "boxed"},
        meta_keys=("answer", "subject", "level"),
        group_by="subject",
    )
