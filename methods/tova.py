"""TOVA: the token that the newest query attends to least makes room."""

from dataclasses import dataclass

from torch import Tensor

from kvbench.policy import DecodePlan, DecodeView, PrefillView, ScoreSpec, SettingsConflict, Stepwise


@dataclass(kw_only=True)
class TOVA(Stepwise):
    """Keeps the tokens that the last query attends to most, the same ones in every head of a layer.

    The prompt is cut down to the budget by its last query. From then on each step drops the token with the smallest
    attention of that step, whatever its age: neither sinks nor recent tokens are protected, unless `protect` says so.
    With a threshold it drops that one only where its attention is below it.

    Args:
        per_head: Every KV head ranks and drops on its own, by the mean of its query heads.

    Source: schwartz-lab-NLP/TOVA src/tova_cache.py (mean over all heads of a layer, then top-k of the last query).
    Differs: the victim of a step is overwritten when the next step begins, so one token more than the budget is held
        between steps, as many as the original attends to; kept tokens stay in position order after the prompt;
        `per_head` is an addition.
    """

    per_head: bool = False

    def declare(self) -> None:
        super().declare()
        if not self.per_head and (self.value_aware or self.allocation not in ("uniform", "pyramid")):
            what = "value_aware=true" if self.value_aware else f"allocation={self.allocation}"
            raise SettingsConflict(
                f"{what} tells heads of a layer apart, and TOVA keeps one set for all; set per_head=true",
                setting="method.per_head",
            )
        if self.scope == "head":
            self.scope = "layer"
        self.rank_by(
            ScoreSpec(
                prefill_queries=1, group_reduce="mean", decode_update=True, decode_replace=True, track=("score", "pos")
            )
        )

    def ranking(self, view: PrefillView) -> Tensor:
        score = view.score
        return score if self.per_head else score.mean(1, keepdim=True).expand_as(score)

    def plan_decode(self, view: DecodeView) -> DecodePlan:
        return self.make_room(view, over_layer=not self.per_head)
