"""Slots written, read, moved and searched in C++ against the torch reference: the same bytes, bit for bit."""

import pytest
import torch
from selection import few

from kvbench.kernels.backend import REFERENCE
from kvbench.kernels.cpu import abi as cpu_abi
from kvbench.kernels.cpu.backend import Cpu
from kvbench.kernels.cpu.build import BuildError
from kvbench.kernels.format import PageFormat, SlotFormat
from kvbench.kernels.operands import Ring, SlotSearch, StepRing, StepScores, TierPages

try:
    ISAS = cpu_abi.available_isas()
    cpu_abi.load()
    ABSENT = ""
except BuildError as error:
    ISAS, ABSENT = [], str(error)
pytestmark = pytest.mark.skipif(bool(ABSENT), reason=ABSENT)

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
}


@pytest.fixture(params=few(ISAS, *ISAS[-1:]))
def isa(request, monkeypatch):
    """Every build that this CPU runs, one after the other, with three threads for the smallest call."""
    monkeypatch.setenv(cpu_abi.ISA_VARIABLE, request.param)
    threads, library = torch.get_num_threads(), cpu_abi.load()
    library.kvb_set_work_per_thread(1.0)
    torch.set_num_threads(3)
    yield request.param
    torch.set_num_threads(threads)
    library.kvb_set_work_per_thread(1e6)


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


@pytest.mark.parametrize("name", ["fp16", "fp32", "k8v4", "groups", "symmetric"])
def test_moved_slots_carry_all_their_bytes(name: str):
    """Codes, metadata and tracked fields, from page to page and within one; nothing else changes."""
    fmt = page_format(name, 64)
    num_pages = 6
    make = torch.Generator().manual_seed(1)
    want = torch.randint(0, 256, (num_pages, fmt.page_bytes), dtype=torch.uint8, generator=make)
    got = want.clone()
    page, slot, _ = places(fmt, 2 * fmt.slot.token_quantum, 5)
    half = len(page) // 2
    moves = page[:half], slot[:half], page[half:], slot[half:]
    REFERENCE.move_slots(want, fmt, *moves)
    Cpu().move_slots(got, fmt, *moves)
    assert torch.equal(got, want)


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


@pytest.mark.parametrize("by", ["mean", "score", "pos"])
def test_the_smallest_slot_is_found_as_a_plain_loop_finds_it(by: str, isa: str):
    """Ties, empty lists, full pages; all positions, those before one, those from one on, and a single one."""
    fmt = page_format("k8v4", 64)
    tokens, make = fmt.tokens_per_page, torch.Generator().manual_seed(7)
    held = torch.tensor([0, 1, tokens, 3 * tokens - 2, 5, 2 * tokens + 1])
    ids = torch.randperm(18, generator=make).view(6, 3)
    pages = torch.randint(0, 256, (18, fmt.page_bytes), dtype=torch.uint8, generator=make)
    score, pos = (REFERENCE.region(pages, fmt, name) for name in ("score", "pos"))
    score.copy_(torch.randint(0, 4, score.shape, generator=make) / 4)  # many ties
    pos.copy_(torch.randperm(score.numel(), generator=make).view(score.shape))
    seen, floor = torch.full((6,), 900), torch.tensor([0, 50, 200, 700, 899, 1000])
    single = pos[ids[:, 0], 0].long()
    for rule in ({}, {"first": 30}, {"before": torch.arange(6) * 60}, {"exact": single}, {"floor": floor}):
        value, slot, where = Cpu().slot_extreme(pages, fmt, ids, held, SlotSearch(by=by, seen=seen, **rule))
        for m in range(6):
            best = (float("inf"), -1, -1)
            for i in range(int(held[m])):
                page, at = ids[m, i // tokens], i % tokens
                position, x = int(pos[page, at]), score[page, at]
                if by == "mean":
                    start = max(position, int(rule["floor"][m])) if "floor" in rule else position
                    x = x / torch.tensor(max(1, int(seen[m]) - start))
                elif by == "pos":
                    x = float(position)
                allowed = position >= rule.get("first", 0)
                allowed &= "before" not in rule or position < int(rule["before"][m])
                allowed &= "exact" not in rule or position == int(rule["exact"][m])
                if allowed and (best[1] < 0 or (float(x), position) < (best[0], best[2])):
                    best = (float(x), i, position)
            assert (float(value[m]), int(slot[m]), int(where[m])) == best, (m, rule)


def tier_pages(fmt: PageFormat, counts: torch.Tensor, pool: int, seed: int) -> tuple[torch.Tensor, TierPages]:
    """A pool of `pool` pages with random finite contents, of which lists [S, L, H] hold `counts` slots."""
    make, tokens = torch.Generator().manual_seed(seed), fmt.tokens_per_page
    width = int(-(-counts.max() // tokens)) + 1
    pages = torch.zeros(pool, fmt.page_bytes, dtype=torch.uint8)
    page = torch.arange(pool).repeat_interleave(tokens)
    slot = torch.arange(tokens).repeat(pool)
    for write in (REFERENCE.write_keys, REFERENCE.write_values):
        write(pages, fmt, page, slot, torch.randn(len(page), fmt.slot.head_dim, generator=make))
    if "score" in fmt.slot.track:
        score, pos = torch.rand(len(page), generator=make), torch.arange(len(page)) % 90
        REFERENCE.write_tracked(pages, fmt, page, slot, score, pos)
    ids = torch.randperm(pool, generator=make)[: counts.numel() * width].view(*counts.shape, width)
    return pages, TierPages(fmt, ids, counts, counts)


@pytest.mark.parametrize("update", [None, "add", "replace"])
@pytest.mark.parametrize("skip_near", [0, 3])
def test_a_step_of_all_layers_equals_its_single_operations(update: str | None, skip_near: int, isa: str):
    """Write, attend, update the scores, layer by layer: outputs within 1e-5, bytes equal but for scores (1e-6)."""
    fmt = page_format("k8v4", 64)
    counts = torch.randint(1, 3 * fmt.tokens_per_page, (2, 3, 2), generator=torch.Generator().manual_seed(1))
    pages, tier = tier_pages(fmt, counts, 60, 2)
    last = counts - 1
    page = tier.ids.gather(-1, (last // fmt.tokens_per_page)[..., None])[..., 0]
    slot, seen = last % fmt.tokens_per_page, torch.tensor([88, 91])
    want = pages.clone()
    step = Cpu().open_step(
        pages,
        [tier],
        num_q_heads=6,
        seen=seen,
        target=(0, page, slot),
        scores=StepScores(group="max", update=update, skip_near=skip_near),
    )
    make = torch.Generator().manual_seed(3)
    for layer in range(3):
        q, k, v = (torch.randn(2, heads, 64, generator=make) for heads in (6, 2, 2))
        out = step.attend(layer, q, k, v, 0.125)
        at = page[:, layer].flatten(), slot[:, layer].flatten()
        REFERENCE.write_keys(want, fmt, *at, k.flatten(0, 1))
        REFERENCE.write_values(want, fmt, *at, v.flatten(0, 1))
        one = TierPages(fmt, tier.ids[:, layer], counts[:, layer], counts[:, layer])
        expected, _, (score,) = REFERENCE.paged_decode(q, want, [one], None, 0.125, group="max")
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)
        if update:
            where = REFERENCE.region(want, fmt, "pos")[one.ids].flatten(-2)
            score = score.masked_fill(seen[:, None, None] - where < skip_near, 0.0)
            if update == "replace":
                slots = torch.arange(one.ids.shape[-1] * fmt.tokens_per_page)
                for s, h, i in (slots < one.num_k[..., None]).nonzero().tolist():
                    at = one.ids[s, h, i // fmt.tokens_per_page], i % fmt.tokens_per_page
                    REFERENCE.region(want, fmt, "score")[at] = 0.0
            REFERENCE.add_scores(want, one, score)
    a, b = (REFERENCE.region(x, fmt, "score").clone() for x in (pages, want))
    torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
    for x in (pages, want):
        REFERENCE.region(x, fmt, "score").zero_()
    assert torch.equal(pages, want)


@pytest.mark.parametrize("name", ["channel", "k4v2", "fp16"])
@pytest.mark.parametrize("flush_first", [False, True])
def test_a_step_behind_a_ring_equals_its_single_operations(name: str, flush_first: bool, isa: str):
    """Append to the rings of rows that do not lie side by side, attend, and quantise what leaves: keys by the ring's
    length at once, values one by one."""
    slot_format = SlotFormat(64, **{**FORMATS[name], "track": ()})
    fmt = PageFormat(slot_format, -(-3 * slot_format.quantum_bytes // 16) * 16)
    size, rows = 32, torch.tensor([3, 0])
    total = torch.tensor([[[64, 45], [64, 64]], [[33, 64], [64, 50]]])  # with the new token
    full = total % size == 0
    old_k = (total - 1) // size * size
    old_v = (total - 1 - size).clamp(min=0)
    new_k, new_v = torch.where(full, total, old_k), (total - size).clamp(min=0)
    pages, tier = tier_pages(fmt, torch.full((2, 2, 2), 64), 60, 2)
    tier.num_k, tier.num_v = (new_k, new_v) if flush_first else (old_k, old_v)
    make = torch.Generator().manual_seed(4)
    ring_k = torch.randn(4, 2, 2, size, 64, generator=make).half()
    ring_v = torch.randn(4, 2, 2, size + 1, 64, generator=make).half()
    want, want_k, want_v = pages.clone(), ring_k.clone(), ring_v.clone()
    ring = StepRing(
        k=ring_k,
        v=ring_v,
        rows=rows,
        num_tokens=total,
        before=(old_k, old_v),
        after=(new_k, new_v),
        flush_first=flush_first,
    )
    step = Cpu().open_step(pages, [tier], num_q_heads=6, seen=torch.tensor([70, 70]), target=None, ring=ring)

    def flush(layer: int) -> None:
        for s, h in ((s, h) for s in range(2) for h in range(2)):
            for old, new, buffer, write in (
                (old_k, new_k, want_k, REFERENCE.write_keys),
                (old_v, new_v, want_v, REFERENCE.write_values),
            ):
                token = torch.arange(int(old[s, layer, h]), int(new[s, layer, h]))
                if len(token):
                    page = tier.ids[s, layer, h, token // fmt.tokens_per_page]
                    values = buffer[rows[s], layer, h, token % buffer.shape[3]]
                    write(want, fmt, page, token % fmt.tokens_per_page, values)

    for layer in range(2):
        q, k, v = (torch.randn(2, heads, 64, generator=make) for heads in (6, 2, 2))
        out = step.attend(layer, q, k, v, 0.125)
        for s, h in ((s, h) for s in range(2) for h in range(2)):
            last = int(total[s, layer, h]) - 1
            want_k[rows[s], layer, h, last % size] = k[s, h].half()
            want_v[rows[s], layer, h, last % (size + 1)] = v[s, h].half()
        if flush_first:
            flush(layer)
        one = TierPages(fmt, tier.ids[:, layer], tier.num_k[:, layer], tier.num_v[:, layer])
        view = Ring(want_k[rows, layer], want_v[rows, layer], total[:, layer])
        expected, _, _ = REFERENCE.paged_decode(q, want, [one], view, 0.125)
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)
        if not flush_first:
            flush(layer)
    assert torch.equal(pages, want) and torch.equal(ring_k, want_k) and torch.equal(ring_v, want_v)


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
