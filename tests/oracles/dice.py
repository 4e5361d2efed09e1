"""A policy that throws dice: random valid plans, remembered for the oracle, and views checked against it."""

import random
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from oracles.slow_store import APPEND, EVICT, SlowStore

from kvbench.policy import (
    Compaction,
    CompactPlan,
    DecodePlan,
    DecodeView,
    Policy,
    PrefillPlan,
    PrefillView,
    ScoreSpec,
    Tier,
)

TIERS = {
    "diffkv": (Tier(k_bits=8, v_bits=4), Tier(k_bits=4, v_bits=2)),
    "fp16": (Tier(),),
    "three": (Tier(k_bits=8, v_bits=4, v_splits=2), Tier(k_bits=4, v_bits=2, k_splits=2, v_splits=4), Tier()),
    "odd": (Tier(k_bits=4, v_bits=4, symmetric=True), Tier(k_bits=1, v_bits=2)),
}
SCORED = ScoreSpec(prefill_queries=-1, group_reduce="max", decode_update=True, track=("score", "pos"))
WINDOWED = ScoreSpec(
    prefill_queries=4,
    power=2,
    group_reduce="sum",
    decode_update=True,
    track=("score", "pos"),
    pool="max",
    pool_kernel=3,
)
POSITIONS = ScoreSpec(track=("pos",))


@dataclass(kw_only=True)
class Dice(Policy):
    """Decides by dice, remembers what it decided, and checks what its views say.

    Args:
        own_tiers: Its tiers.
        spec: Its scores.
        own_scores: The prompt's stored scores are random instead of the view's.
        dice: Random numbers.
        slow: The oracle, which bulk evictions are applied to at once.
        stepping: Rows of the step that is being planned.
    """

    own_tiers: tuple = (Tier(),)
    spec: ScoreSpec = ScoreSpec()
    own_scores: bool = False
    dice: random.Random | None = None
    slow: SlowStore | None = None
    stepping: tuple = ()
    compactions: int = 0
    acts_in_decode: ClassVar[bool] = True
    compaction: ClassVar[Compaction] = Compaction(2)

    @property
    def tiers(self) -> tuple:
        """As given."""
        return self.own_tiers

    @property
    def score(self) -> ScoreSpec:
        """As given."""
        return self.spec

    def plan_prefill(self, view: PrefillView) -> PrefillPlan:
        """Random tiers and evictions; the last token always stays. `prefill_plans` keeps tiers and scores by layer."""
        make = torch.Generator().manual_seed(self.dice.randrange(2**31))
        shape = (len(view.layers), view.num_kv_heads, view.num_tokens)
        tier_of = torch.randint(-1, len(self.tiers), shape, generator=make).to(torch.int8)
        tier_of[..., -1] = 0
        score = torch.rand(shape, generator=make) if self.own_scores else None
        for i, layer in enumerate(view.layers.tolist()):
            self.prefill_plans[layer] = (tier_of[i], None if score is None else score[i])
        return PrefillPlan(tier_of=tier_of, score=score)

    def plan_compact(self, view: DecodeView) -> CompactPlan:
        """Keeps random slots of the rows whose turn it is, at least one per list; sometimes a whole tier."""
        self.compactions += 1
        make, owners = torch.Generator().manual_seed(self.dice.randrange(2**31)), self.slow.rows
        grown = {row: owners[row].tokens_seen - owners[row].prompt_tokens for row in self.stepping}
        due = [row for row, tokens in grown.items() if tokens and tokens % self.compaction.every == 0]
        assert view.shape == (len(due), self.slow.num_layers, self.slow.num_heads)
        share, keep = self.dice.random(), []
        for tier in range(len(self.tiers)):
            mask = torch.rand(view.slots(tier).valid.shape, generator=make) < share
            mask[..., :1] = True
            keep.append(None if self.dice.random() < 0.3 else mask)
        for i, row in enumerate(due):
            self.slow.compact(row, [None if mask is None else mask[i].flatten(0, 1) for mask in keep])
        return CompactPlan(keep=keep)

    def plan_decode(self, view: DecodeView) -> DecodePlan:
        """Per list: append, evict, demote to a new slot, or demote over a slot."""
        self.check_view(view)
        dice, num_tiers = self.dice, len(self.tiers)
        tier = dice.choice([0, 0, dice.randrange(num_tiers)])
        held = [view.num_slots(t) for t in range(num_tiers)]
        plan = {name: torch.full(view.shape, -1) for name in ("slot", "demote_to", "demote_slot")}
        for where in np.ndindex(*view.shape):
            action = dice.choice(["append", "evict", "demote", "demote over"])
            if action == "append" or not held[tier][where]:
                continue
            plan["slot"][where] = dice.randrange(int(held[tier][where]))
            others = [t for t in range(num_tiers) if t != tier]
            if action == "evict" or not others:
                continue
            to = dice.choice(others)
            plan["demote_to"][where] = to
            if action == "demote over" and held[to][where]:
                plan["demote_slot"][where] = dice.randrange(int(held[to][where]))
        assert (EVICT, APPEND) == (-1, -1)
        self.plan = DecodePlan(tier=tier, **plan)
        if not (plan["demote_to"] != EVICT).any() and dice.random() < 0.5:  # fields may be left out
            return DecodePlan(tier=tier, slot=plan["slot"])
        return self.plan

    def check_view(self, view: DecodeView) -> None:
        """Counts and reductions of the view equal a search through the oracle's slots."""
        owners = [self.slow.rows[r] for r in self.stepping]
        assert view.tokens_seen.tolist() == [o.tokens_seen for o in owners]
        assert view.prompt_tokens.tolist() == [o.prompt_tokens for o in owners]
        dice, window = self.dice, self.spec.prefill_queries
        scored = "score" in self.spec.track
        tier, first = dice.randrange(len(self.tiers)), dice.choice([0, 3])
        before = torch.tensor([dice.randint(0, o.tokens_seen) for o in owners]) if dice.random() < 0.7 else None
        by = dice.choice(["mean", "score", "pos"] if scored else ["pos"])
        got = view.argmin(tier, by=by, before=before, first=first)
        position = torch.tensor([dice.randint(0, o.tokens_seen) for o in owners])
        found = view.find(tier, position)
        for i, row in enumerate(self.stepping):
            for n, tiers in enumerate(owners[i].each()):
                where = (i, *divmod(n, view.shape[2]))
                slots = tiers[tier]
                assert int(view.num_slots(tier)[where]) == len(slots)
                limit = 10**9 if before is None else int(before[i])
                value = {
                    "mean": lambda s, r=row: self.slow.mean(r, s, window),
                    "score": lambda s: s.score,
                    "pos": lambda s: s.pos,
                }[by]
                options = [(value(s), s.pos, j) for j, s in enumerate(slots) if first <= s.pos < limit]
                want = min(options, default=(np.inf, -1, -1))
                assert float(got.value[where]) == float(want[0])
                assert (int(got.pos[where]), int(got.slot[where])) == want[1:]
                assert bool(got.exists[where]) == bool(options)
                match = [j for j, s in enumerate(slots) if s.pos == int(position[i])]
                assert int(found.slot[where]) == (match[0] if match else -1)
                if match and scored:
                    assert float(found.value[where]) == float(self.slow.mean(row, slots[match[0]], window))
