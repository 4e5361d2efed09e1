"""A method is two files: the example of the README, put into a copy of the repository, is listed, run and tested."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT

SKIPPED = shutil.ignore_patterns("__pycache__", ".pytest_cache", "*.egg-info")


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    """A copy of the repository with the README's two files added, and nothing else changed."""
    target = tmp_path_factory.mktemp("copy") / "repository"
    target.mkdir()
    for folder in ("kvbench", "kernels", "methods", "conf", "tests"):
        shutil.copytree(ROOT / folder, target / folder, ignore=SKIPPED)
    shutil.copy(ROOT / "pyproject.toml", target)
    section = (ROOT / "README.md").read_text().split("## Adding a method")[1].split("\n## ")[0]
    for name, kind in (("methods/toy.py", "python"), ("conf/method/toy.yaml", "yaml")):
        assert not (target / name).exists()
        (target / name).write_text(re.search(rf"```{kind}\n(.*?)```", section, re.DOTALL)[1])
    return target


def run(copy: Path, *arguments: str) -> str:
    """What a Python module of the copy prints."""
    environment = os.environ | {"PYTHONPATH": str(copy), "PYTHONSAFEPATH": "1"}
    done = subprocess.run(
        [sys.executable, "-m", *arguments], cwd=copy, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_a_new_method_is_listed(copy):
    """`list method` shows it with the first sentence of its file."""
    assert re.search(r"^  toy +The first part of every prompt\.$", run(copy, "kvbench", "list", "method"), re.MULTILINE)


@pytest.mark.timeout(240)
def test_a_new_method_runs(copy):
    """A run on a small random model ends complete, and keeps what the setting on the command line says."""
    model = ["model=random", "model.preset=tiny", "task=longctx", "task.kinds=[passkey]", "task.items=1"]
    run(copy, "kvbench", "method=toy", "method.share=0.25", *model, "protocol.max_new_tokens=3", "results_dir=out")
    (found,) = (copy / "out").glob("*/*/toy/*/run.json")
    record = json.loads(found.read_text())
    assert (record["status"], record["method"]) == ("complete", "toy")
    (sample,) = map(json.loads, (found.parent / "samples.jsonl").read_text().splitlines())
    kept = sample["kept"]
    assert kept["prompt_slots"] == int(0.25 * kept["prompt_tokens"]) * kept["lists"] > 0


@pytest.mark.timeout(240)
def test_a_new_method_is_held_to_the_conformance_tests(copy):
    """The conformance tests of the copy find it by its YAML, and it passes those that ask most of its two files."""
    wanted = ["test_settings_file_is_complete", "test_lossless_settings_equal_full", "test_runs_repeat_themselves"]
    choose = ["-k", f"toy and ({' or '.join(wanted)})", "-p", "no:cacheprovider", "-q", "-rA"]
    report = run(copy, "pytest", "tests/methods/test_conformance.py", *choose)
    assert set(re.findall(r"^PASSED \S+::(\w+)\[toy", report, re.MULTILINE)) == set(wanted)
