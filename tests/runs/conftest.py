"""A process that has the libraries already, and does jobs in children that can be killed or disturbed."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import selection
from places import ROOT, TESTS


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """Gives a function that does a job in a process that can be killed; see killed_sweep.py."""
    folder = tmp_path_factory.mktemp("server")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, TESTS, TESTS / "runs"))),
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    environment.setdefault("KVBENCH_CACHE", os.path.expanduser("~/.cache/kvbench"))
    if shutil.which("gcc"):
        shim = folder / "faults.so"
        source = TESTS / "runs" / "faults.c"
        subprocess.run(["gcc", "-O1", "-shared", "-fPIC", "-o", shim, source, "-ldl"], check=True)
        environment["LD_PRELOAD"] = str(shim)
    with subprocess.Popen(
        [sys.executable, str(TESTS / "runs" / "killed_sweep.py"), *["once"] * (not selection.FULL)],
        env=environment,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as child:
        assert child.stdout.readline() == "ready\n"

        def ask(task):
            child.stdin.write(json.dumps(task) + "\n")
            child.stdin.flush()
            return json.loads(child.stdout.readline())

        def run(job, where, *, seconds=None, at=0 if "LD_PRELOAD" in environment else None, kind="", **more):
            return ask({"job": job, "folder": str(where), "seconds": seconds, "at": at, "kind": kind} | more)

        run.ask = ask
        yield run
        child.stdin.close()
