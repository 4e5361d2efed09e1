"""Column sums, pooling and group reduction of prompt scores against full matrices and golden numbers."""

import math

import pytest
import torch
from oracles import slow_attention
from store_helpers import golden

from kvbench.kernels.backend import REFERENCE
from kvbench.kernels.operands import ColumnSums, HeadScores
from kvbench.kernels.reference import prompts
from kvbench.kernels.reference.prompts import pool_scores, reduce_scores


def prompt(q_heads: int, heads: int, length: int, head_dim: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Random queries and keys with peaked attention."""
    make = torch.Generator().manual_seed(seed)
    return torch.randn(q_heads, length, head_dim, generator=make), torch.randn(heads, length, head_dim, generator=make)


@pytest.mark.parametrize("power", [1, 2])
@pytest.mark.parametrize("skip_near", [0, 1, 7])
@pytest.mark.parametrize("queries", [-1, 1, 8, 23, 100])
def test_column_sums_equal_those_of_the_full_matrix(queries: int, skip_near: int, power: int, monkeypatch):
    """Any window, exclusion and power, over ragged query blocks."""
    q, k = prompt(6, 2, 23, 16)
    columns = ColumnSums(queries=queries, skip_near=skip_near, power=power)
    with monkeypatch.context() as patch:
        patch.setattr(prompts, "COLUMN_ROWS", 5)
        got = REFERENCE.column_scores(q, k, 0.25, columns)
    for h in range(6):
        p = slow_attention.causal_probabilities(q[h], k[h // 3], 0.25)
        want = slow_attention.columns(p, queries, skip_near, power)
        assert torch.allclose(got[h].double(), want, rtol=0, atol=2e-6)
    whole = REFERENCE.column_scores(q, k, 0.25, columns)
    assert torch.allclose(got, whole, rtol=0, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_scores_are_computed_in_fp32_for_every_dtype(dtype: torch.dtype):
    """Half-precision inputs give the scores of their fp32 copies, and all columns of all queries sum to the queries."""
    q, k = (x.to(dtype) for x in prompt(3, 1, 70, 64))
    got = REFERENCE.column_scores(q, k, 0.125, ColumnSums(queries=-1))
    assert got.dtype is torch.float32
    assert torch.equal(got, REFERENCE.column_scores(q.float(), k.float(), 0.125, ColumnSums(queries=-1)))
    assert got.sum(-1).tolist() == pytest.approx([70.0] * 3, rel=1e-5)
    few = REFERENCE.column_scores(q, k, 0.125, ColumnSums(queries=9))
    assert few.sum(-1).tolist() == pytest.approx([9.0] * 3, rel=1e-5)


@pytest.mark.parametrize("where", ["prefix", "all"])
@pytest.mark.parametrize("stage", ["per_query_head", "after_group"])
@pytest.mark.parametrize("group", ["sum", "mean", "max"])
@pytest.mark.parametrize(("kind", "kernel"), [("none", 1), ("avg", 5), ("max", 7)])
def test_prompt_scores_pool_and_reduce_in_the_stated_order(kind: str, kernel: int, group: str, stage: str, where: str):
    """Every combination of pool, stage, region and group rule equals the full-matrix oracle."""
    for q_heads, heads, length, queries in ((3, 1, 19, 8), (14, 2, 13, 4), (2, 2, 6, 8), (3, 1, 11, -1)):
        q, k = prompt(q_heads, heads, length, 8, seed=length)
        rule = HeadScores(pool=kind, pool_kernel=kernel, pool_stage=stage, pool_region=where, group=group)
        got = REFERENCE.prompt_scores(q, k, 0.5, ColumnSums(queries=queries, skip_near=2, power=2), rule)
        want = slow_attention.prompt_scores(
            q,
            k,
            0.5,
            queries=queries,
            skip_near=2,
            power=2,
            kind=kind,
            kernel=kernel,
            stage=stage,
            where=where,
            group=group,
        )
        assert torch.allclose(got.double(), want, rtol=0, atol=5e-6)


def test_h2o_column_sums_are_golden():
    """Queries and keys built for the golden probabilities give the golden sums, averages and squared sums."""
    case, squared = golden("h2o"), golden("kvc")
    a = torch.tensor(case["A"])
    q, k = torch.log(a.clamp(min=1e-30))[None], torch.eye(6)[None]  # logits q_i . e_j = log A[i, j]
    sums = REFERENCE.column_scores(q, k, 1.0, ColumnSums(queries=-1))[0]
    assert sums.tolist() == pytest.approx(case["colsum"], abs=1e-6)
    average = sums / torch.arange(6, 0, -1)
    assert average.tolist() == pytest.approx(case["averaged"], abs=1e-6)
    for skip, name in ((2, "full_v2_L2_colsum"), (0, "full_v0_L2_colsum")):
        got = REFERENCE.column_scores(q, k, 1.0, ColumnSums(queries=-1, skip_near=skip, power=2))[0]
        assert got.tolist() == pytest.approx(squared[name], abs=1e-6)


def test_snapkv_window_scores_are_golden():
    """The golden prompt of two window queries gives the golden prefix sums."""
    case = golden("snapkv_softmax")
    k = torch.tensor(case["K"])[None]
    q = torch.cat([torch.zeros(4, 2), torch.tensor(case["Q"])])[None]
    got = REFERENCE.prompt_scores(q, k, 1 / math.sqrt(2), ColumnSums(queries=2), HeadScores(group="mean"))
    assert got[0, :4].tolist() == pytest.approx(case["sum"], abs=1e-6)


def test_pooling_is_golden():
    """Average pooling counts the padding, maximum pooling does not."""
    case = golden("snapkv_pool")
    s = torch.tensor(case["s"])
    assert pool_scores(s, "avg", 3).tolist() == pytest.approx(case["avg3"], abs=1e-6)
    assert pool_scores(s, "max", 3).tolist() == pytest.approx(case["max3"], abs=1e-6)
    assert pool_scores(-s - 1, "max", 3)[0] == pytest.approx(-1.1)  # a zero pad would win here


def test_order_of_pooling_and_summing_is_golden():
    """Pooling each query head before the sum differs from pooling the sum, as the golden pair shows."""
    case = golden("kvc")
    heads = torch.tensor([[0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.6]])
    for stage, name in (("per_query_head", "pool_then_sum"), ("after_group", "sum_then_pool")):
        got = reduce_scores(heads, 1, -1, HeadScores(pool="max", pool_kernel=3, pool_stage=stage, group="sum"))
        assert got[0].tolist() == pytest.approx(case[name])


def test_group_rules_are_golden():
    """Mean and maximum over two query heads pick the golden tokens."""
    case = golden("gqa")
    heads = torch.tensor([case["a"], case["b"]])
    for rule in ("mean", "max"):
        got = reduce_scores(heads, 1, -1, HeadScores(group=rule))[0]
        assert sorted(got.topk(2).indices.tolist()) == case[rule]
