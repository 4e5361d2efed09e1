"""Keys that are stored less one vector per list: attention is the same, whatever the format, and quantisers err less."""

import dataclasses
import math

import pytest
import torch
from engine_helpers import answers, comparable, engine, random_tokens, request
from selection import in_turn
from store_helpers import filled, make_store, plain_attention, random_layer, step_at
from test_rotation import POLICIES

from kvbench.cache.offsets import KeyOffsets, back, less
from kvbench.errors import NotForModel
from kvbench.kernels.operands import Softmax
from kvbench.methods.diffkv import DiffKV
from kvbench.methods.full import Full
from kvbench.methods.keydiff import KeyDiff
from kvbench.methods.kivi import Kivi
from kvbench.methods.kvquant_style import KVQuantStyle
from kvbench.methods.minikv import MiniKV
from kvbench.methods.quest import Quest
from kvbench.methods.r_kv import RKV
from kvbench.methods.snapkv import SnapKV
from kvbench.methods.streaming_llm import StreamingLLM
from kvbench.methods.think import ThinK
from kvbench.methods.uniform import Uniform
from kvbench.methods.zipcache import ZipCache

UNIFORM = (
    *("int8", "int4", "k4v2", "k2v4", "k1v8", "lloyd-k4v4", "fp8", "fp8_e5m2", "fp8_per_token_head"),
    *("int8_per_token_head", "int4_per_token_head", "turboquant_k8v4", "turboquant_4bit", "turboquant_3bit", "nvfp4"),
    *("nvfp4_4over6", "fp4_mx_block16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl", "f16-q8_0", "mxfp4"),
)
# Every way to code tokens, in pages, in rings before them, in several tiers and after them, some of whose tokens go.
FORMATS = {tier: Uniform(tier=tier) for tier in UNIFORM} | {
    "full": Full(tier="fp16"),
    "symmetric": Uniform(tier="int4", symmetric=True, splits=2),
    "by layer": Uniform(tier="int4", tiers_by_layer="0:fp16 -1:int8"),
    "kivi": Kivi(bits=2, group=8, residual_tokens=16),
    "kvquant_style": KVQuantStyle(bits=4, group=8, pre_rope=False),
    "zipcache": ZipCache(window=8),
    "diffkv": DiffKV(alpha_h=2.0, alpha_l=0.5, window=4),
    "snapkv": SnapKV(budget=20, window=4, tier="int4"),
    "quest": Quest(read_budget=24, page_tokens=8, dense_layers=0, tier="int8", group="mean"),
}
LENGTH, PROMPT, DIM = 51, 36, 64


def layers_of(seed: int, heads: int = 2, group: int = 2, dim: int = DIM, shift: float = 0.0, layers: int = 2) -> list:
    """Queries, keys and values of layers; keys of the prompt have the mean 0, so that with `shift` on them a row's
    vector is the shift and the keys less it are the same bits as without."""
    found = []
    for layer in range(layers):
        q, k, v = random_layer(seed + layer, heads, group, LENGTH, dim)
        k = (k * 64).round() / 64
        k[:, PROMPT // 2 : PROMPT] = -k[:, : PROMPT // 2]
        every = torch.arange(dim) % 5 - 2.0  # numbers that sums and 16 bits hold exactly
        found.append((q, k + shift * every, v))
    return found


def outputs(policy, layers, backend="torch", **options) -> list:
    """Attention of the steps behind a prompt, of all layers."""
    store, row = filled(policy, layers, PROMPT, 0.125, new_tokens=LENGTH, backend=backend, **options)
    return [torch.stack(step_at(store, row, layers, at, 0.125)) for at in range(PROMPT, LENGTH)]


@pytest.mark.every(3)
@pytest.mark.parametrize(("name", "backend"), in_turn([*FORMATS], ("torch", "auto")))
def test_a_constant_of_all_keys_costs_no_format_anything(name, backend):
    """Keys that share a large vector are stored as keys without it are, to the bit: in pages of every format and in
    rings, of the prompt and of what follows it. Where attention decides what stays, its last digits may."""
    policy = FORMATS[name]
    plain = outputs(policy, layers_of(0), backend)
    shifted = outputs(policy, layers_of(0, shift=8.0), backend, key_offset="prompt")
    same = [torch.equal(*each) for each in zip(plain, shifted, strict=True)]
    assert all(same) or name in ("diffkv", "snapkv", "zipcache", "minikv"), name
    assert sum(torch.allclose(*each, atol=1e-4) for each in zip(plain, shifted, strict=True)) >= len(same) - 1
