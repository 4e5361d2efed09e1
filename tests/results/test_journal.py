"""The journal and the lock: nothing finished is lost, nothing is there twice, one process at a time."""

import errno
import math
import os
import subprocess
import sys
from contextlib import closing

import pytest
from fake_parts import record
from places import ROOT
from refusals import refused
from selection import few

from kvbench.results.journal import Journal, run_lock
from kvbench.results.sample import write_line
from kvbench.results.writing import plain, write_atomic

RUN = "5" * 64


@pytest.mark.parametrize("step", few([7, 1], 7))
def test_journal_cut_at_every_byte(tmp_path, monkeypatch, step):
    """Whatever byte a crash stops at, reading keeps every whole line, redoes the torn one, and ends with the same
    file."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # thousands of them, and no power is cut here
    records = [record(i) for i in range(3)]
    lines = [write_line(item, RUN) for item in records]
    whole, ends = b"".join(lines), [len(b"".join(lines[:i])) for i in range(4)]
    path = tmp_path / "samples.jsonl"
    for cut in sorted({*range(0, len(whole) + 1, step), *ends}):
        path.write_bytes(whole[:cut])
        journal = Journal(path, run=RUN)
        kept = max(i for i in range(4) if ends[i] <= cut)
        assert len(journal.records) == kept, cut
        assert journal.damaged == (cut not in ends), cut
        assert path.stat().st_size == ends[kept], cut
        added = [journal.append(item) for item in records]
        assert added == [False] * kept + [True] * (3 - kept)
        journal.close()
        assert path.read_bytes() == whole, cut


def test_dropped_lines_are_moved_and_never_erased(tmp_path):
    """Edited, foreign and unknown lines, a second answer to a sample, and a torn end, each byte for byte and in order;
    what is repaired again is added. The same line twice is none the less."""
    good = write_line(record(0), RUN)
    odd = [
        good.replace(b'"exact":1.0', b'"exact":0.0'),
        write_line(record(1), "6" * 64),
        b"\n",
        b"\xff" * 5000 + b"\n",
        write_line(record(9), RUN),
        write_line(record(0, scores={"exact": 0.0}), RUN),
        good[:40],
    ]
    path, told = tmp_path / "samples.jsonl", []
    path.write_bytes(good + good + b"".join(odd))
    with closing(Journal(path, run=RUN, keys={("a/0", 0), ("a/1", 0)}, warn=told.append)) as journal:
        assert journal.damaged == len(odd) and list(journal.records) == [("a/0", 0)]
    assert path.read_bytes() == good and "samples.dropped.jsonl" in told[0]
    assert journal.dropped.read_bytes() == b"".join(odd) + b"\n"
    path.write_bytes(good + odd[1])
    Journal(path, run=RUN).close()
    assert journal.dropped.read_bytes() == b"".join(odd) + b"\n" + odd[1] and path.read_bytes() == good


@pytest.mark.parametrize("call", ["write", "fsync"])
def test_a_line_that_cannot_be_moved_stays(tmp_path, monkeypatch, call):
    """A full disk leaves the journal as it is, and nothing half moved: the next opening moves the line once."""
    path = tmp_path / "samples.jsonl"
    whole = write_line(record(0), RUN) + b"odd\n"
    path.write_bytes(whole)

    def full(*given):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch, refused("write-failed", None, "disk is full"):
        patch.setattr("kvbench.results.journal.copy_lines" if call == "write" else "os.fsync", full)
        Journal(path, run=RUN)
    assert path.read_bytes() == whole
    Journal(path, run=RUN).close()
    assert (tmp_path / "samples.dropped.jsonl").read_bytes() == b"odd\n"


def test_journal_finish_sorts_and_refuses_gaps(tmp_path):
    """A finished journal is in request order, stays open for appending, and a run with a gap is not called finished."""
    path = tmp_path / "samples.jsonl"
    journal = Journal(path, run=RUN)
    for number in (2, 0, 1):
        journal.append(record(number))
    with pytest.raises(ValueError, match="1 samples missing or unknown"):
        journal.finish([("a/0", 0), ("a/1", 0)])
    journal.finish([(f"a/{i}", 0) for i in range(3)])
    assert path.read_bytes() == b"".join(write_line(record(i), RUN) for i in range(3))
    journal.append(record(3))
    assert path.read_bytes().endswith(write_line(record(3), RUN))
    assert [item.name for item in tmp_path.iterdir()] == ["samples.jsonl"]


def test_journal_survives_a_full_disk(tmp_path, monkeypatch):
    """A disk that fills in the middle of a record leaves whole records only, says so, and can go on afterwards."""
    path = tmp_path / "samples.jsonl"
    journal = Journal(path, run=RUN)
    journal.append(record(0))
    real = os.write
    calls = []

    def full(descriptor, data):
        calls.append(len(data))
        if len(calls) == 1:
            return real(descriptor, data[:7])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with refused("write-failed", None, "disk is full"):
        journal.append(record(1))
    monkeypatch.setattr(os, "write", real)
    assert path.read_bytes() == write_line(record(0), RUN)
    assert journal.append(record(1))
    assert path.read_bytes() == write_line(record(0), RUN) + write_line(record(1), RUN)


def test_atomic_write_keeps_the_old_file(tmp_path, monkeypatch):
    """A write that fails half way leaves the old content and no litter."""
    path = tmp_path / "run.json"
    write_atomic(path, b"old")

    def fail(descriptor):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with refused("write-failed", None, "run.json: Input/output error"):
        write_atomic(path, b"new and longer")
    assert path.read_bytes() == b"old"
    assert [item.name for item in tmp_path.iterdir()] == ["run.json"]


def test_plain_is_strict():
    """NaN and infinity become null, numpy scalars become numbers, and an unknown type is refused."""
    np = pytest.importorskip("numpy")
    value = {"a": [float("nan"), -math.inf, 1.5], 3: (np.float32(0.5), np.int64(2), np.bool_(True))}
    assert plain(value) == {"a": [None, None, 1.5], "3": [0.5, 2, True]}
    with pytest.raises(TypeError, match="cannot write set to JSON"):
        plain({"a": {1}})


LOCKER = "import sys; from pathlib import Path; from kvbench.results.journal import run_lock\n"
LOCKER += "with run_lock(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"


def test_lock_between_processes(tmp_path):
    """A second process is refused by the holder's number, one that waits gets its turn, and a killed holder lets go."""
    command = [sys.executable, "-c", LOCKER, str(tmp_path / "run")]
    holder = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        with refused("run-locked", None, f"process {holder.pid}"), run_lock(tmp_path / "run"):
            pass
        told = []

        def tell(text):
            told.append(text)
            holder.kill()

        with run_lock(tmp_path / "run", wait=True, say=tell):
            assert told == [f"waiting for process {holder.pid}, which is computing {tmp_path / 'run'}"]
    finally:
        holder.kill()
        holder.communicate()
    with run_lock(tmp_path / "run"):
        pass
