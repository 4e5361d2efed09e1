"""torch's own fused attention of a prompt, with the log-sum-exp that its public function keeps to itself."""

import torch
from torch import Tensor

from kvbench.kernels import checks

LARGEST_DIM = 256  # of a head, in torch's fused kernels for GPUs


def attention_with_lse(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor] | None:
    """Causal attention of a whole prompt with the log-sum-exp of every query's logits, by the kernels that
    `scaled_dot_product_attention` takes where it can.

    Args:
        q: [Hq, N, D]; k, v: [H, N, D], the model's dtype.
        scale: Factor on the logits.

    Returns:
        [Hq, N, D] in the same dtype, and lse fp32 [Hq, N]; None where torch has no such kernel for these tensors.
    """
    checks.prompt(q, k, v)
    prompt = q[None], k[None], v[None]
    if q.device.type == "cpu":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*prompt, 0.0, True, scale=scale)
    elif q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] % 8 == 0 and q.shape[-1] <= LARGEST_DIM:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention(*prompt, 0.0, True, scale=scale)[:2]
    else:
        return None
    return out[0], lse[0, :, : q.shape[1]].float()
