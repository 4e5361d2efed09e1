"""Decode steps made of the Triton operations alone against the same steps on the reference's."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed (pip install 'kvbench[test]')")

from page_helpers import PAGE_BYTES, tier_format
from triton_helpers import DEVICE, random_queries

from kvbench.kernels.dispatch import get_backend, gpu_backend
from kvbench.kernels.operands import TierPages
from kvbench.kernels.pool import PagePool
from kvbench.kernels.reference.pages import region
from kvbench.kernels.table import PageTable

SEQUENCES, HEADS, COLUMNS, STEPS, HEAVY = 2, 2, 3, 2, 3


def on_device(formats: list, steps: list) -> tuple:
    """Appends, demotes the oldest token of the high tier once it is full, attends, adds scores: no host in between."""
    backend = gpu_backend(DEVICE)
    lists = torch.arange(SEQUENCES * HEADS, device=DEVICE)
    size = tuple(fmt.tokens_per_page for fmt in formats)
    pool, held = backend.tables(PAGE_BYTES, 24, size, (len(lists), 1, 1), COLUMNS, DEVICE)
    pool.pages.zero_()
    outs = []
    for step, (q, k, v) in enumerate(steps):
        count = held.num_slots[0].long()
        full = count >= HEAVY
        first = held.reserve(lists, 0, (~full).long(), at_most=0)
        down = held.reserve(lists, 1, full.long(), at_most=0)
        oldest = torch.full_like(count, step % HEAVY)
        source = held.lookup(lists, 0, oldest)
        target = held.lookup(lists, 1, torch.where(full, down, -1))
        backend.demote(pool.pages, *formats, *source, *target)
        page, slot = held.lookup(lists, 0, torch.where(full, oldest, first))
        backend.write_keys(pool.pages, formats[0], page, slot, k.to(DEVICE))
        backend.write_values(pool.pages, formats[0], page, slot, v.to(DEVICE))
        backend.write_tracked(pool.pages, formats[0], page, slot, 0.0, torch.full_like(slot, step))
        shape = (SEQUENCES, HEADS)
        tiers = [
            TierPages(fmt, held.page_ids(lists, t, COLUMNS).view(*shape, -1), *[held.num_slots[t].view(shape)] * 2)
            for t, fmt in enumerate(formats)
        ]
        out, _, _ = backend.paged_decode(
            q.to(DEVICE), pool.pages, tiers, None, 0.125, group="max", accumulate=True, pages_per_part=1
        )
        outs.append(out.cpu())
    pool.check()
    return torch.stack(outs), pool.pages.cpu(), held.num_slots.cpu(), tiers


def on_reference(formats: list, steps: list) -> tuple:
    """The same steps by the reference, which may choose on the host."""
    backend = get_backend("torch")
    lists = torch.arange(SEQUENCES * HEADS)
    pool = PagePool(PAGE_BYTES, 24, growable=False)
    pool.pages.zero_()
    table = PageTable(pool, tuple(fmt.tokens_per_page for fmt in formats), SEQUENCES, 1, HEADS, COLUMNS)
    outs = []
    for step, (q, k, v) in enumerate(steps):
        if int(table.num_slots[0, 0]) < HEAVY:
            slot = table.reserve(lists, 0, torch.ones_like(lists))
        else:
            slot = torch.full_like(lists, step % HEAVY)
            target = table.lookup(lists, 1, table.reserve(lists, 1, torch.ones_like(lists)))
            source = table.lookup(lists, 0, slot)
            keys, values = backend.read_slots(pool.pages, formats[0], *source)
            backend.write_keys(pool.pages, formats[1], *target, keys)
            backend.write_values(pool.pages, formats[1], *target, values)
            backend.write_tracked(
                pool.pages, formats[1], *target, *backend.read_tracked(pool.pages, formats[0], *source)
            )
        page, slot = table.lookup(lists, 0, slot)
        backend.write_keys(pool.pages, formats[0], page, slot, k)
        backend.write_values(pool.pages, formats[0], page, slot, v)
        backend.write_tracked(pool.pages, formats[0], page, slot, 0.0, torch.full_like(slot, step))
        shape = (SEQUENCES, HEADS)
        tiers = [
            TierPages(fmt, table.page_ids(lists, t, COLUMNS).view(*shape, -1), *[table.num_slots[t].view(shape)] * 2)
            for t, fmt in enumerate(formats)
        ]
        out, _, scores = backend.paged_decode(q, pool.pages, tiers, None, 0.125, group="max")
        for tier, score in zip(tiers, scores, strict=True):
            backend.add_scores(pool.pages, tier, score)
        outs.append(out)
    return torch.stack(outs), pool.pages, table.num_slots, tiers


def test_steps_of_reserving_demoting_writing_and_attending_equal_the_reference():
    """Outputs and scores to 1e-5 and every other byte of every page, over steps that fill a tier and demote from it."""
    formats = [tier_format(bits, 64, track=("score", "pos")) for bits in ("8,4", "4,2")]
    make = torch.Generator().manual_seed(2)
    rows = SEQUENCES * HEADS
    steps = [
        (random_queries(SEQUENCES, 3 * HEADS, 64, seed), *(torch.randn(rows, 64, generator=make) for _ in range(2)))
        for seed in range(STEPS + HEAVY)
    ]
    out, pages, slots, tiers = on_device(formats, steps)
    want_out, want_pages, want_slots, want_tiers = on_reference(formats, steps)
    assert slots[1].tolist() == [STEPS] * rows and torch.equal(slots, want_slots)
    torch.testing.assert_close(out, want_out, rtol=0, atol=1e-5)
    for fmt, tier, reference in zip(formats, tiers, want_tiers, strict=True):
        ids = reference.ids[..., 0].flatten()
        assert torch.equal(tier.ids[..., 0].flatten().cpu(), ids)
        scores = [region(x, fmt, "score")[ids] for x in (pages, want_pages)]
        assert float(scores[1].sum()) > 1
        torch.testing.assert_close(*scores, rtol=0, atol=1e-5)
        region(pages, fmt, "score")[ids] = scores[1]
    assert torch.equal(pages, want_pages)
