"""Fetching and checking the benchmarks' files; not part of a run, whose hash covers the rows it reads."""
