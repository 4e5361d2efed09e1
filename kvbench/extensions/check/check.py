"""The command `check`: the conformance tests of the repository on methods outside of it."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from omegaconf import DictConfig

from kvbench.config import files
from kvbench.errors import FileContent, PackageMissing, SettingMissing, unknown_name
from kvbench.show.progress import note

TESTS = "test_conformance*.py"
# Tests for files of the repository alone: the list of its methods, and the style of their files.
OF_THE_REPOSITORY = (
    *("test_methods_are_found", "test_settings_file_is_complete", "test_method_files_are_short"),
    *("test_the_list_of_eviction_methods_is_long", "test_the_list_is_long"),
)


def main(cfg: DictConfig) -> int:
    """Run the tests in a process of their own; returns 0 where all pass."""
    if cfg.place is None:
        raise SettingMissing(
            "give a folder with method/NAME.yaml, or a Python file with one method: kvbench check mine", setting="place"
        )
    path = Path(str(cfg.place)).expanduser()
    with files.with_config_dirs([path]):  # refuses what is neither
        names = sorted(files.options("method", Path(os.path.realpath(path))))
    if not names:
        raise FileContent(
            f"{path} has no method/NAME.yaml; `kvbench help methods` shows what kvbench has", setting="place"
        )
    folder = files.package_folder().parent / "tests" / "methods"
    paths = sorted(folder.glob(TESTS))
    if not paths or find_spec("pytest") is None:
        raise PackageMissing("check needs the tests of a clone of the repository, and pytest: pip install -e '.[test]'")
    if not isinstance(cfg.all_cases, bool):
        raise unknown_name("all_cases", cfg.all_cases, ("true", "false"))
    note(f"holding {', '.join(names)} to {len(paths)} files of conformance tests")
    chosen = " and not ".join(["", *OF_THE_REPOSITORY]).removeprefix(" and ")
    words = ["-k", f"({cfg.only}) and {chosen}" if cfg.only else chosen, *(["-m", ""] if cfg.all_cases else [])]
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *words, *map(str, paths)]
    environment = os.environ | {"KVBENCH_CHECKED": os.path.realpath(path)}
    return subprocess.run(command, cwd=folder.parents[1], env=environment, check=False).returncode
