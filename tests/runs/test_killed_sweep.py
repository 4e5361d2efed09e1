"""A sweep that is killed again and again ends with the tables of a sweep that was left alone.

`make test-killed` (KVBENCH_FULL_TESTS=1) runs it: a hundred kills take minutes. The default suite kills single runs.
"""

import os
import random
import shutil
import subprocess
import sys
import time

import pandas as pd
import pytest
from killed_sweep import METHODS, NUM_SAMPLES
from places import ROOT, TESTS

from kvbench.cli.commands import compose_command
from kvbench.evidence import compare, pareto

NUM_KILLS = 100
TIMES = ["time", "time_low", "time_high", "time_standing"]


@pytest.fixture
def server():
    """Gives a function that runs a sweep into a folder, killed after some seconds."""
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{TESTS}", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, str(TESTS / "runs" / "killed_sweep.py")],
        env=environment,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as child:
        assert child.stdout.readline() == "ready\n"

        def run(folder, seconds):
            child.stdin.write(f"{folder} {seconds}\n")
            child.stdin.flush()
            return child.stdout.readline().strip()

        yield run
        child.stdin.close()


def num_records(results_dir):
    """Finished samples in all journals."""
    return sum(path.read_bytes().count(b"\n") for path in results_dir.rglob("samples.jsonl"))


def tables(results_dir, out, metrics=("score", "nll", "kl")):
    """The final tables as CSV text, without the columns of time."""
    texts = []
    for metric in metrics:
        settings = [f"results_dir={results_dir}", f"metric={metric}", "resamples=200"]
        wide, narrow = out / metric, out / f"{metric}.csv"
        assert pareto.main(compose_command("pareto", [*settings, f"out={wide}", "kinds=[png]", "axes=resident"])) == 0
        assert compare.main(compose_command("compare", [*settings, f"out={narrow}"])) == 0
        table = pd.read_csv(wide / "pareto.csv", dtype=str)
        texts += [table.drop(columns=TIMES).to_csv(index=False), narrow.read_text()]
    return texts


@pytest.mark.timeout(3600)
@pytest.mark.skipif(not os.environ.get("KVBENCH_FULL_TESTS"), reason="takes minutes: make test-killed")
def test_killed_sweep_ends_with_the_same_tables(tmp_path, server, capsys):
    """SIGKILL at random moments of a sweep, then one start to its end: quality and bytes are the same to the byte."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    begin = time.monotonic()
    assert server(whole, "inf") == "0"
    whole_s = time.monotonic() - begin
    rng = random.Random(1)
    kills, seen, last = 0, set(), 0
    while kills < NUM_KILLS:
        answer = server(cut, rng.uniform(0, 0.5 * whole_s))
        assert answer in ("killed", "0")
        kills += answer == "killed"
        count = num_records(cut)
        assert count >= last, "a finished sample was lost"
        seen.add(count)
        last = count
        if answer == "0" and kills < NUM_KILLS:  # done before it was killed: the next starts begin with nothing
            shutil.rmtree(cut)
            last = 0
    assert len(seen) >= 8, "the kills all hit the same moment, so this test shows nothing"
    assert server(cut, "inf") == "0"
    assert num_records(cut) == num_records(whole) == NUM_SAMPLES * (len(METHODS) + 1)
    assert tables(cut, tmp_path / "a") == tables(whole, tmp_path / "b")
    with capsys.disabled():
        print(f"\n{kills} kills; an unbroken sweep takes {whole_s:.1f} s; journals held {sorted(seen)} records")
