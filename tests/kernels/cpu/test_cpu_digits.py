"""Attention in whole numbers (csrc/digits.h) where one scaling must serve numbers of very different size."""

import pytest
import torch
from oracles import slow_attention
from page_helpers import PAGE_BYTES, Cache, tier_format
from selection import few
from test_cpu import ISAS, pytestmark  # noqa: F401

from kvbench.kernels.backend import REFERENCE
from kvbench.kernels.cpu.backend import Cpu
from kvbench.kernels.format import PageFormat, SlotFormat
from kvbench.kernels.operands import TierPages
from kvbench.kernels.reference.pages import region

FORMATS = {
    "K4V2": {"k_bits": 4, "v_bits": 2},
    "K8V4": {"k_bits": 8, "v_bits": 4},
    "K2V8": {"k_bits": 2, "v_bits": 8},
    "symmetric": {"k_bits": 4, "v_bits": 4, "symmetric": True},
    "groups": {"k_bits": 4, "v_bits": 4, "k_groups": 2, "v_groups": 2},
    "channel": {"k_bits": 2, "v_bits": 2, "k_channel_group": 32},
}
NUM_TOKENS, HEAD_DIM, GROUP = 4310, 64, 3  # three chunks of a list; a last page and a last quad that are not full


def outlier_query(make: torch.Generator) -> tuple[torch.Tensor, ...]:
    """One channel of the query a thousand times the others, against keys that are as much smaller there."""
    q, k, v = torch.randn(GROUP, HEAD_DIM, generator=make), *random_tokens(make)
    q[:, 7] *= 1000
    k[:, 7] /= 1000
    return q, k, v


def peaked(make: torch.Generator) -> tuple[torch.Tensor, ...]:
    """Logits from -100 to 100: most weights vanish beside one."""
    return (25 * torch.randn(GROUP, HEAD_DIM, generator=make), *random_tokens(make))


def uneven_values(make: torch.Generator) -> tuple[torch.Tensor, ...]:
    """Values of 1e-3 to 1e3, so that a chunk's scales differ by a million."""
    k, v = random_tokens(make)
    size = 10 ** (6 * torch.rand(NUM_TOKENS, 1, generator=make) - 3)
    return torch.randn(GROUP, HEAD_DIM, generator=make), k, v * size


def tiny(make: torch.Generator) -> tuple[torch.Tensor, ...]:
    """A query, keys and values near the smallest scales that fp16 has."""
    k, v = random_tokens(make)
    return 1e-30 * torch.randn(GROUP, HEAD_DIM, generator=make), 1e-6 * k, 1e-6 * v


def random_tokens(make: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [n, D]."""
    return torch.randn(NUM_TOKENS, HEAD_DIM, generator=make), torch.randn(NUM_TOKENS, HEAD_DIM, generator=make)


@pytest.mark.every(2)
@pytest.mark.parametrize("isa", few(ISAS, *ISAS[-1:]))
@pytest.mark.parametrize("case", [outlier_query, peaked, uneven_values, tiny], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", FORMATS)
def test_numbers_of_unlike_size_lose_no_more_than_in_fp32(name: str, case, isa, monkeypatch: pytest.MonkeyPatch):
    """Against float64 attention on what the pages hold, no build errs more than twice as much as plain fp32 C++, plus
    3e-6 of the largest output, which is 25 roundings of fp32."""
    fmt = PageFormat(SlotFormat(head_dim=HEAD_DIM, **FORMATS[name]), PAGE_BYTES)
    q, k, v = case(torch.Generator().manual_seed(11))
    held = NUM_TOKENS // fmt.slot.group_tokens * fmt.slot.group_tokens
    columns = -(-held // fmt.tokens_per_page)
    pages = torch.zeros(columns, PAGE_BYTES, dtype=torch.uint8)
    slot = torch.arange(held)
    page, within = slot // fmt.tokens_per_page, slot % fmt.tokens_per_page
    REFERENCE.write_keys(pages, fmt, page, within, k[:held])
    REFERENCE.write_values(pages, fmt, page, within, v[:held])
    keys, values = REFERENCE.read_slots(pages, fmt, page, within)
    exact = torch.stack([slow_attention.attend_one(x, keys, values, HEAD_DIM**-0.5)[0] for x in q])
    count = torch.full((1, 1), held)
    tiers = [TierPages(fmt, torch.arange(columns).view(1, 1, -1), count, count)]
    errors = {}
    for each in ("portable", isa):
        monkeypatch.setenv("KVBENCH_CPU_ISA", each)
        out = Cpu().paged_decode(q[None], pages, tiers, None, HEAD_DIM**-0.5)[0]
        errors[each] = float((out[0] - exact).abs().max())
    assert max(errors.values()) <= 2 * errors["portable"] + 3e-6 * float(exact.abs().max()), errors


@pytest.mark.parametrize("bits", ["4,2", "8,8"])
@pytest.mark.parametrize("where", ["v_scale", "v_zero", "k_scale", "k_zero"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_broken_scale_never_gives_a_number(bits: str, where: str, bad: float):
    """NaN or infinity in one slot's metadata comes out as no number in the heads that read it, and in no other."""
    fmt = tier_format(bits, 64)
    cache = Cache([fmt], [[[700, 30]]], 64)
    region(cache.pages, fmt, where)[cache.tiers[0].ids[0, 0, 0], 0, 5] = bad
    out, _, _ = Cpu().paged_decode(torch.ones(1, 6, 64), cache.pages, cache.tiers, None, 0.125)
    assert not out[0, :3].isfinite().all(-1).any()
    assert out[0, 3:].isfinite().all()


def test_what_an_earlier_call_left_behind_the_last_page_is_not_read():
    """Pages of 56 slots: the last one ends half a register before the registers of the list's weights do. A call
    with zero points that are no number leaves them there, and the next one must not weigh them, with zero either."""
    fmt = PageFormat(SlotFormat(head_dim=64, k_bits=4, v_bits=4, track=("score", "pos")), PAGE_BYTES)
    assert fmt.tokens_per_page == 56
    spoiled, cache = Cache([fmt], [[[2000]]], 64), Cache([fmt], [[[305]]], 64)
    region(spoiled.pages, fmt, "v_zero")[:] = float("nan")
    q = torch.ones(1, 3, 64)
    want, _, _ = REFERENCE.paged_decode(q, cache.pages, cache.tiers, None, 0.125)
    Cpu().paged_decode(q, spoiled.pages, spoiled.tiers, None, 0.125)
    out, _, _ = Cpu().paged_decode(q, cache.pages, cache.tiers, None, 0.125)
    torch.testing.assert_close(out, want, rtol=0, atol=1e-5)  # sums of 305 fp32 products in another order
