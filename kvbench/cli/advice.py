"""What is known of one method and setting, and what can be said of it: no more than was measured."""

from dataclasses import dataclass, field
from typing import Any

from kvbench.evidence.comparison import ComparedRun
from kvbench.sizing.project import Projection

ADVISED, ELSEWHERE, OPEN, LOSES, UNMEASURED, UNSIZED, TOO_LARGE = (
    "advised",
    "other model",
    "cannot tell",
    "loses more",
    "not measured",
    "bytes unknown",
    "too large",
)
MEANING = {
    ADVISED: "it fits, and the whole interval of its loss on this model is within the margin",
    ELSEWHERE: "the same on another model",
    OPEN: "it fits, and the interval reaches beyond the margin",
    UNMEASURED: "it fits, and its quality was never compared with the full cache's",
    LOSES: "it fits, and the whole interval is beyond the margin",
    UNSIZED: "its method is not for this model, or keeps what the text decides",
    TOO_LARGE: "it does not fit",
}
RANKS = (ADVISED, ELSEWHERE, OPEN, UNMEASURED, LOSES, UNSIZED, TOO_LARGE)
FAR = 2  # a context this many times as long as the longest measured prompt is another question


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What is asked for."""

    context_tokens: int
    answer_tokens: int
    batch: int
    memory_bytes: int | None
    """For the caches alone; None for any."""
    margin: float
    """Loss that is accepted, in the metric's unit."""


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Tokens per second of one bench."""

    tokens_per_s: float
    model: str
    context_tokens: int
    batch: int
    device: str


@dataclass(frozen=True, kw_only=True)
class Quality:
    """The paired difference to the full cache on one task and model."""

    row: ComparedRun
    task: str
    model: str
    own: bool
    """It was measured on the model that is asked about."""
    longest_tokens: int
    """Of its prompts."""

    @property
    def lost(self) -> float:
        """Mean loss, positive when worse."""
        return self.row.value * (-1 if self.row.what.higher_is_better else 1)

    @property
    def most(self) -> float | None:
        """Largest loss that the 95 % interval leaves open, the missing answers as bad as they can be; None where it is
        not known."""
        if not self.row.pairs.is_enough:
            return None
        found = [self.row.found, *((end for end in self.row.extremes) if self.row.extremes is not None else ())]
        ends = []
        for one in found:
            ends_of = None if one is None else one.interval[0]
            if ends_of is None:
                return None
            ends.append(-ends_of[0] if self.row.what.higher_is_better else ends_of[1])
        return max(ends)

    @property
    def least(self) -> float | None:
        """Smallest loss that the interval leaves open."""
        ends = self.row.interval
        if ends is None or not self.row.pairs.is_enough:
            return None
        return -ends[1] if self.row.what.higher_is_better else ends[0]


@dataclass(kw_only=True)
class Advice:
    """Everything that is known of one method and setting."""

    label: str
    method: str
    settings: dict[str, Any]
    """What differs from the method's configuration."""
    bytes_of: Projection | None
    """One sequence on the model that is asked about; None where it cannot be known."""
    speeds: list[Speed]
    quality: list[Quality] = field(default_factory=list)

    def total_bytes(self, asked: Asked) -> int | None:
        """Of all sequences."""
        return None if self.bytes_of is None else asked.batch * self.bytes_of.resident_bytes

    @property
    def worst(self) -> Quality | None:
        """The task that counts: of those on the own model, where there is any, the one that leaves most loss open."""
        found = [item for item in self.quality if item.own] or self.quality
        return max(found, key=lambda item: (item.most is None, item.most or 0.0, item.lost), default=None)

    def speed(self, model: str, asked: Asked) -> Speed | None:
        """The measurement that is nearest to what is asked for: of the own model first, then of the nearest length."""
        return min(
            self.speeds,
            key=lambda item: (item.model != model, abs(item.context_tokens - asked.context_tokens)),
            default=None,
        )

    def says(self, asked: Asked, is_full: bool) -> str:
        """What can be said, one of `RANKS`."""
        total, worst = self.total_bytes(asked), self.worst
        if total is None:
            return UNSIZED
        if asked.memory_bytes is not None and total > asked.memory_bytes:
            return TOO_LARGE
        if is_full:
            return ADVISED
        if worst is None:
            return UNMEASURED
        if worst.most is not None and worst.most <= asked.margin:
            return ADVISED if worst.own else ELSEWHERE
        if worst.least is not None and worst.least > asked.margin:
            return LOSES
        return OPEN

    def rank(self, asked: Asked, model: str, is_full: bool) -> tuple:
        """For sorting, the best first: what is said, measured throughput, bytes."""
        speed = self.speed(model, asked)
        rate = speed.tokens_per_s if speed is not None and speed.model == model else 0.0
        return RANKS.index(self.says(asked, is_full)), -rate, self.total_bytes(asked) or 0, self.label
