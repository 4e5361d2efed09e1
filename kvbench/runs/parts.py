"""Where a run gets its model, task, policy and engine from; tests put small ones in their place."""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache
from typing import TYPE_CHECKING

from omegaconf import DictConfig, OmegaConf

from kvbench.errors import unknown_name

if TYPE_CHECKING:
    from kvbench.engine.prompt_cache import PromptCache


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The four things a run is made of, as functions of the configuration."""

    make_policy: Callable[[DictConfig], object]
    """Method group -> policy."""
    load_model: Callable[[DictConfig], object]
    """Model group -> `LoadedModel`."""
    load_task: Callable[..., object]
    """Task group, model, and `limit`, `seed`, `protocol` by name -> `TaskSet`."""
    make_engine: Callable[[DictConfig, object, object], object]
    """Whole configuration, model, policy -> `Engine`."""


def make_policy(cfg: DictConfig) -> object:
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
    cfg = OmegaConf.masked_copy(cfg, [key for key in cfg if key != calibration.KEY])
    try:
        known = [item.name for item in fields(get_class(cfg._target_)) if item.init]
    except (ImportError, ValueError, TypeError) as error:
        raise ValueError(f"method._target_={cfg.get('_target_')} is no policy class: {error}") from error
    for key in cfg:
        if key not in known and not str(key).startswith("_"):
            raise unknown_name("key", f"method.{key}", [f"method.{name}" for name in known])
    try:
        return instantiate(cfg, _convert_="all")
    except InstantiationException as error:
        cause = error.__cause__ or error
        if isinstance(cause, ValueError) and not isinstance(cause, InstantiationException):
            raise cause from None
        if isinstance(cause, TypeError):
            raise ValueError(f"the settings of {cfg._target_} do not fit: {cause}") from error
        raise ValueError(f"cannot build the method {cfg.get('_target_')}: {cause}") from error


def make_engine(cfg: DictConfig, model: object, policy: object) -> object:
    """Build the engine.

    Args:
        cfg: The whole configuration.
        model: The loaded model.
        policy: The method.

    Raises:
        ValueError: An unknown key, or a method that does not fit the model.
    """
    from kvbench.cache.layout import StoreOptions
    from kvbench.engine.engine import Engine

    options = OmegaConf.to_container(cfg.store, resolve=True)
    options = {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
    known = [item.name for item in fields(StoreOptions)]
    for key in options:
        if key not in known:
            raise unknown_name("key", f"store.{key}", [f"store.{name}" for name in known])
    engine = Engine(
        model,
        policy,
        store=StoreOptions(**options),
        batch_size=cfg.batch_size,
        seed=cfg.seed,
        backend=cfg.backend.name,
        fidelity_max_tokens=cfg.fidelity.max_tokens,
        prompts=_prompts(read_bytes("prompt_cache_bytes", cfg.get("prompt_cache_bytes", 0))),
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


@cache
def _prompts(limit_bytes: int) -> "PromptCache":
    """The prompts that all jobs of this process share."""
    from kvbench.engine.prompt_cache import PromptCache

    return PromptCache(limit_bytes)


class _LastOne:
    """Remembers the last thing loaded: a method and its reference, and all jobs of a sweep, then share one model and
    one task."""

    def __init__(self, load: Callable[..., object]) -> None:
        self._load = load
        self._key: str | None = None
        self._value: object = None

    def __call__(self, key: object, *arguments: object, **named: object) -> object:
        text = json.dumps(key, sort_keys=True, default=str)
        if text != self._key:
            self._key = self._value = None  # let go of the old one before the new one takes its memory
            self._value = self._load(*arguments, **named)
            self._key = text
        return self._value


def _load_model(cfg: DictConfig) -> object:
    name = cfg.get("path") or cfg.get("name") or cfg.get("preset") or cfg.get("kind")
    print(f"loading model {name}", file=sys.stderr, flush=True)  # the imports alone take seconds
    from kvbench.models.load import load_model

    return load_model(cfg)


def _load_task(cfg: DictConfig, model: object, **named: object) -> object:
    from kvbench.tasks import load_task

    return load_task(cfg, model, **named)


_models, _tasks = _LastOne(_load_model), _LastOne(_load_task)


def _plain(cfg: object) -> object:
    return OmegaConf.to_container(cfg, resolve=True) if OmegaConf.is_config(cfg) else cfg


def default_parts() -> Parts:
    """kvbench's own model loader, tasks, policies and engine."""

    def load_model(cfg: DictConfig) -> object:
        return _models(_plain(cfg), cfg)

    def load_task(cfg: DictConfig, model: object, **named: object) -> object:
        key = [_plain(cfg), model.fingerprint, {name: _plain(value) for name, value in named.items()}]
        return _tasks(key, cfg, model, **named)

    return Parts(make_policy=make_policy, load_model=load_model, load_task=load_task, make_engine=make_engine)
