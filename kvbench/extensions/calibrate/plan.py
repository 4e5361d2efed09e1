"""Plan of a calibration: the settings to tune one after the other, the rule of the choice, and two sets of samples."""

import hashlib
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from omegaconf import DictConfig

from kvbench.config.files import FULL
from kvbench.config.settings import as_dict
from kvbench.errors import SettingMissing, SettingsConflict, SettingValue, check_whole, unknown_name
from kvbench.evidence.settings import POSITIVE
from kvbench.policy import Policy
from kvbench.results.measures import LOSSES, SCORE
from kvbench.rules import Declared, declared
from kvbench.tasks.taskset import TaskSet

PROOFS = ("interval", "mean")
CHEAPEST, PAPER = RULES = ("cheapest", "paper")
Number = int | float | str  # a budget in bytes is written `8MiB`


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Rule that chooses a setting: good ones lose at most the margin in `criterion` against the full cache.

    `cheapest` chooses the fewest bytes among the good ones; `paper` the highest score, good or not.
    """

    name: str = CHEAPEST
    criterion: str
    margin: float
    proof: str
    """`interval`: the upper end of the loss's 95 % interval is within the margin; `mean`: the mean loss is."""
    tie: float
    """Bytes that are larger than the fewest by at most this share of them count as equal."""
    resamples: int
    seed: int

    def text(self) -> str:
        """The rule as a sentence."""
        if self.name == PAPER:
            return (
                "the highest score; a tie goes to the earlier, gentler value of the grid, which is the smaller one of "
                f"thresholds; the verdict is by the {self.proof} of the {LOSSES[self.criterion].rule}, at most "
                f"{self.margin:g}"
            )
        what = "the upper end of the 95 % interval of the loss" if self.proof == "interval" else "the mean loss"
        return (
            f"the fewest resident bytes among the values of which {what} is at most {self.margin:g} "
            f"({LOSSES[self.criterion].rule}); bytes within {100 * self.tie:g} % of the fewest are a tie, which the "
            "earlier, gentler value of the grid wins"
        )


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One setting of the method and the values to try, from the gentlest to the harshest."""

    parameter: str
    values: tuple[Number, ...]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Settings of a calibration, in addition to the experiment's; samples are counted per subset."""

    stages: tuple[Stage, ...]
    raised: Mapping[str, tuple[str, Number]]
    """Setting -> the other setting that it must not be below, and that one's value where it is not tuned."""
    rule: Rule
    tuning_samples: int
    held_out_samples: int
    off: Mapping[str, Number] = field(default_factory=dict)
    """Setting -> a value that joins its grid where the mean loss of every value of it is above the margin."""

    def settings(self, stage: int, value: Number, chosen: Mapping[str, Number]) -> dict[str, Number]:
        """The tuned settings of one grid point: earlier stages at what they chose, later ones at their first value."""
        result = {item.parameter: chosen.get(item.parameter, item.values[0]) for item in self.stages}
        result[self.stages[stage].parameter] = value
        for name, (other, otherwise) in self.raised.items():
            if name in result:
                result[name] = max(result[name], result.get(other, otherwise))
        return result


def read_plan(
    cfg: DictConfig, method: str, policy: Policy, stages: tuple[Stage, ...] | None = None, rule: str = CHEAPEST
) -> Plan:
    """Checks the settings of the command, for a method at its uncalibrated settings.

    `stages` are passed where they do not follow from the grid.
    """
    if method == FULL:
        raise SettingValue(
            "method=full is what the others are measured against; choose a method that compresses", setting="method"
        )
    if rule not in RULES:
        raise unknown_name("rule", rule, RULES)
    usual = cfg.rules[rule]
    if stages is None:
        stages = _stages(cfg, method, declared(type(policy)), usual)
    for name in ("tuning_samples", "held_out_samples", "resamples"):
        check_whole(f"calibrate.{name}", cfg[name], 2)
    if not isinstance(cfg.tie, int | float) or not 0 <= cfg.tie < 1:
        raise SettingValue(f"calibrate.tie={cfg.tie} must be a share of the bytes in [0, 1)", setting="calibrate.tie")
    criterion = usual.criterion if cfg.criterion is None else cfg.criterion
    for name, value, known in (("criterion", criterion, LOSSES), ("proof", cfg.proof, PROOFS)):
        if value not in known:
            raise unknown_name(f"calibrate.{name}", value, known)
    if rule == PAPER and criterion != SCORE.name:
        raise SettingsConflict(
            f"calibrate.criterion={criterion} does not fit rule={PAPER}, which chooses by the task's score; leave it "
            f"out, or take rule={CHEAPEST}",
            setting="calibrate.criterion",
        )
    margin = cfg.margin[criterion]
    if not POSITIVE.fits(margin):
        raise SettingValue(
            f"calibrate.margin.{criterion}={margin} must be a number above 0: the loss you accept",
            setting=f"calibrate.margin.{criterion}",
        )
    chosen = Rule(
        name=rule,
        criterion=criterion,
        proof=cfg.proof,
        resamples=cfg.resamples,
        margin=float(margin),
        tie=float(cfg.tie),
        seed=cfg.split_seed,
    )
    off = {name: float(value) for name, value in (usual.get("otherwise") or {}).items()}
    raised = {name: (other, getattr(policy, other)) for name, other in cfg.raised.items() if hasattr(policy, other)}
    sizes = {name: cfg[name] for name in ("tuning_samples", "held_out_samples")}
    return Plan(stages=stages, raised=raised, off=off, rule=chosen, **sizes)


def _stages(cfg: DictConfig, method: str, known: Mapping[str, Declared], usual: Mapping[str, Any]) -> tuple[Stage, ...]:
    """Settings to tune: those requested, or those of the grid that the method has.

    `known` is what it declares, and `usual` has the rule's values where the grid has none.
    """
    grid = {name: as_dict(usual).get(name) if values is None else values for name, values in as_dict(cfg.grid).items()}
    names = cfg.parameters
    if names is None and not (names := [name for name in grid if name in known]):
        raise SettingMissing(
            f"method={method} has none of the settings {', '.join(grid)}; say which to tune and with which values, "
            f"for example calibrate.parameters=[NAME] '+calibrate.grid.NAME=[...]'; it has {', '.join(known)}",
            setting="calibrate.parameters",
        )
    stages = []
    for name in names:
        if name not in known:
            raise unknown_name("calibrate.parameters", name, known)
        values = grid.get(name)
        if not isinstance(values, list) or not values or any(isinstance(item, bool | None) for item in values):
            raise SettingValue(
                f"calibrate.parameters has {name}, and calibrate.grid.{name}={values} is no list of values; give one, "
                f"the gentlest first: '+calibrate.grid.{name}=[...]'",
                setting=f"calibrate.grid.{name}",
            )
        if len(set(values)) < len(values):
            raise SettingValue(f"calibrate.grid.{name}={values} holds a value twice", setting=f"calibrate.grid.{name}")
        # 1 and 1.0 are two runs to the hash; a setting that is a float takes floats.
        values = [float(item) if known[name].kinds == (float,) and isinstance(item, int) else item for item in values]
        stages.append(Stage(parameter=name, values=tuple(values)))
    if not stages or len({stage.parameter for stage in stages}) < len(stages):
        raise SettingValue(
            f"calibrate.parameters={list(names)} must name at least one setting, and none twice",
            setting="calibrate.parameters",
        )
    return tuple(stages)


def describe_data(task: TaskSet, limit: object, rule: Rule) -> dict[str, Any]:
    """Name the problems of a calibration: their source and numbers.

    For the paper's rule also where they are not the paper's, MATH's training split.
    """
    settings = {name: task.protocol[name] for name in ("problems", "levels") if name in task.protocol}
    settings |= {} if limit is None else {"limit": limit}
    files = [f"{item['file']} ({item['rows']} rows)" for item in task.sources]
    remarks = [
        f"{item['file']} has {item['rows']} rows and the benchmark's {item['of']}: another file stands for it"
        for item in task.sources
        if item.get("of", item["rows"]) != item["rows"]
    ]
    if rule.name == PAPER and settings.get("problems") != "train":
        remarks.append("the paper takes MATH's training problems (task=math task.split=train), and these are others")
    text = ", ".join([task.name, *(f"{name}={value}" for name, value in settings.items()), *files])
    said = "; ".join([text, *remarks])
    return {"sources": list(task.sources), "settings": settings, "remarks": remarks, "said": said}


def split(task: TaskSet, plan: Plan, seed: int) -> tuple[TaskSet, TaskSet]:
    """Two disjoint sets of samples, one to tune on and one for the verdict; refuses a subset of a single sample.

    A sample's id and the seed alone decide where it goes. A subset with fewer samples than requested is split in the
    same proportion.
    """
    tuning: set[str] = set()
    held_out: set[str] = set()
    for subset, group in itertools.groupby(sorted(task.requests, key=lambda r: r.subset), key=lambda r: r.subset):
        order = sorted(group, key=lambda r: hashlib.sha256(f"{seed}/{r.sample_id}".encode()).hexdigest())
        wanted = plan.tuning_samples + plan.held_out_samples
        count = min(plan.tuning_samples, max(1, len(order) * plan.tuning_samples // wanted))
        if len(order) < 2:
            raise SettingValue(
                f"subset {subset} of task {task.name} has a single sample, which cannot serve for tuning and verdict; "
                "leave the subset out",
                setting="task",
            )
        tuning |= {request.sample_id for request in order[:count]}
        held_out |= {request.sample_id for request in order[count:wanted]}
    return _part(task, tuning), _part(task, held_out)


def _part(task: TaskSet, names: set[str]) -> TaskSet:
    requests = [request for request in task.requests if request.sample_id in names]
    marked = hashlib.sha256("\n".join([task.fingerprint, *sorted(names)]).encode()).hexdigest()
    return replace(task, requests=requests, fingerprint=marked)
