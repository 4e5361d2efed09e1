"""A method is two files: those of docs/extend.md are listed, run and ranked by; in a copy of the repository, with
nothing else changed, the conformance tests find them."""

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT
from store_helpers import filled, held_positions, random_layer, step_at

import kvbench.methods
from kvbench.cli.main import main
from kvbench.methods.lagkv import LagKV

NAMES = ("toy", "mylag")


def write_files(methods: Path, conf: Path) -> None:
    """Puts the page's two files for each of two methods where methods and their settings lie."""
    section = (ROOT / "docs" / "extend.md").read_text()
    for folder, kind, end in ((methods, "python", "py"), (conf, "yaml", "yaml")):
        for name, text in zip(NAMES, re.findall(rf"```{kind}\n(.*?)```", section, re.DOTALL), strict=True):
            assert not (folder / f"{name}.{end}").exists()
            (folder / f"{name}.{end}").write_text(text)


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A folder with the files, in which the package of methods looks too."""
    for folder in ("methods", "method"):
        (tmp_path / folder).mkdir()
    write_files(tmp_path / "methods", tmp_path / "method")
    monkeypatch.setattr(kvbench.methods, "__path__", [*kvbench.methods.__path__, str(tmp_path / "methods")])
    importlib.invalidate_caches()
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in NAMES:
        sys.modules.pop(f"kvbench.methods.{name}", None)


def test_a_new_method_is_listed_and_runs(mine, capsys):
    """With the first sentence of its file; a run on a small random model ends complete, and keeps what the setting on
    the command line says."""
    assert main(["--config-dir", str(mine), "list", "method"]) == 0
    assert re.search(r"^  toy +The first part of every prompt\.$", capsys.readouterr().out, re.MULTILINE)
    model = ["model=random", "model.preset=tiny", "task=longctx", "task.kinds=[passkey]", "task.items=1"]
    small = ["task.length=256", "protocol.max_new_tokens=3", "results_dir=out"]
    assert main(["--config-dir", str(mine), "method=toy", "method.share=0.25", *model, *small]) == 0
    (found,) = (mine / "out").glob("*/*/toy/*/run.json")
    record = json.loads(found.read_text())
    assert (record["status"], record["method"]) == ("complete", "toy")
    (sample,) = map(json.loads, (found.parent / "samples.jsonl").read_text().splitlines())
    kept = sample["kept"]
    assert kept["prompt_slots"] == int(0.25 * kept["prompt_tokens"]) * kept["lists"] > 0


def test_the_page_s_lagkv_is_lagkv(mine):
    """The statistic of the page's own file keeps the very tokens that `lagkv` keeps, in the prompt and behind it."""
    own = importlib.import_module("kvbench.methods.mylag")
    assert Path(own.__file__).parent == mine / "methods"
    layer, held = random_layer(0, 2, 1, 109, 16), []
    for policy in (own.MyLag, LagKV):
        store, row = filled(policy(budget=40, lag=8, decode_every=4), [layer], 100, 0.25)
        held.append(held_positions(store, row))
        for at in range(100, 109):
            step_at(store, row, [layer], at, 0.25)
        held.append(held_positions(store, row))
    assert held[:2] == held[2:] and held[0] != held[1]
    assert [len(positions) for positions in held[0] + held[1]] == [40, 40, 41, 41]


@pytest.mark.exhaustive
@pytest.mark.timeout(240)
def test_a_new_method_is_held_to_the_conformance_tests(tmp_path):
    """In a copy of the repository the command line lists them, and the conformance tests find them by their YAML; they
    pass those that ask most of two files."""
    copy, skipped = tmp_path / "repository", shutil.ignore_patterns("__pycache__", ".pytest_cache", "*.egg-info")
    for folder in ("kvbench", "kernels", "methods", "conf", "tests"):
        shutil.copytree(ROOT / folder, copy / folder, symlinks=True, ignore=skipped)
    shutil.copy(ROOT / "pyproject.toml", copy)
    write_files(copy / "methods", copy / "conf" / "method")

    def run(*arguments: str) -> str:
        environment = os.environ | {"PYTHONPATH": str(copy), "PYTHONSAFEPATH": "1"}
        command = [sys.executable, "-m", *arguments]
        done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    assert re.search(r"^  toy +The first part of every prompt\.$", run("kvbench", "list", "method"), re.MULTILINE)
    wanted = ["test_settings_file_is_complete", "test_lossless_settings_equal_full", "test_runs_repeat_themselves"]
    choose = ["-k", f"(toy or mylag) and ({' or '.join(wanted)})", "-p", "no:cacheprovider", "-q", "-rA"]
    report = run("pytest", "tests/methods/test_conformance.py", *choose)
    for name in NAMES:
        assert set(re.findall(rf"^PASSED \S+::(\w+)\[{name}\b", report, re.MULTILINE)) == set(wanted)
