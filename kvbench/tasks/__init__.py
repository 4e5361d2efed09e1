"""Tasks: their prompts, and the scores of answers."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvbench.config.settings import read_settings
from kvbench.errors import SettingsConflict, Unsupported, unknown_name
from kvbench.rules import modes
from kvbench.tasks.files import DataFile, check_folder
from kvbench.tasks.protocol import Protocol
from kvbench.tasks.task import Ask, Limit, Task
from kvbench.tasks.taskset import MetricInfo, TaskSet

if TYPE_CHECKING:
    from kvbench.models.load import LoadedModel

__all__ = ["MetricInfo", "TaskSet", "check_task", "data_files", "load_task", "settings_class"]

# Task -> the module of this folder and the class in it.
BENCHMARKS = {
    "longbench": "longbench.LongBench",
    "longbench_v2": "longbench_v2.LongBenchV2",
    "infinitebench": "infinitebench.InfiniteBench",
    "scbench": "scbench.ScBench",
    "longctx": "longctx.LongContext",
    "ruler": "ruler.Ruler",
    "needle": "ruler.grid.Needle",
    "instructions": "instructions.TwoRules",
    "tools": "transcripts.tools.Tools",
    "similar": "transcripts.similar.Similar",
    "drift": "drift.Drift",
    "stream": "stream.Stream",
    "perplexity": "stream.perplexity.Perplexity",
    "gsm8k": "gsm8k.Gsm8k",
    "math500": "mathematics.Math500",
    "math": "mathematics.Math",
    "aime24": "aime.Aime",
    "aime25": "aime.Aime",
    "aime26": "aime.Aime",
    "custom": "custom.Custom",
    "humaneval_plus": "code.CodeTask",
    "mbpp_plus": "code.CodeTask",
}
HARNESS = "lm_eval"


def settings_class(task_cfg: Mapping[str, Any]) -> type[Task]:
    """The class of a task, whose fields say what may be set; `name` and `harness` of the `task` group say which."""
    name, harness = task_cfg.get("name"), task_cfg.get("harness")
    if harness not in (None, HARNESS):
        raise unknown_name("task.harness", harness, (HARNESS,))
    location = "harness.HarnessTask" if harness else BENCHMARKS.get(str(name))
    if location is None:
        raise unknown_name("task.name", name, BENCHMARKS)
    module, _, kind = location.rpartition(".")
    task_class: type[Task] = getattr(import_module(f"kvbench.tasks.{module}"), kind)
    return task_class


def _task(task_cfg: Mapping[str, Any]) -> Task:
    return read_settings(settings_class(task_cfg), task_cfg, "task.", "task key")


def check_settings(task_cfg: Mapping[str, Any], protocol: Mapping[str, Any] | None = None) -> None:
    """Refuse settings of a task and of a protocol that are unknown or out of range; reads no data."""
    _task(task_cfg)
    Protocol.from_mapping(protocol)


def _with_data(task_cfg: Mapping[str, Any]) -> Task:
    """A task whose folder of data, where it names one, has a file of it."""
    task = _task(task_cfg)
    check_folder(task.files(), getattr(task, "data_dir", None))
    return task


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
        model: See `Ask`.
        limit: Number of samples per subset, a fixed random choice; `first:20` for the first ones, `after:20` for the
            others; None for all.
        seed: Decides generated data.
        protocol: The `protocol` group of the configuration; None takes its defaults.

    Raises:
        ValueError: a setting is unknown or out of range, or data is missing or broken; the message says what to do.
    """
    task = _with_data(task_cfg)
    if model.tokenizer is None:
        raise Unsupported(
            f"task={task_cfg.get('name')} needs a tokenizer and model {model.name} has none; choose another model",
            setting="task",
        )
    ask = Ask(model, Limit.read(limit), seed, Protocol.from_mapping(protocol))
    with _modes_kept(task_cfg):
        loaded = task.load(ask)
    if ask.protocol.chat_setting and not any(request.thoughts or request.choices for request in loaded.requests):
        raise SettingsConflict(
            f"{ask.protocol.chat_setting} needs a chat, and task={loaded.name} asks none here; set "
            "protocol.chat_template=always with a model that has a chat template, take a form of the task or subsets "
            "that are asked as a chat, or leave it at null",
            setting=ask.protocol.chat_setting.partition("=")[0],
        )
    return loaded


def requires_chat(task_cfg: Mapping[str, Any]) -> bool:
    """True for a task whose prompts not every chat template can hold."""
    return settings_class(task_cfg).check_chat is not Task.check_chat


def check_chat(task_cfg: Mapping[str, Any], model: "LoadedModel", protocol: Mapping[str, Any] | None = None) -> None:
    """Refuse a chat template that a task has no use for; see `Task.check_chat`."""
    _task(task_cfg).check_chat(model, Protocol.from_mapping(protocol))


def _modes_kept(task_cfg: Mapping[str, Any]) -> AbstractContextManager[None]:
    """A context in which a folder of the user's own, whose modules are imported there, may change no mode of torch."""
    folder = task_cfg.get("include_path")
    name = f"task.name={task_cfg.get('name')} of task.include_path={folder}"
    return modes.kept(name, once=name) if folder else nullcontext()


_checked: set[str] = set()  # of this process: the jobs of a sweep have few tasks


def check_task(
    task_cfg: Mapping[str, Any],
    *,
    limit: int | str | Limit | None,
    seed: int,
    protocol: Mapping[str, Any] | None = None,
) -> None:
    """Check everything of a task that needs no model, so that a missing file does not cost the minutes of loading one.

    Raises:
        MissingDataError: Names every part of the data that is missing.
        ValueError: a setting is unknown or out of range.
    """
    key = repr([task_cfg, limit, seed, protocol])
    if key in _checked:
        return
    task = _with_data(task_cfg)
    Limit.read(limit)
    with _modes_kept(task_cfg):
        task.data(seed, Protocol.from_mapping(protocol))
    _checked.add(key)


def data_files(task_cfg: Mapping[str, Any]) -> list[DataFile]:
    """The files of a benchmark, or of the parts of it that its settings choose; none for a task that has none."""
    kind = settings_class(task_cfg)
    return [] if kind.files is Task.files else _task(task_cfg).files()
