"""Where a result comes from: library versions, the state of the source tree, the machine, and a hash of the code that
made it."""

import ast
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import kvbench

SOURCE_SUFFIXES = {".py", ".yaml", ".cpp", ".c", ".h", ".cu", ".jinja", ".json", ".txt"}

# These files show results and cannot change one, so editing a table does not make every stored run stale.
PRESENTATION = {
    "__main__.py",
    "cli.py",
    "commands.py",
    "compose.py",
    "errors.py",
    "figure.py",
    "intervals.py",
    "labels.py",
    "listing.py",
    "method_table.py",
    "progress.py",
    "provenance.py",
    "summary.py",
    "table.py",
}


@dataclass(frozen=True, kw_only=True)
class Versions:
    """What was installed. A missing library is recorded as an empty string."""

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
    """Where the model ran, with the name of the accelerator or processor."""
    host: str
    """Operating system and architecture; never the host's name."""
    num_cpus: int
    """Processors this process may use."""
    num_threads: int | None
    """Threads of torch inside one operation; None when torch was not loaded."""
    omp_wait_policy: str
    """Value of OMP_WAIT_POLICY; empty when not set. ACTIVE threads that share cores make small operations many times
    slower."""


def package_folder() -> Path:
    """The folder of the `kvbench` package."""
    return Path(__file__).resolve().parent


def sibling_folder(name: str) -> Path:
    """The folder `conf`, `methods` or `kernels`: beside the package in a source tree, inside it when installed.

    Raises:
        ValueError: Neither exists, so the installation is broken.
    """
    package = package_folder()
    for folder in (package.parent / name, package / name):
        # In site-packages a neighbour called `kernels` belongs to somebody else.
        if folder.is_dir() and (folder.parent == package or (package.parent / "pyproject.toml").exists()):
            return folder
    raise ValueError(f"the folder {name}/ is missing beside or inside {package}; install kvbench again")


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def versions() -> Versions:
    """Read the installed versions without importing the libraries."""
    return Versions(
        python=platform.python_version(),
        kvbench=kvbench.__version__,
        torch=_version("torch"),
        transformers=_version("transformers"),
        lm_eval=_version("lm_eval"),
    )


def git_state() -> Git:
    """Ask git about the repository kvbench runs from; a missing git, a wheel or a foreign repository give an empty
    answer."""
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
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def machine(device: object) -> Machine:
    """Describe the machine.

    Args:
        device: The model's torch device, or its name.
    """
    torch = sys.modules.get("torch")
    kind = str(device)
    name = torch.cuda.get_device_name(device) if torch is not None and kind.startswith("cuda") else _processor()
    return Machine(
        device=f"{kind} ({name})",
        host=f"{platform.system()} {platform.machine()}",
        num_cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        num_threads=torch.get_num_threads() if torch is not None else None,
        omp_wait_policy=os.environ.get("OMP_WAIT_POLICY", ""),
    )


def _sources(folder: Path) -> list[Path]:
    return sorted(
        path for path in folder.rglob("*") if path.suffix in SOURCE_SUFFIXES and "__pycache__" not in path.parts
    )


def hash_files(files: dict[str, Path]) -> str:
    """Hash names and contents of files.

    Args:
        files: Name under which each file counts (so that the place of the installation does not matter), and its path.

    Returns:
        64 hexadecimal digits.
    """
    digest = hashlib.sha256()
    for name, path in sorted(files.items()):
        content = path.read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


@cache
def harness_hash() -> str:
    """Hash of every source file of `kvbench` and `kernels` that can change an answer, read once per process."""
    package, kernels = package_folder(), sibling_folder("kernels")
    # A task hashes its own code (TaskSet.fingerprint), a method's files are in `method_files`: a new one of either must
    # not make the stored runs of the others stale.
    # What reads stored results or measures speed changes no answer.
    apart = {package / name for name in ("conf", "methods", "kernels", "tasks", "evidence", "bench")}
    files = {
        f"kvbench/{path.relative_to(package)}": path
        for path in _sources(package)
        if not (path.parent == package and path.name in PRESENTATION) and not apart & set(path.parents)
    }
    inside = (path.relative_to(kernels) for path in _sources(kernels))
    files |= {f"kernels/{path}": kernels / path for path in inside if path.parts[0] != "bench"}
    return hash_files(files)


def method_files(policy_class: type) -> dict[str, Path]:
    """The source files a method consists of: its own, and every other file of `methods` that it imports or inherits
    from.

    A new method must not make the stored runs of all others stale, so the folder as a whole does not count.

    Args:
        policy_class: Class of the policy.

    Returns:
        Name and path of each file; empty for a class that was typed into an interpreter.
    """
    inherited = {cls.__module__ for cls in policy_class.__mro__}
    todo = {policy_class.__module__} | {module for module in inherited if module.startswith("kvbench.methods.")}
    files: dict[str, Path] = {}
    while todo:
        module = todo.pop()
        loaded = sys.modules.get(module)
        origin = getattr(loaded, "__file__", None)
        if origin is None and module.startswith("kvbench.methods."):
            try:
                spec = importlib.util.find_spec(module)
            except ModuleNotFoundError:  # a class imported from a method's module looks like a module of it
                spec = None
            origin = spec.origin if spec else None
        if origin is None or not origin.endswith(".py") or module in files:
            continue
        files[module] = Path(origin)
        for node in ast.walk(ast.parse(files[module].read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                base = f"kvbench.methods.{node.module}" if node.level else node.module
                names = [base, *(f"{base}.{alias.name}" for alias in node.names)]
            todo |= {name for name in names if name.startswith("kvbench.methods.")}
    return files
