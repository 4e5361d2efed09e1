"""What is killed, or meets a disk that refuses, again and again ends with what one that was left alone leaves.

The default suite has a few kills and faults of a small sweep; KVBENCH_KILLS=1000 makes them many, of the same sweep.
`make test-killed` kills a larger sweep, KVBENCH_KILLS times, a hundred by default, and the
conversion of the embedded model.
"""

import hashlib
import json
import os
import random
import re
import shutil
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
from refusals import ERROR
from selection import FULL

from kvbench.cli.commands import compose_command
from kvbench.evidence import compare, pareto

NUM_KILLS = int(os.environ.get("KVBENCH_KILLS", "100" if FULL else "4"))
NUM_FAULTS = max(12, NUM_KILLS // 4) if FULL else 2  # a full disk and a short write
METHODS = ("full", "snapkv", "h2o", "kivi", "diffkv") if FULL else ("full", "snapkv")
ITEMS = 3 if FULL else 1
NUM_RECORDS = 2 * ITEMS * len(METHODS)
WORDS = f"-m method={','.join(METHODS)} model=random model.preset=tiny backend=torch batch_size=2 task.length=400"
WORDS += f" task.kinds=[kv,recall] task.items={ITEMS} protocol.max_new_tokens=4"
KNOWN = {".lock", "config.yaml", "run.json", "samples.jsonl", "samples.dropped.jsonl", "result.png", "sweep.png"}
KNOWN |= {"multirun.yaml", "sweep.json", "sweep.log", "job.json"}
NEEDS_SHIM = pytest.mark.skipif(
    sys.platform != "linux" or not shutil.which("gcc"), reason="faults at system calls need Linux and gcc"
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, server):
    """An unbroken sweep: its folder, the calls below it that it made, and its seconds."""
    folder = tmp_path_factory.mktemp("sweep") / "whole"
    begin = time.monotonic()
    answer = sweep(server, folder)
    seconds = time.monotonic() - begin
    assert answer["ended"] == 0, answer["said"]
    assert num_records(folder) == NUM_RECORDS and not litter(folder)
    return folder, answer["calls"], seconds


def sweep(server, folder, **when):
    """The sweep of these tests in a process of its own; see killed_sweep.py."""
    return server("sweep", folder, words=WORDS.split(), **when)


def num_records(results_dir):
    """Finished samples in all journals."""
    return sum(path.read_bytes().count(b"\n") for path in results_dir.rglob("samples.jsonl"))


def litter(results_dir):
    """Files that no run is known to leave."""
    return [path.name for path in results_dir.rglob("*") if path.is_file() and path.name not in KNOWN]


def content(results_dir):
    """All that two sweeps must have in common, file by file: records without times, and pictures."""
    found = {}
    for path in sorted(results_dir.rglob("*")):
        name = path.relative_to(results_dir).as_posix()
        if path.name == "samples.jsonl":
            rows = [json.loads(line) for line in path.read_text().splitlines()]
            found[name] = [{key: row[key] for key in row if key not in ("timing", "seal")} for row in rows]
        if path.name == "run.json":
            record = json.loads(path.read_text())
            kept = ("status", "message", "hash", "metrics", "fidelity", "ledger", "kept", "comparison")
            found[name] = {key: record[key] for key in (*kept, "task_aggregate")}
        if path.suffix == ".png":
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def tables(results_dir, out, metrics=("score", "nll", "kl")):
    """The final tables as CSV text, without the columns of time."""
    texts = []
    for metric in metrics:
        settings = [f"results_dir={results_dir}", f"metric={metric}", "resamples=200"]
        wide, narrow = out / metric, out / f"{metric}.csv"
        assert pareto.main(compose_command("pareto", [*settings, f"out={wide}", "kinds=[png]", "axes=resident"])) == 0
        assert compare.main(compose_command("compare", [*settings, f"out={narrow}"])) == 0
        table = pd.read_csv(wide / "pareto.csv", dtype=str)
        texts += [table.to_csv(index=False), narrow.read_text()]
    return texts


def moment(rng, calls, whole_s):
    """A random moment to kill at: a time, or a call, before it is done or in its middle."""
    if calls and rng.random() < 0.6:
        return {"at": rng.randint(1, calls), "kind": rng.choice(("kill", "torn"))}
    return {"seconds": rng.uniform(0, whole_s)}


@pytest.mark.long
@pytest.mark.timeout(36000 if FULL or NUM_KILLS > 100 else 600)
def test_killed_sweep_ends_with_the_same_tables(tmp_path, server, whole, capsys):
    """SIGKILL at random times and calls of a sweep, then one start to its end: samples, numbers and pictures are the
    unbroken sweep's, no finished sample is ever lost, and nothing else is left lying."""
    folder, calls, whole_s = whole
    cut = tmp_path / "cut"
    rng = random.Random(1)
    kills, seen, last, wholes = {"seconds": 0, "kill": 0, "torn": 0}, set(), 0, 0
    while sum(kills.values()) < NUM_KILLS:
        when = moment(rng, calls, whole_s)
        answer = sweep(server, cut, **when)
        assert answer["ended"] in ("killed", 0), answer["said"]
        count = num_records(cut)
        assert count >= last, "a finished sample was lost"
        seen.add(count)
        last = count
        if answer["ended"] == "killed":
            kills[when.get("kind", "seconds")] += 1
        else:  # done before it was killed: the next starts begin with nothing
            assert content(cut) == content(folder) and not litter(cut)
            shutil.rmtree(cut)
            last, wholes = 0, wholes + 1
    places = min(8, NUM_KILLS // 2, 1 + NUM_RECORDS // 2)
    assert len(seen) >= places, "the kills all hit the same moment, so this test shows nothing"
    answer = sweep(server, cut)
    assert answer["ended"] == 0, answer["said"]
    assert num_records(cut) == NUM_RECORDS
    assert content(cut) == content(folder)
    assert not litter(cut)
    metrics = ("score", "nll", "kl") if FULL else ("nll",)
    assert tables(cut, tmp_path / "a", metrics) == tables(folder, tmp_path / "b", metrics)
    if NUM_KILLS >= 100:
        with capsys.disabled():
            print(f"\n{kills} kills of {wholes + 1} sweeps; an unbroken one takes {whole_s:.1f} s and {calls} calls")


@pytest.mark.long
@NEEDS_SHIM
@pytest.mark.timeout(36000 if FULL else 600)
def test_refused_calls_end_with_one_message(tmp_path, server, whole):
    """A call that fails with EIO or ENOSPC ends a sweep with exit code 1 or 2 and one message; a write that does half
    of its work changes nothing; the next start ends with the unbroken sweep's samples, numbers and pictures."""
    folder, calls, _ = whole
    rng = random.Random(2)
    told = trial = 0
    while trial < NUM_FAULTS or told < -(-NUM_FAULTS // 3):  # a line of the log that cannot be written stops nothing
        trial += 1
        assert trial <= 5 * NUM_FAULTS, "hardly a fault was told"
        cut, kind = tmp_path / str(trial), ("eio", "enospc", "short")[trial % 3]
        at = rng.randint(1, calls)
        answer = sweep(server, cut, at=at, kind=kind)
        where = f"{kind} at call {at} of {calls}: {answer['said']}"
        errors = [line for line in answer["said"].splitlines() if re.match(ERROR, line)]
        assert "Traceback" not in answer["said"], where
        if answer["ended"] != 0:
            assert kind != "short" and answer["ended"] in (1, 2) and len(errors) == 1, where
            assert kind != "enospc" or "the disk is full; free some space, then give the same" in errors[0], where
            told += 1
            answer = sweep(server, cut)
            assert answer["ended"] == 0, f"after {where}: {answer['said']}"
        else:  # a folder that was there before was to be made
            assert not errors, where
        assert content(cut) == content(folder) and not litter(cut), where
        shutil.rmtree(cut)


@NEEDS_SHIM
def test_killed_build_is_built_again(tmp_path, server):
    """Killed at every call of a kernel's build, and while the compiler works, the next start builds and loads it."""
    answer = server("build", tmp_path / "whole")
    assert answer["ended"] == 0 and answer["calls"] >= 2, answer["said"]
    moments = [*({"at": at, "kind": "kill"} for at in range(1, answer["calls"] + 1)), {"seconds": 0.1}]
    cache = tmp_path / "cut"
    for when in moments:
        answer = server("build", cache, **when)
        assert answer["ended"] in ("killed", 0), answer["said"]
        if answer["ended"] == 0:  # it was in place before the kill
            shutil.rmtree(cache)
    answer = server("build", cache)
    assert answer["ended"] == 0, answer["said"]
    assert names(cache) == names(tmp_path / "whole")


def names(cache):
    """What lies in a cache, without locks and without scratch folders of a compiler, which may work on after a kill."""
    found = (path.relative_to(cache) for path in cache.rglob("*") if path.suffix != ".lock")
    return sorted(
        path.as_posix() for path in found if not any(part.startswith((".build-", "tmp")) for part in path.parts)
    )


@pytest.mark.timeout(3600)
@pytest.mark.exhaustive
def test_killed_conversion_is_done_again(tmp_path, server):
    """Killed at calls and times of the embedded model's conversion, the next start has the files of an unbroken one."""
    from kvbench.models import embedded

    gguf = embedded._obtain_gguf(tmp_path)
    answer = server("convert", tmp_path / "whole", gguf=str(gguf))
    assert answer["ended"] == 0, answer["said"]
    rng = random.Random(3)
    cut = tmp_path / "cut"
    for trial in range(6):
        when = {"at": rng.randint(1, answer["calls"]), "kind": "torn"} if trial % 2 else {"seconds": rng.uniform(0, 30)}
        server("convert", cut, gguf=str(gguf), **when)
    assert server("convert", cut, gguf=str(gguf))["ended"] == 0
    assert names(cut) == names(tmp_path / "whole")
    for path in Path(cut).rglob("*"):
        if path.is_file() and path.suffix != ".lock":
            other = tmp_path / "whole" / path.relative_to(cut)
            with open(path, "rb") as one, open(other, "rb") as two:
                assert hashlib.file_digest(one, "sha256").digest() == hashlib.file_digest(two, "sha256").digest(), path
