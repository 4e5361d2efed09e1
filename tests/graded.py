"""A method whose loss and bytes follow from its two thresholds, for the tests of calibration."""

import hashlib
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import yaml
from fake_parts import altered
from omegaconf import OmegaConf

from kvbench.config.compose import compose
from kvbench.engine.requests import Outcome, Request
from kvbench.policy import Policy
from kvbench.runs.parts import Loaders
from kvbench.tasks.taskset import MetricInfo, TaskSet


@dataclass(kw_only=True)
class Graded(Policy):
    """Two thresholds and a setting that is not tuned; `None` for both is the full cache."""

    alpha_h: float = 1.0
    alpha_l: float = 0.02
    window: int = 64
    full: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.alpha_l <= self.alpha_h:
            raise ValueError(f"alpha_l={self.alpha_l} and alpha_h={self.alpha_h} do not fit")


MODEL = {
    "name": "tiny",
    "fingerprint": "ab" * 32,
    "dtype": "float32",
    "device": "cpu",
    "max_tokens": 64,
    "device_spans": (),
}
MODEL |= {"chat_template": False, "quantisation": "", "tensor_parallel": 1, "linear": "plain", "remark": ""}


class Bench:
    """Record of what the fakes did, and of what they are to do."""

    def __init__(self, loss, size, *, stop_after=None, held_out_penalty=0.0, subsets=2, count=40) -> None:
        self.loss, self.size, self.stop_after, self.held_out_penalty = loss, size, stop_after, held_out_penalty
        self.answered: list[tuple[float, float, str]] = []
        names = ["ab"[i % subsets] for i in range(count)]
        same = {"segments": ((1, 2, 3),), "gold": (4, 5, 6)}
        self.requests = [Request(sample_id=f"{name}/{i}", subset=name, **same) for i, name in enumerate(names)]
        self.penalised: set[str] = set()

    def parts(self) -> Loaders:
        """The loaders of a run."""
        return altered(
            Loaders(),
            check_task=lambda config: None,
            check_fit=lambda config, policy: None,
            check_chat=lambda config: None,
            make_policy=lambda cfg: Graded(full=True) if "full" in cfg["_target_"] else Graded(**_fields(cfg)),
            load_model=lambda cfg: SimpleNamespace(**MODEL),
            load_task=self.load_task,
            make_engine=lambda cfg, model, policy, prompts=None: Engine(self, cfg, policy),
        )

    def load_task(self, cfg, model, *, limit, seed, protocol) -> TaskSet:
        """A task of yes-or-no answers; the first `limit` samples of each subset."""
        chosen = [r for name in "ab" for r in [q for q in self.requests if q.subset == name][:limit]]
        return TaskSet(
            name="graded",
            protocol={},
            fingerprint="f" * 64,
            requests=chosen,
            metrics={"score": MetricInfo(True, "right or wrong")},
            primary="score",
            scorer=lambda sample, text: {"score": float(text == "right")},
        )


class Engine:
    """Answers each request with the loss that the settings have."""

    def __init__(self, bench: Bench, cfg, policy: Graded) -> None:
        self.bench, self.policy, self.backend = bench, policy, SimpleNamespace(name="torch", isa="")
        self.group, self.most_requests, self.is_free = None, 4, False

    def text_of(self, ids) -> str:
        """Every token is a word."""
        return " ".join(map(str, ids))

    def running(self, requests, *, on_outcome, on_step=None, sizing=None, force_generated=False):
        """One outcome per request, each given before; Ctrl-C after as many as the test says."""
        policy, bench = self.policy, self.bench
        for request in requests:
            yield request
            if bench.stop_after is not None and len(bench.answered) >= bench.stop_after:
                raise KeyboardInterrupt
            settings = (None, None) if policy.full else (policy.alpha_h, policy.alpha_l)
            bench.answered.append((*settings, request.sample_id))
            # Differs from sample to sample, the same for every setting: pairing takes it out.
            common = hashlib.sha256(request.sample_id.encode()).digest()[0] / 256
            own = 0.0 if policy.full else bench.loss(*settings)
            if not policy.full and request.sample_id in bench.penalised:
                own += bench.held_out_penalty
            wobble = 0.0 if policy.full else 0.01 * (common - 0.5)
            size = 1000.0 if policy.full else bench.size(*settings)
            on_outcome(
                Outcome(
                    sample_id=request.sample_id,
                    text="right" if common > 0.3 + own else "wrong",
                    fidelity={"nll": 0.5 + common + own + wobble, "kl_mean": own / 2},
                    ledger={"resident_bytes": size, "fp16_bytes": 1000.0},
                    kept={"slots_per_tier": [30, 10], "slot_ratio": 0.8},
                )
            )


def _fields(cfg) -> dict:
    return {key: value for key, value in cfg.items() if key in ("alpha_h", "alpha_l", "window")}


def make_cfg(folder: Path, **changes) -> OmegaConf:
    """The settings of the command, as the command line composes them, with the graded method."""
    plain = deepcopy(_composed())
    plain |= {"_choices_": {"method": "graded"}, "results_dir": str(folder), "task": {"name": "graded"}}
    plain["method"] = {"_target_": "graded.Graded", "alpha_h": 1.0, "alpha_l": 0.02, "window": 64, "calibration": None}
    del plain["_target_"]
    plain["calibrate"]["grid"] = {"alpha_h": [0, 1, 2, 3], "alpha_l": [0, 0.01, 0.02]}
    plain["calibrate"] |= {"resamples": 199, "tie": 0.0, "tuning_samples": 6, "held_out_samples": 12}
    cfg = OmegaConf.create(plain)
    for key, value in changes.items():
        OmegaConf.update(cfg, key.replace("__", "."), value, merge=False, force_add=True)
    return cfg


@cache
def _composed() -> dict:
    return OmegaConf.to_container(compose([], name="command/calibrate"))


def gentle(alpha_h, alpha_l):
    """Loss grows with both thresholds; the margin of 0.05 lies beyond alpha_h = 2 and beyond alpha_l = 0.01."""
    return 0.01 * alpha_h + (0.0 if alpha_l <= 0.01 else 0.5)


def smaller(alpha_h, alpha_l):
    """Bytes shrink with both."""
    return 500.0 - 50 * alpha_h - 1000 * alpha_l


def file_of(folder: Path, suffix: str) -> Path:
    """The only calibration below a folder, in one of its forms."""
    (path,) = folder.rglob(f"calibration.{suffix}")
    return path


def content_of(folder: Path, suffix: str) -> dict:
    """The content of a calibration as `yaml` or `json`."""
    return yaml.safe_load(file_of(folder, suffix).read_text())  # JSON is YAML
