"""A small model, task, policy and engine for the tests of the run loop, and a slow run on them that can be killed."""

import copy
import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import torch
from omegaconf import OmegaConf

from kvbench.engine.requests import Outcome, Request
from kvbench.errors import SettingValue
from kvbench.policy import Bounds, Extent, Policy
from kvbench.results.sample import journal_record
from kvbench.runs.parts import Loaders
from kvbench.runs.run import Run, run_experiment


@dataclass(kw_only=True)
class FakePolicy(Policy):
    """Keeps a share of the cache and answers as well as that share is large."""

    ratio: float = 1.0
    hidden: int = 3
    does_nothing: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:
            said = f"method.ratio={self.ratio} is outside (0, 1]; give the share of the cache to keep"
            raise SettingValue(said, setting="method.ratio")

    def bounds(self, extent: Extent) -> Bounds:
        """The share of the prompt that was asked for."""
        least, most = (share * extent.prompt_tokens for share in (self.ratio - 0.01, self.ratio + 0.01))
        return Bounds(why="the share allows", prompt_mean=(least, most))


@dataclass
class FakeTask:
    """Asks for the sample's own number."""

    requests: list[Request]
    name: str = "fake"
    fingerprint: str = "data-1"
    protocol: dict = field(default_factory=lambda: {"query_aware": True})
    quarantined: list = field(default_factory=list)
    primary: str = "exact"
    grading_limit_s: float | None = 60.0
    grading_workers: int = 0
    copies: list = field(default_factory=list)
    unused: list = field(default_factory=list)
    missing: list = field(default_factory=list)
    weighting: str = "subset"
    scorer: Callable[[Request, str], float] = lambda asked, text: float(text == asked.meta["answer"])

    @property
    def metrics(self) -> dict:
        """One metric, yes or no."""
        return {"exact": SimpleNamespace(higher_is_better=True, description="the whole answer is right")}

    def score(self, request: Request, text: str) -> dict[str, float]:
        """1 for the right answer."""
        return {"exact": self.scorer(request, text)}

    def score_outcome(self, request: Request, outcome: Outcome) -> dict[str, float]:
        """By the text."""
        return self.score(request, outcome.text)

    def aggregate(self, records: list[dict]) -> dict:
        """Number of records, which is enough to see that it was asked."""
        return {"records": len(records)}


class FakeEngine:
    """Deterministic answers that depend on the neighbours in the batch, so that a resume with other groups is
    noticed."""

    def __init__(
        self,
        cfg: object,
        policy: FakePolicy,
        *,
        pause_s: float = 0.0,
        statuses: dict | None = None,
        group: int | None = None,
        is_free: bool = False,
    ) -> None:
        self.cfg, self.policy, self.pause_s, self.statuses = cfg, policy, pause_s, statuses or {}
        self.store = None
        self.backend, self.graphs = SimpleNamespace(name="torch", isa="", fallbacks=set(), decodes=set()), {}
        self.seen: list[str] = []
        sizes = {"fp16_bytes": lambda tokens: tokens, "num_q_heads": 2, "num_kv_heads": 1}
        self.shape = SimpleNamespace(device="cpu", dtype=torch.float32, **sizes)
        self.group = group or (None if cfg.batch_size == "auto" else cfg.batch_size)
        self.batch_size, self.is_free = self.group or "auto", is_free

    @property
    def most_requests(self) -> int:
        """Requests at once at most."""
        return 32 if self.batch_size == "auto" else self.batch_size

    def text_of(self, ids) -> str:
        """Every token is a word."""
        return " ".join(map(str, ids))

    def running(self, requests, *, on_outcome, on_step=None, sizing=None, force_generated=False):
        """Answer group by group; give each request before it is answered."""
        self.sizing = len(sizing or requests)
        size = self.most_requests
        for start in range(0, len(requests), size):
            group = requests[start : start + size]
            neighbours = ",".join(request.sample_id for request in group)
            for request in group:
                yield request
                self.seen.append(request.sample_id)
                for repeat in range(request.num_samples):
                    time.sleep(self.pause_s)
                    on_step and on_step({"decode_tokens_per_s": 10.0, "cache_bytes": 1e6, "live_rows": len(group)})
                    on_outcome(self.answer(request, repeat, neighbours))

    def answer(self, request: Request, repeat: int, neighbours: str) -> Outcome:
        """One outcome, a pure function of the settings, the sample and its group."""
        status = self.statuses.get(request.sample_id, "ok")
        if status != "ok":
            layer = 7 if status == "nan" else None
            return Outcome(
                sample_id=request.sample_id, repeat=repeat, status=status, nan_layer=layer, message="too big"
            )
        digest = hashlib.sha256(f"{self.cfg.seed} {neighbours} {request.sample_id} {repeat}".encode()).digest()
        right = digest[0] < 256 * (0.2 + 0.8 * self.policy.ratio) - 1
        ratio = 1.0 if self.policy.does_nothing else self.policy.ratio
        return Outcome(
            sample_id=request.sample_id,
            repeat=repeat,
            text=request.meta["answer"] if right else "wrong",
            token_ids=list(digest[1:5]),
            finish="eos",
            num_prompt_tokens=request.num_prompt_tokens,
            fidelity={"nll": digest[5] / 64, "kl_mean": digest[6] / 1000 * (1 - ratio), "top1_agreement": 1.0},
            ledger={
                "payload_bytes": 1000 * ratio,
                "slack_bytes": 24,
                "resident_bytes": 1000 * ratio + 24,
                "average_bytes": 900 * ratio,
                "average_ratio": 0.9 * ratio,
                "peak_bytes": 1200,
                "fp16_bytes": 1000,
            },
            kept={"ratio": ratio, "tokens_seen": (length := request.num_prompt_tokens)}
            | {"prompt_tokens": length, "prompt_slots": ratio * length, "lists": 1, "page_tokens": 1},
            timing={"prefill_s": time.perf_counter() % 1, "decode_s": 0.5, "decode_share_s": 0.25, "decode_tokens": 5},
        )


def record(number: int, **changes) -> dict:
    """A journal record of sample `number`."""
    request = Request(sample_id=f"a/{number}", subset="a", segments=((1, 2, 3),))
    outcome = Outcome(sample_id=f"a/{number}", text='a "quoted"\nline \u00e4', token_ids=[7], finish="eos")
    return journal_record(request, outcome, {"exact": 1.0}, {}) | changes


def make_requests(count: int, repeats: int = 1) -> list[Request]:
    """Samples of two subsets, alternating."""
    return [
        Request(
            sample_id=f"{'ab'[i % 2]}/{i}",
            subset="ab"[i % 2],
            segments=((1,) * (5 + i),),
            num_samples=repeats,
            temperature=1.0 if repeats > 1 else 0.0,
            num_prompt_tokens_untruncated=5 + i + (i == 3),
            answers=(str(i),),
            meta={"answer": str(i)},
        )
        for i in range(count)
    ]


def altered(loaders: Loaders, **functions) -> Loaders:
    """The same loaders with some of their functions replaced."""
    made = copy.copy(loaders)
    vars(made).update(functions)
    return made


def make_parts(
    count: int = 10, repeats: int = 1, engines: list | None = None, task: dict | None = None, **engine
) -> Loaders:
    """Loaders of the fakes.

    Args:
        count: Samples of the task.
        repeats: Answers per sample.
        engines: Every engine that is made is appended here.
        task: Fields of the task to change.
        engine: Settings of the engine.
    """

    def make_engine(cfg, model, policy):
        made = FakeEngine(cfg, policy, **engine)
        made.group = None if model.rows_are_alone else made.group
        if engines is not None:
            engines.append(made)
        return made

    def load_model(cfg):
        chosen = {"name": "tiny", "fingerprint": "weights-1", "dtype": "float32", "device": "cpu", "linear": "plain"}
        chosen |= {"remark": "", "device_spans": (), "quantisation": "", "tensor_parallel": 1}
        chosen |= {"weights_bytes": 4096} | dict(cfg)
        return SimpleNamespace(**{"chat_template": False, "max_tokens": 512, "rows_are_alone": False} | chosen)

    def load_task(cfg, model, *, limit, seed, protocol):
        return FakeTask(make_requests(min(count, limit or count), repeats), **(task or {}))

    def make_policy(cfg):
        return FakePolicy(**{key: value for key, value in cfg.items() if key in ("ratio", "hidden")})

    fakes = {"make_policy": make_policy, "load_model": load_model, "load_task": load_task, "make_engine": make_engine}
    return altered(
        Loaders(),
        **fakes,
        check_values=lambda cfg: None,
        check_task=lambda config: None,
        check_fit=lambda config, policy: None,
        check_chat=lambda config: None,
        try_out=lambda experiment, say: None,
    )


def make_cfg(results_dir: Path, /, **changes) -> OmegaConf:
    """A configuration as Hydra would compose it; dotted keys with `__` for the dot change one value."""
    cfg = OmegaConf.create(
        {
            "method": {"_target_": "fake_parts.FakePolicy", "ratio": 0.5},
            "task": {"kind": "fake"},
            "model": {},
            "protocol": {"temperature": 0.0},
            "backend": {"name": "auto"},
            "seed": 0,
            "limit": None,
            "batch_size": 4,
            "results_dir": str(results_dir),
            "resume": True,
            "reference": "none",
            "fidelity": {"max_tokens": 64},
            "store": {"page_bytes": "auto", "budget_bytes": None, "track": []},
        }
    )
    for key, value in changes.items():
        OmegaConf.update(cfg, key.replace("__", "."), value, force_add=True)
    return cfg


def run_fake(results: Path, parts: Loaders | None = None, *, method="half", say=lambda text: None, **changes) -> Run:
    """A run on fakes, with changes of the configuration as `make_cfg` takes them."""
    return run_experiment(make_cfg(results, **changes), method=method, parts=parts or make_parts(), say=say)


def main(results_dir: Path, shard: str | None = None) -> None:
    """Run 120 samples slowly; the test kills this process when it likes."""
    from kvbench.results import provenance
    from kvbench.runs import experiment

    # The starts belong to one run even while somebody edits a source file, and each begins at once.
    provenance.harness_hash = lambda *backends: "the same"
    experiment._harness_imports = lambda *backends: frozenset()
    run_fake(results_dir, make_parts(count=120, pause_s=0.004), say=print, **({"shard": shard} if shard else {}))
