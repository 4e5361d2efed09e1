"""Runs models to find settings: sweeps a method's grid, chooses on some samples, confirms on others; measures gates."""
