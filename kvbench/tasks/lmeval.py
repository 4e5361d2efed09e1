"""The joint with lm-eval: where its tasks lie, and our own task YAMLs loaded through it."""

import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbench.tasks.files import read_each

if TYPE_CHECKING:
    from lm_eval.api.task import Task

TASKS_FOLDER = Path(__file__).resolve().parent


def lmeval_tasks_folder() -> Path:
    """The folder in which the installed lm-eval keeps its tasks; finding it imports nothing."""
    spec = find_spec("lm_eval")
    assert spec is not None and spec.submodule_search_locations, "kvbench is installed with lm-eval"
    return Path(spec.submodule_search_locations[0]) / "tasks"


def load_lmeval_tasks(folder: Path, names: Sequence[str], metadata: Mapping[str, Any]) -> "dict[str, Task]":
    """Build lm-eval task objects from one folder of YAMLs, in the order of the names.

    Only that folder is indexed: lm-eval's own index of 14,000 tasks takes a minute and more.

    Args:
        folder: Folder with the YAMLs.
        names: Names of tasks in them.
        metadata: Passed to each task's `custom_dataset` function, on top of the YAML's own metadata.

    Raises:
        MissingDataError: data is missing; names every part that is.
        ValueError: whatever else the data function raises.
    """
    _import_requests()
    from lm_eval.tasks import TaskManager

    with quiet():
        manager = TaskManager(include_defaults=False, include_path=str(folder), metadata=dict(metadata))
        return read_each(names, lambda name: manager.load([name])["tasks"][name])


@cache
def _import_requests() -> None:
    """Import lm-eval's requests without chardet.

    requests uses chardet if it is installed, and its tables take a second to load; charset_normalizer, which requests
    requires, does the same for nothing.
    """
    known = sys.modules.get("chardet")
    sys.modules["chardet"] = None  # type: ignore[assignment]  # Python's own word for "cannot be imported"
    try:
        import_module("requests")
    finally:
        del sys.modules["chardet"]
        if known is not None:
            sys.modules["chardet"] = known


def scorer_of(scored: Mapping[str, tuple["Task", dict]]) -> Callable[[str, str], Mapping[str, float]]:
    """The `TaskSet.scorer` for sample id -> the task of lm-eval, whose `process_results` scores, and the document."""
    return lambda sample_id, answer: scored[sample_id][0].process_results(scored[sample_id][1], [answer])


@contextmanager
def quiet() -> Iterator[None]:
    """Hide what lm-eval says while it loads: advice on metadata, which we pass, and progress of single tasks."""
    logger = logging.getLogger("lm_eval")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


@cache
def _configs() -> dict[str, dict[str, Any]]:
    """Name -> YAML of every task of ours, `include` resolved and functions left as names."""
    from lm_eval.tasks import TaskManager

    index = TaskManager(include_defaults=False, include_path=str(TASKS_FOLDER)).task_index
    return {name: entry.cfg for name, entry in index.items() if entry.cfg and "generation_kwargs" in entry.cfg}


def metadata_of(task_name: str) -> dict[str, Any] | None:
    """The `metadata` of one of our tasks' YAMLs, such as `kvbench_longbench_trec`; None for a task that is not ours."""
    config = _configs().get(task_name)
    return dict(config["metadata"]) if config else None
