"""The version of kvbench: a leaf, so that whatever needs it imports nothing else."""

VERSION = "0.1.0"
