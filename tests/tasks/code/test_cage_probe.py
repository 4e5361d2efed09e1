"""Finding out whether a cage holds: a bare interpreter is found out, and the folder it starts in changes nothing."""

import os

import pytest

from kvbench.tasks.code.cage import mechanism as cage_mechanism
from kvbench.tasks.code.cage import probe as cage_probe
from kvbench.tasks.code.cage import run as cage

needs_cage = pytest.mark.skipif(
    cage.check_isolation().mechanism is None, reason=f"no isolation here: {'; '.join(cage.check_isolation().missing)}"
)


def test_probe_finds_a_cage_that_holds_nothing(monkeypatch):
    """A bare interpreter is refused, and the message names what is missing and what to do."""
    *command, text = cage_mechanism._interpreter()
    # Run by root it becomes nobody, who may not read root's modules: the one that the attempts need is loaded before.
    bare = cage_mechanism.Mechanism(lambda limits: [*command, "import socket\n" + text], {})
    monkeypatch.setattr(cage_probe, "mechanisms", lambda: {"bare": bare})
    monkeypatch.setattr(cage, "check_isolation", cage_probe._first_that_holds.__wrapped__)
    with pytest.raises(cage.CageRefused, match="no network isolation.*no file system of its own.*bubblewrap"):
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
    *command, text = cage_mechanism._interpreter()
    bare = cage_mechanism.Mechanism(lambda limits: [*command, "import socket\n" + text], {})
    monkeypatch.chdir("/tmp")
    found, remove = [], cage_probe._remove
    monkeypatch.setattr(cage_probe, "_remove", lambda paths: found.extend(remove(paths)) or list(found))
    assert "no file system of its own" in cage_probe.what_is_missing(bare)
    assert [path for path in found if os.path.dirname(path) == "/tmp"]
    assert not [path for path in found if os.path.exists(path)]
    facts = {"ids": (65534,), "cwd": "/tmp", "wrote": ["/tmp"], "forks": 3, "scratch": 1, "devices": True}
    facts |= dict.fromkeys(("became_root", "connected", "connected_local", "saw", "signalled", "memory", "file"))
    facts |= dict.fromkeys(("files", "unshared", "environment"))
    assert cage_probe._judge(facts, []) == []
    assert cage_probe._judge(facts, ["/tmp/left"]) == ["no file system of its own"]
