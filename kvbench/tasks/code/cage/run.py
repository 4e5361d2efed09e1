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
from pathlib import Path
from typing import TypeVar

from kvbench.errors import KvbenchError
from kvbench.tasks.code.cage.mechanism import mechanisms, run_under
from kvbench.tasks.code.cage.probe import check_isolation
from kvbench.tasks.code.cage.process import CageReport, Limits, Output

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class CageRefused(KvbenchError, code="code-not-run"):
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
        limits: Limits of the program.
        on_output: See `process.run_process`.

    Raises:
        CageRefused: Not allowed, no isolation here, or the cage did not come up.
        ValueError: The program is too long.
    """
    require_consent(allow_code_execution)
    isolation = check_isolation()
    if isolation.mechanism is None:
        raise CageRefused(
            "Generated code is not run on this machine because it cannot be isolated: "
            f"{'; '.join(isolation.missing)}. {advice(isolation.missing)}"
        )
    limits = limits or Limits()
    seconds = [float(call_s)] * len(calls) if isinstance(call_s, int | float) else [float(value) for value in call_s]
    report = run_under(mechanisms()[isolation.mechanism], program, entry_point, calls, seconds, limits, on_output)
    if report.status == "jail":
        raise CageRefused(f"The cage did not come up: {report.message}. Try again with fewer programs at a time.")
    return report


def require_consent(allow_code_execution: bool) -> None:
    """Raises CageRefused unless the setting `task.allow_code_execution` is exactly true."""
    if allow_code_execution is not True:
        raise CageRefused(
            f"task.allow_code_execution={allow_code_execution}: this task runs code that the model wrote, in a cage,"
            " and only when you agree. Set task.allow_code_execution=true.",
            setting="task.allow_code_execution",
        )


def map_bounded(
    function: Callable[[_Item], _Result],
    items: Iterable[_Item],
    *,
    workers: int | None = None,
    after_each: Callable[[], None] = lambda: None,
) -> list[_Result]:
    """Grade many programs side by side, by default one per CPU core; `after_each` is called for each that is done."""
    results = []
    with ThreadPoolExecutor(workers or len(os.sched_getaffinity(0)), thread_name_prefix="cage") as pool:
        for result in pool.map(function, items):
            results.append(result)
            after_each()
    return results


def _setting(name: str) -> str | None:
    """A setting of the kernel (`sysctl`), as text; None where this kernel has none of that name."""
    try:
        return Path("/proc/sys", *name.split(".")).read_text().strip()
    except OSError:
        return None


def advice(missing: Sequence[str], setting: Callable[[str], str | None] = _setting) -> str:
    """Say what would bring up a cage here, by what each mechanism lacks and the kernel's settings."""
    said = " ".join(missing)
    if "no filter of system calls" in said:
        return "Run it on an x86-64 or 64-bit ARM machine, or with task.allow_code_execution=false."
    steps = []
    if setting("user.max_user_namespaces") == "0":
        steps.append(
            "The kernel allows no user namespaces, which bubblewrap needs as well: set them"
            " (`sysctl user.max_user_namespaces=16384`)"
        )
    elif "[Errno 28]" in said or "No space left on device" in said:
        steps.append(
            "As many user namespaces exist as the kernel allows: end other containers, or allow more"
            " (`sysctl user.max_user_namespaces`)"
        )
    elif setting("kernel.unprivileged_userns_clone") == "0":
        steps.append(
            "The kernel keeps user namespaces from ordinary users: permit them"
            " (`sysctl kernel.unprivileged_userns_clone=1`)"
        )
    elif setting("kernel.apparmor_restrict_unprivileged_userns") == "1":
        steps.append(
            "AppArmor keeps user namespaces from programs without a profile: install bubblewrap with its profile, or"
            " permit them (`sysctl kernel.apparmor_restrict_unprivileged_userns=0`)"
        )
    elif "Operation not permitted" in said:
        steps.append(
            "Something keeps namespaces from this process, as containers do: permit them there (Docker:"
            " `--security-opt seccomp=unconfined`, or `--cap-add SYS_ADMIN` for root)"
        )
    if "Permission denied: '" in said:
        steps.append(
            "The cage's user may not start this Python: install it where everybody may read it, or run as root in a"
            " container that may create namespaces (CAP_SYS_ADMIN)"
        )
    if not steps and not any(name.startswith("bubblewrap") for name in missing):
        steps.append("Install bubblewrap (for example `apt-get install bubblewrap`), a second way to build the cage")
    if not steps:
        steps.append("Run where user namespaces are permitted, or as root in a container that may create namespaces")
    return ". ".join(steps) + "."
