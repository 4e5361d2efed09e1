"""One GPU for each worker on a machine."""

import json
import os
import subprocess
import sys

from places import ROOT

CHILD = """
import json, sys
from pathlib import Path
from kvbench.cli import gpus
print(json.dumps([gpus.claim(Path(sys.argv[1])), gpus.claim(Path(sys.argv[1]))]), flush=True)
sys.stdin.readline()
"""


def test_workers_share_out_the_gpus(tmp_path):
    """Each of three workers takes another GPU of three; a fourth and a fifth share; a GPU whose worker was killed is
    free again."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "0,GPU-ab/1, 7"}
    workers = []

    def start():
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        workers.append(subprocess.Popen([sys.executable, "-c", CHILD, tmp_path / "locks"], env=environment, **pipes))
        first, again = json.loads(workers[-1].stdout.readline())
        assert first == again
        return first

    try:
        assert [start() for _ in range(5)] == ["0", "GPU-ab/1", "7", "0", "GPU-ab/1"]
        workers[1].kill()
        workers[1].wait()
        assert start() == "GPU-ab/1"
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()


def test_nothing_to_choose(monkeypatch):
    """Without a choice nothing is locked, and the environment stays as it is."""
    from kvbench.cli import gpus

    for visible, taken in (("", None), ("-1", None), ("3", "3")):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert gpus.claim() == taken
        assert os.environ["CUDA_VISIBLE_DEVICES"] == visible
