"""`task=gsm8k`: grade-school mathematics, in the three forms that papers use.

`cot8`: eight fixed worked examples, "Q: ... A:"; `fewshot5`: five examples of the train file, "Question: ... Answer:",
with its calculator annotations and `####`; `zeroshot`: the question alone, in the chat template where there is one.
"""

from dataclasses import dataclass
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

FORMS = ("cot8", "fewshot5", "zeroshot")
METRICS = {
    "correct": MetricInfo(True, "the final number is right"),
    "parsed": MetricInfo(True, "the answer holds a number to grade; a wrong answer is not a parse failure"),
}
_FOLDER = Path(__file__).resolve().parent


@dataclass(frozen=True, kw_only=True)
class Settings(TaskSettings):
    """What is set of the task.

    Args:
        form: How the problems are asked.
        data_dir: Folder with test.jsonl, and train.jsonl for `fewshot5`; None for the local caches, then the hub.
    """

    form: Annotated[str, Choice(FORMS)] = FORMS[0]
    data_dir: DataDir = None


SETTINGS = {"gsm8k": Settings}


def load(cfg: Settings, model: "LoadedModel", *, limit: Limit | None, seed: int, protocol: Protocol) -> TaskSet:
    """Load the test file in one form.

    Args:
        cfg: The settings.
        model: Tokenizes the prompts.
        limit: Which problems; None for all.
        seed: Chooses the examples of `fewshot5`.
        protocol: How the problems are asked; with `query_aware=false` the examples are the context.

    Raises:
        ValueError: Data is missing or broken.
    """
    return load_problems(
        name="gsm8k",
        folder=_FOLDER,
        yaml_names=[f"kvbench_gsm8k_{cfg.form}"],
        metadata={"data_dir": cfg.data_dir, "seed": seed},
        model=model,
        limit=limit,
        protocol=protocol,
        metrics=METRICS,
        primary="correct",
        describe={"form": cfg.form, "split": "after the examples"},
        meta_keys=("answer",),
    )
