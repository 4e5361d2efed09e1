"""Flags that show something show what Hydra's own command line shows."""

import os
import subprocess
import sys

import pytest
from places import ROOT

from kvbench.cli import showing
from kvbench.cli.main import main

COMPLETED = {"COMP_LINE": "kvbench meth", "COMP_POINT": "12"}  # what a shell says of the line


def by_hydra(*words):
    """The text that `hydra.main` prints, in a process of its own, under the names that kvbench has there."""
    command = [sys.executable, "-m", "kvbench.cli.hydra_main", *words]
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | COMPLETED
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.replace("hydra_main", "jobs")


@pytest.mark.parametrize(
    "words",
    [
        ["--cfg", "job", "method=kivi"],
        ["--cfg", "job", "-p", "method", "method=kivi"],
        ["--cfg", "job", "-p", "seed", "seed=3"],
        ["--cfg", "hydra"],
        ["--cfg", "hydra", "-p", "hydra.job"],
        ["--cfg", "all", "--resolve"],
        ["-sc", "query=bash"],
    ],
)
def test_what_is_shown_is_what_hydra_shows(words, capsys, monkeypatch):
    """The configuration, Hydra's own settings, both, or a part of them; and what the tab completes."""
    for name, value in COMPLETED.items():
        monkeypatch.setenv(name, value)
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert shown and shown == by_hydra(*words)


def test_the_tab_is_installed_for_the_program_alone(capsys, monkeypatch):
    """`python -m kvbench` is no program whose words a shell could complete."""
    monkeypatch.setattr(sys, "argv", ["/bin/python", "kvbench"])
    assert main(["-sc", "install=bash"]) == 2
    assert "kvbench -sc install=bash" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["/bin/kvbench"])
    for word in ("install=bash", "uninstall=bash"):
        assert main(["-sc", word]) == 0
    assert "hydra_bash_completion kvbench\n" in capsys.readouterr().out
    assert main(["-sc", "install=bash", "query=bash"]) == 2


def test_hydras_help_names_kvbench(capsys, tmp_path):
    """It is Hydra's, in a process of its own words: folders of the user's are searched there too."""
    assert main(["--hydra-help"]) == 0
    assert "--shell-completion" in (shown := capsys.readouterr().out) and "hydra_main" not in shown
    (tmp_path / "task").mkdir()
    assert main(["--config-dir", str(tmp_path), "--info", "searchpath", "seed=1"]) == 0
    shown = capsys.readouterr().out
    assert f"kvbench://{tmp_path}" in shown and f"kvbench://{ROOT / 'kvbench' / 'conf'}" in shown


def test_the_code_of_hydras_process_is_the_commands(monkeypatch):
    """A word that Hydra refuses ends it with another code than 0."""
    assert main(["--info", "nothing"]) != 0
    monkeypatch.setattr(showing.sys, "executable", "/bin/false")
    assert main(["--hydra-help"]) == 1


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--cfg", "jbo"], "--cfg=jbo"),
        (["--cfg", "job", "-p", "metod"], "--package=metod"),
        (["--cfg"], "--cfg needs a value"),
        (["--resolve", "seed=1"], "--resolve"),
        (["-r", "--cfg", "job"], "--cfg and --run"),
        (["-sc", "instal=bash"], "--shell-completion"),
        (["-sc", "query=bsh"], "query=bsh"),
    ],
)
def test_wrong_flags_are_named(words, named, capsys):
    """What a flag of Hydra's cannot be is an error of use."""
    assert main(words) == 2
    assert named in capsys.readouterr().err
