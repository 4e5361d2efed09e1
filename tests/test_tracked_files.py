"""What is committed says nothing about the machine that it was written on."""

import json
import lzma
import re
import subprocess

import pytest
from places import ROOT

from kvbench.results.lines import PACKED

# An absolute path below a place that only one machine, or one person, has.
TOPS = ("tmp", "root", "home", "work", "Users")
MACHINE = re.compile(rf"(?<![\w./~}}\]-])/(?:{'|'.join(TOPS)})/[\w.<{{]")
# Programs that run in the cage know its own scratch folder and try to leave it.
CAGE = ("kvbench/tasks/code/cage/", "tests/tasks/code/")


def machine_paths(text):
    """The lines of a text that name a machine's path."""
    return [line.strip()[:120] for line in text.splitlines() if MACHINE.search(line)]


def tracked(*paths):
    """The files under git below some paths, or all."""
    listed = subprocess.run(["git", "ls-files", "-z", *paths], cwd=ROOT, capture_output=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listed.stdout.decode().split("\0") if name and not name.startswith(CAGE)]


def test_stored_runs_under_git_hold_no_benchmark():
    """Records hold right answers, ends of prompts and answers that repeat them; those of a benchmark are not ours to
    pass on, so its runs are packed without (results/example/benchmarks.py)."""
    kept = [path for path in tracked("results") if path.name.startswith("samples.jsonl")]
    assert kept
    for path in kept:
        if json.loads(path.with_name("run.json").read_text())["task"] == "longctx":  # generated
            continue
        assert path.suffix == PACKED, path
        for line in lzma.decompress(path.read_bytes()).splitlines():
            sample = json.loads(line)
            assert "gold" not in sample and sample["prompt"]["tail"] == sample["text"] == "" and not sample.get("turns")


def test_no_tracked_file_names_a_machine():
    """No file or link under git names a folder of somebody's machine; the cage's own programs apart."""
    files = [path for path in tracked() if path.is_file()]
    found = {path: machine_paths(path.read_text(encoding="utf-8", errors="ignore")) for path in files}
    assert len(found) > 300 and not {path: lines for path, lines in found.items() if lines}
    assert not [path for path in tracked() if path.is_symlink() and path.readlink().is_absolute()]


@pytest.mark.parametrize("top", TOPS)
def test_machine_paths_are_seen(top):
    """The pattern finds paths in settings, quotes and addresses of files, and leaves parts of other paths alone."""
    for text in (f"out=/{top}/x.yaml", f'"/{top}/a b"', f"(/{top}/x)", f"`/{top}/x`"):
        assert machine_paths(text) == [text]
    for text in (f"results/{top}/x", f"https://host/{top}/x", f"~/{top}/x", f"/{top}", f"{{folder}}/{top}/x"):
        assert not machine_paths(text)
