"""Base of the methods that make room for each new token: one goes at every step, from the first on."""

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from kvbench.policy.bounds import Bounds, Extent, of_answer
from kvbench.policy.eviction import answer_share
from kvbench.policy.plans import APPEND, DecodePlan
from kvbench.policy.ranked import Ranked
from kvbench.policy.views import DecodeView


@dataclass(kw_only=True)
class Stepwise(Ranked):
    """A method whose new tokens take the slots of the lightest ones once a list is full.

    With a share of all tokens seen the recent window grows too, and the incoming token is one of it.

    A subclass declares a score with `decode_update` and `track=("score", "pos")`.

    Args:
        recent_share: Share of the budget that is the recent window, in [0, 1].
    """

    acts_in_decode = True
    recent_share: float = field(init=False, repr=False, compare=False, default=0.0)

    @property
    def no_eviction(self) -> str:
        return ""

    def always(self, budget: int) -> tuple[int, int]:
        return 0, int(budget * self.recent_share)

    def last_tokens(self) -> int:
        return 0  # a share of what a sequence may hold

    def plan_decode(self, view: DecodeView) -> DecodePlan:
        return self.make_room(view)

    def make_room(self, view: DecodeView, over_layer: bool = False) -> DecodePlan:
        """Evicts the token with the lowest score of each full list; protected ones stay.

        With a threshold a token goes once its score, per query that counted, is below it, however full the list is.

        Args:
            view: The view.
            over_layer: Decide once per layer, by the mean over its heads.
        """
        if self._budget.of_seen:
            window = (view.budget_tokens(self._budget).double() * self.recent_share).long()
            return self.keep_up(view, window, over_layer)
        by: Literal["mean", "score"] = "score"
        if self.threshold is not None and not self.score.decode_replace:
            by = "mean"
        first = self.protection.first_held(view)
        allowed = self._allowed(view)
        before = view.tokens_seen
        if self.recent_share:  # the prompt's number of recent tokens: 0.29 x 100 differs in fp32
            before = before - (allowed.double() * self.recent_share).long()
        if self.protection.is_first:  # the recent ones yield to them, as in the prompt's plan
            before = torch.maximum(before, view.tokens_seen - (allowed - first))
        if self.protect == "answer":
            before = torch.minimum(before, view.prompt_tokens)
        lightest = view.argmin(0, by=by, before=before, first=first, over_layer=over_layer)
        if self.protect == "prompt" and self.threshold is None:
            full = view.num_slots(0) > (view.prompt_tokens + allowed)[:, None, None]
        else:  # whatever a list's share is: from the prompt's end on one comes and one goes
            full = (view.tokens_seen > torch.maximum(view.prompt_tokens, allowed))[:, None, None]
        goes = lightest.exists & full
        if self.threshold is not None:
            goes = goes & (lightest.value < self.threshold)
        return DecodePlan(slot=torch.where(goes, lightest.slot, APPEND))

    def _allowed(self, view: DecodeView) -> Tensor:
        """Tokens that a list may hold, int64 [S].

        Of the answer where the prompt is protected, of the prompt's length where a threshold decides.
        """
        if self.threshold is not None:
            return view.prompt_tokens
        if self.protect == "prompt":
            return answer_share(view, self._budget)[:, 0, 0] - view.prompt_tokens
        return self.protection.room(view, view.budget_tokens(self._budget))

    def bounds(self, extent: Extent) -> Bounds | None:
        if self.threshold is not None or not self.acts_in_decode or self._budget.of_seen:
            return super().bounds(extent)
        if self.protect == "prompt":
            return of_answer(extent, self._budget, 0, 1)
        spare, new = 1, extent.new_tokens
        if self.protect == "answer":
            allowed = extent.allowed(self._budget, extent.prompt_tokens)
            spare += new if self.budget_is_mean else max(0, new - allowed)
        return self.within_budget(extent, at_end=spare)
