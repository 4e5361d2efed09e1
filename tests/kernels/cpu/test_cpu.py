"""The C++ attention against the torch reference, and how it is compiled, cached and done without."""

import pytest
import torch
from page_helpers import PAGE_BYTES, Cache, tier_format
from selection import FULL, few, in_turn

from kvbench.kernels import dispatch
from kvbench.kernels.backend import REFERENCE
from kvbench.kernels.cpu import abi as cpu_abi
from kvbench.kernels.cpu.backend import Cpu
from kvbench.kernels.cpu.build import BuildError
from kvbench.kernels.format import PageFormat, SlotFormat
from kvbench.kernels.operands import Channels, InOrder, Ring, TierPages
from kvbench.kernels.reference.pages import region

try:
    ISAS = cpu_abi.available_isas()
    cpu_abi.load()
    ABSENT = ""
except BuildError as error:
    ISAS, ABSENT = [], str(error)
pytestmark = pytest.mark.skipif(bool(ABSENT), reason=ABSENT)

CODED = ("8,8", "8,4", "4,4", "4,2", "2,2", "2,1", "1,1")
VARIANTS = {
    "token": {},
    "symmetric": {"symmetric": True},
    "groups": {"k_groups": 2, "v_groups": 4},
    "narrow": {"k_groups": 4, "v_groups": 16},  # value groups of 4 to 8 channels, below any register
    "channel": {"k_channel_group": 16, "v_groups": 2},
    "channel8": {"k_channel_group": 8},  # half a register of AVX-512
}


def random_queries(num_seq: int, num_heads: int, head_dim: int, seed: int = 3) -> torch.Tensor:
    """Queries fp32 [S, Hq, D]."""
    return torch.randn(num_seq, num_heads, head_dim, generator=torch.Generator().manual_seed(seed))


def assert_equal(q: torch.Tensor, pages: torch.Tensor, tiers: list, ring: Ring | None, **scores) -> None:
    """Output, log-sum-exp and scores equal the reference's to 1e-5, which is the rounding of fp32 sums."""
    scale = q.shape[-1] ** -0.5
    want = REFERENCE.paged_decode(q, pages, tiers, ring, scale, **scores)
    got = Cpu().paged_decode(q, pages, tiers, ring, scale, **scores)
    assert len(got[2]) == len(want[2])
    for a, b in zip((*got[:2], *got[2]), (*want[:2], *want[2]), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


def ragged(fmt: PageFormat) -> list[list[int]]:
    """Counts of one token, full pages, nearly full ones, and two chunks of 2,048 slots, or three."""
    full = fmt.tokens_per_page
    return [[1, full], [2 * full + 3, full - 1], [5, 4300 if FULL else 2100]]


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("variant", "head_dim"),
    few([(v, d) for v in VARIANTS for d in (64, 80, 128)], *zip(VARIANTS, (64, 80, 128) * 2, strict=True)),
)
def test_every_coded_format_equals_the_reference(variant: str, head_dim: int):
    """All bit widths; metadata per token, per group of channels and per channel; 1, 3 and 7 query heads per KV head."""
    checked = 0
    for index, bits in enumerate(CODED):
        extra = VARIANTS[variant]
        if extra.get("symmetric") and "1" in bits.split(","):
            continue  # one bit has no symmetric code
        slot = SlotFormat(head_dim=head_dim, k_bits=int(bits[0]), v_bits=int(bits[2]), **extra)
        fmt = PageFormat(slot, max(PAGE_BYTES, -(-slot.quantum_bytes // 16) * 16))
        cache = Cache([fmt], [ragged(fmt)], head_dim) if fmt.page_bytes == PAGE_BYTES else None
        if cache is None:
            continue  # one group is more than the page of these tests
        group_size = (1, 3, 7)[index % 3]
        rule, power = (("max", 1), ("sum", 2), ("mean", 1))[(index + 1) % 3]
        assert_equal(
            random_queries(3, 2 * group_size, head_dim), cache.pages, cache.tiers, None, group=rule, power=power
        )
        checked += 1
    assert checked >= 4


ELEMENTS = [
    ("16,16", "fp16", {}),
    ("16,16", "bf16", {}),
    ("32,32", "fp32", {}),
    ("8,8", "fp16", {"fp8": True}),
    ("4,8", "fp16", {"fp8": True}),
    ("8,16", "bf16", {}),
    ("16,2", "fp16", {}),
    ("16,16", "fp16", {"k_channels": 5}),
    ("16,4", "bf16", {"k_channels": 7}),
    ("32,32", "fp32", {"k_channels": 3}),
    ("3,3", "fp16", {}),
    ("3,3", "fp16", {"symmetric": True, "k_groups": 2, "v_groups": 2}),
    ("3,3", "fp16", {"k_channel_group": 16}),
    ("8,8", "fp16", {"k_code": "e4m3_scaled", "v_code": "e4m3_scaled"}),
    ("4,4", "fp16", {"k_code": "lloyd"}),
    ("3,3", "fp16", {"k_code": "lloyd", "v_code": "lloyd"}),
    ("2,2", "fp16", {"k_code": "lloyd", "v_code": "lloyd", "v_groups": 2}),
    ("4,4", "fp16", {"k_code": "nvfp4", "v_code": "nvfp4", "k_groups": 4, "v_groups": 4}),
    ("4,4", "fp16", {"k_code": "mxfp4", "v_code": "mxfp4", "k_groups": 2, "v_groups": 2}),
    ("5,5", "fp16", {"k_code": "q5_0", "v_code": "q5_1", "k_groups": 2, "v_groups": 2}),
    ("5,5", "fp16", {"k_code": "q5_1", "v_code": "q5_0"}),
    ("8,4", "fp16", {"k_code": "q8_0", "v_code": "iq4_nl", "k_groups": 2, "v_groups": 2}),
    ("4,8", "fp16", {"k_code": "iq4_nl", "v_code": "e5m2"}),
    ("8,4", "bf16", {"k_code": "e5m2", "v_code": "zero_point"}),
]


@pytest.mark.every(2)
@pytest.mark.parametrize(("form", "head_dim"), in_turn(ELEMENTS, (8, 80, 64, 128)))
def test_elements_and_mixed_sides_equal_the_reference(form: tuple, head_dim: int):
    """16- and 32-bit sides, e4m3, and one coded side beside one of elements; also pages shorter than a register."""
    bits, kind, extra = form
    try:
        fmt = tier_format(bits, head_dim, kind, **extra)
    except ValueError:
        pytest.skip("a page of these tests holds no eight slots of this format")
    cache = Cache([fmt], [ragged(fmt)], head_dim)
    for group_size in (1, 3, 7):
        assert_equal(random_queries(3, 2 * group_size, head_dim), cache.pages, cache.tiers, None, group="max")


@pytest.mark.every(2)
@pytest.mark.parametrize("isa", few(ISAS, *ISAS[-1:]))
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 192, 256])
def test_highest_bits_that_lie_apart_equal_the_reference(head_dim: int, isa: str, monkeypatch: pytest.MonkeyPatch):
    """Codes of 5 and 3 bits, whose highest bits lie in runs shorter and longer than a register, and across its end;
    several groups in a plane, one in several, and a scale that is not finite."""
    monkeypatch.setenv("KVBENCH_CPU_ISA", isa)
    groups = {"k_groups": head_dim // 32, "v_groups": head_dim // 32}
    for bits, extra in (
        ("5,5", {"k_code": "q5_1", "v_code": "q5_0", **groups}),
        ("5,5", {"k_code": "q5_0", "v_code": "q5_1"}),
        ("3,3", groups),
    ):
        fmt = tier_format(bits, head_dim, **extra)
        cache = Cache([fmt], [ragged(fmt)], head_dim)
        for group_size in (3, 5):
            assert_equal(random_queries(3, 2 * group_size, head_dim), cache.pages, cache.tiers, None, group="max")
        region(cache.pages, fmt, "v_scale")[cache.tiers[0].ids[0, 0, 0], 0, 0] = float("nan")
        out, _, _ = Cpu().paged_decode(random_queries(3, 2, head_dim), cache.pages, cache.tiers, None, 0.125)
        want, _, _ = REFERENCE.paged_decode(random_queries(3, 2, head_dim), cache.pages, cache.tiers, None, 0.125)
        assert torch.equal(out.isnan(), want.isnan()) and out[0, 0].isnan().any() and out[1:].isfinite().all()
        torch.testing.assert_close(out, want, rtol=0, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize(("num_k", "num_v"), [(0, 0), (64, 32), (32, 61), (64, 64)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_residual_rings_equal_the_reference(num_k: int, num_v: int, dtype: torch.dtype):
    """Keys and values that left the buffer at different times, on either side, and rings that have wrapped around."""
    fmt = PageFormat(SlotFormat(64, 2, 2, k_channel_group=32, v_groups=2), PAGE_BYTES)
    cache = Cache([fmt], [[[64, 64], [64, 64]]], 64)
    make = torch.Generator().manual_seed(1)
    k, v = (torch.randn(2, 2, length, 64, generator=make).to(dtype) for length in (40, 42))
    held = [torch.full((2, 2), n) for n in (num_k, num_v)]
    tier = TierPages(fmt, cache.tiers[0].ids, *held)
    low = max(num_k, num_v, 1)
    high = min(num_k + 40, num_v + 42)
    ring = Ring(k, v, torch.tensor([[low, high], [low, min(low + 3, high)]]))
    assert_equal(random_queries(2, 6, 64), cache.pages, [tier], ring)
    rows = torch.stack([k, k], 1)[:, 0]  # rows that do not lie next to each other
    assert_equal(random_queries(2, 6, 64), cache.pages, [tier], Ring(rows, v, ring.num_tokens), group="sum")


LATENT = [
    ("16,16", 40, {}),
    ("16,16", 288, {}),
    ("32,32", 24, {"kind": "fp32"}),
    ("8,8", 512, {}),
    ("4,4", 576, {"k_groups": 4}),
    ("4,4", 96, {"k_channel_group": 16}),
    ("3,3", 40, {}),
    ("5,5", 64, {"k_code": "q5_1", "k_groups": 2}),
    ("8,8", 72, {"k_code": "e4m3_scaled"}),
    ("4,4", 64, {"k_code": "book", "k_table": tuple(range(0, 256, 17)), "k_apart": 3}),
]


@pytest.mark.parametrize("isa", few(["portable", "auto"], "auto"))
@pytest.mark.parametrize(("bits", "head_dim", "how"), LATENT)
def test_keys_that_are_values_equal_the_reference(bits, head_dim, how, isa, monkeypatch):
    """One list of keys, read twice, over ragged pages and two tiers or a ring: elements and codes of every kind, as
    wide as DeepSeek-V3's latent vectors; one to seventeen query heads."""
    monkeypatch.setenv("KVBENCH_CPU_ISA", isa)
    fmt = tier_format(bits, head_dim, **how, keys_only=True)
    full, total = fmt.tokens_per_page, fmt.slot.group_tokens * 4
    cache = Cache([fmt, fmt], [[[full + 3], [2]], [[0], [2100 if head_dim < 50 else 70]]], head_dim)
    for heads, rule in ((1, "sum"), (5, "max"), (17, None)):
        assert_equal(random_queries(2, heads, head_dim), cache.pages, cache.tiers, None, group=rule)
    ring = torch.randn(2, 1, 20, head_dim, generator=torch.Generator().manual_seed(1)).half()
    held = torch.tensor([[min(full, total)], [0]])
    tier = TierPages(fmt, cache.tiers[0].ids, held, held)
    in_all = held + torch.tensor([[20], [7]])
    assert_equal(random_queries(2, 6, head_dim), cache.pages, [tier], Ring(ring, ring, in_all))


@pytest.mark.parametrize("isa", few(["portable", "auto"], "auto"))
@pytest.mark.parametrize("half", [32, 20])
@pytest.mark.parametrize(
    ("bits", "how"),
    [
        ("16,16", {}),
        ("8,8", {"fp8": True}),
        ("1,4", {"k_channel_group": 32}),
        ("2,2", {"k_channel_group": 32}),
        ("4,4", {"k_channel_group": 32}),
        ("8,4", {"k_channel_group": 32}),
        ("8,4", {}),
        ("2,2", {"k_code": "book_channels", "k_table": (0, 9, 200, 255), "k_apart": 1}),
        ("3,4", {"k_code": "book_channels", "k_table": (0, 9, 20, 25, 70, 90, 200, 255)}),
        ("4,4", {"k_code": "book_channels", "k_table": tuple(range(0, 256, 17)), "k_apart": 2}),
    ],
)
def test_keys_at_positions_in_order_equal_the_reference(bits, how, half, isa, monkeypatch):
    """Every way that a page is read: element by element, as codes of channels with scales of the page or of their own,
    with numbers kept apart, and as floats where only part of the channels is turned; one to nine heads to a list."""
    monkeypatch.setenv("KVBENCH_CPU_ISA", isa)
    fmt = tier_format(bits, 64, **how)
    cache = Cache([fmt], [[[9, 70], [33, 1]]], 64)
    (tier,) = cache.tiers
    tier.rotation = InOrder(torch.tensor([3, 1000]), 0.5 ** (torch.arange(half) % 12))
    if "k_code" in how:
        make = torch.Generator().manual_seed(4)
        tier.channels = Channels(torch.randn(2, 64, generator=make) / 100, torch.randn(2, 64, generator=make))
    for heads in (2, 6, 10, 18):
        assert_equal(random_queries(2, heads, 64), cache.pages, cache.tiers, None, group="sum")


@pytest.mark.parametrize("bits", ["16,16", "4,2"])
@pytest.mark.parametrize("where", ["q", "k", "v"])
def test_nan_comes_out_of_its_own_list_only(bits: str, where: str):
    """A NaN in a query, a key or a value spoils every head that reads it, and no other."""
    fmt = tier_format(bits, 64)
    cache = Cache([fmt], [[[40, 40]]], 64)
    q = random_queries(1, 6, 64)
    if where == "q":
        q[0, :3, 7] = float("nan")
    else:
        name = f"{where}_codes" if bits == "16,16" else f"{where}_scale"
        # Codes are [channel, slot] of keys, [slot, channel] of values; scales are [group, slot].
        region(cache.pages, fmt, name)[cache.tiers[0].ids[0, 0, 0], 0, 5] = float("nan")
    out, _, scores = Cpu().paged_decode(q, cache.pages, cache.tiers, None, 0.125, group="sum")
    bad = ~torch.isfinite(out[0]).all(1)
    assert bad[:3].all() and not bad[3:].any()
    assert torch.isfinite(scores[0][0, 1]).all()


def test_a_list_of_nothing_has_no_value():
    """Attention over no token is NaN with a log-sum-exp of minus infinity; its neighbour is untouched."""
    fmt = tier_format("4,2", 64)
    cache = Cache([fmt], [[[0, 12]]], 64)
    out, lse, _ = Cpu().paged_decode(random_queries(1, 2, 64), cache.pages, cache.tiers, None, 0.125)
    assert out[0, 0].isnan().all() and float(lse[0, 0]) == float("-inf")
    assert out[0, 1].isfinite().all() and lse[0, 1].isfinite()


def test_results_depend_neither_on_threads_nor_on_the_batch():
    """Bit for bit: one thread, two and three, all rows together, each row alone, and in another order."""
    formats = [tier_format("8,4", 64), tier_format("4,2", 64)]
    cache = Cache(formats, [[[9000, 3], [600, 90], [5, 40]], [[7, 9100], [0, 1], [900, 0]]], 64)
    q = random_queries(3, 6, 64)  # enough for three threads: 19,000 slots of 3 x 64 products each

    def attend(rows: list[int]) -> list[torch.Tensor]:
        tiers = [TierPages(t.fmt, t.ids[rows], t.num_k[rows], t.num_v[rows]) for t in cache.tiers]
        out, lse, scores = Cpu().paged_decode(q[rows], cache.pages, tiers, None, 0.125, group="max")
        return [out, lse, *scores]

    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        want = attend([0, 1, 2])
        for count in (2, 3) * 10:
            torch.set_num_threads(count)
            assert all(torch.equal(a, b) for a, b in zip(attend([0, 1, 2]), want, strict=True))
    finally:
        torch.set_num_threads(threads)
    for rows in ([0], [1], [2], [2, 0], [1, 1]):
        assert all(torch.equal(a, b[rows]) for a, b in zip(attend(rows), want, strict=True))


def test_a_page_that_does_not_exist_is_refused():
    """A broken table is an error and no read of foreign memory."""
    fmt = tier_format("4,2", 64)
    cache = Cache([fmt], [[[5]]], 64)
    cache.tiers[0].ids[:] = len(cache.pages)
    with pytest.raises(AssertionError, match="names a page that the pool does not have"):
        Cpu().paged_decode(random_queries(1, 1, 64), cache.pages, cache.tiers, None, 0.125)


@pytest.mark.parametrize("isa", few(ISAS, *ISAS[-1:]))
def test_every_build_equals_the_reference(isa: str, monkeypatch: pytest.MonkeyPatch):
    """All builds that this CPU runs, from portable C++ to the widest registers, attend alike; rotated keys too."""
    formats = [tier_format(bits, 80, v_groups=2) for bits in ("8,4", "2,1")]
    cache = Cache(formats, [[[1, 70]], [[530, 0]]], 80)
    channel = Cache([tier_format("2,2", 64, k_channel_group=32)], [[[96, 33]]], 64)
    elements = Cache([tier_format("16,16", 64), tier_format("8,8", 64, fp8=True)], [[[9, 80]], [[3, 20]]], 64)
    rotated = Cache([tier_format("4,4", 64)], [[[9, 40]]], 64)
    width = rotated.tiers[0].ids.shape[-1] * rotated.tiers[0].fmt.tokens_per_page
    rotated.tiers[0].rotation = torch.randn(1, width, 20, generator=torch.Generator().manual_seed(4))
    assert cpu_abi.available_isas()[0] == "portable"
    monkeypatch.setenv("KVBENCH_CPU_ISA", isa)
    assert cpu_abi.load().kvb_path().decode() == isa
    for each, head_dim in ((cache, 80), (channel, 64), (elements, 64), (rotated, 64)):
        assert_equal(random_queries(1, 14, head_dim), each.pages, each.tiers, None, group="max")


def test_a_build_that_does_not_run_here_is_refused(monkeypatch: pytest.MonkeyPatch):
    """The variable's value must be a build, and one for this CPU; the error names those that are."""
    monkeypatch.setenv("KVBENCH_CPU_ISA", "sse9")
    with pytest.raises(ValueError, match="KVBENCH_CPU_ISA=sse9 does not exist; choose auto or one of portable, avx2"):
        dispatch.get_backend("auto")
    monkeypatch.setattr(cpu_abi, "best_isa", lambda: "avx2")
    monkeypatch.setenv("KVBENCH_CPU_ISA", "avx512")
    with pytest.raises(ValueError, match="KVBENCH_CPU_ISA=avx512 does not run on this CPU; choose portable, avx2"):
        cpu_abi.chosen_isa()
    monkeypatch.setenv("KVBENCH_CPU_ISA", "auto")
    assert cpu_abi.chosen_isa() == "avx2"


def test_auto_takes_the_compiled_kernels_on_a_cpu_only():
    """On a GPU auto goes elsewhere, and asking for them there is an error."""
    assert dispatch.get_backend("auto").name == "cpu" and not dispatch.get_backend("cpu").is_reference
    assert dispatch.get_backend("auto", "cuda").name != "cpu"
    with pytest.raises(ValueError, match="this model is on cuda"):
        dispatch.get_backend("cpu", torch.device("cuda"))
