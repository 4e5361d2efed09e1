"""torch's own fused attention with its log-sum-exp, beside the whole matrix in fp64."""

import pytest
import torch

from kvbench.kernels.backend import REFERENCE
from kvbench.kernels.reference.prompts import attention_with_lse


@pytest.mark.parametrize(("length", "head_dim", "q_heads"), [(1, 64, 2), (70, 16, 6), (131, 40, 4)])
def test_output_and_log_sum_exp_of_a_prompt(length, head_dim, q_heads):
    """Two KV heads, odd lengths; the output is that of `prefill_attention` to the bit."""
    make = torch.Generator().manual_seed(length)
    q, k, v = (torch.randn(heads, length, head_dim, generator=make) for heads in (q_heads, 2, 2))
    out, lse = attention_with_lse(q, k, v, 0.3)
    keys = k.repeat_interleave(q_heads // 2, 0).double()
    logits = (q.double() @ keys.mT * 0.3).masked_fill(torch.ones(length, length).triu(1).bool(), float("-inf"))
    assert lse.dtype is torch.float32 and lse.shape == (q_heads, length)
    torch.testing.assert_close(lse.double(), logits.logsumexp(-1), rtol=0, atol=1e-5)
    assert torch.equal(out, REFERENCE.prefill_attention(q, k, v, 0.3))


def test_half_precision_keeps_its_type():
    """The log-sum-exp is fp32 whatever the prompt is."""
    q, k, v = (torch.randn(heads, 33, 16, generator=torch.Generator().manual_seed(0)) for heads in (4, 2, 2))
    out, lse = attention_with_lse(q.bfloat16(), k.bfloat16(), v.bfloat16(), 0.3)
    assert out.dtype is torch.bfloat16 and lse.dtype is torch.float32
    torch.testing.assert_close(lse, attention_with_lse(q, k, v, 0.3)[1], rtol=0, atol=0.05)


def test_who_has_no_kernel_says_none():
    """On a GPU the fused kernels take 16 bits and head dims in eights; meta tensors stand for one."""
    wrong = ((torch.float32, 64), (torch.float16, 60), (torch.float16, 264))
    for dtype, dim in (*wrong, (torch.bfloat16, 64)):
        q, k = (torch.empty(heads, 33, dim, dtype=dtype, device="meta") for heads in (4, 2))
        found = attention_with_lse(q, k, k, 0.3)
        if (dtype, dim) in wrong:
            assert found is None
        else:
            assert [tuple(x.shape) for x in found] == [(4, 33, 64), (4, 33)]
