"""Column scores of the CPU backend against full matrices in fp64, for every build that this CPU runs."""

import pytest
import torch
from test_cpu import pytestmark  # noqa: F401
from test_cpu_pages import isa  # noqa: F401

from kvbench.kernels.backend import REFERENCE
from kvbench.kernels.cpu.backend import Cpu
from kvbench.kernels.operands import ColumnSums, HeadScores

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
def test_column_sums_equal_those_of_the_full_matrix(shape: str, dtype: torch.dtype, isa: str):  # noqa: F811
    """Any window, exclusion and power; one token, two, less than a block of queries, and one more than whole blocks.

    The bound is the rounding of fp32 sums over 513 probabilities; the sums reach 30.
    """
    for length in (1, 2, 31, 513):
        q, k, scale = prompt(shape, length, dtype)
        p, distance = probabilities(q, k, scale)
        for option in OPTIONS:
            how = {"queries": -1, "skip_near": 0, "power": 1, **option}
            got = Cpu().column_scores(q, k, scale, ColumnSums(**how))
            counts = counted(distance, how["queries"], how["skip_near"])
            want = (p ** how["power"] * counts).sum(1)
            assert got.dtype is torch.float32
            torch.testing.assert_close(got.double(), want, rtol=2e-6, atol=2e-6, msg=lambda m, o=option: f"{o}: {m}")


def test_low_counts_equal_those_of_the_full_matrix(isa: str):  # noqa: F811
    """Counted queries with less than 1 / (keys seen); a probability within 1e-5 of the threshold may fall either way,
    an equal one is not below it."""
    q, k, scale = prompt("3:1", 513)
    p, distance = probabilities(q, k, scale)
    share = p * torch.arange(1, 514)[:, None]
    for queries, skip_near in ((-1, 0), (40, 3)):
        got = Cpu().column_scores(q, k, scale, ColumnSums(queries=queries, skip_near=skip_near, below_uniform=True))
        counts = counted(distance, queries, skip_near)
        most, least = (((share < limit) & counts).sum(1) for limit in (1 + 1e-5, 1 - 1e-5))
        assert bool((least <= -got).all() and (-got <= most).all()) and int(least.max()) > 0
    assert not Cpu().column_scores(q, torch.zeros_like(k), scale, ColumnSums(queries=-1, below_uniform=True)).any()


def test_sums_are_the_same_bits_for_any_number_of_threads_and_strides(isa: str):  # noqa: F811
    """A head is summed by one thread in one order; a prompt that is part of a longer tensor is read as it lies."""
    q, k, scale = prompt("7:1", 513)
    threads = torch.get_num_threads()
    try:
        found = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            part = q[:, :300], k[:, :300]
            for given in (part, [x.clone() for x in part]):
                found.append(Cpu().column_scores(*given, scale, ColumnSums(queries=-1, power=2)))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(found[0], other) for other in found[1:])


def test_a_key_that_is_not_finite_shows_in_its_head_alone(isa: str):  # noqa: F811
    """NaN in one KV head of two: the reference's rows are NaN, and so are these; the other head is untouched."""
    q, k, scale = prompt("3:1", 70)
    k[1, 20] = float("nan")
    got, want = (m.column_scores(q, k, scale, ColumnSums(queries=-1)) for m in (Cpu(), REFERENCE))
    assert torch.equal(got.isnan(), want.isnan()) and bool(got[3:, :20].isnan().all())
    torch.testing.assert_close(got[:3], want[:3], rtol=2e-6, atol=2e-6)


def test_scores_are_pooled_and_reduced_as_the_reference_s():
    """The whole operation, with windowed pooling before the group's mean, and the counts of both."""
    q, k, scale = prompt("3:1", 90)
    how = ColumnSums(queries=32, skip_near=2), HeadScores(pool="max", pool_kernel=7, pool_region="prefix", group="mean")
    got, want = (m.prompt_scores(q, k, scale, *how) for m in (Cpu(), REFERENCE))
    torch.testing.assert_close(got, want, rtol=2e-6, atol=2e-6)
    got, want = (m.prompt_low_counts(q, k, scale, queries=-1, skip_near=2, group="max") for m in (Cpu(), REFERENCE))
    assert got.shape == want.shape and float((got - want).abs().max()) <= 1
