"""Fixtures of commands that run on fakes in this process; a conftest imports what its tests need."""

from pathlib import Path

import pytest
from fake_command import SMALL, write_conf
from fake_parts import make_parts

from kvbench.config import files
from kvbench.evidence import frontier_figure
from kvbench.results import provenance


@pytest.fixture
def work(tmp_path) -> Path:
    """An empty folder beside a configuration of small methods, tasks and models."""
    write_conf(tmp_path / "conf")
    (tmp_path / "work").mkdir()
    return tmp_path / "work"


@pytest.fixture
def pictures() -> None:
    """The pictures of runs and sweeps are drawn: half a second each, which tests of other things do without."""


@pytest.fixture
def fakes(work, monkeypatch, request) -> Path:
    """The same as the current folder of this process, whose commands run on fakes."""
    if "pictures" not in request.fixturenames:
        monkeypatch.setattr("kvbench.show.figure.draw", lambda records, path: path)
    monkeypatch.setattr(files, "conf_folder", lambda: work.parent / "conf")
    monkeypatch.setattr("kvbench.runs.parts.Loaders", make_parts)
    monkeypatch.setattr("kvbench.runs.run.Loaders", make_parts)
    monkeypatch.chdir(work)
    return work


@pytest.fixture
def small(fakes, monkeypatch):
    """A suite on fakes, without pictures."""
    (fakes.parent / "conf" / "suite").mkdir()
    (fakes.parent / "conf" / "suite" / "small.yaml").write_text(SMALL)
    monkeypatch.setattr(frontier_figure, "render", lambda *given: b"")
    return fakes


@pytest.fixture(autouse=True)
def fixed_code(monkeypatch):
    """The starts of a test belong to one version of the code even while somebody edits a source file."""
    monkeypatch.setattr(provenance, "harness_hash", lambda *backends: "the same")
