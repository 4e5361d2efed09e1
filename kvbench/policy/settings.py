"""Rules of settings that many methods have, and their dependence on the model.

Also the methods that can drop tokens of a prompt before all of it was read.
"""

from dataclasses import dataclass
from typing import Annotated

from kvbench.errors import SettingsConflict, SettingValue
from kvbench.policy.base import Policy
from kvbench.policy.budget import Budget, BudgetRule
from kvbench.policy.declare import ALL_QUERIES
from kvbench.policy.tiers import NAMED, Tier
from kvbench.rules import Readable, Whole, declared


@dataclass(frozen=True)
class TierRule(Readable):
    """Rule of settings that `Tier.parse` reads."""

    text = f"a precision: {', '.join(NAMED)}, k<bits>v<bits> such as k8v4, or lloyd-k<bits>v<bits>"

    def check(self, name: str, value: object) -> None:
        Tier.parse(value, name)


TierText = Annotated[str, TierRule()]
"""A setting that names a precision."""


def check_sizes(policy: Policy, *, max_tokens: int, num_layers: int) -> None:
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
            raise SettingValue(
                f"method.{name}={value} is beyond the model, whose {what} of {unit} is {limit}; give at most that many",
                setting=f"method.{name}",
            )


CHUNK = Whole(1, unit="tokens")


def check_chunk(policy: Policy, chunk: int | None) -> None:
    """Refuses `prefill.chunk` for a method that cannot do with it.

    Args:
        policy: The method.
        chunk: Tokens of a prompt that are read at once; None = all.

    Raises:
        ValueError: Names the method, the rule and the remedy.
    """
    if chunk is None:
        return
    CHUNK.check("prefill.chunk", chunk)
    spec, name, moves = policy.score, type(policy).__name__, len(policy.tiers) > 1 and policy.by_layer is None
    remedy = "set prefill.chunk=null, or choose another method"
    if spec.probe is not None:
        reason = "reads the whole prompt a second time before it drops any of it"
    elif not policy.in_chunks:
        reason = "decides once, by the whole prompt"
    elif spec.measures_prompts and not spec.statistic.in_chunks:
        reason = f"measures tokens by {type(spec.statistic).__name__}, which has to see the whole prompt at once"
    elif spec.measures_prompts and policy.residual is not None:
        reason = "drops tokens whose keys share scales with others behind a residual buffer, where none can go alone"
    elif moves and "pos" not in spec.track and policy.position_mode != "pre_rope":
        reason = "moves tokens between tiers without tracking their positions"
    elif spec.prefill_queries == ALL_QUERIES and spec.query_reduce != "sum":
        reason = f"takes the {spec.query_reduce} over all queries of the prompt, which does not add up over chunks"
    elif chunk < spec.prefill_queries:
        reason = f"measures tokens by the last {spec.prefill_queries} queries, and a chunk has fewer"
        remedy = f"give prefill.chunk={spec.prefill_queries} or more"
    else:
        return
    raise SettingsConflict(
        f"prefill.chunk={chunk} does not go with {name}, which {reason}; {remedy}", setting="prefill.chunk"
    )


def check_chunk_devices(chunk: int | None, num_devices: int, num_processes: int) -> None:
    """Refuses `prefill.chunk` where a chunk's past lies in several places.

    Args:
        chunk: Tokens of a prompt that are read at once; None = all.
        num_devices: Devices that share the layers.
        num_processes: Processes that share the heads.

    Raises:
        ValueError: Names the settings, the rule and the remedy.
    """
    if chunk is None or (num_devices < 2 and num_processes < 2):
        return
    spread, other = f"model.device spreads its layers over {num_devices} devices", "name one device"
    if num_processes > 1:
        spread, other = f"model.tensor_parallel={num_processes} divides its heads", "model.tensor_parallel=null"
    raise SettingsConflict(
        f"prefill.chunk={chunk} needs a cache in one place, and {spread}; set prefill.chunk=null, or {other}",
        setting="prefill.chunk",
    )
