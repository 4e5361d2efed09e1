"""The journeys of docs/run.md, each in an empty folder, as a reader types them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# In place of the embedded model and its questions, which take minutes.
SMALL = "model=random model.preset=tiny task.length=256 task.kinds=[kv] limit=1"
SHIM = f"""#!/bin/bash
case "$*" in
  *task=custom*) exec {sys.executable} -m kvbench "$@" model=random model.preset=tiny ;;
  method=*) exec {sys.executable} -m kvbench "$@" {SMALL} ;;
  *) exec {sys.executable} -m kvbench "$@" ;;
esac
"""
JOURNEYS = (ROOT / "docs" / "run.md").read_text().split("\n## Journeys\n")[1].split("\n## ")[0]
CHAPTERS = re.findall(r"### (.+?)\n(.*?)```(python)?\n(.*?)```", JOURNEYS, re.DOTALL)
# What is there behind a journey: files, and words of its output.
LEFT = {
    "Three methods on my own questions": (["results/custom/*/kivi/*/run.json"], ["snapkv", "h2o", "kivi"]),
    "What my engine's flags save and cost": ([], ["method=engine_format", "Bytes"]),
    "A method of my own, next to SnapKV and random": (["results/longctx/*/toy/*/run.json"], ["passed", "toy"]),
    "A table in LaTeX and a figure in PDF": (["table.tex", "figures/*.pdf"], []),
    "The same from Python": (["results/longctx/*/h2o/*/run.json"], ["method.budget"]),
    "After Ctrl-C": (["results/longctx/*/snapkv/*/run.json"], ["already there"]),
    "List, name and remove results": ([], ["snapkv", "first"]),
}


def toy():
    """The first method of docs/extend.md, in one file."""
    found = re.search(r"```python\n(.*?class Toy.*?)```", (ROOT / "docs" / "extend.md").read_text(), re.DOTALL)
    return f"# lossless: share=1.0\n{found[1]}"


@pytest.mark.exhaustive
@pytest.mark.parametrize(("title", "code", "kind"), [(title, code, kind) for title, _, kind, code in CHAPTERS])
def test_a_journey_ends_where_it_should(tmp_path, title, code, kind):
    """Every line ends well; its files are there, and its output has the words."""
    (tmp_path / "bin").mkdir()
    shim = tmp_path / "bin" / "kvbench"
    shim.write_text(SHIM)
    shim.chmod(0o755)
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "toy.py").write_text(toy())
    if "remove" in title:
        code = "kvbench method=snapkv\n" + code
    if kind:
        small = 'model="random", settings={"model.preset": "tiny", "task.length": 256, "task.kinds": ["kv"]}, limit=1)'
        code = code.replace("limit=8)", small)
    command = [sys.executable, "-c", code] if kind else ["bash", "-e", "-c", code]
    environment = {**os.environ, "PATH": f"{shim.parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    files, words = LEFT[title]
    assert all(list(folder.glob(pattern)) for pattern in files), said
    assert all(word in said for word in words), said


def test_journeys_are_short():
    """At most four lines each, and every one is tested."""
    assert [title for title, *_ in CHAPTERS] == list(LEFT)
    for title, _, kind, code in CHAPTERS:
        lines = [line for line in code.splitlines() if line and not line.startswith("import")]
        assert len(lines) <= 4, (title, kind)
