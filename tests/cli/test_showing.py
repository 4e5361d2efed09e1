"""Flags that show something show what Hydra's own command line shows."""

import os
import subprocess
import sys

import pytest
from places import ROOT

from kvbench.cli import showing
from kvbench.cli.main import main


def hydra_itself(*words):
    """`hydra.main` with these words, in a process of its own."""
    command = [sys.executable, "-m", "kvbench.cli.hydra_main", *words]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def by_hydra(*words):
    """The text that `hydra.main` prints, under the names that kvbench has there."""
    done = hydra_itself(*words)
    assert done.returncode == 0, done.stderr
    return done.stdout.replace("hydra_main", "jobs")


@pytest.mark.parametrize(
    "words",
    [
        ["--cfg", "job", "method=kivi"],
        ["--cfg", "job", "-p", "method", "method=kivi"],
        ["--cfg", "job", "-p", "_global_"],
        ["--cfg", "job", "-p", "seed", "seed=3"],
        ["--cfg", "hydra"],
        ["--cfg", "hydra", "-p", "hydra.job"],
        ["--cfg", "all", "--resolve"],
    ],
)
def test_what_is_shown_is_what_hydra_shows(words, capsys):
    """The configuration, Hydra's own settings, both, or a part of them."""
    assert main(words) == 0
    assert capsys.readouterr().out == by_hydra(*words)


@pytest.mark.parametrize(("line", "offered"), [("kvbench meth", "method="), ("kvbench task=per", "task=perplexity")])
def test_the_tab_completes_what_hydra_completes(line, offered, capsys, monkeypatch):
    """Groups, and the choices of one."""
    monkeypatch.setenv("COMP_LINE", line)  # as a shell says it
    monkeypatch.setenv("COMP_POINT", str(len(line)))
    assert main(["-sc", "query=bash"]) == 0
    assert offered in (shown := capsys.readouterr().out) and shown == by_hydra("-sc", "query=bash")


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


def test_hydra_itself_runs_nothing():
    """It only shows."""
    done = hydra_itself("method=kivi")
    assert done.returncode == 1 and "kvbench runs experiments" in done.stderr


def test_the_code_of_hydras_process_is_the_commands(tmp_path, monkeypatch):
    """Whatever it is."""
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setattr(showing.sys, "executable", str(program))
    assert main(["--hydra-help"]) == 3


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
