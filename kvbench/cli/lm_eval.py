"""`python -m kvbench lm_eval ...`: lm-eval's own command line, with kvbench among its models.

lm-eval 0.4.13 reads no entry points: its models are a table in its package, and whatever registered itself when it was
imported before the command line ran. This imports kvbench's model and then runs that command line, nothing else.

Differs: `--model` is kvbench where none is given; lm-eval's index of 14,000 YAMLs, which takes minutes, is replaced by
    the folders of the requested tasks, unless a name is a pattern; kvbench's own tasks (`kvbench_...`) are
    found without `--include_path`.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kvbench.errors import CommandLine

PACKAGES = ("kvbench", "kernels", "methods")


def main(arguments: Sequence[str]) -> int:
    """Run lm-eval's command line, which leaves with another code than 0 itself after an error of usage."""
    import lm_eval.__main__
    import lm_eval.models  # lm-eval reads the table of its own models only where no other one is registered

    import kvbench.lm  # noqa: F401  (registers the model)
    from kvbench.tasks.harness.find import missing_package

    arguments = with_defaults(arguments)
    names = task_names(arguments)
    if names and _flags(arguments).model == "kvbench":
        check_whole_texts(names, arguments)
    # lm-eval's command line takes no words: it reads sys.argv, and inserts `run` there. Its documented functions,
    # `simple_evaluate` and `evaluate`, parse no flags and write neither results and samples nor the table.
    before = sys.argv
    sys.argv = ["lm_eval", *arguments]
    try:
        with _small_index(names), _bytes_in_tables():
            lm_eval.__main__.cli_evaluate()
    except ImportError as error:
        if error.name is not None and error.name.partition(".")[0] in PACKAGES:
            raise  # a fault of kvbench
        raise missing_package(f"a task of {', '.join(names) or 'these'}", error) from error
    finally:
        sys.argv = before
    return 0


def _flags(arguments: Sequence[str]) -> argparse.Namespace:
    """The flags of lm-eval's that matter here; None where one is not given."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("-t", "--tasks", nargs="+", action="extend", default=[])
    for names in (("-M", "--model"), ("-C", "--config"), ("--include_path",), ("--model_args",), ("--device",)):
        parser.add_argument(*names)
    return parser.parse_known_args(list(arguments))[0]


def check_whole_texts(names: Sequence[str], arguments: Sequence[str]) -> None:
    """Refuse tasks that score the likelihood of whole texts where the method has nothing to compress in them.

    kvbench's model would refuse them too, but perhaps only after an hour of other tasks.
    """
    from kvbench.tasks.harness.find import leaves_of, manager_of
    from kvbench.tasks.lmeval import TASKS_FOLDER

    flags = _flags(arguments)
    folders = [flags.include_path] if flags.include_path else []
    index = manager_of(names, folders, extra=[TASKS_FOLDER]).task_index
    whole = [
        leaf
        for name in names
        for leaf in leaves_of(name, index)
        if leaf in index and (index[leaf].cfg or {}).get("output_type") == "loglikelihood_rolling"
    ]
    if not whole:
        return
    from kvbench.config.compose import compose
    from kvbench.config.files import FULL
    from kvbench.lm import check_rolling, full_names
    from kvbench.runs.parts import make_policy

    model_args = dict(word.split("=", 1) for word in (flags.model_args or "").split(",") if "=" in word)
    method = model_args.pop("method", FULL)
    words = [f"{key}={value}" for key, value in full_names(method, model_args).items() if key.startswith("method.")]
    prompt_tokens = model_args.get("rolling_prompt_tokens", "1")
    try:
        policy = make_policy(compose([f"method={method}", *words]).method)
        check_rolling(policy, 1 if prompt_tokens == "1" else 2)
    except ValueError as error:
        raise CommandLine(f"--tasks {whole[0]}: {error}", setting="--tasks") from error


def with_defaults(arguments: Sequence[str]) -> list[str]:
    """Add kvbench's model where tasks have none, with `--device auto` where no device is named.

    lm-eval's defaults are its model `hf` and the first GPU.
    """
    whole, flags = list(arguments), _flags(arguments)
    if flags.tasks and flags.model is None and flags.config is None:
        flags.model = "kvbench"
        whole += ["--model", flags.model]
    return whole + (["--device", "auto"] if flags.model == "kvbench" and flags.device is None else [])


def task_names(arguments: Sequence[str]) -> list[str]:
    """List the names after `--tasks` (`-t`); none when they are patterns or files, which need the whole index."""
    names = [name for word in _flags(arguments).tasks for name in word.split(",") if name]
    return [] if any(sign in name for name in names for sign in "*?[/") else names


@contextmanager
def _bytes_in_tables() -> Iterator[None]:
    """Let lm-eval's command line show what kvbench's model held below its table of scores."""
    import lm_eval.utils

    make_table = lm_eval.utils.make_table

    def with_bytes(results: dict, column: str = "results", *args: object, **named: object) -> str:
        table = make_table(results, column, *args, **named)
        entry = (results.get("config") or {}).get("kvbench") or {"held": {}}
        if column != "results" or not entry["held"]:
            return table
        rows = [
            f"|{task}|{held['prompts']}|{held['resident_bytes']:.0f}|{100 * held['resident_ratio']:.1f}|"
            for task, held in entry["held"].items()
        ]
        head = [f"|held by {entry['method']}|prompts|mean bytes|% of an FP16 full cache|", "|---|--:|--:|--:|"]
        return "\n".join([table, *head, *rows, ""])

    lm_eval.utils.make_table = with_bytes
    try:
        yield
    finally:
        lm_eval.utils.make_table = make_table


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
