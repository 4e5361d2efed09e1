"""Holds a method of the user's own to the conformance tests of the repository."""
