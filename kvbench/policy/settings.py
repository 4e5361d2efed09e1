"""Rules of the settings that many methods have, and what of them depends on the model."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from kvbench.policy.budget import Budget
from kvbench.policy.tiers import NAMED, Tier
from kvbench.rules import Rule, declared

if TYPE_CHECKING:
    from kvbench.policy.base import Policy


class Readable(Rule):
    """What a function reads; a subclass defines `check`, which lets it refuse the rest in its own words."""

    def fits(self, value: object) -> bool:
        try:
            self.check("it", value)
        except ValueError:
            return False
        return True


@dataclass(frozen=True)
class BudgetRule(Readable):
    """What `Budget.parse` reads."""

    text = "a ratio in (0, 1] such as 0.25, a whole number of tokens per KV head, or bytes such as 8MiB"

    def check(self, name: str, value: object) -> None:
        Budget.parse(value, name)


@dataclass(frozen=True)
class TierRule(Readable):
    """What `Tier.parse` reads."""

    text = f"a precision: {', '.join(NAMED)}, k<bits>v<bits> such as k8v4, or lloyd-k<bits>v<bits>"

    def check(self, name: str, value: object) -> None:
        Tier.parse(value, name)


BudgetText = Annotated[float | int | str, BudgetRule()]
"""A setting that says how much may be kept."""
TierText = Annotated[str, TierRule()]
"""A setting that names a precision."""


def check_sizes(policy: "Policy", *, max_tokens: int, num_layers: int) -> None:
    """Refuses settings that no prompt of a model can reach.

    A window longer than some prompts is as it should be. One that is longer than the model's context would make every
    run the full cache under another name.

    Args:
        policy: The method.
        max_tokens: The model's context length.
        num_layers: The model's layers.

    Raises:
        ValueError: Names the setting, its value and what the model has.
    """
    limits = {"tokens": (max_tokens, "context"), "layers": (num_layers, "number")}
    for name, field in declared(type(policy)).items():
        value, unit = getattr(policy, name), field.rule.unit if field.rule else ""
        if isinstance(field.rule, BudgetRule) and value is not None:
            budget = Budget.parse(value, name)
            value, unit = int(budget.value), budget.unit
        if unit in limits and isinstance(value, int) and value > limits[unit][0]:
            limit, what = limits[unit]
            raise ValueError(
                f"method.{name}={value} is beyond the model, whose {what} of {unit} is {limit}; give at most that many"
            )
