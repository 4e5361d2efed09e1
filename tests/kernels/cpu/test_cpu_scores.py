"""Column scores of the CPU backend against full matrices in fp64, for every build that this CPU runs."""

import pytest
import torch

from kvbench.kernels.cpu import abi as cpu_abi
from kvbench.kernels.cpu import scores as cpu_scores
from kvbench.kernels.cpu.backend import Cpu
from kvbench.kernels.cpu.build import BuildError
from kvbench.kernels.reference import attention as torch_attention
from kvbench.kernels.reference.backend import Reference

try:
    ISAS = cpu_abi.available_isas()
except BuildError as error:
    pytest.skip(str(error), allow_module_level=True)

SHAPES = {"1:1": (2, 2, 64), "3:1": (6, 2, 80), "7:1": (7, 1, 128)}
OPTIONS = (
    {},
    {"power": 2},
    {"queries": 32},
    {"queries": 1},
    {"skip_near": 1},
    {"skip_near": 7, "power": 2, "queries": 600},
    {"skip_near": 50, "queries": 40},
)


@pytest.fixture(params=[pytest.param(isa, id=isa) for isa in ISAS])
def isa(request, monkeypatch):
    """Runs a test on one build of the library."""
    monkeypatch.setenv(cpu_abi.ISA_VARIABLE, request.param)
    return request.param


def prompt(shape: str, length: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Queries, keys with peaked attention, and the scale."""
    q_heads, heads, dim = SHAPES[shape]
    make = torch.Generator().manual_seed(length)
    q, k = torch.randn(q_heads, length, dim, generator=make), torch.randn(heads, length, dim, generator=make)
    return (2 * q).to(dtype), k.to(dtype), dim**-0.5


def probabilities(q: torch.Tensor, k: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal probabilities fp64 [Hq, N, N], and how far each key lies before each query."""
    keys = k.double().repeat_interleave(len(q) // len(k), 0)
    position = torch.arange(q.shape[1])
    distance = position[:, None] - position
    logits = (torch.matmul(q.double(), keys.transpose(1, 2)) * scale).masked_fill(distance < 0, float("-inf"))
    return logits.softmax(-1), distance


def counted(distance: torch.Tensor, queries: int, skip_near: int) -> torch.Tensor:
    """Which query counts for which key."""
    length = len(distance)
    last = torch.arange(length)[:, None] >= (0 if queries < 0 else length - queries)
    return last & (distance >= skip_near)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_column_sums_equal_those_of_the_full_matrix(shape: str, dtype: torch.dtype, isa: str):
    """Any window, exclusion and power; one token, two, less than a block of queries, and one more than whole blocks.

    The bound is the rounding of fp32 sums over 513 probabilities; the sums reach 30.
    """
    for length in (1, 2, 31, 513):
        q, k, scale = prompt(shape, length, dtype)
        p, distance = probabilities(q, k, scale)
        for option in OPTIONS:
            how = {"queries": -1, "skip_near": 0, "power": 1, **option}
            got = cpu_scores.column_scores(q, k, scale, **how)
            counts = counted(distance, how["queries"], how["skip_near"])
            want = (p ** how["power"] * counts).sum(1)
            assert got.dtype is torch.float32
            torch.testing.assert_close(got.double(), want, rtol=2e-6, atol=2e-6, msg=lambda m, o=option: f"{o}: {m}")


def test_low_counts_equal_those_of_the_full_matrix(isa: str):
    """Counted queries with less than 1 / (keys seen); a probability within 1e-5 of the threshold may fall either way,
    an equal one is not below it."""
    q, k, scale = prompt("3:1", 513)
    p, distance = probabilities(q, k, scale)
    share = p * torch.arange(1, 514)[:, None]
    for queries, skip_near in ((-1, 0), (40, 3)):
        got = cpu_scores.column_scores(q, k, scale, queries=queries, skip_near=skip_near, below_uniform=True)
        counts = counted(distance, queries, skip_near)
        most, least = (((share < limit) & counts).sum(1) for limit in (1 + 1e-5, 1 - 1e-5))
        assert bool((least <= -got).all() and (-got <= most).all()) and int(least.max()) > 0
    assert not cpu_scores.column_scores(q, torch.zeros_like(k), scale, queries=-1, below_uniform=True).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_sums_are_the_same_bits_for_any_number_of_threads_and_strides(dtype: torch.dtype, isa: str):
    """A head is summed by one thread in one order; a prompt that is part of a longer tensor is read as it lies."""
    q, k, scale = prompt("7:1", 513, dtype)
    threads = torch.get_num_threads()
    try:
        found = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append(cpu_scores.column_scores(q[:, :300], k[:, :300], scale, queries=-1, power=2))
            found.append(cpu_scores.column_scores(q[:, :300].clone(), k[:, :300].clone(), scale, queries=-1, power=2))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(found[0], other) for other in found[1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_sums_are_the_same_bits_in_whatever_room(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    """KV heads are taken one at a time, some at a time or all at once, as their logits have room."""
    make = torch.Generator().manual_seed(3)
    q, k = torch.randn(10, 130, 32, generator=make).to(dtype), torch.randn(5, 130, 32, generator=make).to(dtype)
    found, block = [], scores_block(dtype)
    for heads in (5, 2, 1, 0):
        monkeypatch.setattr(cpu_scores, "ROOM_BYTES", heads * 2 * block * 130 * 4)
        found.append(cpu_scores.column_scores(q, k, 0.3, queries=-1))
    assert all(torch.equal(found[0], other) for other in found[1:])


def scores_block(dtype: torch.dtype) -> int:
    """Queries at a time, of a prompt that has at least as many."""
    fast = dtype == torch.bfloat16 and cpu_scores._multiplies_bf16()
    return cpu_scores.BF16_BLOCK if fast else cpu_scores.BLOCK


def test_products_of_bf16_leave_the_precision_of_others_alone(monkeypatch: pytest.MonkeyPatch):
    """fp32 is taken for bf16 while a bf16 prompt's logits are made, not for an fp32 prompt's, and not behind them, even
    where they fail."""
    seen, matmul = [], torch.backends.mkldnn.matmul
    for name in ("bmm", "baddbmm"):
        plain = getattr(torch, name)
        noted = lambda *given, plain=plain, **named: (seen.append(matmul.fp32_precision), plain(*given, **named))  # noqa: E731
        monkeypatch.setattr(torch, name, noted)
    monkeypatch.setattr(cpu_scores, "_multiplies_bf16", lambda: True)
    before = matmul.fp32_precision
    for dtype in (torch.float32, torch.bfloat16):
        cpu_scores.column_scores(*prompt("3:1", 31, dtype)[:2], 0.1, queries=-1)
    assert seen == [before, "bf16"] and before != "bf16" and matmul.fp32_precision == before

    def failing(*given: object, **named: object) -> None:
        raise RuntimeError("out of paper")

    monkeypatch.setattr(torch, "baddbmm", failing)
    with pytest.raises(RuntimeError, match="out of paper"):
        cpu_scores.column_scores(*prompt("3:1", 31, torch.bfloat16)[:2], 0.1, queries=-1)
    assert matmul.fp32_precision == before


def test_a_key_that_is_not_finite_shows_in_its_head_alone(isa: str):
    """NaN in one KV head of two: the reference's rows are NaN, and so are these; the other head is untouched."""
    q, k, scale = prompt("3:1", 70)
    k[1, 20] = float("nan")
    got, want = (m.column_scores(q, k, scale, queries=-1) for m in (cpu_scores, torch_attention))
    assert torch.equal(got.isnan(), want.isnan()) and bool(got[3:, :20].isnan().all())
    torch.testing.assert_close(got[:3], want[:3], rtol=2e-6, atol=2e-6)


def test_scores_are_pooled_and_reduced_as_the_reference_s():
    """The whole operation, with windowed pooling before the group's mean, and the counts of both."""
    q, k, scale = prompt("3:1", 90)
    how = {"queries": 32, "skip_near": 2, "power": 1, "pool": "max", "pool_kernel": 7, "group": "mean"}
    how |= {"pool_stage": "per_query_head", "pool_region": "prefix"}
    got, want = (m.prompt_scores(q, k, scale, **how) for m in (Cpu(), Reference()))
    torch.testing.assert_close(got, want, rtol=2e-6, atol=2e-6)
    got, want = (m.prompt_low_counts(q, k, scale, queries=-1, skip_near=2, group="max") for m in (Cpu(), Reference()))
    assert got.shape == want.shape and float((got - want).abs().max()) <= 1
