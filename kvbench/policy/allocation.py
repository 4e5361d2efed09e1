"""Allocation of one budget over the lists of a cache: by layer, by the number of best tokens, or by a table."""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import torch
from torch import Tensor

from kvbench.errors import NotForModel, SettingsConflict, SettingValue
from kvbench.policy.budget import Budget
from kvbench.policy.ranking import pyramid_budgets, rank_descending, share_with_cap
from kvbench.policy.views import PrefillView
from kvbench.rules.tables import Table

Allocation = Literal["uniform", "pyramid", "ada", "ada_pyramid", "global", "preference", "table"]
"""Who competes for a budget: nobody, layers by their depth, the heads of a layer, all heads, or a table decides, or
what the method finds its layers to be worth."""


@dataclass(frozen=True, kw_only=True)
class Shares:
    """Allocation of a budget over layers and heads.

    Args:
        allocation: The rule.
        alpha: Share of a list's budget that the others cannot take, in [0, 1].
        beta: Steepness of a pyramid.
        table: Weights of `allocation=table`, one row per layer.
        official_rounding: Round pyramids and Ada-KV's budgets as their released code does, which misses the budget.

    Raises:
        ValueError: Weights that no rule uses, or that say nothing.
    """

    allocation: Allocation = "uniform"
    alpha: float = 0.2
    beta: int = 20
    table: Table | None = None
    official_rounding: bool = False

    def __post_init__(self) -> None:
        if self.table is None:
            return
        if self.allocation != "table":
            raise SettingsConflict(
                f"table is for allocation=table, but allocation={self.allocation}; set one of the two",
                setting="method.table",
            )
        if min(map(min, self.table)) < 0 or not any(map(any, self.table)):
            raise SettingValue(
                "table holds weights below 0, or nothing but 0; give what every head's share is worth",
                setting="method.table",
            )

    def check(self, text: object, budget: Budget, without_weights: str | None) -> None:
        """Refuses shares that a budget or a method does not go with.

        Args:
            text: The budget as it was set.
            budget: It, parsed.
            without_weights: Class of the method, if that has no `layer_weights`.
        """
        if self.allocation == "preference" and without_weights:
            raise SettingValue(
                "allocation=preference is for methods that say what a prompt's layers are worth, and "
                f"{without_weights} does not; choose another allocation, or a method such as cake",
                setting="method.allocation",
            )
        if self.spare_pages and budget.unit == "bytes":
            raise SettingsConflict(
                f"official_rounding=true may spend more than budget={text}, which bytes do not allow; give a ratio or "
                "tokens",
                setting="method.official_rounding",
            )

    @property
    def is_mean(self) -> bool:
        """Lists may have more than the budget, which is the mean over them."""
        return self.allocation != "uniform"

    @property
    def spare_pages(self) -> int:
        """Pages per list that may be spent beyond the budget."""
        return int(self.official_rounding and self.is_mean)

    @property
    def scope(self) -> Literal["head", "layer", "model"]:
        """Lists whose tokens have to be ranked together."""
        if self.allocation in ("global", "preference"):
            return "model"
        return "layer" if self.allocation in ("ada", "ada_pyramid") else "head"

    def check_model(self, num_layers: int, num_kv_heads: int) -> None:
        """Refuses weights of another model.

        Raises:
            NotForModel: The shape of the table is not the model's.
        """
        shape = (len(self.table), len(self.table[0])) if self.table is not None else (0, 0)
        if self.allocation == "table" and shape != (num_layers, num_kv_heads):
            raise NotForModel(
                f"method.table has {shape[0]} layers x {shape[1]} heads, but the model has {num_layers} layers x "
                f"{num_kv_heads} KV heads; give allocation=table the weights of this model as method.table=PATH",
                setting="method.table",
            )

    def targets(
        self, view: PrefillView, score: Tensor, mean: int, reserve: int, worth: Callable[[PrefillView], Tensor]
    ) -> Tensor:
        """Tokens that each list keeps of those ranked, int64 and broadcast against [V, H, 1]; their mean is `mean`.

        Args:
            view: The view.
            score: fp32 [V, H, n] the tokens to choose from.
            mean: At most n.
            reserve: Tokens (0 or 1) that every list has before others are shared out.
            worth: View -> weight of each layer, fp64 [L], for `allocation=preference`.
        """
        base, room, here = mean - reserve, score.shape[-1] - reserve, score.device
        if self.allocation == "uniform":
            return torch.full((), mean, device=here)
        if self.table is not None:
            weights = torch.tensor(self.table, dtype=torch.float64)
            weights = weights.repeat_interleave(view.num_kv_heads // weights.shape[1], 1)
            shares = shares_by_table(weights, base, room, self.alpha)[view.layers.cpu()]
            return (reserve + shares).to(here)[..., None]
        if self.allocation == "preference":
            by_layer = share_with_cap(worth(view), base * view.num_layers, room, at_least=0)
            return reserve + torch.tensor(by_layer, device=here)[:, None, None]
        layers = torch.full((len(view.layers),), base, device=here)
        if "pyramid" in self.allocation and base:
            pyramid = pyramid_budgets(
                base,
                room,
                view.num_tokens,
                view.num_layers,
                beta=self.beta,
                official_rounding=self.official_rounding,
                uniform_middle=self.allocation == "pyramid" or not self.official_rounding,
            )
            layers = torch.tensor(pyramid, device=here)[view.layers]
        if self.allocation == "pyramid":
            return reserve + layers[:, None, None]
        if reserve:
            score = score.masked_fill(rank_descending(score) == 0, float("-inf"))
        if self.allocation == "global":
            score, layers = score.flatten(0, 1)[None], layers[:1]
        by_score = shares_by_score(score, layers, self.alpha, official_rounding=self.official_rounding)
        return reserve + by_score.view(len(view.layers), -1, 1)


def shares_by_score(score: Tensor, base: Tensor, alpha: float, *, official_rounding: bool = False) -> Tensor:
    """Budgets int64 [G, M] by each list's share of the best tokens (fp32 [G, M, n]) of a group of lists.

    Their mean is `base`, int64 [G], of which the share `alpha` does not depend on the scores: Ada-KV's safeguard.

    Source: FFY0/AdaKV at efe4e2e, AdaptiveSnapKVCluster.
    Differs: largest remainder, unless `official_rounding`.
    """
    lists = score.shape[1]
    total = base * lists
    # Ties go to the lower list, then to the lower position.
    best = rank_descending(score.flatten(1)).view_as(score) < total[:, None, None]
    count = best.sum(-1)
    if official_rounding:
        return (count.double() * (1 - alpha) + (base.double() * alpha).floor()[:, None]).round().long()
    share = Fraction(str(alpha))  # 0.2 is not exact in binary, and ties have to be ties
    parts = count * (share.denominator - share.numerator) + base[:, None] * share.numerator
    return round_to_total(parts, share.denominator, total)


def round_to_total(parts: Tensor, denominator: int, total: Tensor) -> Tensor:
    """Rounds parts [G, M] / denominator to int64 with the sums `total` [G].

    Floors, then +1 by remainder descending, index ascending.
    """
    floors = parts // denominator
    by_remainder = rank_descending(parts - floors * denominator)
    return floors + (by_remainder < (total - floors.sum(-1))[:, None])


def shares_by_table(weight: Tensor, base: int, room: int, alpha: float) -> Tensor:
    """Budgets in proportion to weights, with a floor; int64 [L, H]; their mean is `base`, and none is above `room`."""
    mixed = alpha * weight.mean() + (1 - alpha) * weight
    shares = share_with_cap(mixed.flatten(), base * weight.numel(), room, at_least=0)
    return torch.tensor(shares, device=weight.device).view_as(weight)
