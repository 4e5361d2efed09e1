"""Key norms: keys with a small norm attract attention, so they stay."""

from dataclasses import dataclass
from typing import Annotated

from kvbench.policy import KeyNorms, PrefillView, Scored, ScoreSpec, SettingsConflict, Whole


@dataclass(kw_only=True)
class KeyNorm(Scored):
    """Keeps, per KV head, the prompt tokens whose keys have the smallest Euclidean norm; no attention is looked at.

    Args:
        skip_layers: First layers that keep everything, >= 0; the others share what the budget leaves.

    Source: alessiodevoto/l2compress cache.py, l2_compress (EMNLP 2024).
    Differs: one budget for the whole cache: with `skip_layers` the other layers keep less, so that the mean is met (the
        original keeps its ratio in them); no minimum length (`prune_after`); kept tokens stay in position order.
    """

    skip_layers: Annotated[int, Whole(0, 1000, unit="layers")] = 0

    def declare(self) -> None:
        super().declare()
        if self.skip_layers and (self.allocation != "uniform" or self.threshold is not None):
            raise SettingsConflict(
                f"skip_layers={self.skip_layers} divides a budget among layers, as allocation={self.allocation} with "
                f"threshold={self.threshold} does or has no need to; set one of them",
                setting="method.skip_layers",
            )
        self.budget_is_mean = self.budget_is_mean or self.skip_layers > 0
        self.rank_by(ScoreSpec(statistic=KeyNorms(), track=("score", "pos") if self.evicts_later else ()))

    def prompt_budget(self, view: PrefillView) -> int:
        budget, skipped, length = super().prompt_budget(view), self.skip_layers, view.num_tokens
        if budget >= length or not skipped:
            return budget
        left = budget * view.num_layers - skipped * length
        if skipped >= view.num_layers or left < view.num_layers - skipped:
            raise SettingsConflict(
                f"skip_layers={skipped} whole layers of {view.num_layers} leave nothing of budget={self.budget} "
                f"({budget} of {length} tokens) for the others; lower skip_layers or raise the budget",
                setting="method.skip_layers",
            )
        return length if int(view.layers[0]) < skipped else left // (view.num_layers - skipped)
