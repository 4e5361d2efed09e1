"""`model.linear=fused`: the model's own work in few launches, on interpreted Triton kernels."""

import os

import pytest
import torch
import transformers

pytest.importorskip("triton", reason="triton is not installed (pip install -e '.[test]')")

from kvbench.kernels.gpu import rows as kernels
from kvbench.models import fused, matrices

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
SIZES = {
    "vocab_size": 96, "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 128, "pad_token_id": 0,
}  # fmt: skip
# A bias with the products of attention, norms of heads, a window: what families have beside Llama's layers.
FAMILIES = {
    "Llama": {},
    "Mistral": {"sliding_window": None},
    "Qwen2": {},
    "Qwen3": {},
    "SmolLM3": {"no_rope_layers": [1, 1]},
}


def model_of(family: str, dtype: torch.dtype = torch.float32, **more) -> torch.nn.Module:
    """A random model of a family, with norms and biases that are not those of a new one."""
    config = getattr(transformers, f"{family}Config")(**SIZES | more)
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).to(DEVICE, dtype).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 1:
                weight.add_(0.3 * torch.randn(len(weight), device=weight.device).to(dtype))
    return model


def close(found: torch.Tensor, wanted: torch.Tensor, allowed: float) -> None:
    """Differ by no more than a share of the largest number."""
    torch.testing.assert_close(found, wanted, rtol=0, atol=allowed * float(wanted.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_plain_model(family: str, dtype: torch.dtype):
    """Within 1e-4 of the largest logit in fp32, and 1e-2 in fp16 over two layers."""
    plain, model = (model_of(family, dtype, **FAMILIES[family]) for _ in range(2))
    assert fused.fuse(model) == (2, 2)
    ids = torch.randint(1, 96, (2, 7), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    with torch.no_grad():
        want = plain(ids, use_cache=False).logits
        close(model(ids, use_cache=False).logits, want, 1e-4 if dtype == torch.float32 else 1e-2)
        first = model(ids[:, :4], use_cache=True)  # and token by token behind what transformers' cache holds
        name = "cache" if hasattr(first, "cache") else "past_key_values"
        after = [model(ids[:, i : i + 1], **{name: getattr(first, name)}).logits[:, 0] for i in range(4, 7)]
    close(torch.stack(after, 1), want[:, 4:], 1e-4 if dtype == torch.float32 else 1e-2)
    trained = model(ids, use_cache=False).logits  # with gradients, transformers' own code
    trained.sum().backward()
    assert model.model.layers[0].self_attn.q_proj.weight.grad is not None


@pytest.mark.parametrize("family", ["Gemma2", "Olmo2", "Granite", "Phi3"])
def test_layers_of_another_kind_stay_as_they_are(family: str):
    """Norms behind, residuals that are scaled, matrices that are joint: to the bit."""
    more = {"residual_multiplier": 0.5} if family == "Granite" else {}
    plain, model = (model_of(family, **more) for _ in range(2))
    assert fused.fuse(model) == (0, 2)
    ids = torch.arange(1, 8)[None].to(DEVICE)
    with torch.no_grad():
        assert torch.equal(plain(ids).logits, model(ids).logits)


def test_rows_are_as_torch_makes_them():
    """Norm, gate and rotation of sizes that are no powers of two, of rows that lie apart."""
    make = torch.Generator().manual_seed(2)
    x, weight = torch.randn(3, 2, 100, generator=make), torch.randn(100, generator=make)
    want = weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))
    close(kernels.norm_rows(x.to(DEVICE), weight.to(DEVICE), 1e-5).cpu(), want, 1e-6)
    wide = torch.randn(3, 2 * 1500, generator=make)
    gate, up = wide.split(1500, -1)
    close(kernels.gate_rows(wide.to(DEVICE)).cpu(), torch.nn.functional.silu(gate) * up, 1e-6)
    both = torch.randn(5, (7 + 3) * 48, generator=make).to(DEVICE)
    q, k = (part.unflatten(-1, (-1, 48)) for part in both.split([7 * 48, 3 * 48], -1))
    angle = torch.rand(5, 24, generator=make).to(DEVICE)
    cos, sin = angle.cos(), angle.sin()
    for found, part in zip(kernels.turn_rows(q, k, cos, sin), (q, k), strict=True):
        low, high = part.split(24, -1)
        by_cos, by_sin = cos[:, None], sin[:, None]
        close(found, torch.cat([low * by_cos - high * by_sin, high * by_cos + low * by_sin], -1), 1e-6)


def test_what_it_needs_is_said(monkeypatch: pytest.MonkeyPatch):
    """A GPU; and layers of the kind, or the model's remark says how many there were."""
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert "for GPUs" in matrices.why_not(matrices.FUSED, torch.float32, torch.device("cpu"))
    assert not matrices.why_not(matrices.FUSED, torch.bfloat16, torch.device("cuda"))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    linear, remark = matrices.lay(model_of("Olmo2"), matrices.FUSED, torch.float32, torch.device("cpu"))
    assert linear == matrices.PLAIN and "0 of 2 layers" in remark
