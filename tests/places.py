"""Where tests find things: the repository, the configuration, and real benchmark items outside of it."""

import os
from pathlib import Path

import pytest

from kvbench.config import extensions

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
CONF = ROOT / "conf"
# The extension that this copy of the repository lacks: tests/config/test_extensions.py proves that the core's tests
# pass without it. In the repository itself there is none, and no test is skipped for one.
WITHOUT, *GONE = os.environ.get("KVBENCH_WITHOUT", "").split() or [""]  # and the commands that went with it
# Real benchmark items are never committed; KVBENCH_TEST_DATA names the folder that holds one subfolder per task.
DATA = Path(os.environ.get("KVBENCH_TEST_DATA", ROOT.parent / "shared" / "data"))


def need_extension(name: str) -> pytest.MarkDecorator:
    """A mark that skips a test of the core, which goes through an extension, in a copy without it."""
    return pytest.mark.skipif(bool(WITHOUT) and name not in extensions.enabled(), reason=f"without {WITHOUT}")


def need_data(*names: str) -> pytest.MarkDecorator:
    """A mark that skips a test where a file or folder of the benchmark data is missing, and says how to fetch it.

    Args:
        names: Paths below the folder of the data; the first part of each is the name of the task.
    """
    missing = [name for name in names if not (DATA / name).exists()]
    tasks = dict.fromkeys(name.split("/")[0] for name in missing)
    fetch = " and ".join(f"`python -m kvbench data task={task} to={DATA / task}`" for task in tasks)
    return pytest.mark.skipif(
        bool(missing),
        reason=f"{', '.join(missing)} not in {DATA}: {fetch} fetches it (KVBENCH_TEST_DATA names another folder)",
    )
