"""Finding out whether a cage holds: a bare interpreter is found out, and the folder it starts in changes nothing."""

import os

import pytest
from cage_target import needs_cage
from refusals import refused

from kvbench.tasks.code.cage import mechanism as cage_mechanism
from kvbench.tasks.code.cage import probe as cage_probe
from kvbench.tasks.code.cage import run as cage


def bare():
    """A mechanism that isolates nothing: the interpreter, on the machine itself."""
    *command, text = cage_mechanism._interpreter()
    # Run by root it becomes somebody who may not read root's modules: those that the attempts need are loaded before.
    text = "import socket, threading\n" + text
    settings = lambda limits, user: {"command": [*command, text, *([] if user is None else [str(user)])]}  # noqa: E731
    return cage_mechanism.Mechanism(settings, by_root=True)


def test_probe_finds_a_cage_that_holds_nothing(monkeypatch):
    """A bare interpreter is refused, and the message names what is missing and what to do."""
    monkeypatch.setattr(cage_probe, "mechanisms", lambda: {"bare": bare()})
    monkeypatch.setattr(cage, "check_isolation", cage_probe._first_that_holds.__wrapped__)
    with refused("code-not-run", None, "no network isolation", "no file system of its own", "bubblewrap"):
        cage.run("def f(): pass", "f", [[]], allow_code_execution=True)


@needs_cage
@pytest.mark.parametrize("place", ["cwd", "home"])
def test_the_cage_holds_when_started_in_tmp(place, monkeypatch):
    """The cage has its own /tmp: a file written there is an escape only if it shows up outside."""
    monkeypatch.chdir("/tmp" if place == "cwd" else "/")
    monkeypatch.setenv("HOME", "/tmp" if place == "home" else "/nonexistent")
    assert cage_probe._first_that_holds.__wrapped__() == cage.check_isolation()


def test_a_file_that_gets_out_to_tmp_is_seen_and_removed(monkeypatch):
    """Started in /tmp, a cage without a /tmp of its own is found out by the file that it leaves there."""
    monkeypatch.chdir("/tmp")
    found, remove = [], cage_probe._remove
    monkeypatch.setattr(cage_probe, "_remove", lambda paths: found.extend(remove(paths)) or list(found))
    assert "no file system of its own" in cage_probe.what_is_missing(bare())
    assert [path for path in found if os.path.dirname(path) == "/tmp"]
    assert not [path for path in found if os.path.exists(path)]


# What the attempts tell of a cage that holds.
HELD = {
    "ids": (65534,), "cwd": "/tmp", "wrote": ["/tmp"], "threads": 3, "number": 2, "scratch": 1, "devices": True,
    **dict.fromkeys(("became_root", "connected", "connected_local", "saw", "signalled", "memory", "file", "files")),
    **dict.fromkeys(("families", "processes", "unshared", "environment")),
}  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "lacks"),
    [
        ({}, None),
        ({"families": [40]}, "sockets of other families than AF_UNIX can be opened"),
        ({"processes": ["fork"]}, "new processes can be started"),
        ({"threads": 12}, "no limit on threads"),
        ({"threads": 0}, "no thread can be started, because the kernel counts what other programs of this user run"),
        ({"number": 4711}, "no process isolation"),
        ({"saw": ["/proc/self"]}, "no file system of its own"),
        ({"ids": (0, 65534)}, "no user of its own"),
    ],
)
def test_each_thing_that_got_through_is_named(changed, lacks):
    """A limit that keeps everything out is not taken for no limit, and each fact has its own words."""
    assert cage_probe._judge(HELD | changed, []) == ([] if lacks is None else [lacks])
    assert "no file system of its own" in cage_probe._judge(HELD | changed, ["/tmp/left"])
