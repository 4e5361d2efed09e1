"""Bytes of tensors that are alive, counted while operations run."""

import torch

from kvbench.extensions.bench.chunks import LiveBytes


def test_what_is_alive_counts_once():
    """A tensor counts until its last view is gone, in main memory and on meta tensors."""
    before = torch.zeros(1000)
    for device in ("cpu", "meta"):
        with LiveBytes() as live:
            first = torch.zeros(1000, device=device)
            view, other = first[10:], first + 1
            assert live.now_bytes == live.peak_bytes == 8000
            del first
            assert live.now_bytes == 8000, "a view holds what it is a view of"
            del view
            other.add_(1)
            other.view(10, 100)
            assert live.now_bytes == 4000
            live.restart()
            del other
            assert (live.now_bytes, live.peak_bytes) == (0, 4000)
            before.view(10, 100)
            assert live.now_bytes == 0, "what was there before is not counted"
