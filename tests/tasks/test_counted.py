"""What a task adds to a run's identity: the user's graders with all that they import, and Python where code is run."""

import os
import sys
from importlib.util import cache_from_source
from pathlib import Path

import pytest
import torch
from lmeval_demo import DATA, WRITE, lm_of, task_of, write_folder

import kvbench
from kvbench.config import code
from kvbench.rules.modes import ChangedMode
from kvbench.tasks import BENCHMARKS, check_task, lmeval, settings_class
from kvbench.tasks.counted import code_of, runs_code

GRADER = """import counted_helper
C = 0.0
def judge(r):
    return C
def score(doc, results):
    return {'acc': judge(results)}
"""
YAML = WRITE.replace("demo_write", "own").split("filter_list")[0] + (
    "process_results: !function own.score\nmetric_list:\n  - {metric: acc, aggregation: mean, higher_is_better: true}\n"
)


@pytest.fixture
def mine(tmp_path, monkeypatch) -> Path:
    """A folder with a task of the user's own, its grader, and a module that this imports."""
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "counted_helper", raising=False)
    monkeypatch.setattr(code, "_first_read", {})
    write_folder(tmp_path)
    (tmp_path / "own.yaml").write_text("include: base.yml\n" + YAML)
    (tmp_path / "base.yml").write_text(DATA.format(folder=tmp_path))
    (tmp_path / "all.yaml").write_text("group: all_own\ntask: [{group: inner_own, task: [own]}]\n")
    (tmp_path / "own.py").write_text(GRADER)
    (tmp_path / "counted_helper.py").write_text("VALUE = 0.0\n")
    return tmp_path


def entries(folder: Path, name: str = "own") -> dict[str, str]:
    """What a task of a folder adds."""
    group = {"harness": "lm_eval", "name": name, "include_path": str(folder)}
    return code_of(group, task_of(folder, lm_of(), name))


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("own.py", "return C", "return 1.0 - C"),  # a function that the named one calls
        ("own.py", "C = 0.0", "C = 1.0"),
        ("counted_helper.py", "0.0", "1.0"),
        ("base.yml", "train: ", "train:  "),  # of YAML every byte counts
        ("all.yaml", "inner_own", "other_own"),
    ],
)
def test_all_that_grades_counts(mine, monkeypatch, file, old, new):
    """A change of anything that the grader consists of is another run; of what is beside it, none."""
    name = "all_own" if file == "all.yaml" else "own"
    before = entries(mine, name)
    (mine / "pick.yaml").write_text("# beside it\n" + (mine / "pick.yaml").read_text())
    (mine / "own.py").write_text("# a comment\n" + (mine / "own.py").read_text())
    assert entries(mine, name) == before
    monkeypatch.setattr(code, "_first_read", {})  # a new process
    text = (mine / file).read_text()
    (mine / file).write_text(text.replace(old, new))
    after = entries(mine, name)
    assert text != (mine / file).read_text() and after.pop("task") != before.pop("task") and after == before


@pytest.mark.parametrize("name", ["own.py", "counted_helper.py", "own.yaml"])
def test_an_old_grader_is_not_stored_under_the_new_ones_name(mine, name):
    """In a notebook Python goes on with the modules that it imported, and kvbench with the task that it loaded."""
    entries(mine)
    text = (mine / name).read_text()
    (mine / name).write_text(text.replace("0.0", "1.0").replace("higher_is_better: true", "higher_is_better: false"))
    with pytest.raises(ValueError, match=rf"{name} was changed .* restart Python"):
        entries(mine)


def test_the_libraries_and_the_python_of_a_grader_count(mine, monkeypatch):
    """Versions of what it imports stand beside the hash of its files; a YAML without a grader needs neither."""
    (mine / "counted_helper.py").write_text("import math_verify\n")
    found = entries(mine)
    assert found["python"] == "{}.{}".format(*sys.version_info) and found["task:sympy"]  # required by math-verify
    assert not {"task:own", "task:counted_helper", "task:lm-eval"} & {*found}
    monkeypatch.setattr(sys, "version_info", (3, 99, 1, "final", 0))
    assert entries(mine)["python"] == "3.99"
    assert set(entries(mine, "demo_write")) == {"task"}


def test_lm_eval_itself_counts_where_it_is_a_checkout(mine, monkeypatch):
    """The version of an installed lm-eval says all; files of a checkout change under one version."""
    installed = code._is_installed
    before = entries(mine, "demo_write")
    monkeypatch.setattr(code, "_is_installed", lambda top: top != "lm_eval" and installed(top))
    counted = code.users_files(["lm_eval.api.task"], room="kvbench.tasks")
    assert {"lm_eval.api.metrics", "lm_eval.filters.extraction"} < {*counted}
    assert entries(mine, "demo_write")["task"] != before["task"]


def test_only_a_task_that_runs_code_counts_python():
    """HumanEval+ and MBPP+ run answers in the cage; no other benchmark does."""
    folders = {name: settings_class({"name": name}).folder() for name in BENCHMARKS}
    assert {name for name, folder in folders.items() if runs_code(folder)} == {"humaneval_plus", "mbpp_plus"}
    assert code_of({"name": "humaneval_plus"}, None) == code.interpreter() and code_of({"name": "gsm8k"}, None) == {}


def test_a_grader_changes_no_mode_of_torch(mine):
    """A module of a task's folder that does is refused with the mode, before and after a model is loaded."""
    (mine / "own.py").write_text("import torch\ntorch.set_default_dtype(torch.float64)\n" + GRADER)
    group = {"harness": "lm_eval", "name": "own", "include_path": str(mine)}
    for _ in range(2):
        with pytest.raises(ChangedMode, match=r"task.include_path=.* changed torch.get_default_dtype"):
            check_task(group, limit=None, seed=0)
    assert torch.get_default_dtype() == torch.float32
    with pytest.raises(ChangedMode, match=r"get_default_dtype"):
        task_of(mine, lm_of(), "own")


def test_names_do_not_depend_on_the_place(mine, tmp_path_factory, monkeypatch):
    """The same files elsewhere are the same code."""
    here = entries(mine, "demo_write")["task"]
    other = write_folder(tmp_path_factory.mktemp("other"))
    (other / "write.yaml").write_bytes((mine / "write.yaml").read_bytes())
    assert entries(other, "demo_write")["task"] == here and lmeval.TASKS_FOLDER.is_dir()


def test_a_grader_is_run_as_its_file_says(mine, monkeypatch):
    """Two writes within a second of one size: Python takes the bytecode of the first for that of the second."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    times = [1_600_000_000_200_000_000 + 200_000_000 * step for step in range(3)]
    grader = mine / "own.py"
    for value, written in (("0.0", times[0]), ("1.0", times[2])):
        grader.write_text(GRADER.replace("C = 0.0", f"C = {value}"))
        os.utime(grader, ns=(written, written))
        (doc,) = {id(each.task): each.task for each in task_of(mine, lm_of(), "own").docs.values()}.values()
        assert doc.process_results({}, ["x"]) == {"acc": float(value)}
        bytecode = Path(cache_from_source(str(grader)))
        os.utime(bytecode, ns=(times[1], times[1]))


def test_a_changed_grader_is_another_run(mine, tmp_path, monkeypatch):
    """The stored score of the old one was shown as `already there`, and a resumed run mixed both."""
    settings = {"task.name": "own", "task.include_path": str(mine), "model.preset": "tiny", "backend": "torch"}
    settings |= {"results_dir": str(tmp_path / "results"), "reference": "none", "fidelity.max_tokens": 0}
    runs = []
    for value in ("0.0", "1.0"):
        monkeypatch.setattr(code, "_first_read", {})  # a new process
        kvbench.release()
        (mine / "own.py").write_text(GRADER.replace("C = 0.0", f"C = {value}"))
        runs.append(kvbench.run("full", task="lm_eval", model="random", settings=settings))
    kvbench.release()
    first, second = (run.record for run in runs)
    assert first.hash != second.hash and [each.metrics["acc"].value for each in (first, second)] == [0.0, 1.0]
    for part in ("model", "task", "method", "generation", "store"):
        assert first.identity[part] == second.identity[part]
