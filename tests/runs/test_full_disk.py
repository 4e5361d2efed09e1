"""A disk that fills up during a sweep: a clear error, nothing lost, and the same tables after room was made."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from full_disk_sweep import READERS
from test_killed_sweep import tables

# A disk of one's own without being root: a mount inside a namespace, which ends with its process.
UNSHARE = ["unshare", "--user", "--map-root-user", "--mount"]
ERROR = (
    r"error: cannot write (\S+): the disk is full; free some space, then give the same command again: every finished"
)


def can_mount(folder: Path) -> bool:
    """True where an ordinary user may mount a disk for a process of their own."""
    if shutil.which("unshare") is None:
        return False
    trial = [*UNSHARE, "mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    return subprocess.run(trial, capture_output=True, check=False).returncode == 0


@pytest.mark.exhaustive
def test_full_disk_in_a_sweep(tmp_path, server):
    """Started with more and more room, a sweep names the file that did not fit every time and goes on from there; in
    the end its quality and byte columns are an unbroken sweep's, and readers leave their good files alone."""
    if not can_mount(tmp_path):
        pytest.skip("needs user namespaces that may mount a tmpfs (util-linux's unshare)")
    answer = server("disk", tmp_path)
    assert answer["ended"] == 0, answer["said"]
    first, *facts = map(json.loads, (tmp_path / "facts.jsonl").read_text().splitlines())
    assert first["code"] == 0, first["said"]
    starts, readers = ([fact for fact in facts if ("reader" in fact) is reads] for reads in (False, True))
    last = starts.pop()
    assert last["code"] == 0 and last["samples"] == 8 and "error" not in last["said"]
    for fact in facts:
        assert not fact["torn"] and not fact["left"] and fact["whole"] and "Traceback" not in fact["said"]
    refused = [path for fact in starts for path in re.findall(ERROR, fact["said"])]
    assert all(fact["code"] == 1 and re.search(ERROR, fact["said"]) for fact in starts)
    assert {"multirun.yaml", ".lock", "run.json", "samples.jsonl", "result.png"} <= {
        Path(path).name for path in refused
    }
    samples = [fact["samples"] for fact in [*starts, last]]
    assert samples == sorted(samples) and len(set(samples)) >= 3
    cut, whole = (tables(tmp_path / name, tmp_path / f"{name}-tables", ("score", "nll")) for name in ("cut", "whole"))
    assert cut == whole
    assert [fact["reader"] for fact in readers] == [*READERS, *READERS]
    assert all(fact["same"] for fact in readers)
    codes = {(fact["reader"], fact["free"] > 0): (fact["code"], re.findall(ERROR, fact["said"])) for fact in readers}
    assert codes.pop(("compare", True)) == (0, [])
    assert {code for code, _ in codes.values()} == {1} and all(len(names) == 1 for _, names in codes.values())
    assert codes["pareto", True][1][0].endswith(".png")


def test_full_terminal_redirection():
    """Output that goes to a full disk is an error that says so, not a traceback."""
    code = "from kvbench.cli.main import main; raise SystemExit(main(['list', 'method']))"
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-uc", code], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert done.stderr.startswith("error: cannot write a file or the output: the disk is full; free some space")
