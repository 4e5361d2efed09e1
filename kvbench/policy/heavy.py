"""What the methods share that keep heavy hitters and a recent window, and make room for every new token."""

from dataclasses import dataclass
from typing import Annotated

import torch

from kvbench.policy.plans import DecodePlan
from kvbench.policy.ranked import Ranked
from kvbench.policy.settings import BudgetText
from kvbench.policy.views import DecodeView
from kvbench.rules.kinds import Number


@dataclass(kw_only=True)
class HeavyHitters(Ranked):
    """A method that keeps recent tokens and those with the largest tracked scores; in every decode step the new token
    takes the slot of the lightest one outside the recent window.

    A subclass says by what it ranks (`rank_by`); its ScoreSpec tracks `score` and `pos`, and updates them while
    decoding.

    Args:
        budget: Heavy and recent tokens together: ratio of the prompt, tokens, or bytes.
        recent_share: Share of the budget that is the recent window, in [0, 1].
    """

    budget: BudgetText = 0.2
    recent_share: Annotated[float, Number(0, 1)] = 0.5
    acts_in_decode = True

    def always(self, budget: int) -> tuple[int, int]:
        return 0, int(budget * self.recent_share)

    def plan_decode(self, view: DecodeView) -> DecodePlan:
        budget = view.budget_tokens(self._budget)
        recent = (budget.double() * self.recent_share).long()  # the prompt's number: 0.29 x 100 differs in fp32
        lightest = view.argmin(0, by="score", before=view.tokens_seen - recent)
        full = view.tokens_seen > torch.maximum(view.prompt_tokens, budget)  # whatever a list's share is
        full = full[:, None, None]
        return DecodePlan(slot=torch.where(full & lightest.found, lightest.slot, -1))

    def check_outcome(self, record: dict) -> str | None:
        at_end = 1 if self.acts_in_decode else None
        return self.budget_complaint(record, self._budget, mean=self.budget_is_mean, at_end=at_end)
