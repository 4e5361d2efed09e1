"""Where the configuration files lie and what there is to choose from, found without importing anything heavy."""

from pathlib import Path

FULL = "full"  # conf/method/full.yaml: the one method the harness knows by name, the reference of every other
GROUPS = {
    "method": "how the cache is compressed",
    "task": "what the model is asked",
    "model": "which model",
    "protocol": "how it is asked",
    "backend": "which kernels",
    "experiment": "several settings at once",
}


def package_folder() -> Path:
    """The folder of the `kvbench` package."""
    return Path(__file__).resolve().parent.parent


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


def conf_folder() -> Path:
    """The folder with config.yaml and the groups."""
    return sibling_folder("conf")


def describe(path: Path) -> str:
    """The leading comment of a YAML file up to its first full stop, on one line."""
    words: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        text = line.strip()
        if not text.startswith("#"):
            if text and text != "---":
                break
            continue
        text = text.lstrip("#").strip()
        if text.startswith("@package") or (text.startswith("source:") and not words):
            continue
        if text.startswith("source:"):
            break
        words.append(text)
    sentence, stop, _ = " ".join(words).partition(". ")
    return sentence + ("." if stop else "")


def command_files() -> dict[str, str]:
    """The commands that have a file in conf/command/, and what each does."""
    return options("command")


def options(group: str, conf: Path | None = None) -> dict[str, str]:
    """Names of a group's configurations and what each is.

    Args:
        group: Folder under conf/, for example `method`.
        conf: The configuration folder; kvbench's own by default.
    """
    folder = (conf or conf_folder()) / group
    return {str(path.relative_to(folder).with_suffix("")): describe(path) for path in sorted(folder.rglob("*.yaml"))}
