"""Estimates, intervals and tests."""
