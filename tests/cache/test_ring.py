"""Rings of newest tokens: what of a layer is seen, and which counts follow from a plain list of tokens."""

import pytest
import torch

from kvbench.cache.buffered import ResidualBuffer
from kvbench.policy import Residual

ROWS, LAYERS, HEADS, DIM = 5, 2, 3, 4


def ring_of(**residual) -> ResidualBuffer:
    """A ring of 6 tokens per list, in front of groups of 2, with a number of its own in every element."""
    ring = ResidualBuffer(
        Residual(num_tokens=6, **residual), (ROWS, LAYERS, HEADS), DIM, torch.float16, 2, torch.device("cpu")
    )
    ring.k.copy_(torch.arange(ring.k.numel()).view_as(ring.k) % 2048)
    ring.v.copy_(torch.arange(ring.v.numel()).view_as(ring.v) % 1024)
    return ring


@pytest.mark.parametrize(
    ("rows", "shared"),
    [([0, 1, 2], True), ([3], True), ([2, 3, 4], True), ([1, 3], False), ([2, 1], False), ([], False)],
)
def test_rows_that_follow_one_another_are_not_copied(rows, shared):
    """One layer of any rows, in their order; a view of the rings where they lie side by side."""
    ring, which = ring_of(), torch.tensor(rows, dtype=torch.int64)
    for layer in range(LAYERS):
        for found, whole in zip(ring.of_layer(which, layer), (ring.k, ring.v), strict=True):
            assert found.equal(torch.stack([whole[row, layer] for row in rows]) if rows else whole[:0, layer])
            assert (found.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()) == shared


@pytest.mark.parametrize("v_flush", ["all", "oldest"])
def test_bytes_of_a_list(v_flush):
    """Six keys, and six values or one more where the newest is written before the oldest leaves."""
    ring = ring_of(v_flush=v_flush)
    values = 6 + (v_flush == "oldest")
    assert ring.list_bytes == (6 + values) * DIM * 2
    lists = ROWS * LAYERS * HEADS
    assert ring.allocated_bytes == lists * (ring.list_bytes + 3 * 4) and len(ring.num_k) == lists


@pytest.mark.parametrize("hold_prompt", [True, False])
@pytest.mark.parametrize("v_flush", ["all", "oldest"])
def test_counts_follow_plain_lists(v_flush, hold_prompt):
    """Prompts of 0 to 20 tokens and 15 steps: keys leave when 6 wait, values with them or one by one."""
    ring = ring_of(v_flush=v_flush, hold_prompt=hold_prompt)
    counts = torch.arange(21)
    lists = torch.arange(21)
    keys, values = ring.split_prompt(counts)
    for n, k, v in zip(counts.tolist(), keys.tolist(), values.tolist(), strict=True):
        assert k == n // 6 * 6 if hold_prompt else k == n // 2 * 2
        assert v == (max(0, n - 6) if hold_prompt and v_flush == "oldest" else k)
    ring.hold(lists, keys, values, counts)
    waiting = [(n - k, n - v) for n, k, v in zip(counts.tolist(), keys.tolist(), values.tolist(), strict=True)]
    total = counts.tolist()
    for _ in range(15):
        after = []
        for k, v in waiting:
            k, v = k + 1, v + 1
            leaves = k >= 6
            if v_flush == "all":
                v = 0 if leaves else v
            elif v > 6:
                v = 6
            after.append((0 if leaves else k, v))
        waiting, total = after, [n + 1 for n in total]
        keys, values = ring.after_append(lists)
        assert [(n - k, n - v) for n, k, v in zip(total, keys.tolist(), values.tolist(), strict=True)] == waiting
        ring.hold(lists, keys, values, torch.tensor(total))
