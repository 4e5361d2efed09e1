"""Uniform quantisation: every token in one precision, nothing evicted."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from kvbench.policy import (
    TABLE_OR_PATH,
    ByLayer,
    HeadScales,
    NotForModel,
    SettingsConflict,
    SettingValue,
    Tier,
    TierText,
    Unless,
    Whole,
    read_table,
)


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
        scales: Calibrated scales of `fp8`, which never change: the path of a file that
            `kvbench calibrate what=scales` wrote, or a list of lists. One line per layer: the keys' scale and the
            values', or one for each KV head of keys and then of values. null = scales of 1.
        pre_rope: Quantise keys as they are before the rotary embedding, and rotate them when they are read; of formats
            with a rotation of their own with store.rotation=off. `store.key_offset=bias` needs it.

    Source: Atom/QServe style KV quantisation as DiffKV section 2.2 describes it; DiffKV's INT4 baseline (K4V4,
        thresholds 0). fp8: vLLM kv_cache_dtype=fp8 (e4m3, scale 1); scales: its k_scale and v_scale, of a tensor or (PR
        30141) a head. fp8_per_token_head, int8_per_token_head, turboquant_* (there with _nc, the norm correction): vLLM
        config/cache.py and quantization/turboquant/config.py; lloyd: TurboQuant (Zandieh et al. 2025), its first stage
        on both sides. nvfp4: vLLM PR 40177. mxfp4: OCP MX 1.0. int4_per_token_head: vLLM PR 40835. fp4_mx_block16:
        SGLang 0.5.23, kvfp4_tensor.py. q8_0 .. iq4_nl: llama.cpp, ggml-quants.c; rotated since PR 21038.
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
    scales: Annotated[str | Sequence[Sequence[float]] | None, TABLE_OR_PATH] = None
    pre_rope: Annotated[bool, Unless(False)] = False

    def declare(self) -> None:
        named = Tier.parse(self.tier)
        if max(named.k_bits, named.v_bits) == 16 and not (named.native or named.has_form):
            raise SettingValue(
                f"tier={self.tier} leaves 16-bit elements, as method=full does; choose int8, int4, fp8 or k8v4",
                setting="method.tier",
            )
        if self.symmetric and min(named.k_bits, named.v_bits) < 2:
            raise SettingsConflict(
                f"symmetric=true needs at least 2 bits, but tier={self.tier} has {min(named.k_bits, named.v_bits)}",
                setting="method.symmetric",
            )
        if (self.symmetric or self.splits > 1) and named.has_form:
            raise SettingsConflict(
                f"tier={self.tier} says itself how its scales are made; leave symmetric=false and splits=1, or choose "
                "an integer tier such as int4",
                setting="method.tier",
            )
        if not (named.native or named.fp8 or named.has_form):
            named = replace(named, k_splits=self.splits, v_splits=self.splits, symmetric=self.symmetric)
        if self.scales is not None:
            if named != Tier.parse("fp8"):
                raise SettingsConflict(
                    f"scales of a calibration are for tier=fp8, and tier={self.tier} has its own; leave scales out",
                    setting="method.scales",
                )
            self.scales = read_table(self.scales, "scales")  # the numbers themselves, whatever the path
            self.head_scales = _read_scales(self.scales)
        self.tiers = (named,)
        self.spread()
        if self.pre_rope:
            self.position_mode = "pre_rope"

    def check_model(self, num_layers: int, num_kv_heads: int) -> None:
        super().check_model(num_layers, num_kv_heads)
        if self.scales is not None:
            layers, numbers = len(self.scales), len(self.scales[0])
            if layers != num_layers or numbers not in (2, 2 * num_kv_heads):
                raise NotForModel(
                    f"method.scales has {layers} layers x {numbers} numbers, but the model has {num_layers} layers, "
                    f"which take 2 numbers each, or {2 * num_kv_heads} for {num_kv_heads} KV heads; measure them with "
                    "`kvbench calibrate what=scales`",
                    setting="method.scales",
                )


def _read_scales(rows: Sequence[Sequence[float]]) -> HeadScales:
    """The scales of lines that have those of keys and then those of values.

    Raises:
        ValueError: The lines are none.
    """
    half, odd = divmod(len(rows[0]), 2)
    if odd or not all(0 < number < math.inf for row in rows for number in row):
        raise SettingValue(
            "method.scales: a line has scales above 0 of a layer's keys and then as many of its values; `kvbench "
            "scales` writes such a file",
            setting="method.scales",
        )
    keys, values = (tuple(tuple(row[part]) for row in rows) for part in (slice(half), slice(half, None)))
    return HeadScales(keys=keys, values=values)
