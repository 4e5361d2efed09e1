"""The tasks: what a model is asked, and how its answers are scored."""

from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

from kvbench.errors import unknown_name
from kvbench.tasks.draw import Limit
from kvbench.tasks.protocol import Protocol
from kvbench.tasks.settings import TaskSettings
from kvbench.tasks.taskset import MetricInfo, TaskSet

if TYPE_CHECKING:
    from kvbench.models.load import LoadedModel

__all__ = ["MetricInfo", "TaskSet", "check_task", "load_task", "settings_class"]

# Task -> the package of this folder whose function `load` loads it. Its `SETTINGS` says by name what may be set.
BENCHMARKS = {
    "longbench": "longbench",
    "longbench_v2": "longbench_v2",
    "infinitebench": "infinitebench",
    "longctx": "longctx",
    "ruler": "ruler",
    "needle": "ruler.grid",
    "instructions": "instructions",
    "drift": "drift",
    "stream": "stream",
    "gsm8k": "gsm8k",
    "math500": "mathematics",
    "math": "mathematics",
    "aime24": "aime",
    "aime25": "aime",
    "custom": "custom",
    "humaneval_plus": "code",
    "mbpp_plus": "code",
}
HARNESS = "lm_eval"


def load_task(
    task_cfg: Mapping[str, Any],
    model: "LoadedModel",
    *,
    limit: int | str | Limit | None,
    seed: int,
    protocol: Mapping[str, Any] | None = None,
) -> TaskSet:
    """Load a task: read or generate its data, build its prompts, tokenise them.

    Args:
        task_cfg: The `task` group of the configuration; `name` says which task, the other keys are that task's own.
            With `harness: lm_eval` it is a task of lm-eval.
        model: Its tokenizer, context length and chat template are used; its weights are not.
        limit: How many samples per subset, a fixed random choice; `first:20` for the first ones; None for all.
        seed: Decides generated data.
        protocol: The `protocol` group of the configuration; None takes its defaults.

    Returns:
        The task, ready to run.

    Raises:
        ValueError: a setting is unknown or out of range, or data is missing or broken; the message says what to do.
    """
    package, settings = _read(task_cfg)
    if model.tokenizer is None:
        raise ValueError(
            f"task={task_cfg.get('name')} needs a tokenizer and model {model.name} has none; choose another model"
        )
    asked = Protocol.from_mapping(protocol)
    task: TaskSet = package.load(settings, model, limit=Limit.read(limit), seed=seed, protocol=asked)
    if asked.chat_setting and not any(request.thoughts or request.choices for request in task.requests):
        raise ValueError(
            f"{asked.chat_setting} needs a chat, and task={task.name} asks none here; set "
            "protocol.chat_template=always with a model that has a chat template, or leave it at null"
        )
    return task


class _ModelNeeded(Exception):
    """A task's loader came to the point where it needs its model."""


class _NotLoaded:
    """Stands for a model that is not loaded yet."""

    def __getattr__(self, name: str) -> NoReturn:
        raise _ModelNeeded


_checked: set[str] = set()  # of this process: the jobs of a sweep have few tasks


def check_task(
    task_cfg: Mapping[str, Any],
    *,
    limit: int | str | Limit | None,
    seed: int,
    protocol: Mapping[str, Any] | None = None,
) -> None:
    """Check everything of a task that needs no model: its settings, and whether its data are there.

    It begins to load the task and ends where the model is first asked for anything. To load a model takes minutes,
    which a missing file should not cost.

    Args:
        task_cfg, limit, seed, protocol: As for `load_task`.

    Raises:
        MissingDataError: Names every part of the data that is missing.
        ValueError: a setting is unknown or out of range.
    """
    key = repr([task_cfg, limit, seed, protocol])
    if key in _checked:
        return
    package, settings = _read(task_cfg)
    with suppress(_ModelNeeded):
        asked = {"limit": Limit.read(limit), "seed": seed, "protocol": Protocol.from_mapping(protocol)}
        package.load(settings, _NotLoaded(), **asked)
    _checked.add(key)


def settings_class(task_cfg: Mapping[str, Any]) -> type[TaskSettings]:
    """What may be set of a task: a dataclass whose fields say it.

    Args:
        task_cfg: The `task` group of the configuration, of which `name` and `harness` are read.

    Raises:
        ValueError: There is no such task.
    """
    return _package(task_cfg).SETTINGS[HARNESS if task_cfg.get("harness") else str(task_cfg["name"])]


def _read(task_cfg: Mapping[str, Any]) -> tuple[ModuleType, TaskSettings]:
    """The package that loads a task, and the task's settings."""
    return _package(task_cfg), settings_class(task_cfg).read(task_cfg)


def _package(task_cfg: Mapping[str, Any]) -> ModuleType:
    name, harness = task_cfg.get("name"), task_cfg.get("harness")
    if harness not in (None, HARNESS):
        raise unknown_name("task.harness", harness, (HARNESS,))
    package = "harness" if harness else BENCHMARKS.get(str(name))
    if package is None:
        raise unknown_name("task.name", name, BENCHMARKS)
    return import_module(f"kvbench.tasks.{package}")
