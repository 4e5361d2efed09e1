"""One version of the code for the starts of a test, and no picture where none is looked at."""

import pytest

from kvbench.extensions.calibrate import show
from kvbench.results import provenance


@pytest.fixture(autouse=True)
def fixed_code(monkeypatch):
    """The starts of a test belong to one version of the code even while somebody edits a source file."""
    monkeypatch.setattr(provenance, "harness_hash", lambda *backends: "the same")


@pytest.fixture
def undrawn(monkeypatch):
    """Leaves the picture out, which takes most of the time."""
    monkeypatch.setattr(show, "draw", lambda result: [])
