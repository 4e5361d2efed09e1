"""What the methods share that make room for each new token: one goes at every step, from the first on."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvbench.policy.outcomes import answer_tokens, prompt_complaint
from kvbench.policy.plans import DecodePlan
from kvbench.policy.ranked import Ranked
from kvbench.policy.scored import answer_share
from kvbench.policy.views import DecodeView


@dataclass(kw_only=True)
class Stepwise(Ranked):
    """A method whose new tokens take the slots of the lightest ones once a list is full.

    A subclass declares a score with `decode_update` and `track=("score", "pos")`, and its `plan_decode` calls
    `make_room`.
    """

    acts_in_decode = True

    def evicts_later(self) -> bool:
        return True

    def recent_tokens(self, budget: Tensor) -> Tensor:
        """int64 [S]: last tokens that a step never drops, of so many that a list may hold. Default: none."""
        return torch.zeros_like(budget)

    def make_room(self, view: DecodeView, over_layer: bool = False) -> DecodePlan:
        """The lightest token of each list that is full makes room; what is protected stays. With a threshold it goes
        once its score, per query that counted, is below it, however full the list is.

        Args:
            view: The view.
            over_layer: Decide once per layer, by the mean over its heads.
        """
        by: Literal["mean", "score"] = "score"
        if self.threshold is not None and not self.score.decode_replace:
            by = "mean"
        first = self._first(view)
        allowed = self._allowed(view)
        before = view.tokens_seen - self.recent_tokens(allowed)
        if self.protect in ("sinks", "instruction"):  # the recent ones yield to them, as in the prompt's plan
            before = torch.maximum(before, view.tokens_seen - (allowed - first))
        if self.protect == "answer":
            before = torch.minimum(before, view.prompt_tokens)
        lightest = view.argmin(0, by=by, before=before, first=first, over_layer=over_layer)
        if self.protect == "prompt" and self.threshold is None:
            full = view.num_slots(0) > (view.prompt_tokens + allowed)[:, None, None]
        else:  # whatever a list's share is: from the prompt's end on one comes and one goes
            full = (view.tokens_seen > torch.maximum(view.prompt_tokens, allowed))[:, None, None]
        goes = lightest.found & full
        if self.threshold is not None:
            goes = goes & (lightest.value < self.threshold)
        return DecodePlan(slot=torch.where(goes, lightest.slot, -1))

    def _first(self, view: DecodeView) -> int | Tensor:
        """First tokens that no step drops."""
        if self.protect == "prompt":
            return view.prompt_tokens
        return view.instruction_tokens if self.protect == "instruction" else self._sinks

    def _allowed(self, view: DecodeView) -> Tensor:
        """int64 [S]: tokens that a list may hold, of the answer where the prompt is protected, and of the prompt's
        length where a threshold decides."""
        if self.threshold is not None:
            return view.prompt_tokens
        if self.protect == "prompt":
            return answer_share(view, self._budget)[:, 0, 0] - view.prompt_tokens
        allowed, first = view.budget_tokens(self._budget), self._first(view)
        return torch.maximum(allowed, first) if isinstance(first, Tensor) else allowed.clamp(min=first)

    def check_outcome(self, record: dict) -> str | None:
        kept = record.get("kept", {})
        if self.threshold is not None or not kept or not self.acts_in_decode:
            return super().check_outcome(record)
        if self.protect == "prompt":
            return prompt_complaint(record, self._budget, 0, 1)
        spare = 1
        if self.protect == "answer":
            given = kept.get("budget_tokens") or self._budget.tokens(
                kept["prompt_tokens"], kept["lists"], kept["slot_bytes"]
            )
            spare += answer_tokens(kept) if self.budget_is_mean else max(0, answer_tokens(kept) - given)
        return self.prompt_budget_complaint(record, at_end=spare)
