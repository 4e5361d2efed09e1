"""What one run is: its settings checked, its parts loaded, and the hash that says which run it is."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from kvbench.config import code, files
from kvbench.config.files import FULL
from kvbench.config.settings import as_dict, copy_config, read_config
from kvbench.errors import check_keys, unknown_name
from kvbench.results import identity, provenance, tracking
from kvbench.results.record import CHUNK_LABEL
from kvbench.results.sample import Key, SampleRecord
from kvbench.results.shards import Shard
from kvbench.results.writing import check_writable
from kvbench.rules import FLAG, Whole
from kvbench.runs import calibration
from kvbench.runs.parts import Parts, prefill_chunk, read_bytes, store_options
from kvbench.show.progress import note

if TYPE_CHECKING:
    from kvbench.engine.engine import Engine
    from kvbench.engine.requests import Request
    from kvbench.kernels.backend import Backend
    from kvbench.models.load import LoadedModel
    from kvbench.policy import Policy
    from kvbench.tasks.taskset import TaskSet

KEYS = {
    "": {"method", "task", "model", "protocol", "backend", "seed", "limit", "batch_size", "results_dir", "resume"}
    | {"reference", "fidelity", "prefill", "store", "prompt_cache_bytes", "tracker", "shard"},
    "fidelity.": {"max_tokens", "on", "per_token"},
    "prefill.": {"chunk"},
}
RULES = {"batch_size": Whole(1, 2**16, unit="samples"), "seed": Whole(0, 2**63 - 1), "resume": FLAG}


GOLD, OWN = "gold", "own"  # which answer is forced: the task's, or the one that the full cache gives


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """Everything one run needs, loaded and checked, with its place in the results."""

    cfg: DictConfig
    method: str
    policy: "Policy"
    engine: "Engine"
    task: "TaskSet"
    model: "LoadedModel"
    backend: str
    """Name of the backend that runs; `auto` is resolved."""
    identity: dict
    hash: str
    folder: Path

    @property
    def forces_own(self) -> bool:
        """The full cache's own answers are forced."""
        return self.cfg.fidelity.get("on", GOLD) == OWN and self.cfg.fidelity.max_tokens != 0

    def forcing(self, records: Iterable[SampleRecord]) -> "Experiment":
        """The same run with the answers of another forced in place of the gold ones; which run it is does not change.

        Args:
            records: Of the other run, with their token ids; a sample without an answer is forced to give none.
        """
        answers: dict[str, list[Sequence[int]]] = {
            item["sample_id"]: [*(turn["token_ids"] for turn in item.get("turns", ())), item["token_ids"]]
            for item in records
            if item["repeat"] == 0
        }

        def forced(request: "Request") -> "Request":
            first, *later = (tuple(ids) for ids in answers.get(request.sample_id, [()]))
            later += [()] * (len(request.turns) - len(later))
            turns = [dataclasses.replace(turn, gold=gold) for turn, gold in zip(request.turns, later, strict=True)]
            return dataclasses.replace(request, gold=first, turns=tuple(turns))

        requests = [forced(request) for request in self.task.requests]
        return dataclasses.replace(self, task=dataclasses.replace(self.task, requests=requests))

    @property
    def keys(self) -> list[Key]:
        """Every answer the run consists of, in request order."""
        return keys_of(self.task.requests)


def keys_of(requests: "Sequence[Request]") -> list[Key]:
    """Every answer to some requests, in their order."""
    return [(request.sample_id, repeat) for request in requests for repeat in range(request.num_samples)]


def check_config(cfg: DictConfig) -> None:
    """Check the settings that belong to no group.

    Raises:
        ValueError: Names the setting, its value, the rule and the remedy.
    """
    for prefix, known in KEYS.items():
        check_keys((OmegaConf.select(cfg, prefix.rstrip(".")) or {}) if prefix else cfg, known, prefix=prefix)
    for key, rule in RULES.items():
        rule.check(key, OmegaConf.select(cfg, key))
    from kvbench.tasks.draw import Limit

    Limit.read(cfg.limit)
    if cfg.fidelity.max_tokens is not None:
        Whole(0, unit="tokens").check("fidelity.max_tokens", cfg.fidelity.max_tokens)
    if cfg.fidelity.get("on", GOLD) not in (GOLD, OWN):
        raise unknown_name("fidelity.on", cfg.fidelity.on, (GOLD, OWN))
    if (chunk := prefill_chunk(cfg)) is not None:
        Whole(1, unit="tokens").check("prefill.chunk", chunk)
        _check_chunk_place(cfg.model, chunk)
    FLAG.check("fidelity.per_token", cfg.fidelity.get("per_token", False))
    if Shard.read(cfg.get("shard")) and not cfg.resume:
        raise ValueError(
            f"shard={cfg.shard} with resume=false would throw away what the other shards finished; give the command "
            "once without shard=, or remove the run's folder"
        )
    if cfg.reference not in ("auto", "none"):
        raise unknown_name("reference", cfg.reference, ("auto", "none"))
    tracking.check(cfg.get("tracker", tracking.NONE))
    if not isinstance(cfg.results_dir, str) or not cfg.results_dir:
        raise ValueError(
            f"results_dir={cfg.results_dir!r} is not a folder; give a path, for example results_dir=results"
        )
    check_writable(Path(cfg.results_dir), "results_dir")
    read_bytes("prompt_cache_bytes", cfg.get("prompt_cache_bytes", 0))
    store_options(cfg.store)


def _check_chunk_place(model: DictConfig, chunk: int) -> None:
    """Refuses chunks of prompts on a model that is spread, before it is loaded; what is no device or no number of
    processes is refused when it is.

    Raises:
        ValueError: Names the settings, the rule and the remedy.
    """
    from kvbench.policy import check_chunk_place

    devices, processes = model.get("device"), model.get("tensor_parallel")
    places = len(devices) if isinstance(devices, ListConfig) else 1
    check_chunk_place(chunk, places, processes if isinstance(processes, int) else 1)


def reference_config(cfg: DictConfig) -> DictConfig:
    """The same experiment with the full cache.

    The byte budget is lifted: the reference says what the full cache answers, and a budget made for a compressed one
    would only make it fail. Nothing is rotated, so that one reference serves runs with and without.
    Prompts are read as in the experiment: in chunks, the full cache is the same but for the rounding of its pages.
    """
    changed = copy_config(cfg)
    changed.method = read_config(files.conf_folder() / "method" / f"{FULL}.yaml")
    changed.store.budget_bytes, changed.store.rotation = None, "none"
    return changed


def prepare(cfg: DictConfig, method: str, parts: Parts) -> Experiment:
    """Load what the configuration names and work out which run it is.

    Args:
        cfg: The resolved configuration.
        method: Name of the method's configuration.
        parts: The loaders.

    Raises:
        ValueError: A setting is out of range, or data or weights are missing.
    """
    method_cfg, policy, model = load_method(cfg, parts, note)
    cfg = _with(cfg, method_cfg)
    task = load_task(cfg, model, parts, cfg.limit)
    engine = parts.make_engine(cfg, model, policy)
    ingredients = _ingredients(cfg, policy, model, task, engine.backend)
    digest = identity.hash_identity(ingredients)
    return Experiment(
        cfg=cfg,
        method=method,
        policy=policy,
        engine=engine,
        task=task,
        model=model,
        backend=engine.backend.name,
        identity=ingredients,
        hash=digest,
        folder=identity.run_folder(Path(cfg.results_dir), task.name, model.name, method, digest),
    )


def _ingredients(
    cfg: DictConfig, policy: "Policy", model: "LoadedModel", task: "TaskSet", backend: "Backend"
) -> dict[str, Any]:
    """Everything that can change an answer, as JSON types."""
    from kvbench.models import matrices

    method_files = provenance.method_files(type(policy))
    own = {name.partition(".")[0] for name in method_files}  # its files count, so no version of theirs has to
    kernels = (backend.name, *matrices.kernels(model.linear))
    found = {
        "model": {
            "fingerprint": model.fingerprint,
            "dtype": str(model.dtype),
            "device": str(model.device).split(":")[0],
            "chat_template": model.chat_template,
            "max_tokens": model.max_tokens,
            "linear": matrices.identity(model.linear),
            **_placement(cfg, model),
        },
        "task": {"name": task.name, "fingerprint": task.fingerprint, "protocol": task.protocol, "limit": cfg.limit},
        "method": _method_settings(cfg.method, policy),
        "generation": cfg.protocol,
        "store": cfg.store,
        "fidelity": cfg.fidelity,
        "batch_size": cfg.batch_size,
        "seed": cfg.seed,
        "backend": backend.name,
        "code": {
            "harness": provenance.harness_hash(*kernels),
            "method": code.hash_files(method_files),
            **({"isa": backend.isa} if backend.isa else {}),
            **code.versions(_harness_imports(*kernels) | (code.imports(method_files.values()) - own)),
        },
    }
    return {name: identity.canonical(found[name]) for name in sorted(found)}


def _placement(cfg: DictConfig, model: "LoadedModel") -> dict[str, Any]:
    """What of a model's placement can change an answer; where it cannot, runs are the same wherever they ran.

    Layers on several devices compute what they compute on one. Only a limit on the pool of pages is then one of each
    device, where a sample may fit or not. Heads in several processes are summed in another order.
    """
    found: dict[str, Any] = {}
    if model.quantisation:
        found["quantisation"] = model.quantisation
    if model.tensor_parallel > 1:
        found["tensor_parallel"] = model.tensor_parallel
    if model.places and cfg.store.budget_bytes is not None:
        found["layers_per_device"] = [count for _, count in model.places]
    return found


@cache
def _harness_imports(*backends: str) -> frozenset[str]:
    """The libraries that the code under every method imports, read once per process."""
    return code.imports(provenance.code_files(*backends).values())


def load_task(cfg: DictConfig, model: "LoadedModel", parts: Parts, limit: int | str | None) -> "TaskSet":
    """Load the task, and name in its protocol that prompts are read in chunks, where they are: later tokens then see a
    compressed past, which is another measurement than one of prompts read at once, for the full cache as well.

    Args:
        cfg: The whole configuration.
        model: Whose prompts.
        parts: The loaders.
        limit: Samples per subset, as in the configuration.

    Raises:
        ValueError: The task has nothing to run.
    """
    task = parts.load_task(cfg.task, model, limit=limit, seed=cfg.seed, protocol=cfg.protocol)
    check_requests(task)
    chunk = prefill_chunk(cfg)
    return task if chunk is None else dataclasses.replace(task, protocol={**task.protocol, CHUNK_LABEL: chunk})


def load_method(cfg: DictConfig, parts: Parts, say: Callable[[str], None]) -> "tuple[DictConfig, Policy, LoadedModel]":
    """Make the policy and load the model.

    The user's own settings are checked first, because a bad one should not cost a model load. The values of a
    calibration file are checked as data; a policy is made of them only after the file was found to be for this model.

    Args:
        cfg: The resolved configuration.
        parts: The loaders.
        say: Is told what a calibration was made with and is not used with.

    Returns:
        The method group with the file's settings, the policy and the model.

    Raises:
        ValueError: A setting is out of range, weights are missing, or the file is for another method or model.
    """
    from kvbench.policy import check_chunk

    changed, found = calibration.apply(cfg.method)
    if found is None:
        policy = parts.make_policy(cfg.method)
        check_chunk(policy, prefill_chunk(cfg))
        parts.check_task(cfg)
        return changed, policy, parts.load_model(cfg.model)
    given = {key: value for key, value in as_dict(cfg.method).items() if key != calibration.KEY}
    policy = parts.make_policy(OmegaConf.create(given))
    calibration.check_values(found, policy)
    check_chunk(policy, prefill_chunk(cfg))
    parts.check_task(cfg)
    model = parts.load_model(cfg.model)
    for remark in calibration.notes(cfg.method, model, policy):
        say(remark)
    return changed, parts.make_policy(changed), model


def _with(cfg: DictConfig, method: DictConfig) -> DictConfig:
    """The configuration with another method group."""
    if method is cfg.method:
        return cfg
    changed = copy_config(cfg)
    changed.method = method
    return changed


def _method_settings(cfg: DictConfig, policy: "Policy") -> dict[str, Any]:
    """What the YAML says plus the policy's own fields, so that a default that is only in the code counts too."""
    settings = as_dict(cfg)
    settings.pop(calibration.KEY, None)  # where the numbers come from changes no answer
    return settings | {item.name: getattr(policy, item.name) for item in dataclasses.fields(policy) if item.init}


def check_requests(task: "TaskSet") -> None:
    """Refuse a task that has nothing to run, or two samples of the same id.

    Raises:
        ValueError: Names the task and the sample.
    """
    if not task.requests:
        broken = f"; {len(task.quarantined)} rows could not be read" if task.quarantined else ""
        raise ValueError(f"task {task.name} has no samples{broken}; check its subsets, its length and its data")
    seen: set[str] = set()
    for request in task.requests:
        if request.sample_id in seen:
            raise ValueError(f"task {task.name} has two samples with the id {request.sample_id}; ids must be unique")
        seen.add(request.sample_id)
