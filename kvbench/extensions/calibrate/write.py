"""The files of a calibration: the file that `method.calibration=` loads, and every measurement as JSON."""

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import yaml

from kvbench.config.code import hash_files
from kvbench.config.files import package_folder
from kvbench.extensions.calibrate.choose import Measured
from kvbench.extensions.calibrate.layers import LayerSearch
from kvbench.extensions.calibrate.plan import Number, Plan, Rule, Stage
from kvbench.results import provenance
from kvbench.results.record import now
from kvbench.results.writing import plain, write_atomic, write_file
from kvbench.runs.calibration import SCHEMA_VERSION, method_hash
from kvbench.runs.experiment import Experiment
from kvbench.stats.intervals import Estimate

DIGITS = 5  # significant digits in the file for people; the JSON has them all


@dataclass(kw_only=True)
class StageResult:
    """A stage, the measurements of its values and of the full cache on the tuning samples, and the choice.

    The choice is an index, if any, with its reason.
    """

    stage: Stage
    points: list[Measured]
    full: Measured
    chosen: int | None
    why: str

    @property
    def value(self) -> Number | None:
        """The value chosen, if any."""
        return None if self.chosen is None else self.stage.values[self.chosen]


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The calibrated settings on the tuning samples and on the held-out ones, against the full cache unless said."""

    tuned: Measured
    held_out: Measured
    held_out_full: Measured
    """The full cache, against itself."""
    held_out_default: Measured
    """The uncalibrated method."""
    against_default: Measured
    """The calibrated settings on the held-out samples, against the uncalibrated method."""

    @property
    def settings(self) -> dict[str, Number]:
        """Setting of the method -> calibrated value."""
        return self.tuned.settings

    @property
    def confirmed(self) -> bool:
        """The loss on the held-out samples is within the margin too."""
        return self.held_out.within

    def refuted(self, rule: Rule) -> bool:
        """True where the 95 % interval of the loss on the held-out samples lies above the margin."""
        low = self.held_out.losses[rule.criterion].low
        return low is not None and low > rule.margin


@dataclass(kw_only=True)
class Result:
    """A calibration, possibly unfinished."""

    plan: Plan
    method: str
    default: Experiment
    """The uncalibrated method."""
    hash: str
    """Over the plan, the method's other settings, model, data and code."""
    folder: Path
    layers: LayerSearch | None = None
    stages: list[StageResult] = field(default_factory=list)
    choice: Choice | None = None
    """None when a stage found no value that is good enough."""
    data: dict = field(default_factory=dict)
    """The problems: `sources`, `settings` and `remark`."""
    sets: dict = field(default_factory=dict)
    """`tuning` and `held_out`: fingerprint, number and names of the samples."""
    false_confirmations: float | None = None
    """Share of simulated calibrations that confirm a setting which loses just the margin; None without a choice."""
    looks: int = 1
    """Calibrations that these held-out samples judged, this one included."""
    prompts_read: int = 0
    prompts_reused: int = 0


def write(result: Result, *, out: str | None = None) -> list[Path]:
    """Writes `calibration.json`, and when there is a choice `calibration.yaml`, to `out` too."""
    text = json.dumps(plain(_everything(result)), indent=1, allow_nan=False)
    files = [result.folder / "calibration.json"]
    write_atomic(files[0], text.encode("ascii") + b"\n")
    if result.choice is None:
        return files
    for path in (result.folder / "calibration.yaml", *([Path(out).expanduser()] if out else [])):
        # The folder is not in the file, which may go anywhere, into a repository too.
        head = (
            f"# {result.method} calibrated for {result.default.model.name} on {result.default.task.name}.\n"
            f"# Use, with this file's folder: kvbench method={result.method} method.calibration={path.name}\n"
        )
        content = plain(_file(result, result.choice))
        text = head + yaml.safe_dump(content, sort_keys=False, default_flow_style=None, width=120)
        write_file(path, text.encode("ascii"))
        files.insert(0, path)
    return files


def _file(result: Result, choice: Choice) -> dict:
    """The content of the calibration file: what `kvbench.runs.calibration` needs, then what people need."""
    plan, origin = result.plan, _origin(result)
    return {
        "schema_version": SCHEMA_VERSION,
        "method": result.method,
        "target": origin["target"],
        "settings": choice.settings,
        "confirmed": choice.confirmed,
        "refuted": choice.refuted(plan.rule),
        "false_confirmations": _rounded(result.false_confirmations),
        "looks": result.looks,
        "replaces": origin["replaces"],
        "base": origin["base"],
        "rule": plan.rule.text(),
        "held_out": {
            "calibrated": _short(choice.held_out),
            "uncalibrated": _short(choice.held_out_default),
            "full": _short(choice.held_out_full),
            "calibrated_against_uncalibrated": _short(choice.against_default),
        },
        "tuning": [
            {
                "parameter": item.stage.parameter,
                "chosen": item.value,
                "why": item.why,
                "full": _short(item.full),
                "grid": list(map(_short, item.points)),
            }
            for item in result.stages
        ],
        **({} if result.layers is None else {"layers": _sensitivity(result.layers, plan.rule.criterion)}),
        "model": origin["model"],
        "data": origin["data"],
        "code": origin["code"],
        "calibration": {"hash": result.hash, "plan": asdict(plan)},
        "versions": origin["versions"],
        "git": origin["git"],
        "made": now(),
    }


def _sensitivity(search: LayerSearch, criterion: str) -> dict:
    table = {tier: list(map(_rounded, costs)) for tier, costs in search.costs(criterion).items()}
    return {"tiers": list(search.plan.tiers), "around": search.plan.around, "loss": table}


def _origin(result: Result) -> dict:
    """The origin of the calibration: model, data, code and settings."""
    run, tuned = result.default, [item.parameter for item in result.plan.stages]
    counted = ("fingerprint", "num_samples")
    settings = {name: value for name, value in run.identity["method"].items() if not name.startswith("_")}
    paths = [path for folder in ("extensions/calibrate", "stats") for path in (package_folder() / folder).glob("*.py")]
    sources = {f"{path.parent.name}/{path.name}": path for path in paths}
    return {
        "target": f"{type(run.policy).__module__}.{type(run.policy).__qualname__}",
        "replaces": {name: settings[name] for name in tuned},
        "base": {name: value for name, value in settings.items() if name not in tuned},
        "model": {"name": run.model.name, **run.identity["model"]},
        "data": {
            "task": run.task.name,
            "protocol": run.task.protocol,
            "seed": run.config.seed,
            "batch_size": run.config.batch_size,
            **result.data,
            **{name: {key: result.sets[name][key] for key in counted} for name in ("tuning", "held_out")},
        },
        "code": {
            "harness": run.identity["code"]["harness"],
            "method": method_hash(run.policy),
            "calibrate": hash_files(sources),
            "backend": run.backend,
        },
        "versions": asdict(provenance.versions()),
        "git": asdict(provenance.git_state()),
    }


def _short(measured: Measured) -> dict:
    """A measurement in a line: values with their interval as [value, low, high]."""
    return {
        **measured.settings,
        "loss": {name: _triple(value) for name, value in measured.losses.items()},
        "bytes_ratio": _triple(measured.bytes_ratio),
        "score": _rounded(measured.score),
        "within": measured.within,
        "num_samples": measured.num_samples,
        **({"num_failed": measured.num_failed} if measured.num_failed else {}),
        "run": measured.hash[:12],
    }


def _triple(estimate: Estimate) -> list:
    return [_rounded(item) for item in (estimate.value, estimate.low, estimate.high)]


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.{DIGITS}g}") + 0.0  # no minus sign in front of a zero


def _everything(result: Result) -> dict:
    """All measurements, each sample's included."""
    choice = result.choice
    names = ("method", "hash", "data", "false_confirmations", "looks", "sets", "prompts_read", "prompts_reused")
    return {
        "plan": asdict(result.plan),
        "layers": None if result.layers is None else asdict(result.layers),
        "stages": [asdict(item) for item in result.stages],
        "chosen": None if choice is None else choice.settings,
        **(dict.fromkeys(item.name for item in fields(Choice)) if choice is None else asdict(choice)),
        "confirmed": choice is not None and choice.confirmed,
        **{name: getattr(result, name) for name in names},
        "rule": result.plan.rule.text(),
        "origin": _origin(result),
        "machine": asdict(provenance.machine(result.default.model.device)),
        "made": now(),
    }
