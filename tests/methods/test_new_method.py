"""A method is two files: those of docs/extending.md, put into a copy of the repository, are listed, run and tested."""

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
    """A copy of the repository with the page's two files for each of two methods, and nothing else changed."""
    target = tmp_path_factory.mktemp("copy") / "repository"
    target.mkdir()
    for folder in ("kvbench", "kernels", "methods", "conf", "tests"):
        shutil.copytree(ROOT / folder, target / folder, symlinks=True, ignore=SKIPPED)
    shutil.copy(ROOT / "pyproject.toml", target)
    section = (ROOT / "docs" / "extending.md").read_text()
    for folder, kind, end in (("methods", "python", "py"), ("conf/method", "yaml", "yaml")):
        files = [target / folder / f"{name}.{end}" for name in ("toy", "mylag")]
        for file, text in zip(files, re.findall(rf"```{kind}\n(.*?)```", section, re.DOTALL), strict=True):
            assert not file.exists()
            file.write_text(text)
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


@pytest.mark.long
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
def test_the_readme_s_lagkv_is_lagkv(copy):
    """The statistic of the page's own file keeps the very tokens that `lagkv` keeps, in the prompt and behind it."""
    script = copy / "compare_lag.py"
    script.write_text(
        "import torch\n"
        "from store_helpers import held_positions, make_store\n"
        "from kvbench.methods.mylag import MyLag\n"
        "from kvbench.methods.lagkv import LagKV\n"
        "held = []\n"
        "for policy in (MyLag, LagKV):\n"
        "    torch.manual_seed(0)\n"
        "    store = make_store(policy(budget=40, lag=8, decode_every=4), num_q_heads=2, num_kv_heads=2, head_dim=16)\n"
        "    row = store.open_row()\n"
        "    store.prefill_layer(row, 0, *torch.randn(3, 2, 100, 16), 0.25)\n"
        "    held.append(held_positions(store, row))\n"
        "    for _ in range(9):\n"
        "        store.begin_step(torch.tensor([row]))\n"
        "        store.attend(0, *torch.randn(3, 1, 2, 16), 0.25)\n"
        "        store.end_step()\n"
        "    held.append(held_positions(store, row))\n"
        "assert held[:2] == held[2:] and held[0] != held[1]\n"
        "print([len(own) for own in held[0] + held[1]])\n"
    )
    environment = os.environ | {"PYTHONPATH": f"{copy}:{copy / 'tests'}", "PYTHONSAFEPATH": "1"}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == "[40, 40, 41, 41]\n", done.stderr[-3000:]


@pytest.mark.exhaustive
@pytest.mark.timeout(240)
def test_a_new_method_is_held_to_the_conformance_tests(copy):
    """The conformance tests of the copy find them by their YAML, and they pass those that ask most of two files."""
    wanted = ["test_settings_file_is_complete", "test_lossless_settings_equal_full", "test_runs_repeat_themselves"]
    choose = ["-k", f"(toy or mylag) and ({' or '.join(wanted)})", "-p", "no:cacheprovider", "-q", "-rA"]
    report = run(copy, "pytest", "tests/methods/test_conformance.py", *choose)
    for name in ("toy", "mylag"):
        assert set(re.findall(rf"^PASSED \S+::(\w+)\[{name}\b", report, re.MULTILINE)) == set(wanted)
