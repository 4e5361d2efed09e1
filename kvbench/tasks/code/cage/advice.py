"""What to do where no cage comes up: the advice that fits the cause."""

from collections.abc import Callable, Sequence
from pathlib import Path


def _setting(name: str) -> str | None:
    """A setting of the kernel (`sysctl`), as text; None where this kernel has none of that name."""
    try:
        return Path("/proc/sys", *name.split(".")).read_text().strip()
    except OSError:
        return None


def advice(missing: Sequence[str], setting: Callable[[str], str | None] = _setting) -> str:
    """Say what would bring up a cage here.

    Args:
        missing: For each mechanism that was tried, its name and what it lacks, as `check_isolation` gives them.
        setting: Name of a kernel setting -> its value, or None where there is no such setting.

    Returns:
        Sentences for the user.
    """
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
