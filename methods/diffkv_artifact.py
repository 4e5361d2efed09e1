"""DiffKV as released: the code that made the paper's numbers, where it differs from the paper."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.policy import APPEND, EVICT, DecodePlan, DecodeView, Policy, PrefillPlan, PrefillView, ScoreSpec, Tier

HIGH, LOW = 0, 1


@dataclass(kw_only=True)
class DiffKVArtifact(Policy):
    """Two precision tiers and pruning by attention from the last 64 prompt queries; one least significant token per
    decode step is demoted or pruned.

    Args:
        alpha_h: Threshold of the high tier against 1 / N, >= alpha_l.
        alpha_l: Threshold of the low tier, >= 0.
        window: Last tokens that stay high; >= 1.
        queries: Prompt queries that are scored; > 0.
        high: Tier of significant tokens.
        low: Tier of less significant ones.
        cot: Chain-of-thought metadata groups: 4-bit sides in 2 groups, 2-bit sides in 4.
        emulate_score_bug: Reproduce the released short-prompt kernel, which stores each slot's score under another
            token's rank.

    Source: DiffKV artefact at 6cf5d20.
    Differs: the score bug is off by default; slots keep their true position beside the count that the code packs into
        it.
    """

    alpha_h: float = 1.0
    alpha_l: float = 0.02
    window: int = 64
    queries: int = 64
    high: str = "k8v4"
    low: str = "k4v2"
    cot: bool = False
    emulate_score_bug: bool = False
    acts_in_decode = True

    def __post_init__(self) -> None:
        if self.alpha_l < 0 or self.alpha_h < self.alpha_l:
            raise ValueError(f"alpha_l={self.alpha_l} and alpha_h={self.alpha_h} must satisfy 0 <= alpha_l <= alpha_h")
        if self.window < 1 or self.queries < 1:
            raise ValueError(f"window={self.window} and queries={self.queries} must be >= 1")
        named = [Tier.parse(self.high), Tier.parse(self.low)]
        splits = {4: 2, 2: 4} if self.cot else {}
        self._tiers = tuple(
            t if t.native else Tier(
                k_bits=t.k_bits, v_bits=t.v_bits, k_splits=splits.get(t.k_bits, 1), v_splits=splits.get(t.v_bits, 1)
            )
            for t in named
        )  # fmt: skip
        self._score = ScoreSpec(
            prefill_queries=self.queries, group_reduce="max", decode_update=True, track=("score", "pos")
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
        mean = view.score / (length - position).clamp(max=self.queries)
        protected = position >= length - self.window
        low = torch.where(mean >= self.alpha_l / length, LOW, EVICT)
        tier_of = torch.where((mean >= self.alpha_h / length) | protected, HIGH, low)
        stored = None
        if self.emulate_score_bug:
            order = mean.masked_fill(protected, 1.0).argsort(dim=-1, stable=True)
            stored = torch.empty_like(view.score).scatter_(-1, order, view.score)
        return PrefillPlan(tier_of=tier_of.to(torch.int8), score=stored)

    def plan_decode(self, view: DecodeView) -> DecodePlan:
        """The released four-way rule: prune the lightest high token, demote it over the lightest low one, demote it to
        a new slot, or append."""
        seen = view.tokens_seen
        at_high, at_low = (alpha / seen[:, None, None] for alpha in (self.alpha_h, self.alpha_l))
        high, low = (view.argmin(tier, by="mean", before=self._counted_before(view)) for tier in (HIGH, LOW))
        room = view.num_slots(HIGH) + view.num_slots(LOW) + 1 <= self.window
        prune = ~room & high.found & (high.value < at_low) & (high.value < low.value)
        demote = ~room & ~prune & high.found & (high.value < at_high)
        reuse = demote & low.found & (low.value < at_low)
        return DecodePlan(
            slot=torch.where(prune | demote, high.slot, APPEND),
            demote_to=torch.where(demote, LOW, EVICT),
            demote_slot=torch.where(reuse, low.slot, APPEND),
        )

    def _counted_before(self, view: DecodeView) -> Tensor:
        """Positions below this have been scored by at least `window` queries, which makes them eligible; int64 [S]."""
        edge = view.tokens_seen - self.window + 1
        # Prompt tokens count from the first scored query on: with window > queries none is eligible until enough steps
        # have passed.
        none_yet = view.tokens_seen - (view.prompt_tokens - self.queries) < self.window
        return torch.where(none_yet, torch.zeros_like(edge), edge)
