"""Which extensions' tests the default run takes, in small repositories."""

import re
import subprocess
from types import SimpleNamespace

import pytest
import touched
from places import ROOT

from kvbench.config import extensions

KNOWN = {"a": SimpleNamespace(uses=("b",)), "b": SimpleNamespace(uses=()), "c": SimpleNamespace(uses=("a",))}
KNOWN |= {"d": SimpleNamespace(uses=())}


@pytest.fixture(autouse=True)
def without_a_base(monkeypatch):
    """No test depends on what the run itself compares with."""
    monkeypatch.delenv(touched.BASE, raising=False)


@pytest.fixture
def repository(tmp_path):
    """A function that calls git in a repository whose main has one commit."""

    def git(*words):
        named = ["-c", "user.name=x", "-c", "user.email=x@y", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", *named, *words], cwd=tmp_path, check=True, capture_output=True)

    def write(path, text="x"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)

    git("init", "-q", "-b", "main")
    write("kvbench/core.py")
    git("add", ".")
    git("commit", "-qm", "first")
    git.write, git.folder = write, tmp_path
    return git


def taken(folder):
    """The extensions whose tests all run."""
    return touched.described(folder, KNOWN)[0]


def test_on_main_and_without_git_all_are_taken(repository, tmp_path_factory):
    """The branch point is not known there: a clean clone of main runs every test."""
    assert taken(repository.folder) == {*KNOWN}
    repository.write("kvbench/extensions/d/x.py")
    assert taken(repository.folder) == {*KNOWN}
    plain = tmp_path_factory.mktemp("plain")
    assert taken(plain) == {*KNOWN}
    inside = repository.folder / "copy"
    inside.mkdir()
    repository("switch", "-qc", "work")
    repository("commit", "-qm", "second", "--allow-empty")
    assert taken(inside) == {*KNOWN}, "a copy inside of another checkout has no history"


def test_a_shallow_clone_takes_all(repository, tmp_path_factory):
    """Its one commit is all that it knows."""
    repository("switch", "-qc", "work")
    repository.write("kvbench/extensions/d/x.py")
    repository("add", ".")
    repository("commit", "-qm", "second")
    clone = tmp_path_factory.mktemp("clones") / "shallow"
    address = repository.folder.as_uri()
    subprocess.run(["git", "clone", "-q", "--depth", "1", address, str(clone)], check=True, capture_output=True)
    assert taken(clone) == {*KNOWN}


def test_a_branch_takes_what_it_touches(repository):
    """Committed, changed and new files count, and so do extensions that use a touched one; those of the core do not."""
    repository("switch", "-qc", "work")
    repository.write("kvbench/core.py", "y")
    repository.write("kvbench/extensions/README.md")
    repository("add", ".")
    repository("commit", "-qm", "second")
    assert taken(repository.folder) == set()
    repository.write("kvbench/extensions/d/tests/test_d.py")  # new, and not added
    assert taken(repository.folder) == {"d"}
    repository("add", ".")
    repository("commit", "-qm", "third")
    assert taken(repository.folder) == {"d"}
    repository.write("kvbench/extensions/b/conf/command/b.yaml")
    said = touched.described(repository.folder, KNOWN)
    assert said[0] == {"a", "b", "c", "d"} and "smoke" not in said[1]


def test_a_base_can_be_named(repository, monkeypatch):
    """`KVBENCH_BASE` is any commit, or `all`; what is no commit is refused."""
    repository.write("kvbench/extensions/d/x.py")
    repository("add", ".")
    repository("commit", "-qm", "second")
    monkeypatch.setenv(touched.BASE, "HEAD~1")
    found, said = touched.described(repository.folder, KNOWN)
    assert found == {"d"} and "of a, b, c those marked smoke" in said
    monkeypatch.setenv(touched.BASE, "all")
    assert taken(repository.folder) == {*KNOWN}
    monkeypatch.setenv(touched.BASE, "gone")
    with pytest.raises(ValueError, match="KVBENCH_BASE=gone is no commit"):
        taken(repository.folder)


def test_every_extension_has_a_smoke_test():
    """One that always runs: an untouched extension that the core broke is seen by it."""
    for name, one in extensions.discovered().items():
        if one.package.startswith(extensions.PACKAGE):
            texts = [path.read_text() for path in (one.folder / "tests").glob("test_*.py")]
            assert any(re.search(r"^@pytest\.mark\.smoke$", text, re.MULTILINE) for text in texts), name


def test_tests_are_known_by_their_path():
    """By the link under tests/ and by the folder itself."""
    assert touched.extension_of("tests/extensions/bench/tests/test_live.py::test_x[1]") == "bench"
    assert touched.extension_of("kvbench/extensions/bench/tests/test_live.py") == "bench"
    assert touched.extension_of("tests/config/test_extensions.py::test_x") is None
    assert (ROOT / "tests" / "extensions").is_dir()
