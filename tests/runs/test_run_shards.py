"""One run in several shards: the samples of the whole run, whoever is killed, in whatever order."""

import os
import signal
import time

import pytest
from fake_parts import make_cfg, make_parts, run_fake
from refusals import refused
from selection import few
from test_run_real import StopAfter, compose, samples

from kvbench.cli.endings import Stopped
from kvbench.cli.main import main
from kvbench.results.journal import run_lock
from kvbench.results.record import RunRecord
from kvbench.runs.parts import Loaders
from kvbench.runs.run import run_experiment

QUIET = {"say": lambda text: None}


def test_three_shards_are_the_whole_run(tmp_path):
    """The real engine in three shards, one of them stopped inside a batch and given again, leaves what one process
    leaves: hash, file but for timing, and numbers, also of the full cache that it is compared with. Where batches are
    no part of a run, the shards have another batch size."""
    changes = {"task.items": 3, "reference": "auto", "backend.name": "auto"}
    parts = Loaders()

    def settings(name, **more):
        cfg = compose("kivi", tmp_path / name)
        for key, value in (changes | more).items():
            node, _, last = key.rpartition(".")
            (cfg[node] if node else cfg)[last] = value
        return cfg

    whole = run_experiment(settings("whole"), method="kivi", parts=parts, **QUIET)
    assert whole.record.counts.total == 9, "the last batch is not full"
    size = 2 if "batch_size" in whole.record.identity else 3
    with pytest.raises(KeyboardInterrupt):
        cfg = settings("split", shard="2/3", batch_size=size)
        run_experiment(cfg, method="kivi", parts=StopAfter(4, parts).parts, **QUIET)
    for number in (3, 1):
        cfg = settings("split", shard=f"{number}/3", batch_size=size)
        part = run_experiment(cfg, method="kivi", parts=parts, **QUIET)
        assert not part.ended and part.record.hash == whole.record.hash
        assert part.record.metrics[part.record.primary].value is None
    split = run_experiment(settings("split", shard="2/3", batch_size=size), method="kivi", parts=parts, **QUIET)
    assert split.ended and split.record.hash == whole.record.hash
    for run in (whole, split):
        assert run.reference.status == run.record.status == "complete"
    folders = [(run.folder, run.folder.parents[1] / "full" / run.reference.hash[:12]) for run in (split, whole)]
    for mine, theirs in zip(*folders, strict=True):
        assert samples(mine) == samples(theirs)
        assert [item.name for item in mine.rglob("*") if item.parent.parent.name == ".shards"] == [".lock"] * 3
    written = (whole.folder / "config.yaml").read_text().replace("batch_size: 2", f"batch_size: {size}")
    assert (split.folder / "config.yaml").read_text() == written.replace(
        str(tmp_path / "whole"), str(tmp_path / "split")
    )
    assert split.record.metrics == whole.record.metrics and split.record.ledger == whole.record.ledger
    assert split.record.comparison == whole.record.comparison and split.record.fidelity == whole.record.fidelity
    done = sorted(session.num_done for session in split.record.sessions)
    assert done == ([1, 2, 3, 3] if size == 3 else [1, 2, 2, 4])


class Started:
    """A slow run of fakes in a process of its own, which works alongside others; see killed_sweep.py."""

    def __init__(self, server, results, shard=None):
        self.ask, self.ended = server.ask, None
        self.pid = server("fake", results, at=None, background=True, shard=shard)["pid"]

    def poll(self, wait=False):
        """How it ended: `killed` or its exit code; None while it works."""
        if self.ended is None:
            self.ended = self.ask({"ended": self.pid, "wait": wait})["ended"]
        return self.ended

    def wait(self):
        """Waits until it has ended; how it did."""
        return self.poll(wait=True)


def finished(results):
    """How many samples every journal below a folder holds."""
    return {path.parent.name: path.read_bytes().count(b"\n") for path in results.rglob("samples.jsonl")}


@pytest.mark.long
@pytest.mark.timeout(240)
@pytest.mark.parametrize("last", few(["3/4", None], "3/4"))
def test_a_killed_shard_loses_nothing(tmp_path, server, capsys, last):
    """Four processes at once, one killed in the middle: its samples are kept and taken over, `status` tells how each
    stands, and either the same shard or the whole run, given again, ends with the records of an unbroken run."""
    assert Started(server, tmp_path / "whole").wait() == 0
    results = tmp_path / "split"
    workers = {number: Started(server, results, f"{number}/4") for number in (1, 2, 3, 4)}
    while finished(results).get("3-of-4", 0) < 5:
        assert workers[3].poll() is None
        time.sleep(0.01)
    os.kill(workers[3].pid, signal.SIGKILL)
    assert [worker.wait() for worker in workers.values()] == [0, 0, "killed", 0]
    (folder,) = (path.parent for path in results.rglob("run.json") if ".shards" not in path.parts)
    assert main(["status", f"results_dir={results}"]) == 0
    said = " ".join(capsys.readouterr().out.split())  # a long path wraps
    kept = finished(results)["3-of-4"] + finished(results)[folder.name] - 92
    assert 5 <= kept < 28, "the kill came too late, so this test shows nothing"
    assert "1 runs: 1 unfinished" in said and "of 120 samples are merged" in said
    for line in ("done 1/4: 32 of 32", "done 2/4: 32 of 32", f"lost 3/4: {kept} of 28", "done 4/4: 28"):
        assert line in said
    with run_lock(folder / ".shards" / "3-of-4"):
        assert main(["status", f"results_dir={results}"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "1 runs: 1 running" in said and f"running 3/4: {kept} of 28" in said
    assert Started(server, results, last).wait() == 0
    (whole,) = (path.parent for path in (tmp_path / "whole").rglob("run.json"))
    assert len(samples(whole)) == 120 and samples(folder) == samples(whole)
    mine, theirs = RunRecord.load(folder), RunRecord.load(whole)
    assert mine.hash == theirs.hash and mine.metrics == theirs.metrics and mine.status == "complete"
    assert len(mine.sessions) == 5 and finished(results) == {folder.name: 120}


def test_what_goes_wrong_in_a_shard_is_told(tmp_path, capsys, monkeypatch):
    """A signal and a fault are in the shard's record, and `status` says them; the run itself is not failed by them."""

    def stopping(after):
        def advance(self):
            self.done += 1
            if self.done == after:
                raise error

        return advance

    for number, error in ((1, Stopped(signal.SIGTERM)), (2, RuntimeError("kernel fault"))):
        with monkeypatch.context() as patch:
            patch.setattr("kvbench.show.progress.Progress.advance", stopping(2))
            with pytest.raises(type(error)):
                run_fake(tmp_path, shard=f"{number}/3")
    assert main(["status", f"results_dir={tmp_path}"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "stopped 1/3: 2 of 4 samples, stopped by SIGTERM" in said
    assert "failed 2/3: 2 of 4 samples, FakeEngine.running raised RuntimeError: kernel fault (" in said
    assert said.endswith("left 3/3")
    ends = [run_fake(tmp_path, shard=f"{number}/3") for number in (3, 1, 2)]
    assert [run.ended for run in ends] == [False, False, True]
    assert ends[-1].record.status == "complete" and ends[-1].record.counts.done == 10


def test_more_shards_than_batches(tmp_path):
    """A shard without a batch says so and does no harm."""
    said = []
    cfg = make_cfg(tmp_path, shard="4/4")
    assert not run_experiment(cfg, method="half", parts=make_parts(), say=said.append).ended
    assert said[0] == "shard=4/4 has nothing to do: the run has fewer batches of 4"
    for number in (1, 2, 3):
        done = run_fake(tmp_path, shard=f"{number}/4")
    assert done.ended


def test_a_shard_does_not_start_again(tmp_path):
    """One shard must not throw away the others' work."""
    with refused("settings-conflict", "shard", "shard=1/2", "resume=false"):
        run_fake(tmp_path, shard="1/2", resume=False)


def test_the_full_caches_own_answers_come_first(tmp_path):
    """Where the full cache's answers are forced, a shard of a method waits for all of them, and says so."""
    changes = {"reference": "auto", "fidelity__on": "own"}
    whole = run_fake(tmp_path / "whole", **changes)

    def shard(number):
        cfg = make_cfg(tmp_path / "split", shard=f"{number}/2", **changes)
        return run_experiment(cfg, method="half", parts=make_parts(), **QUIET)

    with refused("settings-conflict", "shard", "shard=1/2", "fidelity.on=own", "10"):
        shard(1)
    assert not shard(2).ended
    assert samples(shard(1).folder) == samples(whole.folder)
