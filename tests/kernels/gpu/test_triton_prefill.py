"""Column scores and chunks of a prompt by the Triton kernels against full matrices and the torch reference."""

import pytest
import torch
from selection import in_turn

pytest.importorskip("triton", reason="triton is not installed (pip install -e '.[test]')")

import triton.language as tl
from oracles import slow_attention
from triton_helpers import DEVICE, poisoned_memory  # noqa: F401

from kvbench.kernels.backend import REFERENCE
from kvbench.kernels.gpu.backend import Gpu
from kvbench.kernels.gpu.compile import launch_signature
from kvbench.kernels.gpu.parts import INTERPRETED, recording
from kvbench.kernels.operands import ColumnSums, HeadScores
from kvbench.kernels.reference.prompts import attention_with_lse

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy warns of what is not live


def prompt(q_heads: int, heads: int, length: int, head_dim: int, dtype: torch.dtype = torch.float32) -> tuple:
    """Random q, k, v whose tokens do not lie next to each other in memory, as a model's do."""
    make = torch.Generator().manual_seed(length)
    tensors = (torch.randn(length, h, head_dim, generator=make).to(dtype) for h in (q_heads, heads, heads))
    return tuple(x.transpose(0, 1).to(DEVICE) for x in tensors)


@pytest.mark.every(2)
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


# A product of 16-bit operands is summed in fp32, in another order than the reference's.
LONG = [
    (torch.float16, -1, 0, 1),
    (torch.bfloat16, -1, 70, 2),
    (torch.float16, 40, 3, 1),
    (torch.bfloat16, 200, 130, 1),
]


@pytest.mark.every(2)
@pytest.mark.parametrize(("dtype", "queries", "skip_near", "power"), LONG)
@pytest.mark.parametrize("with_lse", [False, True])
def test_columns_of_16_bits_over_several_blocks_equal_the_reference(
    dtype: torch.dtype, queries: int, skip_near: int, power: int, with_lse: bool
):
    """Blocks that the diagonal cuts, whole ones and a ragged end; query heads that share keys; a head dim that is no
    power of two."""
    q, k, v = prompt(4, 2, 290, 40, dtype)
    columns = ColumnSums(queries=queries, skip_near=skip_near, power=power)
    lse = attention_with_lse(*(x.float().cpu() for x in (q, k, v)), 0.25)[1].to(q.device) if with_lse else None
    got = Gpu().column_scores(q, k, 0.25, columns, lse=lse).cpu()
    want = REFERENCE.column_scores(q.cpu(), k.cpu(), 0.25, columns)
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-5)
    assert not got[:, 290 - skip_near :].any()  # exactly nothing where no query counts


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


# Of values of a normal distribution: fp32 sums of up to 200 products in another order, with exp2 beside exp.
CLOSE = 1e-5


def softmax_attention(q, k, v, history, scale: float) -> torch.Tensor:
    """Each query by itself, in fp64."""
    past_k, past_v, live = history
    out = torch.empty(q.shape, dtype=torch.float64)
    for head in range(len(q)):
        h = head // (len(q) // len(k))
        for i in range(q.shape[1]):
            keys, values = (
                torch.cat([past[h][live[h]].double(), own[h, : i + 1].double()])
                for past, own in ((past_k, k), (past_v, v))
            )
            out[head, i] = ((keys @ q[head, i].double()) * scale).softmax(0) @ values
    return out


# Weights are rounded to the 11 bits of fp16 or the 8 of bf16, for which the interpreter takes fp32.
WEIGHTS = {torch.float32: CLOSE, torch.float16: 2**-10, torch.bfloat16: CLOSE if INTERPRETED else 2**-7}


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("shape", "dtype"), in_turn([(1, 1, 0, 64), (3, 33, 70, 80), (2, 70, 1, 32), (4, 5, 32, 128)], [*WEIGHTS])
)
def test_a_chunk_attends_to_what_is_held_and_to_itself(shape, dtype):
    """Over live entries alone, of which a list may have none, by tensors that are not contiguous; what is not live may
    be anything. Without `live` all of the history is."""
    group, chunk, past, head_dim = shape
    make = torch.Generator().manual_seed(chunk)
    q, k, v = (torch.randn(h, chunk, 2 * head_dim, generator=make).to(dtype) for h in (2 * group, 2, 2))
    q, k, v = (x[..., :head_dim] for x in (q, k, v))
    past_k, past_v = (torch.randn(past, 2, head_dim, generator=make).to(dtype).transpose(0, 1) for _ in range(2))
    live = torch.rand(2, past, generator=make) < 0.5
    live[1] = False
    backend, exact = Gpu(), {"rtol": 0, "atol": WEIGHTS[dtype]}

    def attend(*history) -> torch.Tensor:
        moved = (None if x is None else x.to(DEVICE) for x in history)
        return backend.chunk_attention(*(x.to(DEVICE) for x in (q, k, v)), tuple(moved), 0.2).double().cpu()

    everything = torch.ones_like(live)
    want = softmax_attention(q, k, v, (past_k, past_v, everything), 0.2)
    torch.testing.assert_close(attend(past_k, past_v, None), want, **exact)
    want = softmax_attention(q, k, v, (past_k, past_v, live), 0.2)
    past_k[~live] = past_v[~live] = float("nan")
    torch.testing.assert_close(attend(past_k.float(), past_v.float(), live), want, **exact)
    assert backend.fallbacks == set()


def test_a_chunk_s_products_are_of_the_model_s_own_type():
    """Tensor cores take 16-bit operands: where a chunk has them, what is held is rounded to them, whatever it is in."""
    launched = []
    q, k = (torch.zeros(heads, 5, 64) for heads in (4, 2))
    history = torch.zeros(2, 9, 64), torch.zeros(2, 9, 64), torch.ones(2, 9, dtype=torch.bool)
    with recording(lambda kernel, _, arguments, constants: launched.append((arguments[:5], constants["OP"]))):
        for kinds in ((torch.float16, torch.float16), (torch.float32, torch.float32), (torch.float16, torch.float32)):
            Gpu().chunk_attention(q.to(kinds[0]), k.to(kinds[0]), k.to(kinds[1]), history, 0.1)
    assert [operand for _, operand in launched] == [tl.float16, tl.float32, tl.float32]
    assert [{x.dtype for x in tensors[3:]} for tensors, _ in launched] == [
        {torch.float16},
        {torch.float32},
        {torch.float32},
    ]


def test_prompts_of_any_length_take_the_same_kernels():
    """Lengths are no part of what is compiled: a prompt of one token, of a multiple of 16, and any other."""
    signatures = []
    with recording(
        lambda kernel, _, *given: signatures.append(f"{kernel.__name__} {launch_signature(kernel, *given)}")
    ):
        for length, past in ((1, 33), (32, 1), (45, 48)):
            q, k = (torch.zeros(heads, length, 64, dtype=torch.float16) for heads in (4, 2))
            Gpu().column_scores(q, k, 0.1, ColumnSums(queries=7, skip_near=length % 3))
            held = torch.zeros(2, past, 64, dtype=torch.float16)
            Gpu().chunk_attention(q, k, k, (held, held, torch.ones(2, past, dtype=torch.bool)), 0.1)
    assert len(signatures) == 9 and len(set(signatures)) == 3
