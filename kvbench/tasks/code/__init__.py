"""HumanEval+ and MBPP+ (`task=humaneval_plus`, `task=mbpp_plus`): Python functions, run in a cage on the original and
the added inputs.

`complete`: the model continues raw code; `chat`: it is asked for a fenced block in the chat template. Nothing runs
unless `task.allow_code_execution=true`, and nothing where the cage is not complete.

`dataset` reads the rows of the two benchmarks; `extract` makes a program of an answer; `cage/run.py` is the one door to
run it; `grade` compares what came out with the `reference`, by the rules of `oracle`; `metrics` is what lm-eval calls.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from kvbench.rules import Choice
from kvbench.tasks.draw import Limit
from kvbench.tasks.problem_set import load_problems
from kvbench.tasks.protocol import Protocol
from kvbench.tasks.settings import DataDir, TaskSettings
from kvbench.tasks.taskset import MetricInfo, TaskSet

if TYPE_CHECKING:
    from kvbench.models.load import LoadedModel

FORMS = ("complete", "chat")
METRICS = {
    "plus": MetricInfo(
        True, "the function is right on the original and the added inputs (pass@1 of the plus benchmark)"
    ),
    "base": MetricInfo(True, "the function is right on the original inputs"),
    "parsed": MetricInfo(True, "the program loads; one that loads and answers wrongly is not a parse failure"),
}
_FOLDER = Path(__file__).resolve().parent
_MAX_CAGES = 8  # more would only take memory: answers come one after the other


@dataclass(frozen=True, kw_only=True)
class Settings(TaskSettings):
    """What is set of the task.

    Args:
        form: How the functions are asked for.
        data_dir: Folder with EvalPlus' file; None for what EvalPlus left in its cache.
        allow_code_execution: The user's consent that code written by the model runs on this machine, in the cage.
    """

    form: Annotated[str, Choice(FORMS)] = FORMS[0]
    data_dir: DataDir = None
    allow_code_execution: bool = False


SETTINGS = {"humaneval_plus": Settings, "mbpp_plus": Settings}


def _unusable(name: str, docs: Sequence[dict]) -> dict[int, str]:
    """The rows whose reference does not run, found out before hours of answers to them."""
    from kvbench.tasks.code.grade import DATASETS
    from kvbench.tasks.code.reference import unusable

    return unusable(DATASETS[name], ((doc["index"], json.loads(doc["row"])) for doc in docs))


def load(cfg: Settings, model: "LoadedModel", *, limit: Limit | None, seed: int, protocol: Protocol) -> TaskSet:
    """Load the problems in one form.

    Args:
        cfg: The settings; `name` is `humaneval_plus` or `mbpp_plus`.
        model: Tokenizes the prompts.
        limit: Which problems; None for all.
        seed: Not used: nothing here is random.
        protocol: How the problems are asked.

    Raises:
        CageRefused: There is no consent, or this machine cannot isolate generated code; before anything is generated.
        ValueError: Data is missing or broken.
    """
    from kvbench.tasks.code.cage import run as cage

    name, form, consent = cfg.name, cfg.form, cfg.allow_code_execution
    # Hours of answers that cannot be graded help nobody: a trivial program goes first.
    cage.run("def one():\n    return 1\n", "one", [[]], allow_code_execution=consent)
    return load_problems(
        name=name,
        folder=_FOLDER,
        yaml_names=[f"kvbench_{name}_{form}"],
        metadata={"data_dir": cfg.data_dir, "allow_code_execution": consent},
        model=model,
        limit=limit,
        protocol=protocol,
        metrics=METRICS,
        primary="plus",
        describe={"form": form},
        meta_keys=("task_id",),
        reference=lambda doc: doc["row"],
        unusable=partial(_unusable, name),
        grading_limit_s=None,  # the cage ends a program
        grading_workers=min(len(os.sched_getaffinity(0)), _MAX_CAGES),
    )
