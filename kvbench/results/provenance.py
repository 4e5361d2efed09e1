"""Provenance of a result.

Library versions, the state of the source tree, the machine, and a hash of the code that made it.
"""

import importlib.metadata
import os
import platform
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from kvbench.config.code import hash_files, sources, users_files
from kvbench.config.files import package_folder
from kvbench.config.version import VERSION
from kvbench.rules import modes

# Code that an answer depends on, besides the task, the method and the active backend: these folders of kvbench/ ...
ANSWER_FOLDERS = ("policy", "cache", "engine", "models", "runs")
# ... and these parts of kernels/. The reference counts for every backend, which uses it for missing operations.
ANSWER_KERNELS = (
    *("codes.py", "format.py", "pool.py", "table.py", "memory.py", "backend.py", "operands.py"),
    "reference",
)
# Backend -> the folder of kernels/ with its code.
BACKEND_FOLDERS = {"torch": "reference", "cpu": "cpu", "triton": "gpu"}


@dataclass(frozen=True, kw_only=True)
class Versions:
    """The libraries that were installed. A missing library is recorded as an empty string."""

    python: str
    """Version of the interpreter."""
    kvbench: str
    """Version of this package."""
    torch: str
    """Version of torch, with its build tag (`+cpu`, `+cu130`)."""
    transformers: str
    """Version of transformers."""
    lm_eval: str
    """Version of lm-eval."""


@dataclass(frozen=True, kw_only=True)
class Git:
    """State of the source tree; both fields are empty when kvbench does not run from its own repository."""

    commit: str = ""
    """Full id of the commit that is checked out."""
    dirty: bool | None = None
    """True when a tracked file was changed or an unknown one was there; None when unknown."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The hardware and the settings that decide its speed."""

    device: str
    """The devices that the model ran on, with the name of the accelerator or processor."""
    host: str
    """Operating system and architecture; never the host's name."""
    num_cpus: int
    """Processors this process may use."""
    num_threads: int | None
    """Threads of torch inside one operation; None when torch was not loaded."""
    omp_wait_policy: str
    """Value of OMP_WAIT_POLICY, with GOMP_SPINCOUNT where that is set; empty when not set. ACTIVE threads that share
    cores make small operations many times slower."""
    torch_isa: str = ""
    """Instruction set that torch chose for its own operations on this CPU; empty when torch was not loaded."""
    modes: dict[str, str] | None = None
    """Those by which torch and its libraries compute otherwise than usually (`kvbench.rules.modes`); None = not
    recorded."""

    def differences(self, before: "Machine | None") -> list[str]:
        """Differences to an earlier machine that can change a number, with both values; empty where unknown."""
        facts = {"device": "device", "host": "system", "num_threads": "threads", "torch_isa": "torch's instructions"}
        facts["modes"] = "modes of libraries"
        pairs = [(text, getattr(before, name, None), getattr(self, name)) for name, text in facts.items()]
        known = [pair for pair in pairs if None not in pair and "" not in pair]
        return [f"{text} {_said(was)} then, {_said(now)} now" for text, was, now in known if was != now]


def _said(value: object) -> str:
    if not isinstance(value, dict):
        return str(value)
    return " ".join(f"{name}={text}" for name, text in value.items()) or "none"


def versions() -> Versions:
    """Read the installed versions without importing the libraries."""

    def version_of(distribution: str) -> str:
        with suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(distribution)
        return ""

    libraries = {name: version_of(name) for name in ("torch", "transformers", "lm_eval")}
    return Versions(python=platform.python_version(), kvbench=VERSION, **libraries)


def git_state() -> Git:
    """State of the repository that kvbench runs from; empty for a missing git, a wheel or a foreign repository."""
    root = package_folder().parent

    def ask(*arguments: str) -> str:
        return subprocess.run(
            ("git", *arguments), cwd=root, capture_output=True, text=True, timeout=20, check=True
        ).stdout.strip()

    try:
        if Path(ask("rev-parse", "--show-toplevel")).resolve() != root:
            return Git()
        return Git(commit=ask("rev-parse", "HEAD"), dirty=bool(ask("status", "--porcelain")))
    except (OSError, subprocess.SubprocessError):
        return Git()


def _processor() -> str:
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return platform.processor() or platform.machine()


def machine(device: object, *others: object, processes: int = 1) -> Machine:
    """Describe the machine by the model's torch device or its name, and by those of its other layers and processes."""
    torch = sys.modules.get("torch")

    def described(one: object) -> str:
        kind = str(one)
        name = torch.cuda.get_device_name(one) if torch is not None and kind.startswith("cuda") else _processor()
        return f"{kind} ({name})"

    devices = ", ".join(dict.fromkeys(described(one) for one in (device, *others)))
    return Machine(
        device=devices if processes == 1 else f"{processes} processes, the first on {devices}",
        host=f"{platform.system()} {platform.machine()}",
        num_cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        num_threads=torch.get_num_threads() if torch is not None else None,
        omp_wait_policy=wait_policy(),
        torch_isa=torch.backends.cpu.get_cpu_capability() if torch is not None else "",
        modes=modes.counted(),
    )


def wait_policy() -> str:
    """Wait policy of OpenMP threads: OMP_WAIT_POLICY, and GOMP_SPINCOUNT where that is set."""
    turns = os.environ.get("GOMP_SPINCOUNT")
    return " ".join(filter(None, [os.environ.get("OMP_WAIT_POLICY"), turns and f"GOMP_SPINCOUNT={turns}"]))


def code_files(*backends: str) -> dict[str, Path]:
    """List the source files that decide an answer, whatever the task and the method, by name.

    A task counts its own files (`TaskSet.fingerprint`) and a method its own (`method_files`): a new one of either must
    not make the stored runs of the others stale. Code that reads, shows or fetches changes no answer.

    Args:
        backends: Names of those whose kernels run, for the cache and for the model's own products.
    """
    package = package_folder()
    kernels = (package / "kernels").resolve()  # a link in a clone
    names = (*ANSWER_KERNELS, *(BACKEND_FOLDERS.get(backend, backend) for backend in backends))
    roots = {f"kvbench/{name}": package / name for name in ANSWER_FOLDERS}
    roots |= {f"kernels/{name}": kernels / name for name in names}
    return {
        (name if path == root else f"{name}/{path.relative_to(root)}"): path
        for name, root in roots.items()
        for path in ([root] if root.is_file() else sources(root))
    }


@cache
def harness_hash(*backends: str) -> str:
    """Hash of `code_files`, read once per process."""
    return hash_files(code_files(*backends))


def method_files(policy_class: type) -> dict[str, Path]:
    """Source files of a method by module; none for a class that was typed into an interpreter.

    Its file, and every other one that it imports or inherits from, at any remove, wherever it is (`users_files`).

    The rest of kvbench counts for every method.
    """
    module = policy_class.__module__
    return users_files({cls.__module__ for cls in policy_class.__mro__}, room="kvbench.methods", included=module)
