"""`kvbench submit`: a suite with an author's methods, and the folder that a board takes."""

import json
import shlex
import sys

import pytest
from test_own_folder import MODULE

from kvbench.cli.main import main
from kvbench.evidence import frontier_figure, submission

SUITE = """# One task, three methods.
every: model=random model.preset=tiny seed=3 reference=none fidelity.max_tokens=0
tasks:
  - task=longctx task.kinds=[kv] task.length=400 task.items=2
methods:
  - method=full
  - method=knorm,random,tova method.budget=0.5,0.25
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A folder with a method without a budget, one with, and a suite."""
    folder = tmp_path / "mine"
    for group in ("method", "suite"):
        (folder / group).mkdir(parents=True)
    (folder / "own_share.py").write_text(MODULE)
    (folder / "own_late.py").write_text(
        "from dataclasses import dataclass\nfrom kvbench.policy import Scored, Statistic\n\n\n"
        '@dataclass(frozen=True)\nclass Late(Statistic):\n    """The position of a token."""\n\n'
        "    def of_prompt(self, seen):\n        return seen.pos.float()\n\n\n"
        "@dataclass(kw_only=True)\nclass Newest(Scored):\n    def declare(self):\n"
        "        super().declare()\n        self.score_by(Late())\n"
    )
    (folder / "method" / "toy.yaml").write_text("# The first part of a prompt.\n_target_: own_share.Toy\n")
    (folder / "method" / "newest.yaml").write_text("# The newest.\n_target_: own_late.Newest\nbudget: 0.5\n")
    (folder / "suite" / "small.yaml").write_text(SUITE)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    return folder


@pytest.mark.long  # six runs of a small model, and a page
def test_a_folder_that_a_board_takes(mine, capsys, monkeypatch):
    """The method at the budgets of `random`, with full and random beside; records, hashes and code; and it fits."""
    monkeypatch.setattr("kvbench.show.figure.draw", lambda records, path: path)  # no picture is handed in
    monkeypatch.setattr(frontier_figure, "render", lambda *given: b"")
    words = ["submit", "mine", "suite=small", "beside=full", "methods=newest"]
    assert main(words) == 0
    out = mine.parent / "submissions" / "mine"
    found = submission.check(out)
    assert not found.faults and found.digest in capsys.readouterr().err
    runs = [json.loads(path.read_text()) for path in out.glob("longctx/*/*/*/run.json")]
    budgets = sorted((run["method"], run["identity"]["method"].get("budget")) for run in runs)
    assert budgets == [("full", None), ("newest", 0.25), ("newest", 0.5), ("random", 0.25), ("random", 0.5)]
    names = {path.name for path in out.rglob("*") if path.is_file()}
    assert names == {"run.json", "config.yaml", "samples.jsonl", "submission.json", "own_late.py", "newest.yaml"}
    commands = [word for run in runs for session in run["sessions"] for word in session["command"]]
    assert "code" in commands and not any(str(mine.parent) in word for word in commands)
    assert main(words) == 2 and "is there and not empty" in capsys.readouterr().err
    assert main(["board", "submissions", "out=board.html", "resamples=200"]) == 0
    assert "mine: fits, 5 runs" in capsys.readouterr().out
    # Its code is where a run is made again.
    run = next(out.glob("longctx/*/newest/*"))
    assert main(["rerun", str(run), "--config-dir", str(out / "code"), "results_dir=again", "trust=true"]) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "submit needs the folder of your methods"),
        ("mien", "submit mien: this is no folder; make one, with your method"),
        ("mine methods=tyo suite=small", "methods=tyo does not exist. Did you mean toy?"),
        ("mine beside=knrm suite=small", "beside=knrm does not exist. Did you mean knorm?"),
        ("mine 'methods=[\"method=knorm method.budget=0.5\"]' suite=small", "methods=knorm does not exist"),
        ("mine/suite", "mine/suite/method has no YAML"),
        ("mine suite=paper methods=toy tasks=longbench", "asks from files of a benchmark"),
    ],
)
def test_what_is_refused(mine, capsys, words, message):
    """One sentence, and nothing is begun."""
    assert main(["submit", *shlex.split(words)]) == 2
    assert message in capsys.readouterr().err
    assert not (mine.parent / "results").exists()
