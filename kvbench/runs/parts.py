"""Where a run gets its policy, model, task and engine from; tests put small ones in their place.

Torch and transformers take seconds to import, so the functions import what needs them: a wrong setting is answered
before.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from kvbench.config.settings import as_dict, copy_config
from kvbench.errors import check_keys
from kvbench.rules import MAX_BYTES, shown
from kvbench.show.progress import note, steps_shown

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from kvbench.cache.layout import StoreOptions
    from kvbench.engine.engine import Engine
    from kvbench.engine.prompt_cache import PromptCache
    from kvbench.models.load import LoadedModel
    from kvbench.policy import Policy
    from kvbench.tasks.taskset import TaskSet

Loaded = TypeVar("Loaded")


class TaskLoader(Protocol):
    """Loads a task for a model."""

    def __call__(
        self, cfg: "DictConfig", model: "LoadedModel", *, limit: int | str | None, seed: int, protocol: "DictConfig"
    ) -> "TaskSet":
        """Load the task of a task group.

        Args:
            cfg: The task group.
            model: Whose tokenizer and context length the prompts are for.
            limit: Samples per subset, `first:` and a number for the first ones; None for all.
            seed: Decides generated data.
            protocol: The protocol group.
        """
        ...


class EngineMaker(Protocol):
    """Makes an engine for a model and a method."""

    def __call__(
        self, cfg: "DictConfig", model: "LoadedModel", policy: "Policy", *, prompts: "PromptCache | None" = None
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
    check_task: "Callable[[DictConfig], None]" = lambda cfg: None
    """Whole configuration; refuses a task whose data are missing, before its model is loaded."""


def make_policy(cfg: Mapping[str, Any]) -> "Policy":
    """Build the policy that `_target_` names: its class, called with plain settings, and nothing else is called.

    Args:
        cfg: The method group: `_target_`, the policy's fields, and `calibration`, a file whose settings replace some.
            The class is what the user's own YAML or command line names; a calibration file cannot change it.

    Raises:
        ValueError: The class does not exist, a field is unknown, a value is out of range, or the file does not fit.
    """
    from kvbench.runs import calibration

    settings = as_dict(cfg)
    if settings.pop(calibration.KEY, None) is not None:
        changed, _ = calibration.apply(copy_config(cfg))
        settings = as_dict(changed)
        del settings[calibration.KEY]
    target = settings.pop("_target_", None)
    for name, value in settings.items():
        check_plain(f"method.{name}", name, value)
    made_of = policy_class(target)
    known = [item.name for item in fields(made_of) if item.init]
    check_keys(settings, known, prefix="method.")
    needed = [
        item.name
        for item in fields(made_of)
        if item.init and item.default is MISSING and item.default_factory is MISSING and item.name not in settings
    ]
    if needed:
        raise ValueError(f"method.{needed[0]} is missing; {made_of.__name__} has no default for it, so give a value")
    return made_of(**settings)


def policy_class(target: object) -> "type[Policy]":
    """The class of a method.

    Args:
        target: Its module and name, `kvbench.methods.<module>.<Class>` or a module of the user's own.

    Raises:
        ValueError: There is no such class, or it is no method.
    """
    from kvbench.policy import Policy

    parts = target.split(".") if isinstance(target, str) else []
    if len(parts) < 2 or not all(part.isidentifier() and not part.startswith("__") for part in parts):
        raise ValueError(f"method._target_={target} is no policy class: write MODULE.CLASS")
    try:
        found = getattr(import_module(".".join(parts[:-1])), parts[-1])
    except (ImportError, AttributeError) as error:
        raise ValueError(f"method._target_={target} is no policy class: {error}") from error
    if not isinstance(found, type) or not issubclass(found, Policy) or not is_dataclass(found):
        raise ValueError(f"method._target_={target} is no policy class: it must be a dataclass derived from Policy")
    return found


def check_plain(key: str, name: str, value: object) -> None:
    """Refuses a setting that is more than a scalar or lists of scalars.

    Args:
        key: The setting, as the user writes it.
        name: Its own name.
        value: What was given.

    Raises:
        ValueError: The value is or holds a mapping or anything else, or the name begins with an underscore.
    """
    if name.startswith("_"):
        raise ValueError(f"{key} begins with an underscore, which no setting does; leave it out")
    if not _is_plain(value):
        raise ValueError(f"{key}={shown(value)} is no plain value; give a number, text, true, false, null or a list")


def _is_plain(value: object) -> bool:
    return (
        value is None
        or isinstance(value, bool | int | float | str)
        or (isinstance(value, list) and all(map(_is_plain, value)))
    )


def make_engine(
    cfg: "DictConfig", model: "LoadedModel", policy: "Policy", *, prompts: "PromptCache | None" = None
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
    from kvbench.engine.engine import Engine
    from kvbench.policy import check_sizes

    check_sizes(policy, max_tokens=model.max_tokens, num_layers=model.model.config.num_hidden_layers)
    return Engine(
        model,
        policy,
        store=store_options(cfg.store),
        batch_size=cfg.batch_size,
        seed=cfg.seed,
        backend=cfg.backend.name,
        fidelity_max_tokens=cfg.fidelity.max_tokens,
        fidelity_per_token=cfg.fidelity.get("per_token", False),
        prompts=prompts,
        prefill_chunk=prefill_chunk(cfg),
    )


def prefill_chunk(cfg: Mapping[str, Any]) -> int | None:
    """Tokens of a prompt that are read at once; None = all, also where a configuration of before does not say."""
    found: int | None = (cfg.get("prefill") or {}).get("chunk")
    return found


def check_task(cfg: "DictConfig") -> None:
    """Refuse a task that cannot be loaded whatever the model is.

    Args:
        cfg: The whole configuration.

    Raises:
        MissingDataError: Names every part of the data that is missing.
        ValueError: A setting of the task is unknown or out of range.
    """
    from kvbench.tasks import check_task

    check_task(cfg.task, limit=cfg.limit, seed=cfg.seed, protocol=cfg.protocol)


def store_options(cfg: Mapping[str, Any]) -> "StoreOptions":
    """The layout of memory that the `store` group asks for.

    Raises:
        ValueError: An unknown key, or a value out of range.
    """
    from kvbench.cache.layout import StoreOptions

    options = as_dict(cfg)
    check_keys(options, [item.name for item in fields(StoreOptions)], prefix="store.")
    if isinstance(options.get("budget_bytes"), str):
        options["budget_bytes"] = read_bytes("store.budget_bytes", options["budget_bytes"])
    if isinstance(options.get("track"), list):
        options["track"] = tuple(options["track"])
    return StoreOptions(**options)


def read_bytes(key: str, value: object) -> int:
    """Read a setting in bytes.

    Args:
        key: The setting, for messages.
        value: A whole number of bytes, or text such as 512MiB or 8GiB.

    Raises:
        ValueError: It is neither.
    """
    from kvbench.policy.budget import read_size

    found = read_size(value) if isinstance(value, str) else value
    if isinstance(found, bool) or not isinstance(found, int | float) or (found is value and isinstance(found, float)):
        found = -1
    if not 0 <= found <= MAX_BYTES:
        raise ValueError(
            f"{key}={shown(value)} is no number of bytes; write a whole number up to {MAX_BYTES}, or text such as "
            "512MiB or 8GiB"
        )
    return int(found)


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
            make_policy=make_policy,
            load_model=self.load_model,
            load_task=self.load_task,
            make_engine=self.make_engine,
            check_task=check_task,
        )

    def load_model(self, cfg: "DictConfig") -> "LoadedModel":
        """The model of a model group."""

        def load() -> "LoadedModel":
            name = cfg.get("path") or cfg.get("name") or cfg.get("preset") or cfg.get("kind")
            note(f"loading model {name}")  # the imports alone take seconds
            from kvbench.models.load import load_model

            return load_model(cfg)

        return self._model.get(as_dict(cfg), load)

    def load_task(
        self, cfg: "DictConfig", model: "LoadedModel", *, limit: int | str | None, seed: int, protocol: "DictConfig"
    ) -> "TaskSet":
        """The task of a task group."""

        def load() -> "TaskSet":
            from kvbench.tasks import load_task
            from kvbench.tasks.watch import watched

            with watched(steps_shown):
                return load_task(cfg, model, limit=limit, seed=seed, protocol=protocol)

        named = {"limit": limit, "seed": seed, "protocol": as_dict(protocol)}
        return self._task.get([as_dict(cfg), model.fingerprint, named], load)

    def make_engine(
        self, cfg: "DictConfig", model: "LoadedModel", policy: "Policy", *, prompts: "PromptCache | None" = None
    ) -> "Engine":
        """The engine of a configuration, with the prompts that the others have read unless it is given some."""
        return make_engine(cfg, model, policy, prompts=self.prompts(cfg) if prompts is None else prompts)

    def prompts(self, cfg: "DictConfig") -> "PromptCache":
        """The prompts that all engines with one `prompt_cache_bytes` share."""
        from kvbench.engine.prompt_cache import PromptCache

        limit_bytes = read_bytes("prompt_cache_bytes", cfg.get("prompt_cache_bytes", 0))
        if limit_bytes not in self._prompts:
            self._prompts[limit_bytes] = PromptCache(limit_bytes, keeps_queries=True)
        return self._prompts[limit_bytes]


def default_parts() -> Parts:
    """kvbench's own loaders. Runs that are given the same ones share a model, a task and the prompts that were read."""
    return Loaders().parts()
