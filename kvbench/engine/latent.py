"""Latent attention (DeepSeek-V2 and later, Kimi) in absorbed form: one KV head, whose keys are the values, too.

transformers' modules give the cache one latent vector and one rotary key per token, and expand them to keys and values
of all heads (`expand_kv`) once the cache has handed them back. Here they stay as they are: the part of `kv_b_proj` that
makes keys goes to the queries, and the part that makes values after attention. So a key is [latent; rotary key], a
value is its first channels, and the cache holds both once.

Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1 and appendix C.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

EXPAND = "expand_kv"
_Attend = Callable[[Tensor, Tensor, Tensor, float], Tensor]  # q [B, Hq, n, D], k and v [B, 1, n, D], scale


def is_latent(module: torch.nn.Module) -> bool:
    """True of a module of attention that hands its latent vectors to the cache."""
    return hasattr(type(module), EXPAND) and hasattr(module, "kv_b_proj")


def merged(module: Any, tag: str, latent: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
    """Stands in for `expand_kv` of a module.

    In kvbench's cache, whose layer hangs on the latent vectors [B, 1, n, R] by the name `tag`, returns these and the
    rotary keys [B, 1, n, r] in one tensor, which is key and value; else the result of the class.
    """
    if (layer := getattr(latent, tag, None)) is None:
        return getattr(type(module), EXPAND)(module, latent, rotary)
    keys = torch.cat([latent, rotary], -1)
    setattr(keys, tag, layer)
    return keys, keys


def attend(module: Any, attend: _Attend, query: Tensor, key: Tensor, scale: float) -> Tensor:
    """Attention of a module's queries [B, Hq, n, nope + r] over latent keys [B, 1, n, R + r]; [B, Hq, n, V].

    `attend` has heads as wide as these keys.
    """
    weight = module.kv_b_proj.weight.detach().unflatten(0, (query.shape[1], -1))  # [Hq, nope + V, R]
    nope, rank = module.qk_nope_head_dim, weight.shape[2]
    plain, rotary = query[..., :nope], query[..., nope:]
    absorbed = torch.cat([torch.matmul(plain, weight[:, :nope]), rotary], -1)
    out = attend(absorbed, key, key, scale)[..., :rank].to(query.dtype)
    return torch.matmul(out, weight[:, nope:].transpose(1, 2))
