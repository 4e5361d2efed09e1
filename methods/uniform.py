"""Uniform quantisation: every token in one precision, nothing evicted."""

from dataclasses import dataclass, replace
from typing import Annotated

from kvbench.policy import ByLayer, Tier, TierText, Whole


@dataclass(kw_only=True)
class Uniform(ByLayer):
    """Stores every key and value vector at one precision, quantised when it is appended.

    Args:
        tier: `int8`, `int4`, k<bits>v<bits>, lloyd-k<bits>v<bits> (rotated channels, the best levels for a normal
            distribution, one norm per vector), or a format as vLLM names it: `fp8` (e4m3 without scales), `fp8_e5m2`,
            `fp8_per_token_head`, `int8_per_token_head`, `int4_per_token_head`, `turboquant_k8v4`, `turboquant_4bit`,
            `turboquant_k3v4`, `turboquant_3bit`, `nvfp4`, `nvfp4_4over6`; as SGLang does: `fp4_mx_block16`; as
            llama.cpp does, in blocks of 32 channels: `q8_0`, `q5_1`, `q5_0`, `q4_1`, `q4_0`, `iq4_nl`, or two of them,
            keys first, such as `q8_0-q4_0` or `f16-q8_0`; also `mxfp4`.
        symmetric: Codes centred on zero, without zero points (integer tiers).
        splits: Equal groups that a vector is cut into, each with its own scale (integer tiers).

    Source: Atom/QServe style KV quantisation as DiffKV section 2.2 describes it; DiffKV's INT4 baseline (K4V4,
        thresholds 0). fp8: vLLM kv_cache_dtype=fp8 (e4m3, scale 1). fp8_per_token_head, int8_per_token_head,
        turboquant_* (there with _nc, the norm correction): vLLM config/cache.py and quantization/turboquant/config.py;
        lloyd: TurboQuant (Zandieh et al. 2025), its first stage on both sides. nvfp4: vLLM PR 40177. mxfp4: OCP MX 1.0.
        int4_per_token_head: vLLM PR 40835. fp4_mx_block16: SGLang 0.5.23, kvfp4_tensor.py. q8_0 .. iq4_nl: llama.cpp,
        ggml-quants.c; rotated since PR 21038.
    Differs: weights and activations stay as they are, and keys are not smoothed: only the cache is measured. Scales per
        token and head are fp16, where vLLM has fp32; NVFP4 has no scale per tensor (1, as vLLM without a calibrated
        checkpoint); turboquant_* compress every layer, where vLLM leaves the first and last two as they are
        (protect_layers=[0,1,-2,-1] does), and the residual sketch (QJL) of the paper is left out, as there. The signs
        of int4_per_token_head's rotation are kvbench's. llama.cpp's attention rounds queries to 8 bits as well; here
        they stay as they are. iq4_nl's scales are sums in fp64, where llama.cpp has fp32.
    """

    tier: TierText = "int8"
    symmetric: bool = False
    splits: Annotated[int, Whole(1, 1024)] = 1

    def declare(self) -> None:
        named = Tier.parse(self.tier)
        if max(named.k_bits, named.v_bits) == 16 and not (named.native or named.has_form):
            raise ValueError(
                f"tier={self.tier} leaves 16-bit elements, as method=full does; choose int8, int4, fp8 or k8v4"
            )
        if self.symmetric and min(named.k_bits, named.v_bits) < 2:
            raise ValueError(
                f"symmetric=true needs at least 2 bits, but tier={self.tier} has {min(named.k_bits, named.v_bits)}"
            )
        if (self.symmetric or self.splits > 1) and named.has_form:
            raise ValueError(
                f"tier={self.tier} says itself how its scales are made; leave symmetric=false and splits=1, or choose "
                "an integer tier such as int4"
            )
        if not (named.native or named.fp8 or named.has_form):
            named = replace(named, k_splits=self.splits, v_splits=self.splits, symmetric=self.symmetric)
        self.tiers = (named,)
        self.spread()
