"""Slots written, read, moved and searched in C++ against the torch reference: the same bytes, bit for bit."""

import pytest
import torch
from selection import few
from test_cpu import ISAS, pytestmark  # noqa: F401

from kvbench.kernels.backend import REFERENCE
from kvbench.kernels.cpu import abi as cpu_abi
from kvbench.kernels.cpu.backend import Cpu
from kvbench.kernels.format import PageFormat, SlotFormat
from kvbench.kernels.operands import TierPages

FORMATS = {
    "fp16": {"k_bits": 16, "v_bits": 16},
    "bf16": {"k_bits": 16, "v_bits": 16, "dtype": torch.bfloat16},
    "fp32": {"k_bits": 32, "v_bits": 32, "dtype": torch.float32},
    "fp8": {"k_bits": 8, "v_bits": 8, "fp8": True},
    "few-channels": {"k_bits": 16, "v_bits": 16, "k_channels": 11, "track": ("pos",)},
    "few-channels32": {"k_bits": 32, "v_bits": 32, "dtype": torch.float32, "k_channels": 7},
    "few-channels-v4": {"k_bits": 16, "v_bits": 4, "k_channels": 9},
    "k8v4": {"k_bits": 8, "v_bits": 4, "track": ("score", "pos")},
    "k4v2": {"k_bits": 4, "v_bits": 2, "track": ("pos",)},
    "k2v1": {"k_bits": 2, "v_bits": 1},
    "groups": {"k_bits": 4, "v_bits": 2, "k_groups": 2, "v_groups": 4},
    "symmetric": {"k_bits": 8, "v_bits": 4, "symmetric": True, "v_groups": 2},
    "channel": {"k_bits": 2, "v_bits": 2, "k_channel_group": 32, "v_groups": 2},
    "channel-symmetric": {"k_bits": 4, "v_bits": 2, "k_channel_group": 8, "symmetric": True},
    "channel3": {"k_bits": 3, "v_bits": 3, "k_channel_group": 16, "v_groups": 2},
    "k3v3": {"k_bits": 3, "v_bits": 3, "track": ("score",), "symmetric": True},
    "fp8-scaled": {"k_bits": 8, "v_bits": 8, "k_code": "e4m3_scaled", "v_code": "e4m3_scaled", "v_groups": 2},
    "lloyd": {"k_bits": 4, "v_bits": 3, "k_code": "lloyd", "v_code": "lloyd"},
    "lloyd2": {"k_bits": 3, "v_bits": 2, "k_code": "lloyd", "v_code": "lloyd", "k_groups": 2},
    "turboquant": {"k_bits": 3, "v_bits": 3, "k_code": "lloyd", "track": ("pos",)},
    "fp4": {"k_bits": 4, "v_bits": 4, "k_code": "nvfp4", "v_code": "mxfp4"},
    "fp4-blocks": {"k_bits": 4, "v_bits": 4, "k_code": "mxfp4", "v_code": "nvfp4", "k_groups": 2, "v_groups": 4},
    "q5": {"k_bits": 5, "v_bits": 5, "k_code": "q5_0", "v_code": "q5_1", "k_groups": 2, "v_groups": 2},
    "q4": {"k_bits": 4, "v_bits": 4, "k_code": "q4_1", "v_code": "q4_0", "k_groups": 2, "v_groups": 2},
    "q8-nl": {"k_bits": 8, "v_bits": 4, "k_code": "q8_0", "v_code": "iq4_nl", "v_groups": 2, "track": ("pos",)},
    "nl-e5m2": {"k_bits": 4, "v_bits": 8, "k_code": "iq4_nl", "v_code": "e5m2", "k_groups": 2},
    "e5m2-int4": {"k_bits": 8, "v_bits": 4, "k_code": "e5m2", "v_code": "zero_point"},
    "latent": {"k_bits": 16, "v_bits": 16, "keys_only": True, "track": ("pos",)},
    "latent4": {"k_bits": 4, "v_bits": 4, "k_groups": 2, "keys_only": True},
    "latent-channel": {"k_bits": 2, "v_bits": 2, "k_channel_group": 16, "keys_only": True},
    "fp4-searched": {"k_bits": 4, "v_bits": 4, "k_code": "nvfp4_4over6", "v_code": "mxfp4_up", "k_groups": 2},
}


@pytest.fixture(params=few(ISAS, *ISAS[-1:]))
def isa(request, monkeypatch):
    """Every build that this CPU runs, one after the other, with three threads for the smallest call, and no number
    where an earlier call left one."""
    monkeypatch.setenv(cpu_abi.ISA_VARIABLE, request.param)
    threads, library = torch.get_num_threads(), cpu_abi.load()
    library.kvb_set_work_per_thread(1.0)
    library.kvb_spoil_scratch(1)
    torch.set_num_threads(3)
    yield request.param
    torch.set_num_threads(threads)
    library.kvb_set_work_per_thread(1e6)
    library.kvb_spoil_scratch(0)


def page_format(name: str, head_dim: int) -> PageFormat:
    """Pages of about three quanta of slots."""
    slot = SlotFormat(head_dim, **FORMATS[name])
    return PageFormat(slot, -(-3 * slot.quantum_bytes // 16) * 16)


def vectors(num: int, head_dim: int, seed: int) -> torch.Tensor:
    """Vectors of many sizes: near fp16's smallest and beyond its largest, constant, zero, and exactly between codes."""
    make = torch.Generator().manual_seed(seed)
    x = torch.randn(num, head_dim, generator=make) * torch.logspace(-9, 4, num)[:, None]
    x[1], x[2] = 0.0, 3.25
    x[3] = torch.randint(-4, 5, (head_dim,), generator=make) / 2  # ties, for rounding half to even
    x[4, 0] = 70000.0
    x[5], x[5, 1] = 1.0, 1.0 + 1e-7  # a scale that is 0 in fp16
    return x


def places(fmt: PageFormat, num: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Distinct slots in shuffled order (of whole groups where keys need them), and how many pages they lie in."""
    group, tokens = fmt.slot.group_tokens, fmt.tokens_per_page
    pages = -(-num // tokens) + 1
    order = torch.randperm(pages * tokens // group, generator=torch.Generator().manual_seed(seed))[: num // group]
    at = (order[:, None] * group + torch.arange(group)).flatten()
    return at // tokens, at % tokens, pages


@pytest.mark.parametrize("head_dim", [16, 80])
@pytest.mark.parametrize("name", FORMATS)
def test_bytes_written_and_values_read_are_the_reference_s(name: str, head_dim: int, isa: str):
    """Every format and build: all bytes of all pages after writing keys and values, and all floats read back."""
    fmt = page_format(name, head_dim)
    num = 8 * fmt.slot.token_quantum
    page, slot, num_pages = places(fmt, num, 1)
    k, v = vectors(num, head_dim, 2), vectors(num, head_dim, 3)
    want = torch.full((num_pages, fmt.page_bytes), 0xA5, dtype=torch.uint8)
    got = want.clone()
    for pages, ops in ((want, REFERENCE), (got, Cpu())):
        ops.write_keys(pages, fmt, page, slot, k)
        ops.write_values(pages, fmt, page, slot, v.half())
    assert torch.equal(got, want)
    read, expected = (ops.read_slots(want, fmt, page, slot) for ops in (Cpu(), REFERENCE))
    for a, b in zip(read, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)  # an infinite scale times code 0 is NaN


def test_many_slots_are_written_alike_by_several_threads():
    """Enough slots for two threads to share."""
    fmt, threads = page_format("k4v2", 64), torch.get_num_threads()
    page, slot, num_pages = places(fmt, 1000, 1)
    x = vectors(1000, 64, 2)
    want = torch.zeros(num_pages, fmt.page_bytes, dtype=torch.uint8)
    got = want.clone()
    REFERENCE.write_keys(want, fmt, page, slot, x)
    try:
        torch.set_num_threads(3)
        Cpu().write_keys(got, fmt, page, slot, x)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(got, want)


@pytest.mark.parametrize(
    "name", ["fp16", "bf16", "fp8", "k8v4", "groups", "symmetric", "fp8-scaled", "turboquant", "fp4-blocks"]
)
def test_a_nan_stays_where_it_is(name: str, isa: str):
    """A vector with a NaN reads back as NaN (coded: all of it; elements: that channel), its neighbours as they were."""
    fmt = page_format(name, 64)
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    x[1, 5] = float("nan")
    pages = torch.zeros(1, fmt.page_bytes, dtype=torch.uint8)
    at = torch.zeros(3, dtype=torch.int64), torch.arange(3)
    Cpu().write_keys(pages, fmt, *at, x)
    Cpu().write_values(pages, fmt, *at, x)
    for read in Cpu().read_slots(pages, fmt, *at):
        assert read[1, 5].isnan() and read[[0, 2]].isfinite().all()


def test_slots_and_pages_that_do_not_exist_are_refused():
    """No write goes beyond a page or the pool."""
    fmt = page_format("k4v2", 64)
    pages, x = torch.zeros(2, fmt.page_bytes, dtype=torch.uint8), torch.randn(1, 64)
    no_page, no_slot = "a page that the pool does not have", "a slot beyond a page"
    wrong = ((2, 0, no_page), (-1, 0, no_page), (0, fmt.tokens_per_page, no_slot), (0, -1, no_slot))
    for page, slot, said in wrong:
        with pytest.raises(AssertionError, match=said):
            Cpu().write_values(pages, fmt, torch.tensor([page]), torch.tensor([slot]), x)
    assert not pages.any()
    with pytest.raises(ValueError, match="cannot move one by one"):
        Cpu().move_slots(pages, page_format("channel", 64), *[torch.tensor([0])] * 4)


def test_what_the_compiled_code_does_not_cover_goes_to_the_reference():
    """Pages that are no plain array, and heads wider than the C++ buffers."""
    fmt = page_format("k4v2", 64)
    wide = torch.zeros(4, 2 * fmt.page_bytes, dtype=torch.uint8)
    x = torch.randn(1, 64)
    at = torch.tensor([2]), torch.tensor([1])
    part = wide[:, : fmt.page_bytes]
    Cpu().write_keys(part, fmt, *at, x)
    assert wide.any() and not wide[:, fmt.page_bytes :].any()
    counts = torch.ones(1, 1, 1, dtype=torch.int64)
    tier = TierPages(fmt, torch.zeros(1, 1, 1, 1, dtype=torch.int64), counts, counts)
    assert Cpu().open_step(part, [tier], num_q_heads=1, seen=counts[0, 0], target=(0, counts - 1, counts)) is None
