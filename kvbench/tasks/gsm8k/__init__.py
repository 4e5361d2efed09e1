"""`task=gsm8k`: grade-school mathematics, in the three forms that papers use.

`cot8`: eight fixed worked examples, "Q: ... A:"; `fewshot5`: five examples of the train file, "Question: ... Answer:",
with its calculator annotations and `####`; `zeroshot`: the question alone, in the chat template where there is one.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbench.tasks.draw import Limit
from kvbench.tasks.problem_set import load_problems
from kvbench.tasks.protocol import Protocol
from kvbench.tasks.settings import check_keys, one_of
from kvbench.tasks.taskset import MetricInfo, TaskSet

if TYPE_CHECKING:
    from kvbench.models.load import LoadedModel

FORMS = ("cot8", "fewshot5", "zeroshot")
METRICS = {
    "correct": MetricInfo(True, "the final number is right"),
    "parsed": MetricInfo(True, "the answer holds a number to grade; a wrong answer is not a parse failure"),
}
_FOLDER = Path(__file__).resolve().parent


def load(
    cfg: Mapping[str, Any], model: "LoadedModel", *, limit: Limit | None, seed: int, protocol: Protocol
) -> TaskSet:
    """Load the test file in one form.

    Args:
        cfg: `form` (of `FORMS`), `data_dir`.
        model: Tokenizes the prompts.
        limit: Which problems; None for all.
        seed: Chooses the examples of `fewshot5`.
        protocol: How the problems are asked; with `query_aware=false` the examples are the context.

    Raises:
        ValueError: An unknown form or key, or data that is missing or broken.
    """
    check_keys(cfg, ("form", "data_dir"))
    form = one_of("task.form", cfg.get("form") or FORMS[0], FORMS)
    return load_problems(
        name="gsm8k",
        folder=_FOLDER,
        yaml_names=[f"kvbench_gsm8k_{form}"],
        metadata={"data_dir": cfg.get("data_dir"), "seed": seed},
        model=model,
        limit=limit,
        protocol=protocol,
        metrics=METRICS,
        primary="correct",
        describe={"form": form, "split": "after the examples"},
        meta_keys=("answer",),
    )
