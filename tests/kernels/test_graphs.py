"""Captures in CUDA graphs, with torch's own part played by what notes how it was entered."""

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from kvbench.kernels.graphs import capturing


class Held:
    """What only the collector of garbage frees, as an engine with its graphs."""

    def __init__(self) -> None:
        self.mine = self


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_collected_during_a_capture(monkeypatch: pytest.MonkeyPatch, fails: bool):
    """Freeing an older graph would end the capture."""
    collects = []

    @contextmanager
    def graph(of: object, pool: int) -> Iterator[None]:
        assert (of, pool) == ("graph", 3)
        collects.append((gc.isenabled(), older() is None))
        yield

    monkeypatch.setattr(torch.cuda, "graph", graph)
    older = weakref.ref(Held())
    assert older() is not None
    try:
        with capturing("graph", pool=3):
            collects.append((gc.isenabled(), older() is None))
            if fails:
                raise KeyError
    except KeyError:
        assert fails
    assert collects == [(False, True)] * 2
    assert gc.isenabled()
