"""KIVI: keys quantised per channel, values per token, the newest tokens in 16 bits."""

from dataclasses import dataclass
from typing import Annotated

from kvbench.policy import Bounds, ByLayer, Choice, Extent, Residual, SettingsConflict, Tier, Whole, quantised


@dataclass(kw_only=True)
class Kivi(ByLayer):
    """Quantises every token but the newest: keys per channel in groups of tokens, values per token.

    Keys in groups of consecutive tokens, values in groups of channels.

    Args:
        bits: 1, 2, 4 or 8 for keys and values.
        group: Tokens per key scale and channels per value scale.
        residual_tokens: Newest tokens kept in 16 bits, a multiple of `group`. So many are always kept of values; keys
            leave together when so many are held, and none is in 16 bits then.
        native: Store the model's own dtype instead (lossless; for tests).

    Source: jy-yuan/KIVI at 876b4d2, new_pack.py and llama_kivi.py (g=32, R=128).
    Differs: a constant group gets codes 0 (the original divides by zero); GQA heads are handled in every path. Groups
        of 32 are those of its documented results; the default of process_args.py is 128; MiniKV compares it with
        groups of 16. It has no budget, so that no share of what was seen can be asked of it.
    """

    bits: Annotated[int, Choice((1, 2, 4, 8), unit="bits")] = 2
    group: Annotated[int, Whole(8, 1024, unit="tokens", multiple_of=8)] = 32
    residual_tokens: Annotated[int, Whole(8, 2**16, unit="tokens", multiple_of=8)] = 128
    native: bool = False

    def declare(self) -> None:
        if self.residual_tokens % self.group:
            raise SettingsConflict(
                f"residual_tokens={self.residual_tokens} must be a positive multiple of group={self.group}",
                setting="method.residual_tokens",
            )
        self.tiers = (self.other_tier(f"k{self.bits}v{self.bits}"),)
        self.spread()
        self.residual = Residual(
            num_tokens=self.residual_tokens, v_flush="oldest", when="after_attention", hold_prompt=True
        )

    def other_tier(self, text: str) -> Tier:
        return Tier.parse("native" if self.native else text).per_channel(self.group, v_group=self.group)

    def bounds(self, extent: Extent) -> Bounds:
        return quantised(extent, range(len(self.tiers)), beyond=2 * self.residual_tokens - 1)
