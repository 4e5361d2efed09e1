"""One version of the code for the starts of a test."""

from command_fixtures import fixed_code

__all__ = ["fixed_code"]
