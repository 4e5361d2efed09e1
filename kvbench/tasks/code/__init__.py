"""HumanEval+ and MBPP+ (`task=humaneval_plus`, `task=mbpp_plus`).

Python functions, run in a cage on the original and the added inputs.

`complete`: the model continues raw code; `chat`: the chat template requests a fenced block. Nothing runs
unless `task.allow_code_execution=true`, and nothing where the cage is not complete.

`dataset` reads the rows of the two benchmarks; `extract` makes a program of an answer; `cage/run.py` is the one door to
run it; `grade` compares what came out with the `reference`, by the rules of `oracle`.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from kvbench.rules import Choice
from kvbench.tasks.code.dataset import data_file
from kvbench.tasks.files import DataFile
from kvbench.tasks.problems import FIRST, Instruction, Problems
from kvbench.tasks.protocol import Protocol
from kvbench.tasks.taskset import MetricInfo

FORMS = ("complete", "chat")
MOVED_INSTRUCTION = "Write a self-contained Python script that solves the problem above, in a fenced code block."
_MAX_CAGES = 8  # more would only take memory: answers come one after the other


@dataclass(frozen=True, kw_only=True)
class CodeTask(Problems):
    """The task.

    Args:
        form: Form of the prompts.
        data_dir: Folder with EvalPlus' file; None for what EvalPlus left in its cache.
        allow_code_execution: The user's consent that code written by the model runs on this machine, in the cage.
    """

    metrics: ClassVar = {
        "plus": MetricInfo(
            True, "the function is right on the original and the added inputs (pass@1 of the plus benchmark)"
        ),
        "base": MetricInfo(True, "the function is right on the original inputs"),
        "parsed": MetricInfo(True, "the program loads; one that loads and answers wrongly is not a parse failure"),
    }
    primary: ClassVar = "plus"
    meta_keys: ClassVar = ("task_id",)
    instructions: ClassVar = {"chat": Instruction(FIRST, moved=MOVED_INSTRUCTION)}
    grading_limit_s: ClassVar = None  # the cage ends a program
    grading_workers: ClassVar = min(len(os.sched_getaffinity(0)), _MAX_CAGES)

    form: Annotated[str, Choice(FORMS)] = FORMS[0]
    allow_code_execution: bool = False

    def files(self) -> list[DataFile]:
        return [data_file(self.name)]

    def yamls(self) -> list[str]:
        return [f"kvbench_{self.name}_{self.form}"]

    def metadata(self, seed: int) -> dict[str, Any]:
        return {"data_dir": self.data_dir, "allow_code_execution": self.allow_code_execution}

    def protocol_notes(self) -> dict[str, Any]:
        return {"form": self.form}

    def reference(self, doc: dict) -> object:
        return doc["row"]

    def unusable(self, docs: Sequence[dict]) -> dict[int, str]:
        """The rows whose reference does not run, found out before hours of answers to them."""
        from kvbench.tasks.code.reference import unusable

        return unusable(self.name, ((doc["index"], json.loads(doc["row"])) for doc in docs))

    def data(self, seed: int, protocol: Protocol) -> dict[str, Any]:
        """See `Problems`.

        Raises:
            CageRefused: There is no consent, or this machine cannot isolate generated code.
            ValueError: Data is missing or broken.
        """
        from kvbench.tasks.code.cage import run as cage

        # Hours of answers that cannot be graded help nobody: a trivial program goes first.
        cage.run("def one():\n    return 1\n", "one", [[]], allow_code_execution=self.allow_code_execution)
        return super().data(seed, protocol)
