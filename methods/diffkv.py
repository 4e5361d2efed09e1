"""DiffKV (LeanKV): per-token precision by significance, decided per head while decoding."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvbench.policy import (
    ALL_QUERIES,
    APPEND,
    EVICT,
    DecodePlan,
    DecodeView,
    Policy,
    PrefillPlan,
    PrefillView,
    ScoreSpec,
    Tier,
)

HIGH, LOW = 0, 1


@dataclass(kw_only=True)
class DiffKV(Policy):
    """Keeps significant tokens in a high tier, less significant ones in a low tier, and prunes the rest.

    A token's significance is the mean attention it got from the queries after it, the maximum over the query heads of
    its KV head. Against N tokens it is high from alpha_h / N on, low from alpha_l / N on, pruned below. The last
    `window` tokens stay high. In each decode step the token that leaves the window is classified; if it stays (high or
    low), the least significant token of the tier it entered may be demoted or pruned.

    Args:
        alpha_h: Threshold of the high tier, >= alpha_l.
        alpha_l: Threshold of the low tier, >= 0; 0 prunes nothing.
        window: Last tokens that stay high, the incoming one included; >= 1.
        high: Tier of significant tokens.
        low: Tier of less significant ones.
        threshold: `N`: thresholds alpha / prompt length, as the calibration section and Algorithm 1 say. `i`: alpha /
            (1-based position), as section 4 says.
        cot: Metadata groups of the released chain-of-thought mode: 4-bit sides in 2 groups, 2-bit sides in 4.

    Source: DiffKV (SOSP'25) section 4 and Algorithm 1; thresholds of Llama3-8B.
    Differs: none from the paper as read there; `diffkv_artifact` is the released code.
    """

    alpha_h: float = 1.0
    alpha_l: float = 0.02
    window: int = 64
    high: str = "k8v4"
    low: str = "k4v2"
    threshold: Literal["N", "i"] = "N"
    cot: bool = False
    acts_in_decode = True

    def __post_init__(self) -> None:
        if self.alpha_l < 0 or self.alpha_h < self.alpha_l:
            raise ValueError(f"alpha_l={self.alpha_l} and alpha_h={self.alpha_h} must satisfy 0 <= alpha_l <= alpha_h")
        if self.window < 1:
            raise ValueError(f"window={self.window} must be >= 1")
        if self.threshold not in ("N", "i"):
            raise ValueError(f"threshold={self.threshold!r} must be 'N' or 'i'")
        self._tiers = (self._tier(self.high), self._tier(self.low))
        for tier in self._tiers:
            if not tier.evictable:
                raise ValueError(
                    f"tier {tier.name} cannot be demoted token by token; choose a token-axis tier such as k8v4"
                )
        self._score = ScoreSpec(
            prefill_queries=ALL_QUERIES, group_reduce="max", decode_update=True, track=("score", "pos")
        )

    def _tier(self, text: str) -> Tier:
        tier = Tier.parse(text)
        if not self.cot or tier.native:
            return tier
        splits = {4: 2, 2: 4}
        return Tier(
            k_bits=tier.k_bits,
            v_bits=tier.v_bits,
            k_splits=splits.get(tier.k_bits, 1),
            v_splits=splits.get(tier.v_bits, 1),
        )

    @property
    def tiers(self) -> tuple[Tier, ...]:
        return self._tiers

    @property
    def score(self) -> ScoreSpec:
        return self._score

    def plan_prefill(self, view: PrefillView) -> PrefillPlan:
        length = view.num_tokens
        position = torch.arange(length, device=view.score.device)
        mean = view.score / (length - position)
        scale = 1.0 / length if self.threshold == "N" else 1.0 / (position + 1)
        tier_of = torch.where(mean >= self.alpha_h * scale, HIGH, torch.where(mean >= self.alpha_l * scale, LOW, EVICT))
        tier_of[..., max(0, length - self.window) :] = HIGH
        return PrefillPlan(tier_of=tier_of.to(torch.int8))

    def plan_decode(self, view: DecodeView) -> DecodePlan:
        """Algorithm 1; the incoming token always takes the high slot that becomes free, or a new one."""
        seen = view.tokens_seen
        leaving = seen - self.window
        at_high, at_low = (alpha / seen[:, None, None] for alpha in (self.alpha_h, self.alpha_l))
        candidate = view.find(HIGH, leaving)
        high = view.argmin(HIGH, by="mean", before=leaving + 1)
        low = view.argmin(LOW, by="mean", before=leaving + 1)
        # The candidate: pruned, demoted (perhaps over a low victim), or it stays and a high victim is looked for.
        prune = candidate.found & (candidate.value < at_low)
        demote = candidate.found & ~prune & (candidate.value < at_high)
        stays = candidate.found & ~prune & ~demote & high.found
        prune_high = stays & (high.value < at_low)
        demote_high = stays & ~prune_high & (high.value < at_high)
        slot = _first_of((prune | demote, candidate.slot), (prune_high | demote_high, high.slot))
        reuse = demote & low.found & (low.value < at_low)
        return DecodePlan(
            slot=slot,
            demote_to=torch.where(demote | demote_high, LOW, EVICT),
            demote_slot=torch.where(reuse, low.slot, APPEND),
        )


def _first_of(*cases: tuple[Tensor, Tensor]) -> Tensor:
    """The slot of the first case that applies, else `APPEND`."""
    slot = torch.full_like(cases[0][1], APPEND)
    for applies, value in reversed(cases):
        slot = torch.where(applies, value, slot)
    return slot
