"""The files of a calibration: the file that `method.calibration=` loads, and every measurement as JSON."""

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from kvbench.calibrate.choose import Measured
from kvbench.calibrate.layers import LayerSearch
from kvbench.calibrate.plan import Number, Plan, Stage
from kvbench.config.code import hash_files
from kvbench.config.files import package_folder
from kvbench.results import provenance
from kvbench.results.record import now
from kvbench.results.writing import plain, write_atomic, write_file
from kvbench.runs.calibration import SCHEMA_VERSION, method_hash
from kvbench.runs.experiment import Experiment
from kvbench.stats.intervals import Estimate

DIGITS = 5  # significant digits in the file for people; the JSON has them all


@dataclass(kw_only=True)
class StageResult:
    """A stage and what was measured on the tuning samples."""

    stage: Stage
    points: list[Measured]
    """In the order of the stage's values."""
    chosen: int | None
    """Index of the choice; None when no value was good enough."""

    @property
    def value(self) -> Number | None:
        """The value chosen; None when none was good enough."""
        return None if self.chosen is None else self.stage.values[self.chosen]


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The calibrated settings, and what they do on the held-out samples."""

    tuned: Measured
    """They on the tuning samples, against the full cache."""
    held_out: Measured
    """They on the held-out samples, against the full cache."""
    held_out_full: Measured
    """The full cache on the held-out samples, against itself."""
    held_out_default: Measured
    """The uncalibrated method on the held-out samples, against the full cache."""
    against_default: Measured
    """They on the held-out samples, against the uncalibrated method."""

    @property
    def settings(self) -> dict[str, Number]:
        """Setting of the method -> calibrated value."""
        return self.tuned.settings

    @property
    def confirmed(self) -> bool:
        """The loss on the held-out samples is within the margin too."""
        return self.held_out.within


@dataclass(kw_only=True)
class Result:
    """A calibration, as far as it got."""

    plan: Plan
    method: str
    default: Experiment
    """The uncalibrated method."""
    hash: str
    """Over the plan, the method's other settings, model, data and code."""
    folder: Path
    layers: LayerSearch | None = None
    """The cost of each layer, where their precisions are searched."""
    stages: list[StageResult] = field(default_factory=list)
    choice: Choice | None = None
    """None when a stage found no value that is good enough."""
    sets: dict = field(default_factory=dict)
    """`tuning` and `held_out`: fingerprint, number and names of the samples."""
    false_confirmations: float | None = None
    """Share of simulated calibrations that confirm a setting which loses just the margin; None without a choice."""
    looks: int = 1
    """Calibrations that these held-out samples judged, this one included."""
    prompts_read: int = 0
    prompts_reused: int = 0


def write(result: Result, *, out: str | None = None) -> list[Path]:
    """Write `calibration.json`, and `calibration.yaml` when there is a choice.

    Args:
        out: A further place for the YAML file.

    Raises:
        JournalError: The disk is full.
    """
    text = json.dumps(plain(_everything(result)), indent=1, allow_nan=False)
    files = [result.folder / "calibration.json"]
    write_atomic(files[0], text.encode("ascii") + b"\n")
    if result.choice is None:
        return files
    for path in (result.folder / "calibration.yaml", *([Path(out).expanduser()] if out else [])):
        write_file(path, as_yaml(result, result.choice, path.name).encode("ascii"))
        files.insert(0, path)
    return files


def as_yaml(result: Result, choice: Choice, name: str) -> str:
    """The calibration file of this name. Its folder is not in it: the file may go anywhere, into a repository too."""
    import yaml

    head = (
        f"# {result.method} calibrated for {result.default.model.name} on {result.default.task.name}.\n"
        f"# Use, with this file's folder: kvbench method={result.method} method.calibration={name}\n"
    )
    return head + yaml.safe_dump(plain(_file(result, choice)), sort_keys=False, default_flow_style=None, width=120)


def _file(result: Result, choice: Choice) -> dict:
    """The content of the calibration file: what `kvbench.runs.calibration` needs, then what people need."""
    plan, origin = result.plan, _origin(result)
    return {
        "schema_version": SCHEMA_VERSION,
        "method": result.method,
        "target": origin["target"],
        "settings": choice.settings,
        "confirmed": choice.confirmed,
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
            {"parameter": item.stage.parameter, "chosen": item.value, "grid": list(map(_short, item.points))}
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


def _sensitivity(found: LayerSearch, criterion: str) -> dict:
    """The cost of one layer alone at each precision, above the others as usual: a list over layers for each."""
    usual = found.base.losses[criterion].value or 0.0
    table: dict[str, list] = {}
    for trial in found.trials:
        table.setdefault(trial.tier, []).append(_rounded((trial.measured.losses[criterion].value or 0.0) - usual))
    return {"tiers": list(found.plan.tiers), "around": found.plan.around, "loss": table}


def _origin(result: Result) -> dict:
    """The origin of the calibration: model, data, code and settings."""
    run, tuned = result.default, [item.parameter for item in result.plan.stages]
    counted = ("fingerprint", "num_samples")
    settings = {name: value for name, value in run.identity["method"].items() if not name.startswith("_")}
    own = {
        f"{folder}/{path.name}": path
        for folder in ("calibrate", "stats")
        for path in (package_folder() / folder).glob("*.py")
    }
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
            **{name: {key: result.sets[name][key] for key in counted} for name in ("tuning", "held_out")},
        },
        "code": {
            "harness": run.identity["code"]["harness"],
            "method": method_hash(run.policy),
            "calibrate": hash_files(own),
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
    return {
        "plan": asdict(result.plan),
        "method": result.method,
        "hash": result.hash,
        "layers": None if result.layers is None else asdict(result.layers),
        "stages": [asdict(item) for item in result.stages],
        "chosen": None if choice is None else choice.settings,
        **(dict.fromkeys(item.name for item in fields(Choice)) if choice is None else asdict(choice)),
        "confirmed": choice is not None and choice.confirmed,
        "false_confirmations": result.false_confirmations,
        "looks": result.looks,
        "sets": result.sets,
        "prompts_read": result.prompts_read,
        "prompts_reused": result.prompts_reused,
        "rule": result.plan.rule.text(),
        "origin": _origin(result),
        "machine": asdict(provenance.machine(result.default.model.device)),
        "made": now(),
    }
