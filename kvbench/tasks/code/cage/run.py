"""The cage for generated code: the one door to run it.

A solution runs in a fresh interpreter without network, with nothing of the machine's file system but the standard
library, as a user that owns nothing, under limits on time, memory, threads, files and output. It can start no other
process, so that the limits of one are the limits of the cage, and it ends with kvbench, however that ends. It gets
inputs and gives outputs; what the outputs should be stays with the caller. Where a part of that cannot be had, `run`
refuses.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from kvbench.tasks.code.cage.advice import advice
from kvbench.tasks.code.cage.mechanism import Limits, mechanisms, run_under
from kvbench.tasks.code.cage.probe import Isolation, check_isolation
from kvbench.tasks.code.cage.process import CageReport, Output

__all__ = [
    "CageRefused",
    "CageReport",
    "Isolation",
    "Limits",
    "Output",
    "check_isolation",
    "map_bounded",
    "require_consent",
    "run",
]
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class CageRefused(ValueError):
    """Generated code was not run: not allowed, or not to be isolated on this machine; the message says what to do."""


def run(
    program: str,
    entry_point: str,
    calls: Sequence[Sequence[object]],
    *,
    allow_code_execution: bool,
    call_s: Sequence[float] | float = 1.0,
    limits: Limits | None = None,
    on_output: Callable[[Output], bool] | None = None,
) -> CageReport:
    """Load a program in a cage and call one of its functions.

    Args:
        program: Python source that nobody trusts, at most 1 MiB.
        entry_point: Name of the function.
        calls: Positional arguments of each call, of types that `wire.encode` can write.
        allow_code_execution: The user's consent; without it nothing runs.
        call_s: CPU time of each call, in seconds; one number holds for all.
        limits: What the program may use.
        on_output: Sees each output as it comes, the loading (index -1) included; a false answer ends the run.

    Returns:
        How it ended, with the outputs reported until then (unless `on_output` saw them).

    Raises:
        CageRefused: Not allowed, or no isolation here.
        ValueError: The program is too long.
    """
    require_consent(allow_code_execution)
    isolation = check_isolation()
    if isolation.mechanism is None:
        raise CageRefused(
            "Generated code is not run on this machine because it cannot be isolated: "
            + "; ".join(isolation.missing)
            + ". "
            + advice(isolation.missing)
        )
    limits = limits or Limits()
    seconds = [float(call_s)] * len(calls) if isinstance(call_s, int | float) else [float(value) for value in call_s]
    return run_under(mechanisms()[isolation.mechanism], program, entry_point, calls, seconds, limits, on_output)


def require_consent(allow_code_execution: bool) -> None:
    """Stop unless the user agreed to run generated code.

    Args:
        allow_code_execution: The setting `task.allow_code_execution`.

    Raises:
        CageRefused: It is not exactly true.
    """
    if allow_code_execution is not True:
        raise CageRefused(
            f"task.allow_code_execution={allow_code_execution}: this task runs code that the model wrote, in a cage,"
            " and only when you agree. Set task.allow_code_execution=true."
        )


def map_bounded(
    function: Callable[[_Item], _Result],
    items: Iterable[_Item],
    *,
    workers: int | None = None,
    after_each: Callable[[], None] = lambda: None,
) -> list[_Result]:
    """Grade many programs at a time, never more than the given number.

    Args:
        function: Runs one item; it spends its time waiting for its cage.
        items: The items.
        workers: At most this many at a time, at least 1; by default the CPU cores this process may use.
        after_each: Called in this thread for each item that is done, in their order.

    Returns:
        One result per item, in order.

    Raises:
        ValueError: workers below 1.
    """
    workers = len(os.sched_getaffinity(0)) if workers is None else workers
    if workers < 1:
        raise ValueError(f"workers={workers}: at least 1 program at a time. Leave it out for one per CPU core.")
    with ThreadPoolExecutor(workers, thread_name_prefix="cage") as pool:
        found = []
        for result in pool.map(function, items):
            found.append(result)
            after_each()
        return found
