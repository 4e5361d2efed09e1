"""`method=FILE.py`: a method that is one file, tried on a short prompt before anything else is run."""

import sys

import pytest
from refusals import refused

from kvbench.cli import words
from kvbench.cli.main import main
from kvbench.config import one_file
from kvbench.results.record import RunRecord

METHOD = '''"""A method of somebody's own."""

from dataclasses import dataclass

import torch

from kvbench.policy import EVICT, Policy, PrefillPlan


class Base(Policy):
    """What it derives from."""


@dataclass(kw_only=True)
class FirstPart(Base):
    """Keeps the first part of every prompt."""

    budget: float = 0.25
    fault: str = "none"

    def plan_prefill(self, view):
        tier_of = view.filled(0)
        factor = 1.5 if self.fault == "much" else 1.0
        tier_of[..., max(1, int(factor * self.budget * view.num_tokens)) :] = EVICT
        if self.fault == "shape":
            tier_of = tier_of[0, 0]
        if self.fault == "raise":
            raise KeyError("x")
        return PrefillPlan(tier_of=tier_of)
'''
RUN = ("model=random", "model.preset=tiny", "task=longctx", "task.length=512", "task.kinds=[kv]", "limit=1")


@pytest.fixture
def file(tmp_path, monkeypatch):
    """The file of a method, in the folder that commands run in."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    path = tmp_path / "mine" / "kept_first.py"
    path.write_text(METHOD)
    yield path
    sys.modules.pop("kept_first", None)


def test_a_file_is_a_method(file, capsys):
    """It has the name of the file, its class's settings, and the summary of its class; its command names the file."""
    assert main([f"method={file}", "budget=0.3", *RUN]) == 0, capsys.readouterr().err
    (path,) = file.parents[1].glob("results/*/*/kept_first/*/run.json")
    record = RunRecord.load(path.parent)
    assert record.identity["method"] == {"_target_": "kept_first.FirstPart", "budget": 0.3, "fault": "none"}
    assert record.sessions[-1].command[:2] == ["--config-dir", str(file)]
    assert "kept_first" in record.identity["code"]["method"] or record.identity["code"]["method"]
    capsys.readouterr()
    assert main(["list", "method", "--config-dir", str(file)]) == 0
    assert "Keeps the first part of every prompt." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("shape", "tier_of has the shape"),
        ("raise", "FirstPart.plan_prefill raised KeyError"),
        ("much", "the budget 0.25 ratio allows"),
    ],
)
def test_its_faults_show_before_the_full_cache_is_run(file, fault, said, capsys):
    """A wrong shape, an exception and a budget that is not kept end the command; no run lies there."""
    assert main([f"method={file}", f"fault={fault}", *RUN]) in (1, 2)
    assert said in capsys.readouterr().err
    assert not list(file.parents[1].glob("results/*/*/*/*"))


def test_names_stand_for_files():
    """In a sweep, too; a pattern is left alone."""
    assert words.take_config_dir(["method=a/toy.py,snapkv", "x=1"])[1] == ["method=toy,snapkv", "x=1"]
    assert words.take_config_dir(["-m", "method=glob(*)"]) == ([], ["-m", "method=glob(*)"])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = 1", ("file-content", "method", "NAME(Policy)")),
        (
            METHOD + METHOD.replace("FirstPart", "Second").replace("class Base", "class Other"),
            ("file-content", "method", "FirstPart"),
        ),
        ("def (", ("file-content", "method", "line 1")),
    ],
)
def test_a_file_without_one_method_is_refused(tmp_path, text, said):
    """It says what a file has to hold."""
    path = tmp_path / "odd_one.py"
    path.write_text(text)
    with refused(*said):
        one_file.target_of(path)


def test_a_file_with_the_name_of_a_module_is_refused(tmp_path):
    """Python would import its own `json`."""
    with refused("setting-value", "method", "json"):
        one_file.check_name(tmp_path / "json.py")
