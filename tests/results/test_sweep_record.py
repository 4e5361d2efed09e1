"""The records of a sweep: how its jobs stand, and how long the rest takes."""

import json

import pytest
from refusals import refused

from kvbench.results.sweep import Sweep, sweeps


def test_states_of_jobs(tmp_path):
    """A job is left, running, done, failed or lost; what is no record counts as not begun."""
    sweep = Sweep.start(tmp_path, "kvbench -m", "basic", ["a", "b", "c", "d", "e"])
    with sweep.job(1) as job:
        job.code = 0
    with sweep.job(2) as job:
        job.code, job.message = 2, "bad"
    with pytest.raises(KeyError), sweep.job(3):
        raise KeyError("a fault, or a kill: no code was written")
    (sweep.folder / "0005").mkdir()
    (sweep.folder / "0005" / "job.json").write_text('{"number": "five"}')
    with sweep.job(4):
        assert sweep.states() == {1: "done", 2: "failed", 3: "lost", 4: "running", 5: "left"}
    assert sweep.states()[4] == "lost"
    assert sweep.jobs()[2].message == "bad" and sweep.jobs()[2].host and sweep.jobs()[2].ended
    assert [found.folder for found in sweeps(tmp_path)] == [sweep.folder]
    assert sweep.record().jobs == ["a", "b", "c", "d", "e"]


def test_sweeps_of_one_second_have_folders_of_their_own(tmp_path):
    """One process may start several: the items of a suite, then its runs."""
    begun = [Sweep.start(tmp_path, f"kvbench {number}", "basic", ["full"]) for number in range(20)]
    assert len({sweep.folder for sweep in begun}) == 20
    assert [sweep.record().command for sweep in begun] == [f"kvbench {number}" for number in range(20)]


def test_time_left(tmp_path):
    """The seconds in which jobs computed answers are the measure, without loading and the reference; those that were at
    work together share the time."""
    sweep = Sweep.start(tmp_path, "kvbench -m", "basic", list("abcdefgh"))
    assert sweep.left_s() is None

    def write(number, start, wall_s, num_done):
        with sweep.job(number) as job:
            job.code, job.num_done = 0, num_done
        path = sweep.folder / f"{number:04d}" / "job.json"
        at = "2026-01-01T00:{:02d}:00+00:00"
        times = {"started": at.format(start), "ended": at.format(start + wall_s // 60), "wall_s": wall_s + 90}
        times["work_s"] = wall_s
        path.write_text(json.dumps(json.loads(path.read_text()) | times))

    write(1, 0, 60, 0)  # was there already: says nothing
    assert sweep.left_s() is None
    write(2, 1, 600, 5)
    assert sweep.left_s() == pytest.approx(6 * 600)
    write(3, 1, 600, 5)  # at the same time: two at once
    assert sweep.left_s() == pytest.approx(5 * 600 / 2)


def test_no_record_of_a_sweep(tmp_path):
    """Something else in its place is named."""
    folder = tmp_path / ".multirun" / "x"
    folder.mkdir(parents=True)
    (folder / "sweep.json").write_text('{"jobs": 3}')
    with refused("file-content", None, "sweep.json", "jobs"):
        Sweep(folder).record()
