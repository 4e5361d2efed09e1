"""Rotary positions of stored keys: kept as the model gives them, or put on again when keys are read."""

import torch
from torch import Tensor

from kvbench.cache.layout import ModelShape
from kvbench.errors import BrokenRule, Unsupported
from kvbench.kernels.operands import InOrder, KeyRotation, TierPages
from kvbench.kernels.reference.attention import rotate
from kvbench.policy import DecodeView, Policy


class Rope:
    """A policy's `position_mode`, applied to keys on their way into pages and out of them.

    Pages hold keys with their rotary position (`absolute`), or without it; those are rotated when they are read, to
    their index in the cache (`cache_relative`) or to their true position (`pre_rope`; nothing may be evicted, so that
    slot i holds token i, after the tokens of all later tiers). Refuses a model whose keys cannot be rotated, and a
    policy that would move slots away from their tokens.

    Args:
        on_device: Page tables lie on a device; the contents of tensors are not read back.
    """

    def __init__(self, policy: Policy, shape: ModelShape, on_device: bool = False) -> None:
        self.mode, self._policy = policy.position_mode, policy
        name = type(policy).__name__
        if self.mode != "absolute" and shape.inv_freq is None:
            raise Unsupported(
                f"{name} stores keys without their rotary position and rotates them on reading, but this model's "
                "rotary embedding is not of the plain kind that allows it; set method.position_mode=absolute or "
                "method.pre_rope=false where the method has that option"
            )
        if self.mode == "pre_rope" and (policy.acts_in_decode or policy.compaction):
            raise BrokenRule(f"{name}: position_mode='pre_rope' needs tiers in which every token stays in its slot")
        self._in_order = policy.by_layer is None  # else each list has one tier
        self._known: dict[int, InOrder] = {}
        self._looks = not on_device and shape.device.type == "cpu"
        # Without rotation nobody reads it.
        self._inv_freq = torch.zeros(0) if shape.inv_freq is None else shape.inv_freq.to(torch.float32)

    def strip(self, k: Tensor, position: Tensor) -> Tensor:
        """Keys as pages hold them; `position` broadcasts against k[..., 0]."""
        if self.mode == "absolute":
            return k
        return rotate(k.float(), -position[..., None].float() * self._inv_freq)

    def attach(self, tiers: list[TierPages], view: DecodeView | None) -> None:
        """Attaches position angles for one layer's stored keys to its tiers, ids [S, H, m].

        Without the view that the step was planned from, `cache_relative` keys stay unrotated.
        """
        if self.mode == "pre_rope":
            before = torch.zeros_like(tiers[0].num_k[:, 0])
            for index, tier in reversed(list(enumerate(tiers))):
                tier.rotation = self._in_a_row(index, before)
                if self._in_order:
                    before = before + tier.num_k[:, 0]
        elif self.mode == "cache_relative" and view is not None:
            (tier,) = tiers  # an index in the cache is defined for one tier
            tier.rotation = self._cache_angles(view, tier.num_k[:, 0], tier)

    def _in_a_row(self, index: int, first: Tensor) -> InOrder:
        """Positions of a tier.

        While their values stay the same the same object is returned, so that a backend makes its tables once.
        """
        known = self._known.get(index)
        if known is None or not self._looks or not torch.equal(known.first, first):
            known = self._known[index] = InOrder(first, self._inv_freq)
        return known

    def rotation_of(self, view: DecodeView, width: int) -> KeyRotation | None:
        """The rotation of keys for kernels that find slots through tables: `width` slots per list at most."""
        if self.mode == "absolute":
            return None
        if self.mode == "pre_rope":
            return KeyRotation(self._inv_freq)
        return KeyRotation(self._inv_freq, self._policy.cache_positions(view.shown(), width).contiguous())

    def stripping(self, position: Tensor) -> tuple[Tensor, Tensor] | None:
        """Cosine and sine, fp32 [S, D_rot / 2], with which `strip` rotates keys at positions (int64 [S]), or None."""
        if self.mode == "absolute":
            return None
        angle = -position[:, None].float() * self._inv_freq
        return angle.cos(), angle.sin()

    @property
    def leaving(self) -> Tensor | None:
        """Rotary frequencies, fp32 [D_rot / 2], of the positions that `strip` takes off; None where it leaves them."""
        return None if self.mode == "absolute" else self._inv_freq

    def rotate_past(self, keys: Tensor, live: Tensor, seen: int) -> Tensor:
        """Rotates keys of one row, fp32 [H, n, D] ordered by age, for attention from a prompt's next chunk.

        `live` [H, n] excludes padding. `cache_relative` keys are rotated to their index in the cache, which the chunk
        continues after `seen` tokens; other keys are unchanged.
        """
        if self.mode != "cache_relative":
            return keys
        index = torch.arange(keys.shape[1], device=keys.device) + seen - live.sum(1, keepdim=True)
        return rotate(keys, index[..., None].float() * self._inv_freq)

    def attach_all_layers(self, tiers: list[TierPages], view: DecodeView | None) -> bool:
        """Attaches angles for all layers at once, ids [S, L, H, m]; returns False where that is impossible.

        Lists of different lengths need angles of their own, as do angles that depend on the layer.
        """
        if self.mode == "absolute":
            return True
        if self.mode == "pre_rope" or view is None or len(tiers) != 1:
            return False
        held = tiers[0].num_k
        if not bool((held == held[:, :1, :1]).all()):
            return False
        tiers[0].rotation = self._cache_angles(view, held[:, 0, 0], tiers[0])
        return True

    def _cache_angles(self, view: DecodeView, held: Tensor, tier: TierPages) -> Tensor:
        """Angles fp32 [S, m * T, D_rot / 2] that put each stored key at its cache index, relative to the newest token.

        The query keeps its true position, and keys move so that distances are those in the cache. `held` int64 [S] are
        the slots per list, the newest token's included.
        """
        width = tier.ids.shape[-1] * tier.fmt.tokens_per_page
        age = self._policy.cache_positions(view.shown(), width)
        shift = view.tokens_seen - (held - 1)
        return (age + shift[:, None])[..., None].float() * self._inv_freq
