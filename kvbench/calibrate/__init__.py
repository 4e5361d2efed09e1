"""Finds a method's settings for a model: runs sweeps, chooses on some samples and confirms on others."""
