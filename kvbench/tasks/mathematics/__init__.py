"""`task=math500` and `task=math`: competition mathematics, graded by math-verify.

`boxed`: the problem alone, as a chat, with the request for a boxed answer; `minerva4`: four worked examples in front,
as plain text, the form that base models are asked in.

The score is the share of all problems that are right; `run.json` also has it by subject.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from kvbench.rules import Choice
from kvbench.tasks.draw import Limit
from kvbench.tasks.mathematics.dataset import MATH500, SUBJECTS
from kvbench.tasks.mathematics.grade import vote
from kvbench.tasks.problem_set import load_problems
from kvbench.tasks.protocol import Protocol
from kvbench.tasks.settings import DataDir, Draws, TaskSettings, listed, name_list, names_of
from kvbench.tasks.taskset import MetricInfo, TaskSet

if TYPE_CHECKING:
    from kvbench.models.load import LoadedModel

FORMS = ("boxed", "minerva4")
METRICS = {
    "correct": MetricInfo(True, "the last boxed or final answer equals the reference (math-verify)"),
    "parsed": MetricInfo(True, "the answer holds a final answer to grade; a wrong one is not a parse failure"),
}
GROUPS = {"all": SUBJECTS}
_FOLDER = Path(__file__).resolve().parent


@dataclass(frozen=True, kw_only=True)
class Settings(TaskSettings):
    """What is set of MATH-500.

    Args:
        form: How the problems are asked.
        data_dir: Folder with the files; None for the local caches, then the hub.
        k: Of how many answers pass@k and maj@k are reported; None for 1, 2, 4, ... and `protocol.num_samples`.
    """

    form: Annotated[str, Choice(FORMS)] = FORMS[0]
    data_dir: DataDir = None
    k: Draws = None


@dataclass(frozen=True, kw_only=True)
class SubjectSettings(Settings):
    """What is set of MATH.

    Args:
        subjects: Some of them, or `all`.
    """

    subjects: Annotated[str | Sequence[str], names_of(SUBJECTS, GROUPS)] = "all"


SETTINGS = {MATH500: Settings, "math": SubjectSettings}


def load(cfg: Settings, model: "LoadedModel", *, limit: Limit | None, seed: int, protocol: Protocol) -> TaskSet:
    """Load MATH-500, or subjects of MATH.

    Args:
        cfg: The settings.
        model: Tokenizes the prompts.
        limit: Which problems, for `math` per subject; None for all.
        seed: Not used: nothing here is random.
        protocol: How the problems are asked; with `query_aware=false` the examples of `minerva4` are the context.

    Raises:
        ValueError: Data is missing or broken.
    """
    end = "" if cfg.form == FORMS[0] else f"_{cfg.form}"
    yaml_names = [f"kvbench_math500{end}"]
    if isinstance(cfg, SubjectSettings):
        yaml_names = [f"kvbench_math_{subject}{end}" for subject in name_list(cfg.subjects, GROUPS)]
    return load_problems(
        name=cfg.name,
        folder=_FOLDER,
        yaml_names=yaml_names,
        metadata={"data_dir": cfg.data_dir},
        model=model,
        limit=limit,
        protocol=protocol,
        metrics=METRICS,
        primary="correct",
        vote=vote,
        sizes=None if cfg.k is None else listed(cfg.k),
        describe={"form": cfg.form, "split": "after the examples"} if end else {"form": cfg.form},
        meta_keys=("answer", "subject", "level"),
        group_by="subject",
    )
