"""Prompts at once and in chunks, side by side."""

from kvbench.bench.chunks import main
from kvbench.bench.peak import main as peak


def test_both_forms_are_measured():
    """The form in chunks has the smaller peaks and the same bytes in the end."""
    found = main({"method": "snapkv budget=0.25", "context": 1024, "chunk": 128})
    whole, chunked = found["at_once"], found["in_chunks"]
    assert chunked["alive_bytes"] < whole["alive_bytes"] and chunked["peak_bytes"] < whole["peak_bytes"]
    assert chunked["resident_bytes"] == whole["resident_bytes"]


def test_a_process_can_read_in_chunks():
    """The bench of whole decode steps measures a prompt's peak in a process of its own, in chunks where it is told."""
    order = {"model": "random preset=tiny", "device": "cpu", "context": 256, "name": "snapkv budget=0.25"}
    assert peak(order | {"kind": None, "kernels": "torch", "threads": 1, "chunk": 64}) >= 0
