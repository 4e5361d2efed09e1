"""What the tests of the Triton kernels share: where they run, and caches put there."""

import os
from collections.abc import Iterator

import pytest
import torch
from page_helpers import Cache

from kvbench.kernels.gpu import decode
from kvbench.kernels.operands import Ring, TierPages

# tests/conftest.py turns the interpreter on where there is no GPU; with one, the same tests run compiled kernels.
DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Fills what torch.empty gives with NaN (-1 or the largest integer), so that nothing unwritten passes for zero."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def many_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cuts lists into parts of a page or two, as a device of many processors does; the interpreter has one."""
    if DEVICE.type == "cpu":
        monkeypatch.setattr(decode, "_num_processors", lambda device: 4)
        monkeypatch.setattr(decode, "_LEAST_SLOTS", 1)  # or the short lists of tests would have one part


def random_queries(num_seq: int, num_heads: int, head_dim: int, seed: int = 3) -> torch.Tensor:
    """Queries fp32 [S, Hq, D]."""
    return torch.randn(num_seq, num_heads, head_dim, generator=torch.Generator().manual_seed(seed))


def move_tier(tier: TierPages) -> TierPages:
    """The same tier with its tensors where the kernels run."""
    rotation = None if (angles := tier.angles) is None else angles.to(DEVICE)
    return TierPages(tier.fmt, *(x.to(DEVICE) for x in (tier.ids, tier.num_k, tier.num_v)), rotation)


def move_cache(cache: Cache) -> tuple[torch.Tensor, list[TierPages]]:
    """Pages and tiers where the kernels run."""
    return cache.pages.to(DEVICE), [move_tier(tier) for tier in cache.tiers]


def move_ring(ring: Ring) -> Ring:
    """The same residual buffers where the kernels run."""
    return Ring(ring.k.to(DEVICE), ring.v.to(DEVICE), ring.num_tokens.to(DEVICE))
