"""Where a run gets its policy, model, task and engine from; tests put small ones in their place.

Torch and transformers take seconds to import, so the functions import what needs them: a wrong setting is answered
before.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from omegaconf import DictConfig, OmegaConf

from kvbench.config.settings import as_dict
from kvbench.errors import check_keys
from kvbench.show.progress import note

if TYPE_CHECKING:
    from kvbench.engine.engine import Engine
    from kvbench.engine.prompt_cache import PromptCache
    from kvbench.models.load import LoadedModel
    from kvbench.policy import Policy
    from kvbench.tasks.taskset import TaskSet

Loaded = TypeVar("Loaded")


class TaskLoader(Protocol):
    """Loads a task for a model."""

    def __call__(
        self, cfg: DictConfig, model: "LoadedModel", *, limit: int | None, seed: int, protocol: DictConfig
    ) -> "TaskSet":
        """Load the task of a task group.

        Args:
            cfg: The task group.
            model: Whose tokenizer and context length the prompts are for.
            limit: Samples per subset; None for all.
            seed: Decides generated data.
            protocol: The protocol group.
        """
        ...


class EngineMaker(Protocol):
    """Makes an engine for a model and a method."""

    def __call__(
        self, cfg: DictConfig, model: "LoadedModel", policy: "Policy", *, prompts: "PromptCache | None" = None
    ) -> "Engine":
        """Make the engine.

        Args:
            cfg: The whole configuration.
            model: The loaded model.
            policy: The method.
            prompts: Prompts that were read, to be replayed; None leaves it to the maker.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The four things a run is made of, as functions of the configuration."""

    make_policy: "Callable[[DictConfig], Policy]"
    """Method group -> policy."""
    load_model: "Callable[[DictConfig], LoadedModel]"
    """Model group -> model."""
    load_task: TaskLoader
    """Task group and model -> task."""
    make_engine: EngineMaker
    """Whole configuration, model, policy -> engine."""


def make_policy(cfg: DictConfig) -> "Policy":
    """Build the policy that `_target_` names.

    Args:
        cfg: The method group: `_target_`, the policy's fields, and `calibration`, a file whose settings replace some.

    Raises:
        ValueError: The class does not exist, a field is unknown, a value is out of range, or the file does not fit.
    """
    from hydra.errors import InstantiationException
    from hydra.utils import get_class, instantiate

    from kvbench.runs import calibration

    cfg, _ = calibration.apply(cfg)
    cfg = OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != calibration.KEY])
    try:
        known = [item.name for item in fields(get_class(cfg._target_)) if item.init]
    except (ImportError, ValueError, TypeError) as error:
        raise ValueError(f"method._target_={cfg.get('_target_')} is no policy class: {error}") from error
    check_keys([key for key in cfg if not str(key).startswith("_")], known, prefix="method.")
    try:
        return instantiate(cfg, _convert_="all")
    except InstantiationException as error:
        cause = error.__cause__ or error
        if isinstance(cause, ValueError) and not isinstance(cause, InstantiationException):
            raise cause from None
        if isinstance(cause, TypeError):
            raise ValueError(f"the settings of {cfg._target_} do not fit: {cause}") from error
        raise ValueError(f"cannot build the method {cfg.get('_target_')}: {cause}") from error


def make_engine(
    cfg: DictConfig, model: "LoadedModel", policy: "Policy", *, prompts: "PromptCache | None" = None
) -> "Engine":
    """Build the engine.

    Args:
        cfg: The whole configuration.
        model: The loaded model.
        policy: The method.
        prompts: Prompts that were read, shared by engines of one model; None keeps none.

    Raises:
        ValueError: An unknown key, or a method that does not fit the model.
    """
    from kvbench.cache.layout import StoreOptions
    from kvbench.engine.engine import Engine

    options = as_dict(cfg.store)
    check_keys(options, [item.name for item in fields(StoreOptions)], prefix="store.")
    options = {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
    engine = Engine(
        model,
        policy,
        store=StoreOptions(**options),
        batch_size=cfg.batch_size,
        seed=cfg.seed,
        backend=cfg.backend.name,
        fidelity_max_tokens=cfg.fidelity.max_tokens,
        prompts=prompts,
    )
    policy.check_model(engine.shape.num_layers, engine.shape.num_kv_heads)  # here: before the first prompt is read
    return engine


def read_bytes(key: str, value: object) -> int:
    """Read a setting in bytes.

    Args:
        key: The setting, for messages.
        value: A whole number of bytes, or text such as 512MiB or 8GiB.

    Raises:
        ValueError: It is neither.
    """
    from kvbench.policy import Budget

    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    try:
        found = Budget.parse(value) if isinstance(value, str) else None
    except ValueError:
        found = None
    if found is None or found.unit != "bytes":
        raise ValueError(f"{key}={value} is no number of bytes; write a whole number, or text such as 512MiB or 8GiB")
    return int(found.value)


class LastOne(Generic[Loaded]):
    """Remembers the last thing that was loaded."""

    def __init__(self) -> None:
        self._held: list[tuple[str, Loaded]] = []  # the settings and what they gave, once there is something

    def get(self, key: object, load: Callable[[], Loaded]) -> Loaded:
        """What these settings give: the thing at hand, or a new one in its place.

        Args:
            key: Everything that decides what is loaded, as JSON types.
            load: Loads it.
        """
        text = json.dumps(key, sort_keys=True, default=str)
        for held, value in self._held:
            if held == text:
                return value
        self._held.clear()  # let go of the old one before the new one takes its memory
        value = load()
        self._held.append((text, value))
        return value


class Loaders:
    """kvbench's own loaders. A method and its reference, and all jobs of a sweep, share the last model, the last task
    and the prompts that were read."""

    def __init__(self) -> None:
        self._model: LastOne[LoadedModel] = LastOne()
        self._task: LastOne[TaskSet] = LastOne()
        self._prompts: dict[int, PromptCache] = {}

    def parts(self) -> Parts:
        """The loaders, for a run."""
        return Parts(
            make_policy=make_policy, load_model=self.load_model, load_task=self.load_task, make_engine=self.make_engine
        )

    def load_model(self, cfg: DictConfig) -> "LoadedModel":
        """The model of a model group."""

        def load() -> "LoadedModel":
            name = cfg.get("path") or cfg.get("name") or cfg.get("preset") or cfg.get("kind")
            note(f"loading model {name}")  # the imports alone take seconds
            from kvbench.models.load import load_model

            return load_model(cfg)

        return self._model.get(as_dict(cfg), load)

    def load_task(
        self, cfg: DictConfig, model: "LoadedModel", *, limit: int | None, seed: int, protocol: DictConfig
    ) -> "TaskSet":
        """The task of a task group."""

        def load() -> "TaskSet":
            from kvbench.tasks import load_task

            return load_task(cfg, model, limit=limit, seed=seed, protocol=protocol)

        named = {"limit": limit, "seed": seed, "protocol": as_dict(protocol)}
        return self._task.get([as_dict(cfg), model.fingerprint, named], load)

    def make_engine(
        self, cfg: DictConfig, model: "LoadedModel", policy: "Policy", *, prompts: "PromptCache | None" = None
    ) -> "Engine":
        """The engine of a configuration, with the prompts that the others have read unless it is given some."""
        return make_engine(cfg, model, policy, prompts=self.prompts(cfg) if prompts is None else prompts)

    def prompts(self, cfg: DictConfig) -> "PromptCache":
        """The prompts that all engines with one `prompt_cache_bytes` share."""
        from kvbench.engine.prompt_cache import PromptCache

        limit_bytes = read_bytes("prompt_cache_bytes", cfg.get("prompt_cache_bytes", 0))
        if limit_bytes not in self._prompts:
            self._prompts[limit_bytes] = PromptCache(limit_bytes)
        return self._prompts[limit_bytes]


def default_parts() -> Parts:
    """kvbench's own loaders. Runs that are given the same ones share a model, a task and the prompts that were read."""
    return Loaders().parts()
