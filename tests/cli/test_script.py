"""The `kvbench` script: it is declared, it is the same command, and Hydra's tab completion works with it."""

import os
import shutil
import subprocess
import sys
import tomllib

import pytest
from places import ROOT


@pytest.fixture
def script(tmp_path):
    """The script as an installer writes it from pyproject.toml, in a folder of its own; gives the environment."""
    target = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["kvbench"]
    module, _, function = target.partition(":")
    path = tmp_path / "bin" / "kvbench"
    path.parent.mkdir()
    path.write_text(f"#!{sys.executable}\nimport sys\nfrom {module} import {function}\nsys.exit({function}())\n")
    path.chmod(0o755)
    return os.environ | {"PATH": f"{path.parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}


def run(script, *words, **named):
    """What a command says."""
    return subprocess.run(words, env=script, capture_output=True, text=True, timeout=200, check=False, **named)


def test_script_is_the_command(script, tmp_path):
    """It answers like `python -m kvbench`, with its exit codes, from anywhere."""
    shown = run(script, "kvbench", cwd=tmp_path)
    assert shown.returncode == 0 and "kvbench help snapkv" in shown.stdout, shown.stderr
    assert run(script, "kvbench", "method=snapvk", cwd=tmp_path).returncode == 2


@pytest.mark.skipif(not shutil.which("bash"), reason="needs bash")
def test_tab_completes(script, tmp_path):
    """Hydra's completion script, taken into a shell as its help says, completes groups, choices and settings."""
    probe = """
eval "$(kvbench -sc install=bash)"
complete -p kvbench >&2
for line in "kvbench method=sna" "kvbench method=snapkv method.win" "kvbench hydra/launcher=ba"; do
    COMP_LINE="$line" COMP_POINT=${#line} COMP_WORDS=($line)
    COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
    hydra_bash_completion
    echo "${COMPREPLY[@]}"
done
"""
    done = run(script, "bash", "-c", probe, cwd=tmp_path)
    assert "hydra_bash_completion kvbench" in done.stderr, done.stderr
    assert done.stdout.split("\n")[:3] == ["method=snapkv", "method.window=", "hydra/launcher=basic"], done
    assert not list(tmp_path.glob("results"))
