"""A slow oracle of the compressed store: Python lists of slots, one number at a time."""

from copy import deepcopy
from dataclasses import dataclass, field

import numpy as np
import torch
from oracles.slow_attention import attend_one, reduce
from oracles.slow_pages import stored_vector
from torch import Tensor

from kvbench.policy.tiers import Tier

EVICT, APPEND = -1, -1


def two_pointer_moves(keep: list[bool]) -> list[tuple[int, int]]:
    """KV-Compress's compaction by hand: the last survivor goes to the first hole until the two meet."""
    moves, low, high = [], 0, len(keep) - 1
    while True:
        while low < high and keep[low]:
            low += 1
        while low < high and not keep[high]:
            high -= 1
        if low >= high:
            return moves
        moves.append((high, low))
        low, high = low + 1, high - 1


def through_tier(tier: Tier, k: list[float], v: list[float]) -> tuple[np.ndarray, np.ndarray]:
    """What a key and a value read as after they were stored in a token tier."""
    return (
        stored_vector(k, tier.k_bits, groups=tier.k_splits, symmetric=tier.symmetric),
        stored_vector(v, tier.v_bits, groups=tier.v_splits, symmetric=tier.symmetric),
    )


@dataclass
class SlowSlot:
    """One token of one list, as it reads."""

    pos: int
    score: np.float32
    k: np.ndarray
    v: np.ndarray


@dataclass
class SlowRow:
    """One sequence: `lists[layer][head][tier]` is a Python list of slots in slot order."""

    lists: list
    tokens_seen: int = 0
    prompt_tokens: int = 0
    planned: list = field(default_factory=list)  # (layer, head, tier, slot) of the token that is being written

    def each(self) -> list:
        """All lists, layer by layer and head by head."""
        return [tiers for layer in self.lists for tiers in layer]


class SlowStore:
    """Executes plans slot by slot.

    Args:
        tiers: Token-axis tiers.
        num_layers: Layers.
        num_heads: Lists per layer.
        group: How scores of a group's query heads are reduced, or None when decode does not score.
        power: Power of the probabilities.
    """

    def __init__(self, tiers: tuple[Tier, ...], num_layers: int, num_heads: int, group: str | None, power: int) -> None:
        self.tiers, self.num_layers, self.num_heads, self.group, self.power = tiers, num_layers, num_heads, group, power
        self.rows: dict[int, SlowRow] = {}

    def open(self, row: int) -> None:
        """An empty row."""
        empty = [[[[] for _ in self.tiers] for _ in range(self.num_heads)] for _ in range(self.num_layers)]
        self.rows[row] = SlowRow(empty)

    def fork(self, source: int, target: int) -> None:
        """A copy of a row."""
        self.rows[target] = deepcopy(self.rows[source])

    def put(self, tiers: list, tier: int, k: Tensor, v: Tensor, pos: int, score: float) -> None:
        """Appends a token to a tier of a list."""
        stored = through_tier(self.tiers[tier], k.tolist(), v.tolist())
        tiers[tier].append(SlowSlot(pos, np.float32(score), *stored))

    def prefill(self, row: int, layer: int, k: Tensor, v: Tensor, tier_of: Tensor, score: Tensor) -> None:
        """Stores a prompt's layer: k, v [H, N, D], tier_of and score [H, N]."""
        for head, tiers in enumerate(self.rows[row].lists[layer]):
            for token, tier in enumerate(tier_of[head].tolist()):
                if tier != EVICT:
                    self.put(tiers, tier, k[head, token], v[head, token], token, float(score[head, token]))

    def compact(self, row: int, keep: list) -> None:
        """Evicts in bulk: `keep[tier]` is bool [lists, n] or None."""
        for index, tiers in enumerate(self.rows[row].each()):
            for tier, mask in enumerate(keep):
                if mask is None:
                    continue
                slots, kept = tiers[tier], mask[index, : len(tiers[tier])].tolist()
                for source, target in two_pointer_moves(kept):
                    slots[target] = slots[source]
                del slots[sum(kept) :]

    def apply(self, row: int, tier: int, slot: Tensor, demote_to: Tensor, demote_slot: Tensor) -> None:
        """Makes room for the incoming token of every list; the plan's fields are [lists]."""
        owner = self.rows[row]
        owner.planned = []
        for index, tiers in enumerate(owner.each()):
            at, to, over = int(slot[index]), int(demote_to[index]), int(demote_slot[index])
            fresh = SlowSlot(owner.tokens_seen, np.float32(0), None, None)
            if at == APPEND:
                tiers[tier].append(fresh)
                owner.planned.append((tier, len(tiers[tier]) - 1))
                continue
            gone = tiers[tier][at]
            tiers[tier][at] = fresh
            owner.planned.append((tier, at))
            if to == EVICT:
                continue
            moved = SlowSlot(gone.pos, gone.score, *through_tier(self.tiers[to], gone.k.tolist(), gone.v.tolist()))
            if over == APPEND:
                tiers[to].append(moved)
            else:
                tiers[to][over] = moved

    def attend(self, row: int, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Writes the incoming token of a layer and attends: q [Hq, D], k, v [H, D]; returns [Hq, D], float64."""
        owner, size, outs = self.rows[row], q.shape[0] // self.num_heads, []
        for head, tiers in enumerate(owner.lists[layer]):
            tier, slot = owner.planned[layer * self.num_heads + head]
            held = tiers[tier][slot]
            held.k, held.v = through_tier(self.tiers[tier], k[head].tolist(), v[head].tolist())
            slots = [s for part in tiers for s in part]
            keys, values = (torch.from_numpy(np.stack([getattr(s, name) for s in slots])) for name in "kv")
            found = [attend_one(q[head * size + g], keys, values, scale) for g in range(size)]
            outs += [out for out, _, _ in found]
            if self.group is not None:
                gain = reduce(torch.stack([p for _, _, p in found]) ** self.power, self.group).tolist()
                for s, x in zip(slots, gain, strict=True):
                    s.score = np.float32(s.score + x)
        return torch.stack(outs)

    def chunk(self, row: int, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Attends causally over what is held and the chunk, then appends it to tier 0: q [Hq, n, D], k, v [H, n, D]."""
        owner, size, count = self.rows[row], q.shape[0] // self.num_heads, k.shape[1]
        out = torch.zeros(q.shape, dtype=torch.float64)
        for head, tiers in enumerate(owner.lists[layer]):
            slots = [s for part in tiers for s in part]
            past_k, past_v = ([torch.from_numpy(getattr(s, name)) for s in slots] for name in "kv")
            for i in range(count):
                keys = torch.stack([*past_k, *k[head, : i + 1]])
                values = torch.stack([*past_v, *v[head, : i + 1]])
                for g in range(head * size, (head + 1) * size):
                    out[g, i] = attend_one(q[g, i], keys, values, scale)[0]
            for i in range(count):
                self.put(tiers, 0, k[head, i], v[head, i], owner.tokens_seen + i, 0.0)
        return out

    def mean(self, row: int, slot: SlowSlot, window: int) -> np.float32:
        """Score per query counted: a prompt token counts the last `window` prompt queries (-1: all) from itself on."""
        owner = self.rows[row]
        origin = slot.pos if window == -1 else max(slot.pos, owner.prompt_tokens - window)
        return np.float32(slot.score) / np.float32(max(1, owner.tokens_seen - origin))
