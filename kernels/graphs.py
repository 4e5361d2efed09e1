"""Capture of launches in CUDA graphs."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph, **how: Any) -> Iterator[None]:
    """Captures what is launched inside into a graph, as `torch.cuda.graph`, while Python collects no garbage.

    Freeing an older graph ends a capture that is under way: on an H100, steps behind an engine that had ended could not
    be captured when its graphs were collected meanwhile.

    Args:
        graph: What the launches go into.
        how: Further arguments of `torch.cuda.graph`.
    """
    gc.collect()
    collects = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, **how):
            yield
    finally:
        if collects:
            gc.enable()
