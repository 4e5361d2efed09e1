"""Fixtures of commands on fakes."""

from command_fixtures import fakes, pictures, small, work

__all__ = ["fakes", "pictures", "small", "work"]
