"""What the checks of a device leave out of the Triton kernels of decoding: rings, parts, half precision, NaN."""

import warnings

import pytest
import torch
from selection import few

pytest.importorskip("triton", reason="triton is not installed (pip install -e '.[test]')")

from page_helpers import Cache, tier_format
from triton_helpers import DEVICE, many_parts, move_cache, move_ring, poisoned_memory, random_queries  # noqa: F401

from kvbench.kernels import dispatch
from kvbench.kernels.backend import REFERENCE
from kvbench.kernels.format import PageFormat, SlotFormat
from kvbench.kernels.gpu import decode, parts
from kvbench.kernels.gpu.backend import Gpu
from kvbench.kernels.operands import Ring, StepScores, TierPages
from kvbench.kernels.reference.pages import region

# The interpreter computes in numpy, which warns of the NaNs that slots without a token may hold.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def assert_equal(cache: Cache, q: torch.Tensor, ring: Ring | None = None, *, tolerance: float = 1e-5, **options):
    """Output, log-sum-exp and scores equal the reference's; 1e-5 is the rounding of fp32 sums."""
    scale = q.shape[-1] ** -0.5
    want = REFERENCE.paged_decode(q, cache.pages, cache.tiers, ring, scale, **options)
    pages, tiers = move_cache(cache)
    moved = None if ring is None else move_ring(ring)
    got = Gpu().paged_decode(q.to(DEVICE), pages, tiers, moved, scale, **options)
    assert len(got[2]) == len(want[2])
    for a, b in zip((*got[:2], *got[2]), (*want[:2], *want[2]), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        torch.testing.assert_close(a.cpu(), b, rtol=0, atol=tolerance)


@pytest.mark.parametrize("counts", [[[[5, 1]], [[0, 0]]], [[[0, 0]], [[2, 17]]]])
def test_a_tier_without_any_page_costs_nothing(counts: list):
    """Short prompts leave the low tier of a whole layer empty; its table is then no page wide, and so is its split."""
    formats = [tier_format(bits, 64) for bits in ("8,4", "4,2")]
    cache = Cache(formats, counts, 64)
    assert 0 in {tier.ids.shape[-1] for tier in cache.tiers}
    assert_equal(cache, random_queries(1, 6, 64), group="max")


RINGS = [(0, 0, "float16"), (64, 32, "bfloat16"), (32, 61, "float32")]


@pytest.mark.parametrize(("num_k", "num_v", "dtype"), few(RINGS, RINGS[2]))
def test_residual_rings_equal_the_reference(num_k: int, num_v: int, dtype: str):
    """Keys and values that left the buffer at different times, rings that wrapped or lost tokens, strided rows."""
    fmt = tier_format("2,2", 64, k_channel_group=32, v_groups=2)
    cache = Cache([fmt], [[[64, 64], [64, 64]]], 64)
    make = torch.Generator().manual_seed(1)
    k, v = (torch.randn(2, 2, length, 64, generator=make).to(getattr(torch, dtype)) for length in (40, 42))
    held = [torch.full((2, 2), n) for n in (num_k, num_v)]
    cache.tiers = [TierPages(fmt, cache.tiers[0].ids, *held)]
    low, high = max(num_k, num_v, 1), min(num_k + 40, num_v + 42)
    ring = Ring(torch.stack([k, k], 1)[:, 0], v, torch.tensor([[low, high], [high + 3, min(low + 3, high)]]))
    assert_equal(cache, random_queries(2, 6, 64), ring, group="sum")


def test_packed_dims_that_are_no_power_of_two_meet_their_ring():
    """At head dim 80 the planes of codes are padded, the buffer's channels are not."""
    fmt = tier_format("4,2", 80)
    cache = Cache([fmt], [[[40, 8]]], 80)
    make = torch.Generator().manual_seed(1)
    k, v = (torch.randn(1, 2, 16, 80, generator=make) for _ in range(2))
    assert_equal(cache, random_queries(1, 4, 80), Ring(k, v, torch.tensor([[50, 20]])), group="max")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bits", ["16,16", "8,4"])
def test_half_precision_queries_keep_their_digits(bits: str, dtype: torch.dtype):
    """Products in the model's own type: weights are rounded to 11 (fp16) or 8 bits (bf16 elements), sums are not.

    The interpreter cannot multiply bf16 and takes fp32 for it; on a GPU the bound is what it says.
    """
    kind = "bf16" if dtype is torch.bfloat16 else "fp16"
    fmt = tier_format(bits, 64, kind)
    cache = Cache([fmt], [[[33, 7]]], 64)
    rounding = 2**-8 if kind == "bf16" and bits == "16,16" else 2**-10
    assert_equal(cache, random_queries(1, 6, 64).to(dtype), group="max", tolerance=rounding)


def test_small_scales_survive_half_precision():
    """Values of 1e-6 whose scales lie far below fp16's normal range still come out to three digits."""
    fmt = tier_format("8,8", 64)
    cache = Cache([fmt], [[[30]]], 64)
    region(cache.pages, fmt, "v_scale").fill_(6e-8)
    region(cache.pages, fmt, "v_zero").fill_(0.0)
    q = random_queries(1, 2, 64).half()
    want, _, _ = REFERENCE.paged_decode(q, cache.pages, cache.tiers, None, 0.125)
    pages, tiers = move_cache(cache)
    got, _, _ = Gpu().paged_decode(q.to(DEVICE), pages, tiers, None, 0.125)
    torch.testing.assert_close(got.cpu(), want, rtol=4e-3, atol=0)


def test_the_number_of_parts_does_not_change_the_result(monkeypatch: pytest.MonkeyPatch):
    """One part, one page per part, more parts than pages and anything between agree to the rounding of their merge,
    and so do the shares of the blocks whose scores are returned, or added to what pages track."""
    monkeypatch.setattr(decode, "_LEAST_SLOTS", 1)
    fmt = tier_format("8,4", 64, track=("score",))
    cache = Cache([fmt], [[[50, 3]]], 64)
    q = random_queries(1, 6, 64)
    _, _, (known,) = REFERENCE.paged_decode(q, cache.pages, cache.tiers, None, 0.125, group="max")
    want = cache.pages.clone()
    REFERENCE.add_scores(want, cache.tiers[0], known)
    for processors, each in ((1, 1), (2, 2), (100, 16)):
        monkeypatch.setattr(decode, "_num_processors", lambda _, number=processors: number)
        monkeypatch.setattr(decode, "_SCORING", each)
        assert_equal(cache, q, group="max")
        pages, tiers = cache.pages.clone().to(DEVICE), move_cache(cache)[1]
        Gpu().paged_decode(q.to(DEVICE), pages, tiers, None, 0.125, group="max", accumulate=True)
        got, asked = (region(x.cpu(), fmt, "score") for x in (pages, want))
        torch.testing.assert_close(got, asked, rtol=0, atol=1e-6, equal_nan=True)  # free slots hold any bytes


def test_parts_are_cut_within_a_page(monkeypatch: pytest.MonkeyPatch):
    """A page of 64 slots, read 16 at a time, is cut into parts of 16: none is empty, and none has what another has."""
    fmt = PageFormat(SlotFormat(64, 4, 4), 64 * 72)
    monkeypatch.setattr("page_helpers.PAGE_BYTES", fmt.page_bytes)
    monkeypatch.setattr(decode, "_num_parts", lambda *_: 4)
    cache, q = Cache([fmt], [[[64, 33]]], 64), random_queries(1, 6, 64)
    assert fmt.tokens_per_page == 64 and decode._block_slots(fmt, True, True) == 16
    assert_equal(cache, q, group="max")
    pages, tiers = move_cache(cache)
    attention = decode.Attention(q.to(DEVICE), pages, [decode.ListTier.of(tiers[0])], decode.Lists.of(tiers[0]), None)
    attention(q.to(DEVICE), None, 0.125)
    filled = (attention._partial[1] != 0).all(2)
    assert filled.tolist() == [[True] * 4, [True, True, True, False]]


def test_many_parts_are_merged_in_fewer_turns(monkeypatch: pytest.MonkeyPatch):
    """Up to 16 parts 16 at a time, more of them 64 at a time: each turn waits for what it reads."""
    launched, fmt = [], tier_format("8,4", 64)
    count, ids = torch.full((1, 1), 40), torch.zeros(1, 1, 40, dtype=torch.int64)
    pages = torch.zeros(1, fmt.page_bytes, dtype=torch.uint8)
    for number in (1, 16, 17, 40):
        monkeypatch.setattr(decode, "_num_parts", lambda *_, number=number: number)
        with parts.recording(lambda kernel, _, __, constants: launched.append((kernel.__name__, constants.get("BP")))):
            Gpu().paged_decode(torch.zeros(1, 2, 64), pages, [TierPages(fmt, ids, count, count)], None, 1.0)
    assert [each for name, each in launched if name == "_finish"] == [16, 16, 64, 64]


def test_scores_take_no_program_for_each_block():
    """A captured step has room for the longest answer: of 512 lists of 32k slots, those that are short would be nearly
    a million programs that find nothing to do."""
    fmt, grids = tier_format("4,2", 64, track=("score",)), []
    count = torch.full((64, 8), 5)
    ids = torch.zeros(1, dtype=torch.int64).expand(64, 8, -(-(1 << 15) // fmt.tokens_per_page))
    pages = torch.zeros(1, fmt.page_bytes, dtype=torch.uint8)
    with parts.recording(lambda kernel, grid, *_: grids.append((kernel.__name__, grid))):
        Gpu().paged_decode(torch.zeros(64, 32, 64), pages, [TierPages(fmt, ids, count, count)], None, 1.0, group="max")
    (lists, along) = dict(grids)["_finish"]
    assert (
        lists == 512 and along == 4 + 1
    )  # a query head each, and one part, as an interpreter's few processors have it


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_an_output_of_16_bits_is_the_rounded_one(dtype: torch.dtype):
    """What a model would make of fp32, to the bit, a list of nothing included."""
    fmt = tier_format("8,4", 64)
    pages, tiers = move_cache(Cache([fmt], [[[40, 0]]], 64))
    q, lists, found = random_queries(1, 6, 64).to(DEVICE), decode.Lists.of(tiers[0]), [decode.ListTier.of(tiers[0])]
    want, got = (
        decode.Attention(q, pages, found, lists, None, out=out)(q, None, 0.125)[0] for out in (torch.float32, dtype)
    )
    torch.testing.assert_close(got, want.to(dtype), rtol=0, atol=0, equal_nan=True)


def test_layers_of_a_step_share_what_lies_between_their_launches():
    """A layer makes its output, in the type of its queries, and no other tensor."""
    fmt, launched = tier_format("8,4", 64, track=("score",)), []
    _, table = Gpu().tables(fmt.page_bytes, 8, (fmt.tokens_per_page,), (1, 3, 2), 4, "cpu")
    rows, slots = torch.zeros(1, dtype=torch.int64), torch.zeros(1, 3, 2, dtype=torch.int64)
    with parts.recording(lambda kernel, _, arguments, __: launched.append((kernel.__name__, arguments))):
        step = Gpu().open_tables(
            table.pool.pages, [table.tier(0, fmt, 2, None)], (3, 2), rows, num_q_heads=6, seen=rows,
            target=(0, slots, slots), scores=StepScores(group="sum", update="add"),
        )  # fmt: skip
        outs = []
        for layer in range(3):
            q, k = (torch.zeros(1, heads, 64, dtype=torch.bfloat16) for heads in (6, 2))
            outs.append(step.attend(layer, q, k, k, 0.1))
    merged = [arguments for name, arguments in launched if name == "_finish"]
    assert all(arguments[0] is out and out.dtype == torch.bfloat16 for arguments, out in zip(merged, outs, strict=True))
    assert len({out.data_ptr() for out in outs}) == 3 and [arguments[3] for arguments in merged] == [0, 2, 4]
    shared = [[x.data_ptr() for x in arguments[4:] if isinstance(x, torch.Tensor)] for arguments in merged]
    assert shared[0] == shared[1] == shared[2]


def test_a_list_of_nothing_has_no_value():
    """Attention over no token is NaN with a log-sum-exp of minus infinity; its neighbour is untouched."""
    fmt = tier_format("4,2", 64)
    cache = Cache([fmt], [[[0, 12]]], 64)
    pages, tiers = move_cache(cache)
    q = random_queries(1, 2, 64).to(DEVICE)
    out, lse, (scores,) = Gpu().paged_decode(q, pages, tiers, None, 0.125, group="max")
    assert out[0, 0].isnan().all() and float(lse[0, 0]) == float("-inf")
    assert out[0, 1].isfinite().all() and lse[0, 1].isfinite()
    assert not scores[0, 0].any()


def test_nan_comes_out_of_its_own_list_only():
    """A NaN in a value scale spoils every head that reads it, and no other list."""
    fmt = tier_format("4,2", 64)
    cache = Cache([fmt], [[[40, 40]]], 64)
    region(cache.pages, fmt, "v_scale")[cache.tiers[0].ids[0, 0, 0], 0, 5] = float("nan")
    pages, tiers = move_cache(cache)
    out, _, scores = Gpu().paged_decode(random_queries(1, 6, 64).to(DEVICE), pages, tiers, None, 0.125, group="sum")
    bad = ~torch.isfinite(out[0]).all(1)
    assert bad[:3].all() and not bad[3:].any()
    assert torch.isfinite(scores[0]).all()


def test_millions_of_tokens_fit_into_a_grid():
    """A grid takes 65,535 programs along its second axis: no pages of a list lie there."""
    fmt = tier_format("4,2", 64, track=("score",))
    columns = -(-(1 << 23) // fmt.tokens_per_page)
    count = torch.full((2, 1), columns * fmt.tokens_per_page)
    tier = TierPages(fmt, torch.zeros(2, 1, columns, dtype=torch.int64), count, count)
    pages, grids = torch.zeros(1, fmt.page_bytes, dtype=torch.uint8), []
    with parts.recording(lambda kernel, grid, *_: grids.append((kernel.__name__, grid))):
        Gpu().add_scores(pages, tier, torch.zeros(2, 1, int(count[0])))
        Gpu().paged_decode(torch.zeros(2, 1, 64), pages, [tier], None, 1.0, group="max")
    assert {"_add_scores", "_attend", "_finish"} <= {name for name, _ in grids}
    assert max(programs for _, grid in grids for programs in grid) > parts.MOST_ALONG
    assert all(programs <= parts.MOST_ALONG for _, grid in grids for programs in grid[1:])


def test_adding_to_scores_that_are_not_tracked_is_refused():
    """The error names what is missing."""
    fmt = tier_format("4,2", 64)
    pages, tiers = move_cache(Cache([fmt], [[[5]]], 64))
    with pytest.raises(AssertionError, match="the call needs score"):
        Gpu().add_scores(pages, tiers[0], torch.zeros(1, 1, fmt.tokens_per_page, device=DEVICE))


def test_rotated_keys_behind_a_ring_equal_the_reference():
    """The ring's keys have their positions and are not turned; scores are none."""
    fmt = tier_format("4,4", 64, k_channel_group=16)
    cache = Cache([fmt], [[[32, 16]]], 64)
    make = torch.Generator().manual_seed(1)
    k, v = (torch.randn(1, 2, 24, 64, generator=make) for _ in range(2))
    width = cache.tiers[0].ids.shape[-1] * fmt.tokens_per_page
    cache.tiers[0].rotation = torch.randn(1, width, 32, generator=make).transpose(1, 2).contiguous().transpose(1, 2)
    assert_equal(cache, random_queries(1, 4, 64), Ring(k, v, torch.tensor([[50, 20]])))


def test_the_backend_is_refused_where_it_cannot_run(monkeypatch: pytest.MonkeyPatch):
    """On a CPU without the interpreter, and without the package: why, and what to do."""
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(
        ValueError, match=r"needs an NVIDIA or AMD GPU, but this model is on cpu; set model.device=cuda"
    ):
        dispatch.get_backend("triton", "cpu")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert dispatch.get_backend("triton", "cpu").name == "triton"
    monkeypatch.setattr(dispatch.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="triton is not installed; run pip install triton .* or choose backend=torch"):
        dispatch.get_backend("triton", "cuda")


def test_auto_takes_the_kernels_on_a_gpu_and_says_when_it_cannot(monkeypatch: pytest.MonkeyPatch):
    """CUDA and ROCm devices get them; without the package, and on other devices, one warning and the reference."""
    dispatch._auto_gpu.cache_clear()
    assert dispatch.get_backend("auto", "cuda:1").name == "triton"
    dispatch._auto_gpu.cache_clear()
    monkeypatch.setattr(dispatch.importlib.util, "find_spec", lambda name: None)
    with pytest.warns(UserWarning, match="no GPU kernels: the package triton is not installed.*much slower"):
        assert dispatch.get_backend("auto", "cuda").name == "torch"
    with pytest.warns(UserWarning, match="no kernels for mps; going on with backend=torch"):
        assert dispatch.get_backend("auto", "mps").name == "torch"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert dispatch.get_backend("auto", "cuda").name == "torch"
    dispatch._auto_gpu.cache_clear()
