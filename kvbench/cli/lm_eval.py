"""`python -m kvbench lm_eval ...`: lm-eval's own command line, with kvbench among its models.

lm-eval 0.4.13 reads no entry points: its models are a table in its package, and whatever registered itself when it was
imported before the command line ran. This imports kvbench's model and then runs that command line, nothing else.

Differs: lm-eval's index of 14,000 YAMLs, which takes minutes, is replaced by the folders of the tasks that are asked
    for, unless a name is a pattern; kvbench's own tasks (`kvbench_...`) are found without `--include_path`.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


def main(arguments: Sequence[str]) -> int:
    """Run lm-eval's command line.

    Args:
        arguments: What would follow `lm_eval` in a shell.

    Returns:
        0; lm-eval itself leaves with another code after an error of usage.

    Raises:
        ValueError: A setting of kvbench's model or a name is wrong.
    """
    import lm_eval.__main__

    import kvbench.lm  # noqa: F401  (registers the model)

    before = sys.argv
    sys.argv = ["lm_eval", *with_device(arguments)]
    try:
        with _small_index(task_names(arguments)):
            lm_eval.__main__.cli_evaluate()
    finally:
        sys.argv = before
    return 0


def with_device(arguments: Sequence[str]) -> list[str]:
    """The arguments for kvbench's model with `--device auto` when they name none: lm-eval would take the first GPU."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("-M", "--model")
    parser.add_argument("--device")
    found = parser.parse_known_args(list(arguments))[0]
    extra = ["--device", "auto"] if found.model == "kvbench" and found.device is None else []
    return [*arguments, *extra]


def task_names(arguments: Sequence[str]) -> list[str]:
    """The names behind `--tasks` (`-t`); empty when they are patterns or files, which need the whole index."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("-t", "--tasks", nargs="+", action="extend", default=[])
    names = [name for word in parser.parse_known_args(list(arguments))[0].tasks for name in word.split(",") if name]
    return [] if any(sign in name for name in names for sign in "*?[/") else names


@contextmanager
def _small_index(names: Sequence[str]) -> Iterator[None]:
    """Let lm-eval's command line make task managers of the folders of these tasks alone."""
    import lm_eval.tasks
    from lm_eval.tasks import TaskManager as Whole

    from kvbench.tasks.harness.find import manager_of
    from kvbench.tasks.lmeval import TASKS_FOLDER

    class TaskManager(Whole):
        """lm-eval's manager over the folders that define the tasks."""

        def __init__(self, verbosity=None, include_path=None, include_defaults=True, metadata=None) -> None:  # noqa: ANN001
            if not include_defaults:
                super().__init__(include_path=include_path, include_defaults=False, metadata=metadata)
                return
            more = [include_path] if isinstance(include_path, str) else list(include_path or ())
            folders = manager_of(names, more, extra=[TASKS_FOLDER], kind=Whole).include_path
            super().__init__(include_path=folders, include_defaults=False, metadata=metadata)

    if names:
        lm_eval.tasks.TaskManager = TaskManager
    try:
        yield
    finally:
        lm_eval.tasks.TaskManager = Whole
