"""`kvbench calibrate what=layers`: the layers that may have fewer bits, measured layer by layer.

And the tables of precisions that follow from it, from the gentlest to the harshest.

Each layer alone gets each precision, and what the answers lose then is its sensitivity. From all layers at the gentlest
precision, a greedy search takes the step that adds the least loss per byte that it saves, again and again. It adds up
losses of single layers, which is a guess; so tables along its way are measured as they are, chosen from like any other
setting, and proven on other samples.

Source: KVTuner (Li et al. 2025, arXiv 2502.04420): precision by layer, from sensitivities measured offline.
Differs: the idea alone. The paper groups layers and searches by several objectives at once; here single layers and a
greedy search, over whatever formats a method takes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from omegaconf import DictConfig

from kvbench.errors import SettingsConflict, SettingValue, Unsupported, check_whole, unknown_name
from kvbench.extensions.calibrate.choose import Measured, evaluate
from kvbench.extensions.calibrate.measure import Sweep
from kvbench.extensions.calibrate.plan import Rule, Stage
from kvbench.policy import ByLayer, Policy
from kvbench.policy.by_layer import MAX_TIERS, write_table
from kvbench.policy.settings import TierRule
from kvbench.results.refusals import NotMeasured
from kvbench.tasks.taskset import TaskSet

SETTING = "tiers_by_layer"
AROUND = ("gentle", "harsh")


@dataclass(frozen=True, kw_only=True)
class LayerPlan:
    """Settings of a search over layers.

    The precisions that a layer may have, the gentlest first; that of the other layers while one is measured, the
    `gentle` end of these or the `harsh` one; and the number of tables to measure.
    """

    tiers: tuple[str, ...]
    around: str
    points: int

    @property
    def usual(self) -> str:
        """The precision of the others."""
        return self.tiers[0 if self.around == "gentle" else -1]


@dataclass(frozen=True, kw_only=True)
class LayerTrial:
    """One layer at one precision, and what was measured on the tuning samples."""

    layer: int
    tier: str
    measured: Measured


@dataclass(kw_only=True)
class LayerSearch:
    """The measurements, and the way that the search took."""

    plan: LayerPlan
    base: Measured
    """All layers at the usual precision."""
    trials: list[LayerTrial]
    path: list[tuple[str, float]] = field(default_factory=list)
    """Every table on the way, and its loss if losses of layers added up."""

    def costs(self, criterion: str) -> dict[str, list[float]]:
        """Loss of one layer alone at each precision above the usual one's: a list over layers for each."""
        usual, table = self.base.losses[criterion].value or 0.0, dict[str, list[float]]()
        for trial in self.trials:
            table.setdefault(trial.tier, []).append((trial.measured.losses[criterion].value or 0.0) - usual)
        return table


def read_layer_plan(cfg: DictConfig, method: str, policy: Policy) -> LayerPlan:
    """Checks the settings."""
    if not isinstance(policy, ByLayer):
        raise Unsupported(
            f"what=layers is for methods whose layers may differ in precision, and {method} is none; choose another "
            "one, such as int4",
            setting="method",
        )
    if policy.by_layer is not None:
        raise SettingsConflict(
            "what=layers searches method.tiers_by_layer, which method.protect_layers would overrule; leave both out",
            setting="method.tiers_by_layer",
        )
    tiers = tuple(str(tier) for tier in cfg.tiers)
    for tier in tiers:
        TierRule().check("calibrate.layers.tiers", tier)
    if not 2 <= len(tiers) <= MAX_TIERS or len(set(tiers)) < len(tiers):
        raise SettingValue(
            f"calibrate.layers.tiers={list(tiers)} must be 2 to {MAX_TIERS} different precisions, the gentlest first",
            setting="calibrate.layers.tiers",
        )
    if cfg.around not in AROUND:
        raise unknown_name("calibrate.layers.around", cfg.around, AROUND)
    return LayerPlan(tiers=tiers, around=cfg.around, points=check_whole("calibrate.layers.points", cfg.points, 2))


def search(sweep: Sweep, plan: LayerPlan, rule: Rule, task: TaskSet, num_layers: int) -> tuple[LayerSearch, Stage]:
    """Measures every layer at every precision, and makes the tables, which are the values of a stage.

    Raises:
        ValueError: The method refuses a precision, or a sample did not end well.
    """
    usual = plan.usual
    wanted: list[tuple[int, str]] = [(n, tier) for n in range(num_layers) for tier in plan.tiers if tier != usual]
    tables = [[usual] * num_layers, *([usual] * n + [tier] + [usual] * (num_layers - n - 1) for n, tier in wanted)]
    trials = [sweep.trial({SETTING: write_table(table)}, task) for table in tables]
    full = sweep.full(task)
    sweep.measure([*trials, full], f"{sweep.method}: {num_layers} layers x {len(plan.tiers) - 1}")
    base, *measured_layers = (evaluate(trial, full, rule) for trial in trials)
    for measured in (base, *measured_layers):
        if measured.num_failed or rule.criterion not in measured.losses:
            raise NotMeasured(
                f"{measured.num_failed} answers did not end well at {SETTING}={measured.settings[SETTING]}, whose loss "
                "is then not known; choose gentler precisions (calibrate.layers.tiers) or another task",
                setting="calibrate.layers.tiers",
            )
    layer_trials = [
        LayerTrial(layer=n, tier=tier, measured=item) for (n, tier), item in zip(wanted, measured_layers, strict=True)
    ]
    result = LayerSearch(plan=plan, base=base, trials=layer_trials)
    result.path = [
        (write_table([plan.tiers[i] for i in at]), loss)
        for at, loss in greedy(*_by_layer(result, rule.criterion, num_layers), base.losses[rule.criterion].value or 0.0)
    ]
    return result, Stage(parameter=SETTING, values=tuple(spaced([table for table, _ in result.path], plan.points)))


def _by_layer(
    search_result: LayerSearch, criterion: str, num_layers: int
) -> tuple[list[list[float]], list[list[float]]]:
    """Loss and bytes of the whole model with one layer at each precision, and the others as usual."""
    tiers = search_result.plan.tiers
    base = search_result.base.losses[criterion].value or 0.0, search_result.base.resident_bytes
    losses, sizes = ([[end] * len(tiers) for _ in range(num_layers)] for end in base)
    for trial in search_result.trials:
        losses[trial.layer][tiers.index(trial.tier)] = trial.measured.losses[criterion].value or 0.0
        sizes[trial.layer][tiers.index(trial.tier)] = trial.measured.resident_bytes
    return losses, sizes


def greedy(
    losses: Sequence[Sequence[float]], sizes: Sequence[Sequence[float]], base: float
) -> list[tuple[tuple[int, ...], float]]:
    """The way from the gentlest precision in all layers to the harshest, by least loss per byte.

    A step gives one layer a harsher precision, next to its own or not. Where loss falls by chance, it counts as none; a
    step that saves no bytes is never taken.

    Args:
        losses, sizes: Losses and bytes of the model with one layer at each precision, the gentlest first, and the
            others as usual.
        base: Its loss with all layers as usual.

    Returns:
        Per step, from the first on, the precision of every layer, and the loss that the steps so far add up to.
    """
    at, total = [0] * len(losses), base + sum(row[0] - base for row in losses)
    path = [(tuple(at), total)]
    while True:
        steps = []
        for layer, now in enumerate(at):
            for tier in range(now + 1, len(losses[layer])):
                saved = sizes[layer][now] - sizes[layer][tier]
                if saved > 0:
                    lost = max(0.0, losses[layer][tier] - losses[layer][now])
                    steps.append((lost / saved, -saved, layer, tier, lost))
        if not steps:
            return path
        _, _, layer, tier, lost = min(steps)
        at[layer], total = tier, total + lost
        path.append((tuple(at), total))


def spaced(tables: Sequence[str], count: int) -> list[str]:
    """Evenly spaced selection of `count` tables, both ends among them."""
    last, steps = len(tables) - 1, min(count, len(tables)) - 1
    return [tables[round(index * last / max(1, steps))] for index in range(steps + 1)]
