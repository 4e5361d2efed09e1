"""One run: its settings, its loaded parts, and the hash that identifies it."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbench.config import code
from kvbench.errors import FileContent, no_sys_exit
from kvbench.kernels.names import TRITON
from kvbench.results import identity, provenance
from kvbench.results.record import CHUNK_LABEL
from kvbench.results.sample import Key, SampleRecord
from kvbench.rules import modes
from kvbench.rules.counting import Unless, counted, marks_of, unmarked
from kvbench.runs import calibration
from kvbench.runs.config import RunConfig
from kvbench.runs.parts import Loaders
from kvbench.show.progress import note

if TYPE_CHECKING:
    from kvbench.engine.engine import Engine
    from kvbench.engine.requests import Request
    from kvbench.models.load import LoadedModel
    from kvbench.policy import Policy
    from kvbench.tasks.taskset import TaskSet

NAMES_OF_FILES = frozenset({"file", "text", "essays"})  # in a task's protocol; its fingerprint has what they hold


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """Loaded and checked parts of one run, with its folder in the results."""

    config: RunConfig
    method: str
    policy: "Policy"
    engine: "Engine"
    task: "TaskSet"
    model: "LoadedModel"
    identity: dict
    hash: str
    folder: Path

    @property
    def backend(self) -> str:
        """Name of the backend that runs; `auto` is resolved."""
        return self.engine.backend.name

    def forcing(self, records: Iterable[SampleRecord]) -> "Experiment":
        """The same run, with the same hash, forced to the answers of another instead of the gold ones.

        Args:
            records: Records of the other run, with their token ids; a sample without an answer is forced to give none.
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


def prepare(config: RunConfig, method: str, parts: Loaders, task: "TaskSet | None" = None) -> Experiment:
    """Load everything that the configuration names, or reuse `task`, and compute the run's hash."""
    config, policy, model = load_method(config, parts, note)
    if config.method.get(calibration.KEY) is None and (remedy := calibration.lacks(config.method, model.name)):
        note(remedy)
    task = load_task(config, model, parts, config.limit, task)
    engine = parts.make_engine(config, model, policy)
    ingredients = _ingredients(config, policy, model, task, engine)
    digest = identity.hash_identity(ingredients)
    return Experiment(
        config=config,
        method=method,
        policy=policy,
        engine=engine,
        task=task,
        model=model,
        identity=ingredients,
        hash=digest,
        folder=identity.run_folder(Path(config.results_dir), task.name, model.name, method, digest),
    )


def prepared(
    run_requests: Iterable[tuple[Mapping[str, Any], str]],
    parts: Loaders,
    say: Callable[[str], None] = lambda text: None,
) -> list[Experiment]:
    """Prepare runs, each of a configuration and a method's name; `say` gets the reason of each that cannot be."""
    experiments = []
    for cfg, method in run_requests:
        try:
            experiments.append(prepare(RunConfig.read(cfg), method, parts))
        except ValueError as error:
            say(f"left out: {method}: {error}")
    return experiments


def load_task(
    config: RunConfig, model: "LoadedModel", parts: Loaders, limit: int | str | None, task: "TaskSet | None" = None
) -> "TaskSet":
    """Load the task unless it is passed, and name in its protocol that prompts are read in chunks, if they are.

    Later tokens then see a compressed past, which is another measurement, for the full cache as well.
    """
    if task is None:
        task = parts.load_task(config.task, model, limit=limit, seed=config.seed, protocol=config.protocol)
    if not task.requests:
        broken = f"; {len(task.quarantined)} rows could not be read" if task.quarantined else ""
        raise FileContent(
            f"task {task.name} has no samples{broken}; check its subsets, its length and its data", setting="task"
        )
    seen: set[str] = set()
    for request in task.requests:
        if request.sample_id in seen:
            raise FileContent(
                f"task {task.name} has two samples with the id {request.sample_id}; ids must be unique", setting="task"
            )
        seen.add(request.sample_id)
    chunk = config.prefill.chunk
    return task if chunk is None else dataclasses.replace(task, protocol={**task.protocol, CHUNK_LABEL: chunk})


@no_sys_exit()  # also where no run is made, as for lm-eval
def load_method(
    config: RunConfig, parts: Loaders, say: Callable[[str], None]
) -> "tuple[RunConfig, Policy, LoadedModel]":
    """Make the policy and load the model; `say` gets differences between this run and its calibration.

    The user's own settings are checked first, because a bad one should not cost a model load. The values of a
    calibration file are checked as data; a policy is made of them only after the file was found to be for this model.
    """
    from kvbench.cache.offsets import check_key_offset
    from kvbench.cache.rotation import check_rotation
    from kvbench.policy import check_chunk

    method, calibrated = calibration.apply(config.method)
    settings = {key: value for key, value in config.method.items() if key != calibration.KEY}
    policy = parts.make_policy(settings)
    if calibrated is not None:
        calibration.check_values(calibrated, policy)
    check_chunk(policy, config.prefill.chunk)
    check_rotation(config.store.rotation, policy)
    check_key_offset(config.store.key_offset, policy, config.prefill.chunk)
    parts.check_task(config)
    parts.check_fit(config, policy)
    parts.check_chat(config)
    model = parts.load_model(config.model)
    if calibrated is not None:
        say(calibration.said(calibrated))
        for remark in calibration.notes(config.method, model, policy):
            say(remark)
        config, policy = config.with_method(method), parts.make_policy(method)
    return config, policy, model


def _ingredients(
    config: RunConfig, policy: "Policy", model: "LoadedModel", task: "TaskSet", engine: "Engine"
) -> dict[str, Any]:
    """Ingredients that can change an answer or its score, as JSON types."""
    from kvbench.tasks.counted import code_of
    from kvbench.tasks.task import Limit

    limit, ingredients = Limit.read(config.limit), answering(config, policy, model, engine)
    ingredients["code"] = {**ingredients["code"], **code_of(config.task, task)}
    ingredients["task"] = {
        "name": task.name,
        "fingerprint": task.fingerprint,
        "protocol": {key: value for key, value in task.protocol.items() if key not in NAMES_OF_FILES},
        "limit": limit and limit.setting,
    }
    return {name: identity.canonical(ingredients[name]) for name in sorted(ingredients)}


def answering(config: RunConfig, policy: "Policy", model: "LoadedModel", engine: "Engine") -> dict[str, Any]:
    """Ingredients that can change the answer to a given prompt: a run's identity without its task.

    The order of sums counts as far as it was chosen: builds of the kernels, torch's instruction set on a CPU, and
    modes of MKL and oneDNN. The number of threads and the processor do not, so that a run may go on elsewhere: they
    move last digits alone, and `Machine` has them.
    """
    import torch

    from kvbench.models import matrices
    from kvbench.models.load import MARKS
    from kvbench.tasks.protocol import Protocol

    backend = engine.backend
    method_files = provenance.method_files(type(policy))
    # the method's files count, so no version of their packages has to
    method_modules = {name.partition(".")[0] for name in method_files}
    kernels = (backend.name, *matrices.kernels(model.linear))
    harness_imports = _harness_imports(*kernels)
    method_imports = code.imports(method_files.values()) - method_modules - harness_imports
    return {
        "model": {
            "fingerprint": model.fingerprint,
            "dtype": str(model.dtype),
            "device": str(model.device).split(":")[0],
            "chat_template": model.chat_template,
            "max_tokens": model.max_tokens,
            "linear": matrices.identity(model.linear),
            **_placement(config, model),
            **unmarked(config.model, MARKS),
        },
        "method": _method_settings(config.method, policy),
        "generation": Protocol.from_mapping(config.protocol),
        **counted(dataclasses.replace(config, store=config.store.on(torch.device(model.device)))),
        **({} if engine.group is None else {"batch_size": engine.group}),
        **({"batch": "free"} if engine.is_free else {}),
        "backend": backend.name,
        **({} if config.backend.decode == TRITON else {"backend_decode": config.backend.decode}),
        "code": {
            "harness": provenance.harness_hash(*kernels),
            "method": code.hash_files(method_files),
            **({"isa": backend.isa} if backend.isa else {}),
            **({"torch_isa": torch.backends.cpu.get_cpu_capability()} if str(model.device).startswith("cpu") else {}),
            **modes.counted(),
            **code.versions(harness_imports),
            # By another name: they say nothing of the code that other methods run on.
            **{f"method:{name}": version for name, version in code.versions(method_imports).items()},
        },
    }


def _placement(config: RunConfig, model: "LoadedModel") -> dict[str, Any]:
    """Parts of a model's placement that can change an answer.

    Layers on several devices compute the same as on one. Only a limit on the pool of pages is then one of each
    device, where a sample may fit or not. Heads in several processes are summed in another order.
    """
    placement: dict[str, Any] = {}
    if model.quantisation:
        placement["quantisation"] = model.quantisation
    if model.tensor_parallel > 1:
        placement["tensor_parallel"] = model.tensor_parallel
    if model.device_spans and config.store.budget_bytes is not None:
        placement["layers_per_device"] = [count for _, count in model.device_spans]
    return placement


@cache
def _harness_imports(*backends: str) -> frozenset[str]:
    """The libraries that the code under every method imports, read once per process."""
    return code.imports(provenance.code_files(*backends).values())


def _method_settings(group: Mapping[str, Any], policy: "Policy") -> dict[str, Any]:
    """Add the policy's fields to the YAML, so that a default that is only in the code counts too."""
    settings = {key: value for key, value in group.items() if key != calibration.KEY}  # which changes no answer
    held = {item.name: getattr(policy, item.name) for item in dataclasses.fields(policy) if item.init}
    marks = marks_of(type(policy))
    return {
        name: value
        for name, value in (settings | held).items()
        if not isinstance(mark := marks.get(name), Unless) or value != mark.value
    }
