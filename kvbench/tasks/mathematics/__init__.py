"""`task=math500` and `task=math`: competition mathematics, graded by math-verify.

`boxed`: the problem alone, as a chat, with the request for a boxed answer; `minerva4`: four worked examples in front,
as plain text, the form that base models are asked in.

The score is the share of all problems that are right; `run.json` also has it by subject.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbench.tasks.draw import Limit
from kvbench.tasks.mathematics.dataset import MATH500, SUBJECTS
from kvbench.tasks.mathematics.grade import vote
from kvbench.tasks.problem_set import load_problems
from kvbench.tasks.protocol import Protocol
from kvbench.tasks.settings import check_keys, draw_sizes, name_list, one_of
from kvbench.tasks.taskset import MetricInfo, TaskSet

if TYPE_CHECKING:
    from kvbench.models.load import LoadedModel

FORMS = ("boxed", "minerva4")
METRICS = {
    "correct": MetricInfo(True, "the last boxed or final answer equals the reference (math-verify)"),
    "parsed": MetricInfo(True, "the answer holds a final answer to grade; a wrong one is not a parse failure"),
}
_FOLDER = Path(__file__).resolve().parent


def load(
    cfg: Mapping[str, Any], model: "LoadedModel", *, limit: Limit | None, seed: int, protocol: Protocol
) -> TaskSet:
    """Load MATH-500, or subjects of MATH.

    Args:
        cfg: `name` (`math500` or `math`), `form` (of `FORMS`), `data_dir`, `k`; for `math` also `subjects`, of
            `SUBJECTS`.
        model: Tokenizes the prompts.
        limit: Which problems, for `math` per subject; None for all.
        seed: Not used: nothing here is random.
        protocol: How the problems are asked; with `query_aware=false` the examples of `minerva4` are the context.

    Raises:
        ValueError: An unknown subject, form or key, or data that is missing or broken.
    """
    name, form = cfg["name"], one_of("task.form", cfg.get("form") or FORMS[0], FORMS)
    end = "" if form == FORMS[0] else f"_{form}"
    if name == MATH500:
        check_keys(cfg, ("data_dir", "form", "k"))
        yaml_names = [f"kvbench_math500{end}"]
    else:
        check_keys(cfg, ("data_dir", "subjects", "form", "k"))
        subjects = name_list(
            "task.subjects", "all" if cfg.get("subjects") is None else cfg["subjects"], SUBJECTS, {"all": SUBJECTS}
        )
        yaml_names = [f"kvbench_math_{subject}{end}" for subject in subjects]
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
        vote=vote,
        sizes=draw_sizes(cfg),
        describe={"form": form, "split": "after the examples"} if end else {"form": form},
        meta_keys=("answer", "subject", "level"),
        group_by="subject",
    )
