"""Prompts of a cache whose heads are divided among processes: every process plans for all heads and holds its own."""

import pytest
import torch
from store_helpers import make_store
from torch import distributed

from kvbench.cache.ranks import ALONE, ProcessRanks, Ranks
from kvbench.cache.store import CompressedStore
from kvbench.methods.ada_snapkv import AdaSnapKV
from kvbench.methods.kv_compress import KVCompress
from kvbench.methods.snapkv import SnapKV
from kvbench.methods.think import ThinK

LAYERS, HEADS, DIM, LENGTH = 3, 4, 16, 41


class Alike(Ranks):
    """Two processes whose heads hold the same vectors, so that each knows what the other one would send."""

    size = 2

    def __init__(self, index: int) -> None:
        self.index = index

    def gather(self, x, dim):
        return torch.cat([x, x], dim)

    def total(self, x):
        return 2 * x

    def totals(self, numbers):
        return [2 * number for number in numbers]


def read(policy, ranks: Ranks | None) -> CompressedStore:
    """A prompt whose heads repeat after the first half of them, read by one process of `ranks`, or by one for all."""
    heads = {"num_q_heads": HEADS, "num_kv_heads": HEADS}
    store = make_store(policy, num_layers=LAYERS, **heads, head_dim=DIM, ranks=ranks or ALONE)
    row, make = store.open_row(), torch.Generator().manual_seed(3)
    for layer in range(LAYERS):
        mine = [torch.randn(HEADS // 2, LENGTH, DIM, generator=make) for _ in range(3)]
        store.prefill_layer(row, layer, *(mine if ranks else [torch.cat([x, x]) for x in mine]), 0.25)
    return store


@pytest.mark.parametrize(
    "policy",
    [
        SnapKV(budget=0.4, window=4),
        AdaSnapKV(budget=0.4, window=4),
        KVCompress(budget=0.4),
        ThinK(keep_channels=0.5, window=4, keep_tokens=0.5),
    ],
    ids=lambda policy: type(policy).__name__,
)
@pytest.mark.parametrize("index", [0, 1])
def test_a_process_holds_its_heads_of_the_common_plan(policy, index):
    """Counts of slots and the attention of the local heads, are those of a single process."""
    whole, part = read(policy, None), read(policy, Alike(index))
    mine = slice(index * HEADS // 2, (index + 1) * HEADS // 2)
    rows = torch.tensor([0])
    for tier in range(len(policy.tiers)):
        counts = whole.view(rows).num_slots(tier)[..., mine]
        # Of all heads, a view has those of the local ones twice here. Equal scores may fall to either twin.
        assert torch.equal(counts.repeat(1, 1, 2), part.view(rows).num_slots(tier)) and counts.any()
    query = torch.randn(1, HEADS, DIM, generator=torch.Generator().manual_seed(4))
    for store, heads in ((whole, slice(None)), (part, mine)):
        store.begin_step(rows)
        store.outputs = [
            store.attend(layer, query[:, heads], *[torch.ones(1, HEADS, DIM)[:, heads]] * 2, 0.25)
            for layer in range(LAYERS)
        ]
        store.end_step()
    for one, other in zip(whole.outputs, part.outputs, strict=True):
        torch.testing.assert_close(one[:, mine], other, rtol=1e-5, atol=1e-6)  # fp32 sums of other lengths


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.int64, torch.float16, torch.float32])
def test_tensors_of_every_dtype_are_exchanged(dtype):
    """By a group of one process, which gets what it gave."""
    values = (torch.arange(12) - 5).view(3, 4).to(dtype).mT  # not contiguous
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        ranks = ProcessRanks(torch.device("cpu"))
        result = ranks.gather(values, -1)
        assert (ranks.size, ranks.index) == (1, 0) and result.dtype == dtype and torch.equal(result, values)
        assert ranks.totals([3, 1 << 40]) == [3, 1 << 40] and ranks.most(7) == 7
    finally:
        distributed.destroy_process_group()
