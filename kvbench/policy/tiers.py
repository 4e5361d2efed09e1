"""Precision tiers: how one slot's key and value are stored. Methods import `Tier` from `kvbench.policy`."""

import math
import re
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from kvbench.errors import SettingValue
from kvbench.rules import Choice, Number, Whole, check_settings, shown

ALLOWED_BITS = (1, 2, 3, 4, 5, 8, 16)
GGML = {"q8_0": 8, "q4_0": 4, "q4_1": 4, "q5_0": 5, "q5_1": 5, "iq4_nl": 4}  # llama.cpp's types and their bits
GGML_BLOCK = 32  # channels that share a scale
CodeName = Literal[
    "",
    "e4m3_scaled",
    "e5m2",
    "lloyd",
    "nvfp4",
    "nvfp4_4over6",
    "mxfp4",
    "mxfp4_up",
    "zero_point",
    "q8_0",
    "q4_0",
    "q4_1",
    "q5_0",
    "q5_1",
    "iq4_nl",
    "book",
    "book_channels",
]
Rotated = Literal["none", "keys", "both", "llama.cpp"]


@dataclass(frozen=True, kw_only=True)
class Tier:
    """A precision format: how one slot's key and value are stored.

    Args:
        k_bits: Bits per key element: 1, 2, 3, 4, 5, 8 are codes with scale and zero, 16 is fp16 (bf16 for bf16 models).
        v_bits: Bits per value element; see `k_bits`.
        k_axis: `token`: one scale per token vector (or part of it). `channel`: one scale per channel over `k_group`
            consecutive slots; such slots are immutable, so they can be neither evicted nor demoted one by one.
        k_group: Axis `token`: channels per scale, 0 = the whole vector. Axis `channel`: tokens per scale, > 0.
        v_group: Channels per value scale, 0 = the whole vector.
        k_splits: Number of equal groups a key vector is cut into when `k_group` is 0.
        v_splits: As `k_splits`, for values.
        symmetric: Codes are centred on zero and no zero point is stored.
        fp8: 8-bit sides are e4m3 floats without scale instead of integer codes.
        k_code: Kind of key codes: empty = integers, as said above; `e4m3_scaled`: e4m3 floats with one scale;
            `e5m2`: floats without a scale; `lloyd`: the best levels for a normal distribution, with one norm; `nvfp4`,
            `nvfp4_4over6`, `mxfp4`, `mxfp4_up`: e2m1 floats in blocks; a type of llama.cpp (`q8_0`, ..); `zero_point`:
            integers with a whole zero point;
            `book`: levels of a calibrated table, with scale and zero; `book_channels`: with scales that belong to a
            channel for good (`CodeBooks`).
        v_code: As `k_code`, for values.
        k_apart: Of `book_channels` keys: elements of each vector whose rest is kept apart, in 16 bits and a byte.
        v_apart: As `k_apart`, for `book` values.
        rotated: The channels are rotated before they are coded, and back on the way out: of `none`, `keys`, or `both`
            keys and values; `llama.cpp`: of what is coded, as it does. The store rotates all tiers of a method alike.
        k_kept: Share of the key channels that is stored, in (0, 1]: the first of the order that the plan of a prompt
            gives (`PrefillPlan.channels`); attention takes the others for 0. Below 1 for keys of 16 bits only.
        native: Store the model's own dtype; the bits are ignored. For exactness tests.
    """

    k_bits: Annotated[int, Choice(ALLOWED_BITS, unit="bits")] = 16
    v_bits: Annotated[int, Choice(ALLOWED_BITS, unit="bits")] = 16
    k_axis: Literal["token", "channel"] = "token"
    k_group: Annotated[int, Whole(0)] = 0
    v_group: Annotated[int, Whole(0)] = 0
    k_splits: Annotated[int, Whole(1)] = 1
    v_splits: Annotated[int, Whole(1)] = 1
    symmetric: bool = False
    fp8: bool = False
    k_code: CodeName = ""
    v_code: CodeName = ""
    k_apart: int = 0
    v_apart: int = 0
    rotated: Rotated = "none"
    k_kept: Annotated[float, Number(0, 1, above=True)] = 1.0
    native: bool = False

    def __post_init__(self) -> None:
        check_settings(self)
        if self.k_axis == "channel" and self.k_group < 8 and not self.native:
            raise SettingValue(
                f"k_group={self.k_group} with k_axis='channel' must be >= 8 tokens; 32 is usual", setting="k_group"
            )
        for side, bits, code in (("k", self.k_bits, self.k_code), ("v", self.v_bits, self.v_code)):
            if bits == 5 and code not in GGML:
                raise SettingValue(
                    f"{side}_bits=5 are codes of q5_0 and q5_1 alone; choose those, or 4 or 8 bits",
                    setting=f"{side}_bits",
                )
        if self.k_kept < 1 and self.k_bits < 16 and not self.native:
            raise SettingValue(
                f"k_kept={self.k_kept} with k_bits={self.k_bits} must be 1; give keys 16 bits", setting="k_kept"
            )

    @property
    def name(self) -> str:
        """Short label such as `k8v4`, `k2v2-channel32`, `k16v16-keys0.6`, `nvfp4` or `native`."""
        if self.k_kept < 1:
            return f"{replace(self, k_kept=1.0).name}-keys{self.k_kept:g}"
        if self.native:
            return "native"
        if self.k_code in GGML or self.v_code in GGML:
            sides = [code or "f16" for code in (self.k_code, self.v_code)]
            return "-".join(dict.fromkeys(sides))
        if self.has_form or self.fp8:
            code = (self.k_code or self.v_code).removesuffix("_channels")
            other = "fp8" if self.fp8 else f"{code}-k{self.k_bits}v{self.v_bits}"
            return next((name for name, tier in NAMED.items() if tier == self), other)
        return f"k{self.k_bits}v{self.v_bits}" + (f"-channel{self.k_group}" if self.k_axis == "channel" else "")

    @property
    def has_form(self) -> bool:
        """The format says itself how its codes are made; `symmetric` and splits are not for its user to choose."""
        return bool(self.k_code or self.v_code) or self.rotated != "none" or self == NAMED["int8_per_token_head"]

    def key_channels(self, head_dim: int) -> int:
        """Channels of a key that are stored."""
        return max(1, math.ceil(self.k_kept * head_dim - 1e-9))

    def split_by_bits(self, splits: dict[int, int]) -> "Tier":
        """Copy with each side's vectors cut into `splits[bits]` groups; sides of other bits stay whole."""
        return replace(self, k_splits=splits.get(self.k_bits, 1), v_splits=splits.get(self.v_bits, 1))

    def per_channel(self, group: int, **more: int) -> "Tier":
        """Copy with key scales per channel over `group` tokens, and other fields.

        Formats that define their scales themselves, or have none, stay unchanged.
        """
        if self.native or self.fp8 or self.has_form or min(self.k_bits, self.v_bits) == 16:
            return self
        return replace(self, k_axis="channel", k_group=group, **more)  # type: ignore[arg-type]

    @staticmethod
    def parse(text: object, name: str = "tier") -> "Tier":
        """Reads a tier from a config string: `k8v4`, `lloyd-k4v3`, `q8_0-q4_0`, or a key of `NAMED`.

        Args:
            text: The string, or a Tier.
            name: The setting, for messages.

        Raises:
            ValueError: The text names no tier.
        """
        if isinstance(text, Tier):
            return text
        lowered = text.lower() if isinstance(text, str) else ""
        if lowered in NAMED:
            return NAMED[lowered]
        sides = lowered.split("-")
        if len(sides) == 2 and {*sides} <= {*GGML, "f16"} and sides != ["f16", "f16"]:
            return _ggml(*sides)
        match = re.fullmatch(r"(lloyd-)?k([0-9]{1,4})v([0-9]{1,4})", lowered)
        if match is None:
            raise SettingValue(
                f"{name}={shown(text)} is not a tier; write k<bits>v<bits> (for example k8v4), lloyd-k<bits>v<bits>, "
                f"one of {', '.join(NAMED)}, or two of llama.cpp's (for example q8_0-q4_0 or f16-q8_0)",
                setting=name,
            )
        try:
            k_bits, v_bits = int(match[2]), int(match[3])
            return _lloyd(k_bits, v_bits) if match[1] else Tier(k_bits=k_bits, v_bits=v_bits)
        except ValueError as error:
            raise SettingValue(f"{name}={text} is not a tier: {error}", setting=name) from None


def _lloyd(k_bits: int, v_bits: int) -> Tier:
    """Rotated codebooks on both sides, as in the paper of TurboQuant.

    Raises:
        ValueError: A number of bits that has no codebook.
    """
    for side, bits in (("k_bits", k_bits), ("v_bits", v_bits)):
        if bits not in (2, 3, 4):
            raise ValueError(f"{side}={bits} has no codebook; choose 2, 3 or 4 bits")
    return Tier(k_bits=k_bits, v_bits=v_bits, k_code="lloyd", v_code="lloyd", rotated="both")


def _ggml(keys: str, values: str) -> Tier:
    """Types of llama.cpp, keys and values apart; `f16` leaves a side unquantised."""
    sides: dict[str, Any] = {}
    for side, name in (("k", keys), ("v", values)):
        if name in GGML:
            sides |= {f"{side}_bits": GGML[name], f"{side}_group": GGML_BLOCK, f"{side}_code": name}
    return Tier(**sides, rotated="llama.cpp")


# Formats with a name. Those of serving engines have the names that vLLM gives them (vllm/config/cache.py), SGLang
# (fp4_mx_block16, once fp4_e2m1), and llama.cpp.
NAMED: dict[str, Tier] = {
    "native": Tier(native=True),
    "fp16": Tier(),
    "int8": Tier(k_bits=8, v_bits=8),
    "int4": Tier(k_bits=4, v_bits=4),
    "fp8": Tier(k_bits=8, v_bits=8, fp8=True),
    "fp8_per_token_head": Tier(k_bits=8, v_bits=8, k_code="e4m3_scaled", v_code="e4m3_scaled"),
    "fp8_e5m2": Tier(k_bits=8, v_bits=8, k_code="e5m2", v_code="e5m2"),
    "int8_per_token_head": Tier(k_bits=8, v_bits=8, symmetric=True),
    "int4_per_token_head": Tier(k_bits=4, v_bits=4, k_code="zero_point", v_code="zero_point", rotated="both"),
    "turboquant_k8v4": Tier(k_bits=8, v_bits=4, fp8=True),
    "turboquant_4bit": Tier(k_bits=4, v_bits=4, k_code="lloyd", rotated="keys"),
    "turboquant_k3v4": Tier(k_bits=3, v_bits=4, k_code="lloyd", rotated="keys"),
    "turboquant_3bit": Tier(k_bits=3, v_bits=3, k_code="lloyd", rotated="keys"),
    "nvfp4": Tier(k_bits=4, v_bits=4, k_group=16, v_group=16, k_code="nvfp4", v_code="nvfp4"),
    "nvfp4_4over6": Tier(k_bits=4, v_bits=4, k_group=16, v_group=16, k_code="nvfp4_4over6", v_code="nvfp4_4over6"),
    "mxfp4": Tier(k_bits=4, v_bits=4, k_group=32, v_group=32, k_code="mxfp4", v_code="mxfp4"),
    "fp4_mx_block16": Tier(k_bits=4, v_bits=4, k_group=16, v_group=16, k_code="mxfp4_up", v_code="mxfp4_up"),
    **{name: _ggml(name, name) for name in GGML},
}
