"""Files and folders: nothing is written through what is no file, nothing half written stays, names are durable."""

import errno
import fcntl
import os
import stat
import subprocess
import sys

import pytest
from places import ROOT
from refusals import refused

from kvbench.config import durable
from kvbench.results import writing
from kvbench.results.journal import Journal, run_lock
from kvbench.results.record import RunRecord
from kvbench.results.writing import check_writable, write_atomic, write_file, write_files


def names(folder):
    """What lies in a folder."""
    return sorted(item.name for item in folder.iterdir())


@pytest.mark.parametrize("is_dangling", [False, True])
def test_a_lock_that_is_a_link_is_refused(tmp_path, is_dangling):
    """What a link named `.lock` points at is neither emptied nor made."""
    victim, run = tmp_path / "victim", tmp_path / "run"
    run.mkdir()
    if not is_dangling:
        victim.write_text("precious")
    (run / ".lock").symlink_to(victim)
    with refused("file-content", None, ".lock", "no regular file"), run_lock(run):
        pass
    assert is_dangling is not victim.exists()
    assert is_dangling or victim.read_text() == "precious"


def test_a_lock_that_is_no_lock_is_refused(tmp_path):
    """A pipe is not waited for, and a file with another content, a second name of a precious one, is not emptied."""
    os.mkfifo(tmp_path / ".lock")
    with refused("file-content", None, ".lock", "no regular file"), run_lock(tmp_path):
        pass
    (tmp_path / ".lock").unlink()
    (tmp_path / "victim").write_text("precious")
    os.link(tmp_path / "victim", tmp_path / ".lock")
    with refused("file-content", None, ".lock", "something else"), run_lock(tmp_path):
        pass
    assert (tmp_path / "victim").read_text() == "precious"


@pytest.mark.parametrize("content", [b"", b"123", b"\0\0\0\0", b"99999999\n"])
def test_a_lock_of_before_is_taken(tmp_path, content):
    """What a killed process or a power cut left in the lock does not matter."""
    (tmp_path / ".lock").write_bytes(content)
    with run_lock(tmp_path):
        assert (tmp_path / ".lock").read_bytes() == str(os.getpid()).encode()


KILLED = """
import os, sys
from pathlib import Path
from kvbench.results import writing
os.replace = lambda *_: os._exit(9)
writing.write_atomic(Path(sys.argv[1]), b"new")
"""


def test_litter_of_killed_writers_goes(tmp_path):
    """What a killed process left half written goes when the run is locked, or the same file is written again."""
    for name in ("run.json", "samples.jsonl"):
        assert subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / name)], cwd=ROOT).returncode == 9
    assert len(names(tmp_path)) == 2 and all(name.endswith(".tmp") for name in names(tmp_path))
    write_atomic(tmp_path / "run.json", b"x")
    assert len(names(tmp_path)) == 2 and not any(name.startswith(".run.json") for name in names(tmp_path))
    with run_lock(tmp_path):
        assert names(tmp_path) == [".lock", "run.json"]


def test_what_is_no_litter_stays(tmp_path):
    """The temporary file of a living writer, other people's files, folders and links keep their place."""
    alive = tmp_path / ".result.png.17-00c0ffee.tmp"
    alive.write_text("half")
    others = [".x.tmp", "run.json.17-00c0ffee.tmp", ".run.json.swp", ".a.b-00c0ffee.tmp", ".a.1-00c0ffee.tmp.bak"]
    for name in others:
        (tmp_path / name).write_text("mine")
    (tmp_path / ".d.1-00c0ffee.tmp").mkdir()
    (tmp_path / ".l.1-00c0ffee.tmp").symlink_to(alive)
    before = [*names(tmp_path), ".lock"]
    with open(alive, "rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with run_lock(tmp_path):
            assert names(tmp_path) == sorted(before)
    with run_lock(tmp_path):
        assert not alive.exists()


def test_a_planted_temporary_file_is_not_followed(tmp_path, monkeypatch):
    """A link under the name of the next temporary file is passed by."""
    (tmp_path / "victim").write_text("precious")
    tokens = iter(["00000000", "11111111"])
    monkeypatch.setattr(writing.secrets, "token_hex", lambda size: next(tokens))
    (tmp_path / f".run.json.{os.getpid()}-00000000.tmp").symlink_to(tmp_path / "victim")
    write_atomic(tmp_path / "run.json", b"new")
    assert (tmp_path / "victim").read_text() == "precious" and (tmp_path / "run.json").read_text() == "new"


def test_out_follows_links_and_keeps_modes(tmp_path):
    """A link stays one and its target is written; permissions stay as they were; a link to nothing makes its target."""
    target, link = tmp_path / "deep" / "a.csv", tmp_path / "a.csv"
    target.parent.mkdir()
    link.symlink_to(target)
    for mode in (None, 0o600, 0o640, 0o444):
        if mode is not None:
            target.chmod(mode)
        write_file(link, b"%o" % (mode or 0))
        assert link.is_symlink() and target.read_bytes() == b"%o" % (mode or 0)
        assert mode is None or stat.S_IMODE(target.stat().st_mode) == mode
    assert names(target.parent) == ["a.csv"] and names(tmp_path) == ["a.csv", "deep"]


def test_out_refuses_what_is_no_file(tmp_path):
    """A pipe, a folder, a loop and a path through a file are one sentence, and stay what they are."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    for name, why in (
        ("pipe", "it is no regular file; give another path"),
        ("link", "it is no regular file; give another path"),
        ("folder", "it is a folder; give another path"),
        ("loop", "Too many levels of symbolic links; give another path"),
        ("file/a.csv", "Not a directory; give another path"),
    ):
        with refused("file-missing", None, f"{name}: {why}"):
            write_file(tmp_path / name, b"new")
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    assert names(tmp_path) == ["file", "folder", "link", "loop", "pipe"]


@pytest.mark.parametrize("name", ["../victim", "a/../../victim", "link", "there/victim", "/victim", "."])
def test_several_files_lie_below_the_folder_or_none_is_written(tmp_path, name):
    """Neither a name nor a link that somebody left there leads out of the folder that the user named."""
    root = tmp_path / "out"
    root.mkdir()
    (root / "link").symlink_to(tmp_path / "victim")
    (root / "there").symlink_to(tmp_path)
    with refused("file-missing", None, f"below {root}"):
        write_files(root, {root / "good": b"new", root / name: b"new"})
    assert names(root) == ["link", "there"] and names(tmp_path) == ["out"]
    (tmp_path / "linked").symlink_to(root)  # the folder itself may be a link
    assert write_files(tmp_path / "linked", {tmp_path / "linked" / "a" / "b": b"x"}) == [tmp_path / "linked/a/b"]
    assert (root / "a" / "b").read_bytes() == b"x"


def test_a_folder_is_synced_with_those_above_it(tmp_path, monkeypatch):
    """Of every folder that is made, the one that holds its name is synced; a folder that is there costs nothing."""
    synced = []
    monkeypatch.setattr(durable, "sync", synced.append)
    durable.make_folder(tmp_path / "a" / "b" / "c")
    assert synced == [tmp_path, tmp_path / "a", tmp_path / "a" / "b"]
    durable.make_folder(tmp_path / "a" / "b")
    assert len(synced) == 3
    with run_lock(tmp_path / "x" / "y"):
        assert synced[3:] == [tmp_path, tmp_path / "x"]


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    """A file in the way, a loop, a link to nothing and a name too long; a good folder is not made."""
    (tmp_path / "file").write_text("x")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "nothing").symlink_to(tmp_path / "gone")
    for name, why in (
        ("file", "file is no folder"),
        ("file/deep/er", "Not a directory"),
        ("loop/a", "Too many levels of symbolic links"),
        ("nothing", "is a link to nothing"),
        ("x" * 300, "File name too long"),
    ):
        with refused("file-missing", "results_dir", "results_dir=", name, why):
            check_writable(tmp_path / name, "results_dir")
    check_writable(tmp_path / "good" / "deep", "results_dir")
    assert not (tmp_path / "good").exists()


def test_a_pipe_in_a_run_is_not_waited_for(tmp_path):
    """A pipe under the name of a run's file is an error at once."""
    for name in ("run.json", "samples.jsonl"):
        os.mkfifo(tmp_path / name)
    with refused("file-missing", None, "run.json", "no regular file"):
        RunRecord.load(tmp_path)
    with refused("write-failed", None, "samples.jsonl", "no regular file"):
        Journal(tmp_path / "samples.jsonl", run="5")


def test_no_lock_on_a_file_system_without_locks(tmp_path, monkeypatch):
    """Where files cannot be locked, writing works and nothing is taken for litter."""

    def fail(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    (tmp_path / ".a.1-00c0ffee.tmp").write_text("x")
    monkeypatch.setattr(fcntl, "flock", fail)
    write_atomic(tmp_path / "a", b"new")
    assert names(tmp_path) == [".a.1-00c0ffee.tmp", "a"]
