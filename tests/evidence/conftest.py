"""Fixtures of the frontier's tests."""

from frontier_helpers import stored, sweep

__all__ = ["stored", "sweep"]
