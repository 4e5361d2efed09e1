"""The shards of a run: how they are named, what belongs to each, and that nothing of theirs is lost."""

import subprocess
import sys
import time
from contextlib import closing

import pytest
from fake_parts import record as sample
from refusals import refused

from kvbench.results import shards
from kvbench.results.identity import hash_identity
from kvbench.results.journal import Journal, is_held, run_lock
from kvbench.results.record import RunRecord, Session
from kvbench.results.shards import Shard

RUN = hash_identity({})


@pytest.mark.parametrize("value", ["0/4", "5/4", "2", "2/", "/4", "1/2/3", "-1/4", "1.0/2", 2, 0.5, True, ["1/2"], ""])
def test_a_wrong_shard_is_refused(value):
    """What is no part of a run names the value and shows how to write it."""
    with refused("setting-value", "shard", f"shard={value}", "i/n"):
        Shard.read(value)


@pytest.mark.parametrize(
    ("count", "size", "of"), [(10, 4, 1), (10, 4, 2), (11, 3, 4), (1, 4, 3), (16, 1, 5), (0, 2, 1)]
)
def test_shards_are_whole_batches(count, size, of):
    """Every batch of the whole run is in exactly one shard, as it is, and a shard's batches are batches again when they
    are cut one after the other."""
    items = list(range(count))
    batches = [items[start : start + size] for start in range(0, count, size)]
    found = []
    for number in range(1, of + 1):
        part = Shard.read(f"{number}/{of}").part(items, size)
        found += [part[start : start + size] for start in range(0, len(part), size)]
    assert sorted(found) == batches


def test_what_is_finished_is_taken_over_once(tmp_path):
    """A dead shard's samples and sessions go to the run, also when it is tried again after a kill in between; those of
    a shard at work stay where they are."""
    places = [Shard(2, number).folder(tmp_path) for number in (1, 2)]
    for place, name in zip(places, "xy", strict=True):
        place.mkdir(parents=True)
        journal = Journal(place / "samples.jsonl", run=RUN)
        journal.append(sample(0, sample_id=name))
        journal.close()
        RunRecord(sessions=[Session(started=name)], hash=RUN).save(place)
    before = (places[0] / "samples.jsonl").read_bytes()
    (places[0] / "samples.jsonl").write_bytes(before + before[:20])  # a kill in the middle of a line
    (tmp_path / ".shards" / "odd-of-name").mkdir()
    record, journal = RunRecord(), Journal(tmp_path / "samples.jsonl", run=RUN)
    with run_lock(places[1]):
        assert shards.at_work(tmp_path) == [Shard(2, 2)]
        shards.take_over(tmp_path, journal, record, print)
    assert list(journal.records) == [("x", 0)] and [item.started for item in record.sessions] == ["x"]
    assert record.counts.damaged == 1
    (places[0] / "samples.jsonl").write_bytes(before)  # as if the kill came before the shard's own was emptied
    shards.take_over(tmp_path, journal, record, print)
    assert list(journal.records) == [("x", 0), ("y", 0)] and [item.started for item in record.sessions] == ["x", "y"]
    assert (tmp_path / "samples.jsonl").read_bytes().count(b"\n") == 2
    assert [(place / "samples.jsonl").read_bytes() for place in places] == [b"", b""]
    assert shards.shards_in(tmp_path) == {Shard(2, 1): places[0], Shard(2, 2): places[1]}


def test_what_a_shard_was_not_asked_is_not_taken_over(tmp_path):
    """An answer that the run does not ask for stays out of its journal, and is counted."""
    place = Shard(2, 1).folder(tmp_path)
    place.mkdir(parents=True)
    with closing(Journal(place / "samples.jsonl", run=RUN)) as journal:
        for name in ("x", "forged"):
            journal.append(sample(0, sample_id=name))
    record, journal = RunRecord(), Journal(tmp_path / "samples.jsonl", run=RUN, keys={("x", 0)})
    shards.take_over(tmp_path, journal, record, print)
    assert list(journal.records) == [("x", 0)] and record.counts.damaged == 1


def test_a_whole_run_waits_for_its_shards(tmp_path):
    """The lock for the whole run is not to be had while a process works on a shard, which can have the run's lock
    meanwhile; it says once whom it waits for."""
    place = Shard(4, 3).folder(tmp_path)
    program = (
        "import sys, time; from pathlib import Path; from kvbench.results.journal import run_lock\n"
        f"with run_lock(Path({str(place)!r})):\n print('held', flush=True); sys.stdin.readline()\n"
        f" with run_lock(Path({str(tmp_path)!r}), wait=True): print('had both', flush=True)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdin=-1, stdout=-1, text=True) as child:
        assert child.stdout.readline() == "held\n"
        said = []

        def say(text):
            said.append(text)
            child.stdin.write("go on\n")
            child.stdin.flush()

        start = time.monotonic()
        with shards.whole_run_lock(tmp_path, say):
            assert child.stdout.readline() == "had both\n" and not is_held(place)
        assert time.monotonic() - start < 60
    assert said == [f"waiting for the shard 3/4 of {tmp_path}, which other processes are computing"]
