"""What is committed says nothing about the machine that it was written on."""

import json
import re
import subprocess

import pytest
from places import ROOT

# An absolute path below a place that only one machine, or one person, has.
TOPS = ("tmp", "root", "home", "work", "Users")
MACHINE = re.compile(rf"(?<![\w./~}}\]-])/(?:{'|'.join(TOPS)})/[\w.<{{]")
# Programs that run in the cage know its own scratch folder and try to leave it.
CAGE = ("kvbench/tasks/code/cage/", "tests/tasks/code/")


def machine_paths(text):
    """The lines of a text that name a machine's path."""
    return [line.strip()[:120] for line in text.splitlines() if MACHINE.search(line)]


def test_stored_runs_under_git_are_of_generated_tasks():
    """Records hold right answers and ends of prompts; those of a benchmark are not ours to pass on."""
    listed = subprocess.run(["git", "ls-files", "-z", "results"], cwd=ROOT, capture_output=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    kept = ("run.json", "samples.jsonl", "samples.jsonl.xz")
    names = [name for name in listed.stdout.decode().split("\0") if name.endswith(kept)]
    assert names
    for name in names:
        run = json.loads((ROOT / name).with_name("run.json").read_text())
        assert run["task"] == "longctx", f"{name} is a run of task={run['task']}, which is not generated"


def test_no_tracked_file_names_a_machine():
    """No file under git names a folder of somebody's machine; the cage's own programs apart."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    names = [name for name in listed.stdout.decode().split("\0") if name and not name.startswith(CAGE)]
    assert len(names) > 300
    found = {}
    for name in names:
        path = ROOT / name
        if path.is_file() and (lines := machine_paths(path.read_text(encoding="utf-8", errors="ignore"))):
            found[name] = lines
    assert not found


@pytest.mark.parametrize("top", TOPS)
def test_machine_paths_are_seen(top):
    """The pattern finds paths in settings, quotes and addresses of files, and leaves parts of other paths alone."""
    for text in (f"out=/{top}/x.yaml", f'"/{top}/a b"', f"(/{top}/x)", f"`/{top}/x`"):
        assert machine_paths(text) == [text]
    for text in (f"results/{top}/x", f"https://host/{top}/x", f"~/{top}/x", f"/{top}", f"{{folder}}/{top}/x"):
        assert not machine_paths(text)
