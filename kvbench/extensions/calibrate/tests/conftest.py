"""One version of the code for the starts of a test, and no picture where none is looked at."""

import pytest
from command_fixtures import fixed_code

from kvbench.extensions.calibrate import show

__all__ = ["fixed_code", "undrawn"]


@pytest.fixture
def undrawn(monkeypatch):
    """Leaves the picture out, which takes most of the time."""
    monkeypatch.setattr(show, "draw", lambda result: [])
