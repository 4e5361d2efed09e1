"""The source of decode attention in CUDA C++, built for this CPU and run lane by lane, equals the plain reference."""

import ctypes

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed (pip install -e '.[test]')")

from kvbench.kernels.backend import REFERENCE
from kvbench.kernels.cpu.build import BuildError, find_compiler
from kvbench.kernels.device_inputs import filled, moved_to
from kvbench.kernels.format import PageFormat, SlotFormat
from kvbench.kernels.gpu import cuda_call
from kvbench.kernels.gpu.backend import Gpu
from kvbench.kernels.gpu.cuda_call import HostKernels
from kvbench.kernels.gpu.cuda_form import Form
from kvbench.kernels.operands import Ring, Softmax, TierPages
from kvbench.kernels.reference.pages import region

try:
    find_compiler()
except BuildError as error:
    pytest.skip(str(error), allow_module_level=True)

# Probabilities and scaled queries are rounded to fp16 (values of a bf16 buffer to bf16 with them): a few times 2^-11
# (2^-8) of values that are about 1, as `device_inputs.BOUNDS` has it for Triton's products.
BOUND, WITH_BFLOATS = 2e-3, 1e-2
TRACK = ("score", "pos")
PLAIN = {f"k{k}v{v}": {"k_bits": k, "v_bits": v} for k, v in ((4, 4), (8, 4), (4, 2), (8, 8), (2, 2))}
KIVI = {"k_bits": 2, "v_bits": 2, "k_channel_group": 32}


def stored(slots: list[SlotFormat], page_bytes: int, counts: list[list[list[int]]]) -> tuple:
    """Random pages, NaN among the scales of slots that hold nothing, and the tiers on them."""
    formats = [PageFormat(slot, page_bytes) for slot in slots]
    return filled(None, formats, [torch.tensor(count) for count in counts])


def queries(tiers: list[TierPages], group: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Queries [S, Hq, D] for tiers."""
    num_seq, heads = tiers[0].num_k.shape
    dim, make = tiers[0].fmt.slot.head_dim, torch.Generator().manual_seed(3)
    return torch.randn(num_seq, heads * group, dim, generator=make).to(dtype)


def host(blocks: int = 3) -> Gpu:
    """The GPU's backend with decode attention on the CPU's build of the kernels."""
    return Gpu(lambda form, _: HostKernels(form, blocks))


def assert_equal(pages, tiers, q, ring=None, *, bound=BOUND, **options) -> None:
    """Queries [S, Hq, D] for tiers."""
    backend = host()
    want = REFERENCE.paged_decode(q, pages, tiers, ring, q.shape[-1] ** -0.5, **options)
    got = backend.paged_decode(q, pages, moved_to(tiers, torch.device("cpu")), ring, q.shape[-1] ** -0.5, **options)
    assert backend.decodes == {"cuda"}
    empty = want[1] == float("-inf")
    assert torch.equal(got[0].isnan().all(-1), empty) and torch.equal(got[1] == float("-inf"), empty)
    torch.testing.assert_close(got[0], want[0], rtol=0, atol=bound, equal_nan=True)
    torch.testing.assert_close(got[1], want[1], rtol=0, atol=bound)
    assert len(got[2]) == len(want[2])
    nothing = empty.view(*tiers[0].num_k.shape, -1).all(-1)
    for a, b in zip(got[2], want[2], strict=True):  # of a list without a token the reference's are no numbers
        torch.testing.assert_close(a, b.masked_fill(nothing[..., None], 0.0), rtol=0, atol=bound)


@pytest.mark.parametrize("dim", [64, pytest.param(128, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("name", PLAIN)
def test_scales_per_token(name: str, dim: int):
    """Lists of 1 token, a page, several parts, and none; pages whose slots do not fill turns of 32."""
    slot = SlotFormat(dim, **PLAIN[name], track=TRACK)
    size = PageFormat(slot, 64 * dim).tokens_per_page
    pages, tiers = stored([slot], 64 * dim, [[[1, 700], [size, 0]]])
    assert_equal(pages, tiers, queries(tiers, 4))


@pytest.mark.parametrize(("power", "group"), [(1, "max"), (2, "sum"), (1, "mean")])
def test_scores(power: int, group: str):
    """Output, log-sum-exp and scores equal the reference's."""
    slot = SlotFormat(64, 4, 4, track=TRACK)
    pages, tiers = stored([slot], 4096, [[[1, 300], [0, 77]]])
    assert_equal(pages, tiers, queries(tiers, 4), power=power, group=group)
    added = pages.clone()
    host().paged_decode(queries(tiers, 4), added, tiers, None, 0.125, power=power, group=group, accumulate=True)
    want = REFERENCE.paged_decode(queries(tiers, 4), pages, tiers, None, 0.125, power=power, group=group)[2][0]
    live = torch.arange(want.shape[-1]) < tiers[0].num_k[..., None]
    field = region(added, tiers[0].fmt, "score")[tiers[0].ids].flatten(2)
    torch.testing.assert_close(field[live], want[live], rtol=0, atol=BOUND)
    region(added, tiers[0].fmt, "score")[:] = region(pages, tiers[0].fmt, "score")
    assert torch.equal(added, pages)  # nothing else was written


def test_two_tiers_one_of_them_empty():
    """Lists that have tokens in either tier, in none, and a tier without a page."""
    slots = [SlotFormat(64, 8, 4, track=TRACK), SlotFormat(64, 4, 2, track=TRACK)]
    pages, tiers = stored(slots, 4096, [[[1, 300], [0, 77]], [[500, 0], [0, 3]]])
    assert_equal(pages, tiers, queries(tiers, 4), group="max")
    pages, tiers = stored(slots, 4096, [[[3, 40], [9, 77]], [[0, 0], [0, 0]]])
    assert tiers[1].ids.shape[-1] == 0
    assert_equal(pages, tiers, queries(tiers, 4), group="max")


@pytest.mark.parametrize("dim", [64, pytest.param(128, marks=pytest.mark.exhaustive)])
def test_scales_per_channel(dim: int):
    """Keys with a scale per channel and 32 tokens, values with one per 32 channels."""
    slot = SlotFormat(dim, **KIVI, v_groups=dim // 32, track=TRACK)
    pages, tiers = stored([slot], 64 * dim, [[[32, 320], [96, 0]]])
    assert_equal(pages, tiers, queries(tiers, 4))


@pytest.mark.parametrize("kind", ["bfloat16", pytest.param("float16", marks=pytest.mark.exhaustive)])
def test_residual_buffers(kind: str):
    """Keys leave in groups and values one by one, so that a token's two halves lie apart; one list has pages alone, one
    a buffer alone, and one lost tokens, a whole turn of them."""
    slot, dtype = SlotFormat(64, **KIVI, v_groups=2, track=TRACK), getattr(torch, kind)
    pages, tiers = stored([slot], 4096, [[[320, 64], [32, 672]]])
    fmt, ids = tiers[0].fmt, tiers[0].ids
    held = [torch.tensor([[320, 0], [32, 608]]), torch.tensor([[300, 0], [32, 668]])]
    tiers = [TierPages(fmt, ids, *held)]
    make, total = torch.Generator().manual_seed(1), torch.tensor([[340, 37], [250, 700]])
    k, v = (torch.randn(2, 2, length, 64, generator=make).to(dtype) for length in (128, 129))
    assert_equal(
        pages, tiers, queries(tiers, 4, dtype), Ring(k, v, total), bound=BOUND if kind == "float16" else WITH_BFLOATS
    )


def test_sinks_and_odd_groups():
    """Seven query heads per KV head, one of them without a sink, and a list that has nothing else."""
    slot = SlotFormat(64, 4, 4, track=TRACK)
    pages, tiers = stored([slot], 4096, [[[1, 300], [0, 77]]])
    q = queries(tiers, 7, torch.float16)
    sinks = torch.randn(14, generator=torch.Generator().manual_seed(1))
    sinks[3] = float("-inf")
    want = REFERENCE.paged_decode(q, pages, tiers, None, 0.125, softmax=Softmax(sinks=sinks))
    got = host().paged_decode(q, pages, tiers, None, 0.125, softmax=Softmax(sinks=sinks))
    for a, b in zip(got[:2], want[:2], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=BOUND, equal_nan=True)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "more",
    [
        {"k_bits": 4, "v_bits": 2, "symmetric": True},
        {"k_bits": 8, "v_bits": 8, "k_code": "q8_0", "v_code": "q8_0", "v_groups": 8},
        {"k_bits": 4, "v_bits": 4, "k_channel_group": 64, "v_groups": 8},
        {"k_bits": 8, "v_bits": 8},
        {"k_bits": 4, "v_bits": 4},
    ],
)
def test_other_codes_at_256_channels(more: dict):
    """Codes without zeros, groups of values, longer groups of keys; the widest heads."""
    slot = SlotFormat(256, **more, track=TRACK)
    pages, tiers = stored([slot], 68 * 256, [[[64, 320], [128, 0]]])
    assert_equal(pages, tiers, queries(tiers, 4))


def test_neighbours_and_blocks_change_no_bit():
    """How lists are cut depends on their own lengths: the same list alone, beside a longer one, and on other grids."""
    slot = SlotFormat(64, 4, 4, track=TRACK)
    pages, tiers = stored([slot], 4096, [[[900, 2500]]])
    q, fmt = queries(tiers, 4), tiers[0].fmt
    one = torch.full((1, 1), 900)
    alone = host(1).paged_decode(q[:, :4], pages, [TierPages(fmt, tiers[0].ids[:, :1], one, one)], None, 0.125)
    for blocks in (1, 2, 7):
        out, lse, _ = host(blocks).paged_decode(q, pages, tiers, None, 0.125)
        assert torch.equal(out[:, :4], alone[0]) and torch.equal(lse[:, :4], alone[1])


def test_a_form_that_the_kernels_do_not_take_is_triton_s_work(monkeypatch):
    """Said once, and on record."""
    slot = SlotFormat(64, 3, 3, track=TRACK)
    pages, tiers = stored([slot], 4096, [[[5, 9]]])
    backend, q = host(), queries(tiers, 4, torch.float16)
    with pytest.warns(UserWarning, match="3 bits") as said:
        for _ in range(2):
            got = backend.paged_decode(q, pages, tiers, None, 0.125)
    assert len([each for each in said if "triton" in str(each.message)]) == 1
    assert backend.decodes == {"triton: the kernels in CUDA C++ take no keys of 3 bits in min_max"}
    torch.testing.assert_close(got[0], REFERENCE.paged_decode(q, pages, tiers, None, 0.125)[0], rtol=0, atol=4e-3)


@pytest.mark.parametrize(
    ("slot", "queries"),
    [
        (SlotFormat(80, 4, 4), 4),
        (SlotFormat(64, 4, 4), 9),
        (SlotFormat(64, 16, 16), 4),
        (SlotFormat(64, 4, 4, k_groups=2), 4),
        (SlotFormat(64, 4, 4, v_groups=4), 4),
        (SlotFormat(64, 2, 2, k_channel_group=24), 4),
        (SlotFormat(64, 4, 4, k_code="nvfp4", v_code="nvfp4"), 4),
    ],
)
def test_forms_are_refused(slot: SlotFormat, queries: int):
    """By what the kernels have no code for."""
    with pytest.raises(ValueError, match=r"CUDA C\+\+"):
        Form(tiers=(PageFormat(slot, 8192),), queries=queries, query="fp16")


def test_the_call_is_laid_out_as_the_source_has_it():
    """ctypes and the compiler agree about the struct's size."""
    form = Form(tiers=(PageFormat(SlotFormat(64, 4, 4, track=TRACK), 4096),), queries=4, query="bf16")
    assert cuda_call._host_library(form).kvb_call_bytes() == ctypes.sizeof(cuda_call.Call)
