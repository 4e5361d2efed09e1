"""Keys quantised per channel before the rotary embedding, as KVQuant does; values per token."""

from dataclasses import dataclass
from typing import Annotated

from kvbench.policy import Bounds, ByLayer, Choice, Extent, Residual, Tier, Whole, quantised


@dataclass(kw_only=True)
class KVQuantStyle(ByLayer):
    """Quantises keys before the rotary embedding, per channel in groups of consecutive tokens; values per token.

    Keys are rotated when they are read.

    Rotation mixes pairs of channels by an angle that changes from token to token, so channels with outliers are easier
    to tell apart before it. `pre_rope=false` gives the same format after it, to measure just that.

    Args:
        bits: 1, 2, 4 or 8 for keys and values.
        group: Tokens per key scale, a multiple of 8; the newest up to `group` tokens wait in 16 bits for a whole group.
        v_splits: Equal groups that a value vector is cut into, each with its own scale.
        pre_rope: Quantise keys before the rotary embedding, or as they are after it.
        native: Store the model's own dtype instead (lossless; for tests).

    Source: KVQuant (Hooper et al. 2024), its per-channel, pre-RoPE keys and per-token values alone;
        SqueezeAILab/KVQuant.
    Differs: this is not the whole method, of which `kvquant` has more. Codes are uniform, not non-uniform by calibrated
        sensitivity; no outliers are kept apart in a sparse matrix; the first token is not kept in 16 bits. Key scales
        are taken from each group of tokens while running, not from calibration data, which is why whole groups wait in
        16 bits.
    """

    bits: Annotated[int, Choice((1, 2, 4, 8), unit="bits")] = 4
    group: Annotated[int, Whole(8, 1024, unit="tokens", multiple_of=8)] = 64
    v_splits: Annotated[int, Whole(1, 1024)] = 1
    pre_rope: bool = True
    native: bool = False

    def declare(self) -> None:
        self.tiers = (self.other_tier(f"k{self.bits}v{self.bits}"),)
        self.spread()
        self.residual = Residual(num_tokens=self.group, v_flush="all", when="after_attention", hold_prompt=False)
        self.position_mode = "pre_rope" if self.pre_rope else "absolute"

    def other_tier(self, text: str) -> Tier:
        return Tier.parse("native" if self.native else text).per_channel(self.group, v_splits=self.v_splits)

    def bounds(self, extent: Extent) -> Bounds:
        return quantised(extent, range(len(self.tiers)), beyond=2 * self.group)
