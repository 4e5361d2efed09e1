"""`method=FILE.py`: a method that is one file, tried on a short prompt before anything else is run."""

import sys
from dataclasses import dataclass

import pytest
from refusals import refused

from kvbench.cli import words
from kvbench.cli.main import main
from kvbench.config import one_file
from kvbench.policy import Budget, Extent, Policy
from kvbench.results.record import RunRecord
from kvbench.runs import tryout

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
        if self.fault == "memory":
            self.calls = getattr(self, "calls", 0) + 1
            tier_of[..., self.calls % 5] = EVICT
        if self.fault == "raise":
            raise KeyError("x")
        return PrefillPlan(tier_of=tier_of)
'''
RANKS = '''"""A method of somebody's own, with the statistic that it ranks by."""

from dataclasses import dataclass

from kvbench.policy import Scored, Statistic


@dataclass(frozen=True)
class Norm(Statistic):
    """The norm of a key."""

    def of_prompt(self, seen):
        return seen.k.float().norm(dim=-1).log() / (seen.pos > 2)


@dataclass(kw_only=True)
class Ranks(Scored):
    """Keeps tokens with large keys."""

    def declare(self):
        super().declare()
        self.score_by(Norm())
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
        ("much", "a head kept 189 of 504 prompt tokens"),
        ("memory", "asked again about the same"),
    ],
)
def test_its_faults_show_before_the_full_cache_is_run(file, fault, said, capsys):
    """A wrong shape, an exception, a memory and a budget that is not kept end the command; no run lies there."""
    assert main([f"method={file}", f"fault={fault}", *RUN]) in (1, 2)
    assert said in capsys.readouterr().err
    assert not list(file.parents[1].glob("results/*/*/*/*"))


def test_a_budget_is_held_to_a_whole_prompt(file, monkeypatch, capsys):
    """The whole shortest prompt decides where the truncated one breaks the rule."""
    monkeypatch.setattr(tryout, "MOST_TOKENS", 256)
    assert main([f"method={file}", "fault=much", *RUN]) == 2
    assert "a head kept 189 of 504 prompt tokens" in capsys.readouterr().err
    assert not list(file.parents[1].glob("results/*/*/*/*"))


def test_a_limit_is_a_budget_of_any_class():
    """It is declared under any name, by a class that derives from none of kvbench's with a budget."""

    @dataclass(kw_only=True)
    class Plain(Policy):
        """Declares what it keeps."""

        share: float = 0.25

        def declare(self):
            self.limit = Budget.parse(self.share)

    extent = Extent(prompt_tokens=1000, tokens_seen=1000, lists=2, prompt_slots=800, page_tokens=16)
    assert Plain().bounds(extent).prompt_mean == (0, 266)


def test_a_statistic_stands_in_the_file_of_its_method(file, capsys):
    """It is not taken for the method; one that is not finite is refused with the place."""
    path = file.with_name("ranks_by_norm.py")
    path.write_text(RANKS)
    assert main([f"method={path}", *RUN]) == 2
    assert "Norm.of_prompt (ranks_by_norm.py:12) gave" in capsys.readouterr().err


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
