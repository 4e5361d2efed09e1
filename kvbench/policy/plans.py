"""Plans of a policy, as tensors over lists. Methods import these from `kvbench.policy`.

The cache holds every plan to the rules below, in every run; a plan that breaks one ends the run with a ValueError.
"""

from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor

EVICT = -1  # in a PrefillPlan: the token is not stored; in a DecodePlan: the displaced token is dropped
APPEND = -1  # in a DecodePlan: a new slot at the end of the tier


@dataclass(kw_only=True)
class PrefillPlan:
    """Tier or eviction of each prompt token.

    Args:
        tier_of: int8 (or wider integers) [V, H, N]: the tier of each token, or `EVICT`. Every head keeps at least one.
        score: fp32 [V, H, N], finite, to store with the slots instead of `view.score`, or None.
        channels: int64 [V, H, D], where the policy's statistic measures channels (`of_channels`), else None: every
            list's key channels, each once, the one that counts most first. Tiers of few key channels (`Tier.k_kept`)
            hold the first ones.
    """

    tier_of: Tensor
    score: Tensor | None = None
    channels: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Extreme:
    """Slot of each list picked by a reduction, [S, L, H].

    `value` is fp32, `slot` int64 (-1: none eligible), `pos` int64.
    """

    value: Tensor
    slot: Tensor
    pos: Tensor

    @cached_property
    def exists(self) -> Tensor:
        """Mask bool [S, L, H] of the lists with an eligible slot."""
        return self.slot >= 0


@dataclass(frozen=True, kw_only=True)
class SlotArrays:
    """Padded per-slot fields of one tier: `score` fp32, `pos` int64 and `valid` bool, all [S, L, H, n].

    `extra` has the further numbers of a statistic by name, where it measured the slots.
    """

    score: Tensor
    pos: Tensor
    valid: Tensor
    extra: dict[str, Tensor] = field(default_factory=dict)


@dataclass(kw_only=True)
class DecodePlan:
    """Plan of one decode step; every field is int64 [S, L, H], or None for its default everywhere.

    Args:
        slot: Slot of tier `tier` that the incoming token takes, one that its list holds, or `APPEND`. The token there
            makes room: it is evicted, or demoted. Only where `acts_in_decode` is set.
        demote_to: Tier that the displaced token is re-quantised to, or `EVICT`.
        demote_slot: Slot of that tier which the demoted token takes (one that is held; its holder goes), or `APPEND`.
        tier: The incoming token's tier, the same for all lists.
    """

    slot: Tensor | None = None
    demote_to: Tensor | None = None
    demote_slot: Tensor | None = None
    tier: int = 0


@dataclass(kw_only=True)
class CompactPlan:
    """Bulk eviction.

    Args:
        keep: Per tier, bool [S, L, H, n] over the slots of `DecodeView.slots(tier)`, or None to keep all of a tier.
            Every list keeps at least one token.
        restart_scores: The scores of what stays begin again at 0.
    """

    keep: list[Tensor | None]
    restart_scores: bool = False
