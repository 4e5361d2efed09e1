"""What the methods share that keep heavy hitters and a recent window, and make room for every new token."""

from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from kvbench.policy.plans import DecodePlan
from kvbench.policy.settings import BudgetText
from kvbench.policy.stepwise import Stepwise
from kvbench.policy.views import DecodeView
from kvbench.rules import Number


@dataclass(kw_only=True)
class HeavyHitters(Stepwise):
    """A method that keeps recent tokens and those with the largest tracked scores; in every decode step the new token
    takes the slot of the lightest one outside the recent window.

    A subclass says by what it ranks (`rank_by`); its ScoreSpec tracks `score` and `pos`, and updates them while
    decoding.

    Args:
        budget: Heavy and recent tokens together: ratio of the prompt, tokens, or bytes.
        recent_share: Share of the budget that is the recent window, in [0, 1].
    """

    budget: BudgetText | None = 0.2
    recent_share: Annotated[float, Number(0, 1)] = 0.5

    def always(self, budget: int) -> tuple[int, int]:
        return 0, int(budget * self.recent_share)

    def recent_tokens(self, budget: Tensor) -> Tensor:
        return (budget.double() * self.recent_share).long()  # the prompt's number: 0.29 x 100 differs in fp32

    def plan_decode(self, view: DecodeView) -> DecodePlan:
        return self.make_room(view)
