"""Writing, reading, demoting and moving slots by the Triton kernels: the same bytes as the torch reference."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed (pip install 'kvbench[test]')")

from page_helpers import PAGE_BYTES, tier_format
from triton_helpers import DEVICE, poisoned_memory  # noqa: F401

from kvbench.kernels.backend import REFERENCE
from kvbench.kernels.format import PageFormat
from kvbench.kernels.gpu.backend import Gpu

TRACK = ("score", "pos")
FORMATS = {
    "k16": ("16,16", 64, "fp16", {}),
    "bf16": ("16,16", 80, "bf16", {}),
    "fp32": ("32,32", 64, "fp32", {}),
    "k8v4": ("8,4", 128, "fp16", {}),
    "k4v2": ("4,2", 64, "fp16", {}),
    "k2v1-groups": ("2,1", 80, "fp16", {"k_groups": 4, "v_groups": 8}),
    "k4v4-symmetric": ("4,4", 64, "fp16", {"symmetric": True}),
    "k1v16": ("1,16", 80, "fp16", {}),
    "fp8": ("8,8", 64, "fp16", {"fp8": True}),
    "kivi": ("2,2", 64, "fp16", {"k_channel_group": 32, "v_groups": 2}),
    "kivi24": ("4,1", 80, "fp16", {"k_channel_group": 24, "v_groups": 5}),
    "k3v3": ("3,3", 64, "fp16", {}),
    "kivi3": ("3,3", 80, "fp16", {"k_channel_group": 16, "v_groups": 2}),
    "fp8-scaled": ("8,8", 64, "fp16", {"k_code": "e4m3_scaled", "v_code": "e4m3_scaled", "v_groups": 2}),
    "lloyd": ("4,3", 64, "fp16", {"k_code": "lloyd", "v_code": "lloyd"}),
    "lloyd2": ("3,2", 80, "fp16", {"k_code": "lloyd", "v_code": "lloyd", "k_groups": 2}),
    "fp4": ("4,4", 64, "fp16", {"k_code": "nvfp4", "v_code": "mxfp4", "k_groups": 4, "v_groups": 2}),
    "few-channels": ("16,16", 64, "fp16", {"k_channels": 39}),
    "few-channels80": ("16,4", 80, "bf16", {"k_channels": 33}),
    "kivi8-symmetric": ("4,4", 64, "fp16", {"k_channel_group": 8, "symmetric": True}),
}
BOOKS = {"k_code": "book_channels", "v_code": "book", "k_apart": 2, "v_apart": 1}  # the reference codes these


def hard_vectors(count: int, head_dim: int) -> torch.Tensor:
    """Vectors fp32 [count, D] with constants, zeros, halves between codes, tiny and huge ranges among them."""
    x = 3 * torch.randn(count, head_dim, generator=torch.Generator().manual_seed(5))
    x[0], x[1] = 1.5, 0.0
    x[:, 3], x[:, 4] = torch.arange(count) % 7, torch.arange(count) % 31  # along a channel of 32 tokens too
    x[3] *= 1e-9  # zeros of both signs once in fp16
    x[4] *= 1e3
    x[5, 1:] = 0.0
    # Exactly halfway between codes of 4, 2, 1 and 8 bits: a step of 2, and odd numbers.
    x[2], x[6], x[7] = (torch.arange(head_dim) % n for n in (31, 7, 3))
    x[8], x[8, :2] = torch.arange(head_dim) * 2 + 1, torch.tensor([0.0, 510.0])
    return x


def places(fmt: PageFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """Pages and slots of three runs of whole groups on different pages, one of them at the end of its page."""
    run, last = max(8, fmt.slot.group_tokens), fmt.tokens_per_page
    start = torch.tensor([0, last - run, 0]).repeat_interleave(run)
    return torch.tensor([4, 1, 3]).repeat_interleave(run), torch.arange(run).repeat(3) + start


@pytest.mark.parametrize("case", FORMATS.values(), ids=FORMATS.keys())
def test_written_bytes_and_what_they_read_as_equal_the_reference(case: tuple):
    """Page bytes are identical, neighbours included; entries without a page write nothing and read as zero."""
    bits, head_dim, kind, extra = case
    fmt = tier_format(bits, head_dim, kind, track=TRACK, **extra)
    page, slot = places(fmt)
    run = len(page) // 3
    skipped = page.clone()
    skipped[run : 2 * run] = -1
    keep = skipped >= 0
    k, v = hard_vectors(len(page), head_dim), hard_vectors(len(page), head_dim).flip(0)
    want = torch.randint(256, (6, PAGE_BYTES), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    got = want.to(DEVICE, copy=True)
    REFERENCE.write_keys(want, fmt, page[keep], slot[keep], k[keep])
    REFERENCE.write_values(want, fmt, page[keep], slot[keep], v[keep])
    Gpu().write_keys(got, fmt, skipped.to(DEVICE), slot.to(DEVICE), k.to(DEVICE))
    Gpu().write_values(got, fmt, skipped.to(DEVICE), slot.to(DEVICE), v.to(DEVICE))
    assert torch.equal(got.cpu(), want)
    read = Gpu().read_slots(got, fmt, skipped.to(DEVICE), slot.to(DEVICE))
    for mine, theirs in zip(read, REFERENCE.read_slots(want, fmt, page[keep], slot[keep]), strict=True):
        assert torch.equal(mine.cpu()[keep], theirs)
        assert not mine.cpu()[~keep].any()


def test_half_precision_vectors_and_one_by_one_writes_give_the_same_bytes():
    """bf16 and fp16 vectors are encoded from their fp32 values; appending one token at a time changes nothing."""
    fmt = tier_format("4,2", 64)
    page, slot = places(fmt)
    x = hard_vectors(len(page), 64).bfloat16()
    bulk, single = (torch.zeros(6, PAGE_BYTES, dtype=torch.uint8, device=DEVICE) for _ in range(2))
    Gpu().write_keys(bulk, fmt, page.to(DEVICE), slot.to(DEVICE), x.to(DEVICE))
    for i in range(len(page)):
        Gpu().write_keys(single, fmt, page[i : i + 1].to(DEVICE), slot[i : i + 1].to(DEVICE), x[i : i + 1].to(DEVICE))
    want = torch.zeros(6, PAGE_BYTES, dtype=torch.uint8)
    REFERENCE.write_keys(want, fmt, page, slot, x)
    assert torch.equal(bulk.cpu(), want) and torch.equal(single.cpu(), want)


def test_e4m3_rounds_like_torch():
    """Every e4m3 value, the midpoints between neighbours, both signs, zeros, what saturates, and NaN."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    finite = codes[codes.isfinite()].sort().values
    edge = torch.tensor([-0.0, 0.0, 449.0, -1e9, float("inf"), float("nan"), 2.0**-10, 2.0**-11, 1.1 * 2.0**-10])
    x = torch.cat([finite, (finite[1:] + finite[:-1]) / 2, edge])
    x = torch.cat([x, torch.zeros(-len(x) % 64)]).view(-1, 64)
    fmt = tier_format("8,8", 64, fp8=True)
    page, slot = torch.zeros(len(x), dtype=torch.int64), torch.arange(len(x))
    want, got = (
        torch.zeros(1, PAGE_BYTES, dtype=torch.uint8),
        torch.zeros(1, PAGE_BYTES, dtype=torch.uint8, device=DEVICE),
    )
    REFERENCE.write_values(want, fmt, page, slot, x)
    Gpu().write_values(got, fmt, page.to(DEVICE), slot.to(DEVICE), x.to(DEVICE))
    assert torch.equal(got.cpu(), want)


@pytest.mark.parametrize(
    ("source", "target", "channels"),
    [
        *(("8,4", "4,2", (0, 0)), ("16,16", "8,1", (0, 0)), ("4,2", "2,2", (0, 0))),
        *(("16,16", "16,4", (0, 33)), ("16,16", "16,4", (33, 0))),
    ],
)
def test_demotion_writes_the_bytes_of_reading_and_writing_again(source: str, target: str, channels: tuple[int, int]):
    """Codes, scales, score and position of demoted slots; entries without a target leave everything as it is."""
    origin = tier_format(source, 80, track=TRACK, k_groups=1 if source == "16,16" else 2, k_channels=channels[0])
    lower = tier_format(target, 80, track=TRACK, v_groups=2, k_channels=channels[1])
    page, slot = places(origin)
    page, slot = page[:12], slot[:12]
    x = hard_vectors(12, 80)
    want = torch.randint(256, (8, PAGE_BYTES), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    REFERENCE.write_keys(want, origin, page, slot, x)
    REFERENCE.write_values(want, origin, page, slot, x.flip(0))
    REFERENCE.write_tracked(want, origin, page, slot, torch.rand(12), torch.arange(12))
    got = want.to(DEVICE, copy=True)
    onto = torch.where(torch.arange(12) % 3 == 1, -1, 6 + torch.arange(12) % 2)
    at = torch.arange(12) * min(2, (lower.tokens_per_page - 1) // 11)  # 16-bit keys leave room for 16 slots in a page
    keep = onto >= 0
    k, v = REFERENCE.read_slots(want, origin, page[keep], slot[keep])
    REFERENCE.write_keys(want, lower, onto[keep], at[keep], k)
    REFERENCE.write_values(want, lower, onto[keep], at[keep], v)
    REFERENCE.write_tracked(
        want, lower, onto[keep], at[keep], *REFERENCE.read_tracked(want, origin, page[keep], slot[keep])
    )
    Gpu().demote(got, origin, lower, *(x.to(DEVICE) for x in (page, slot, onto, at)))
    assert torch.equal(got.cpu(), want)


def test_demotion_that_cannot_be_is_refused():
    """Into per-channel keys, and between tiers that track different fields."""
    pages = torch.zeros(1, PAGE_BYTES, dtype=torch.uint8)
    none = [torch.zeros(0, dtype=torch.int64)] * 4
    plain, channel = tier_format("8,4", 64), tier_format("2,2", 64, k_channel_group=32)
    with pytest.raises(ValueError, match=r"per-channel keys \(group 32\) one by one; give the lower tier k_axis=token"):
        Gpu().demote(pages, plain, channel, *none)
    with pytest.raises(ValueError, match="the same fields in both"):
        Gpu().demote(pages, plain, tier_format("4,2", 64, track=("pos",)), *none)
    book = tier_format("3,3", 64, **BOOKS)
    for pair in ((plain, book), (book, plain)):
        with pytest.raises(NotImplementedError, match="calibrated tables; use backend=torch"):
            Gpu().demote(pages, *pair, *none)


@pytest.mark.parametrize(
    "case", [*(c for c in FORMATS.values() if "k_channel_group" not in c[3]), ("3,3", 64, "fp16", BOOKS)]
)
def test_moved_slots_are_copied_byte_for_byte(case: tuple):
    """All regions of a slot go along, and nothing beside it changes."""
    bits, head_dim, kind, extra = case
    fmt = tier_format(bits, head_dim, kind, track=TRACK, **extra)
    want = torch.randint(256, (6, PAGE_BYTES), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    last = fmt.tokens_per_page - 1
    moves = [torch.tensor(x) for x in ([0, 5, 5], [0, last, 3], [1, 1, 4], [last, 2, 3])]
    got = want.to(DEVICE, copy=True)
    REFERENCE.move_slots(want, fmt, *moves)
    moves[2] = torch.cat([moves[2], torch.tensor([-1])])
    padded = [torch.cat([x, torch.tensor([0])]) if len(x) == 3 else x for x in moves]
    Gpu().move_slots(got, fmt, *(x.to(DEVICE) for x in padded))
    assert torch.equal(got.cpu(), want)


def test_slots_that_share_scales_or_bounds_do_not_move_alone():
    """As in the reference, with its remedy."""
    fmt = tier_format("2,2", 64, k_channel_group=32)
    none = [torch.zeros(0, dtype=torch.int64)] * 4
    with pytest.raises(ValueError, match="cannot move one by one; evict before quantising"):
        Gpu().move_slots(torch.zeros(1, PAGE_BYTES, dtype=torch.uint8), fmt, *none)
    bounded = PageFormat(tier_format("16,16", 64).slot, PAGE_BYTES, bounds=True)
    with pytest.raises(ValueError, match="bounds of their keys cannot move"):
        Gpu().move_slots(torch.zeros(1, PAGE_BYTES, dtype=torch.uint8), bounded, *none)
