"""A folder that is not the run's: refused as it is, to the byte, whatever names it."""

import shutil

import pytest
from fake_parts import record as sample
from fake_parts import run_fake
from refusals import refused

from kvbench.results import shards
from kvbench.results.journal import Journal
from kvbench.results.record import RunRecord
from kvbench.results.shards import Shard

PART = str(Shard(2, 1).folder(shards.Path()))


def content(folder):
    """The bytes of every file below a folder but its lock."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


@pytest.fixture
def swapped(tmp_path):
    """Gives a results folder in which another run's folder lies under a run's name, and that folder."""
    mine, other = run_fake(tmp_path), run_fake(tmp_path, seed=1)
    assert mine.folder != other.folder
    shutil.rmtree(mine.folder)
    return tmp_path, other.folder.rename(mine.folder)


@pytest.mark.parametrize("resume", [True, False])
@pytest.mark.parametrize("link", [True, False])
def test_another_runs_folder_is_refused_as_it_is(swapped, resume, link):
    """Moved, linked or restored under the wrong name, its samples stay, also where the run is to start again."""
    results, folder = swapped
    if link:
        folder.symlink_to(folder.rename(results / "elsewhere"))
    before = content(folder)
    assert before["samples.jsonl"].count(b"\n") > 1
    with refused("setting-value", "results_dir"):
        run_fake(results, resume=resume)
    assert content(folder) == before


@pytest.mark.parametrize("resume", [True, False])
@pytest.mark.parametrize("name", [PART, f"{shards.FOLDER}/worker.0123abcd"])
def test_another_runs_part_is_refused_as_it_is(tmp_path, name, resume):
    """Of a shard and of a worker alike: neither taken over, nor repaired, nor removed with the run's own parts."""
    folder = run_fake(tmp_path).folder
    place, other = folder / name, "5" * 64
    place.mkdir(parents=True)
    journal = Journal(place / "samples.jsonl", run=other)
    journal.append(sample(0))
    journal.close()
    theirs = run_fake(tmp_path / "other", seed=1).folder
    shutil.copy(theirs / "run.json", place)
    before = content(folder)
    with pytest.raises(ValueError, match="holds a part of another run; move it away"):
        run_fake(tmp_path, resume=resume)
    assert content(folder) == before


def test_a_folder_without_a_record_loses_no_line(tmp_path):
    """Nothing says whose its lines are but their seals: another run's are moved aside, and the run's count."""
    mine, other = run_fake(tmp_path), run_fake(tmp_path, seed=1)
    lines = mine.folder / "samples.jsonl"
    own, foreign = lines.read_bytes(), (other.folder / "samples.jsonl").read_bytes()
    lines.write_bytes(foreign + own)
    (mine.folder / "run.json").unlink()
    again = run_fake(tmp_path)
    assert lines.read_bytes() == own and again.record.counts.damaged == foreign.count(b"\n")
    assert (mine.folder / "samples.dropped.jsonl").read_bytes() == foreign


@pytest.mark.parametrize("torn", [b'{"status": "run', b"\0" * 300, b"[]", b""])
@pytest.mark.parametrize("name", [PART, f"{shards.FOLDER}/worker.0123abcd"])
def test_a_torn_record_of_a_part_does_not_stop_the_run(tmp_path, name, torn):
    """The samples beside it count by their seals; the record is moved aside and named, and so are lines that do not
    count."""
    whole = run_fake(tmp_path / "whole")
    lines = (whole.folder / "samples.jsonl").read_bytes().splitlines(keepends=True)
    folder = tmp_path / "half" / whole.folder.relative_to(tmp_path / "whole")
    place = folder / name
    place.mkdir(parents=True)
    (place / "samples.jsonl").write_bytes(b"".join(lines[:3]) + lines[3][:20])
    (place / "run.json").write_bytes(torn)
    told = []
    run = run_fake(tmp_path / "half", say=told.append)
    assert run.folder == folder and run.record.status == "complete"
    done = (folder / "samples.jsonl").read_bytes().splitlines(keepends=True)
    assert done[:3] == lines[:3] and len(done) == len(lines), "its finished samples were not taken over"
    assert any(f"{place / 'run.json'} " in line for line in told)
    assert content(place) == {"run.unreadable.json": torn, "samples.dropped.jsonl": lines[3][:20] + b"\n"}
    assert RunRecord.load(folder).counts.done == len(lines)
