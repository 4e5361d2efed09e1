"""Capture of launches in CUDA graphs."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

Capture = Callable[[Callable[[], None]], Callable[[], None]]  # runs a step once, and returns what runs it again


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph, **how: Any) -> Iterator[None]:
    """Captures what is launched inside into a graph, as `torch.cuda.graph`, while Python collects no garbage.

    Freeing an older graph ends a capture that is under way: on an H100, steps after an engine that had ended could not
    be captured when its graphs were collected meanwhile.

    Args:
        graph: Graph that records the launches.
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


def cuda_graphs() -> Capture:
    """Capture of steps in CUDA graphs of one memory pool, which ends with them: another cache needs another one."""
    pool = torch.cuda.graph_pool_handle()

    def capture(step: Callable[[], None]) -> Callable[[], None]:
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            with capturing(graph, pool=pool):
                step()
        except BaseException:
            torch.cuda.set_stream(stream)  # where the capture's end fails too, torch leaves its own stream in place
            raise
        graph.replay()
        return graph.replay

    return capture
