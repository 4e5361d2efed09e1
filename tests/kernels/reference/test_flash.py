"""torch's own fused attention with its log-sum-exp, beside the whole matrix in fp64."""

from types import SimpleNamespace

import pytest
import torch
from torch.overrides import TorchFunctionMode

from kvbench.kernels.backend import REFERENCE
from kvbench.kernels.reference.prompts import attention_behind, attention_with_lse, has_flash


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


@pytest.mark.parametrize(("capability", "has"), [((7, 5), False), ((8, 0), True), ((12, 0), True)])
def test_a_gpu_is_asked_for_its_capability(capability, has, monkeypatch):
    """A T4 takes fp16, but torch's flash attention raises there."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    q = SimpleNamespace(dtype=torch.float16, shape=(4, 33, 64), is_cuda=True, device=torch.device("cuda"))
    assert has_flash(q) is has


class Calls(TorchFunctionMode):
    """Notes the heads and lengths of the keys that torch's attention gets."""

    def __init__(self) -> None:
        super().__init__()
        self.keys: list[tuple[bool, tuple[int, ...]]] = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.nn.functional.scaled_dot_product_attention:
            self.keys.append((kwargs["enable_gqa"], tuple(args[1].shape[1:3])))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("dtype", "device", "found"), [("float32", "meta", 6), ("bfloat16", "meta", 2), ("float32", "cpu", 2)]
)
def test_prompts_of_a_gpu_without_flash_attention_need_no_matrix(dtype, device, found):
    """torch's memory-efficient attention takes as many KV heads as query heads; with fewer, torch would make the whole
    matrix of logits. Meta tensors stand for a GPU."""
    q, k = (torch.zeros(heads, 9, 64, dtype=getattr(torch, dtype), device=device) for heads in (6, 2))
    with Calls() as calls:
        assert REFERENCE.prefill_attention(q, k, k, 0.1).shape == (6, 9, 64)
    assert calls.keys == [(found == 2, (found, 9))]


def test_what_lies_behind_a_whole_prompt_is_one_causal_call():
    """Meta tensors stand for a GPU; what its fused kernel does not take, and a CPU, is left to others."""
    for dtype, device, taken in (("bfloat16", "meta", True), ("float32", "meta", False), ("bfloat16", "cpu", False)):
        q, k, past = (
            torch.zeros(heads, length, 64, dtype=getattr(torch, dtype), device=device)
            for heads, length in ((4, 5), (2, 5), (2, 9))
        )
        out = attention_behind(q, k, k, past, past, 0.1)
        assert (out is not None) == taken
        assert not taken or (out.shape, out.dtype) == ((4, 5, 64), torch.bfloat16)
        assert attention_behind(q, k, k, past.float(), past, 0.1) is None
