"""Column scores of the Triton kernels against full matrices and the torch reference."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed (pip install 'kvbench[test]')")

from oracles import slow_attention
from triton_helpers import DEVICE, poisoned_memory  # noqa: F401

from kvbench.kernels.backend import REFERENCE
from kvbench.kernels.gpu.backend import Gpu
from kvbench.kernels.operands import ColumnSums, HeadScores
from kvbench.kernels.reference.prompts import attention_with_lse


def prompt(q_heads: int, heads: int, length: int, head_dim: int, dtype: torch.dtype = torch.float32) -> tuple:
    """Random q, k, v whose tokens do not lie next to each other in memory, as a model's do."""
    make = torch.Generator().manual_seed(length)
    tensors = (torch.randn(length, h, head_dim, generator=make).to(dtype) for h in (q_heads, heads, heads))
    return tuple(x.transpose(0, 1).to(DEVICE) for x in tensors)


@pytest.mark.parametrize(
    ("queries", "skip_near", "power"), [(-1, 0, 1), (-1, 70, 2), (8, 0, 2), (80, 7, 1), (500, 1, 1)]
)
def test_column_sums_equal_those_of_the_full_matrix(queries: int, skip_near: int, power: int):
    """Any window, exclusion and power, over ragged blocks of queries and keys."""
    q, k, _ = prompt(3, 1, 147, 16)
    got = Gpu().column_scores(q, k, 0.25, ColumnSums(queries=queries, skip_near=skip_near, power=power)).cpu()
    for h in range(3):
        p = slow_attention.causal_probabilities(q[h].cpu(), k[0].cpu(), 0.25)
        want = slow_attention.columns(p, queries, skip_near, power)
        assert torch.allclose(got[h].double(), want, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("queries", "skip_near"), [(-1, 0), (80, 7), (8, 70)])
def test_queries_below_the_uniform_share_are_counted(queries: int, skip_near: int):
    """Minus one from every counted query that gives a key less than one over the keys that it sees; uniform rows give
    exactly that much, and count for none."""
    q, k, _ = prompt(4, 2, 147, 16)
    q[0] = 0.0
    options = {"queries": queries, "skip_near": skip_near}
    got = Gpu().column_scores(q, k, 0.25, ColumnSums(**options, below_uniform=True)).cpu()
    for h in range(4):
        p = slow_attention.causal_probabilities(q[h].cpu(), k[h // 2].cpu(), 0.25)
        i, j = torch.arange(147)[:, None], torch.arange(147)
        counted = (i >= j) & (i - j >= skip_near) & (i >= (0 if queries < 0 else 147 - queries))
        low = counted & (p < 1.0 / (i + 1).double()) & (h > 0)
        assert torch.equal(got[h].double(), -low.double().sum(0))
    assert not got[0].any() and got[1].any()
    counts = Gpu()
    assert torch.equal(counts.prompt_low_counts(q, k, 0.25, **options, group="max").cpu(), got.view(2, 2, -1).amax(1))
    assert counts.fallbacks == set()


def test_half_precision_prompts_keep_their_digits():
    """fp16 products are summed in fp32: columns to a thousandth."""
    q, k, _ = prompt(6, 2, 90, 64, torch.float16)
    got = Gpu().column_scores(q, k, 0.125, ColumnSums(queries=-1))
    want = REFERENCE.column_scores(q.cpu(), k.cpu(), 0.125, ColumnSums(queries=-1))
    torch.testing.assert_close(got.cpu(), want, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("group", ["sum", "mean", "max"])
def test_prompt_scores_equal_the_reference(group: str):
    """Pooled and reduced over the group as the reference does it."""
    q, k, _ = prompt(6, 2, 50, 16)
    how = (
        ColumnSums(queries=8, skip_near=2, power=2),
        HeadScores(pool="avg", pool_kernel=5, pool_region="prefix", group=group),
    )
    got = Gpu().prompt_scores(q, k, 0.5, *how).cpu()
    want = REFERENCE.prompt_scores(q.cpu(), k.cpu(), 0.5, *how)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("queries", "power"), [(-1, 1), (40, 2)])
def test_a_log_sum_exp_stands_for_the_first_pass(queries: int, power: int):
    """Columns from the log-sum-exp of torch's own fused attention are those of two passes."""
    q, k, v = prompt(4, 2, 147, 16)
    _, lse = attention_with_lse(q.cpu(), k.cpu(), v.cpu(), 0.25)
    options = {"queries": queries, "skip_near": 3, "power": power}
    want = Gpu().column_scores(q, k, 0.25, ColumnSums(**options))
    got = Gpu().column_scores(q, k, 0.25, ColumnSums(**options), lse=lse.to(q.device))
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
