"""The `bench` command: speed as ratios to a named baseline, measured in one interleaved run."""
