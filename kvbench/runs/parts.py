"""The policy, model, task and engine of a run.

Torch and transformers take seconds to import, so they are imported inside functions: a wrong setting is
reported before.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import is_dataclass
from importlib import import_module
from itertools import repeat
from threading import Thread
from typing import TYPE_CHECKING, Any

from kvbench.config.settings import as_dict, read_settings
from kvbench.errors import NameUnknown, SettingUnknown, SettingValue, UnsupportedModel
from kvbench.rules import modes, shown
from kvbench.runs import calibration
from kvbench.show.progress import note, steps_shown

if TYPE_CHECKING:
    from kvbench.engine.engine import Engine
    from kvbench.engine.prompt_cache import PromptCache
    from kvbench.models.load import LoadedModel
    from kvbench.policy import Policy
    from kvbench.runs.config import RunConfig
    from kvbench.tasks.taskset import TaskSet


def make_policy(group: Mapping[str, Any]) -> "Policy":
    """Build the policy that `_target_` names: its class, called with plain settings, and nothing else is called.

    The class is what the user's own YAML or command line names; a calibration file, which may replace some settings,
    cannot change it.

    Raises:
        ValueError: The class does not exist, a field is unknown, a value is out of range, or the file does not fit.
    """
    settings = calibration.apply(group)[0]
    settings.pop(calibration.KEY, None)
    target = settings.pop("_target_", None)
    for name, value in settings.items():
        if name.startswith("_"):
            raise SettingUnknown(
                f"method.{name} begins with an underscore, which no setting does; leave it out",
                setting=f"method.{name}",
            )
        if not calibration.is_plain(value):
            why = "is no plain value; give a number, text, true, false, null or a list"
            raise SettingValue(f"method.{name}={shown(value)} {why}", setting=f"method.{name}")
    cls = policy_class(target)
    with modes.kept(f"method._target_={target}"):
        return read_settings(cls, settings, "method.")


def policy_class(target: object) -> "type[Policy]":
    """Find the class of a method by its module and name, also in a user's module."""
    from kvbench.policy import Policy

    wrong = f"method._target_={target} is no policy class"
    parts = target.split(".") if isinstance(target, str) else []
    if len(parts) < 2 or not all(part.isidentifier() and not part.startswith("__") for part in parts):
        raise SettingValue(f"{wrong}: write MODULE.CLASS", setting="method._target_")
    module = ".".join(parts[:-1])
    try:
        with modes.kept(f"method._target_={target}", once=module):
            cls = getattr(import_module(module), parts[-1])
    except (ImportError, AttributeError) as error:
        raise NameUnknown(f"{wrong}: {error}", setting="method._target_") from error
    if not isinstance(cls, type) or not issubclass(cls, Policy) or not is_dataclass(cls):
        raise SettingValue(f"{wrong}: it must be a dataclass derived from Policy", setting="method._target_")
    return cls


def _compile_kernels() -> None:
    """Compile the CPU kernels, where no GPU will do the work and no equal build is cached."""
    import torch

    if torch.cuda.is_available():
        return
    from kvbench.kernels.cpu import abi

    begin = time.monotonic()
    try:
        abi.load()
    except ValueError:
        return  # the backend that needs them says so
    if (took_s := time.monotonic() - begin) > 2:
        note(f"compiled the CPU kernels, once: {took_s:.0f} s")


def _begin(group: Mapping[str, Any]) -> str:
    """Print which model is loaded, since the imports alone take seconds, and start to compile on another core."""
    name = str(group.get("path") or group.get("name") or group.get("preset") or group.get("kind"))
    note(f"loading model {name}")
    Thread(target=_compile_kernels, daemon=True).start()
    return name


class Loaders:
    """Loader of the parts of runs, with caches of the last model, the last task and the prompts.

    A method and its reference, and all jobs of a sweep, share them.
    """

    def __init__(self) -> None:
        self._held: dict[str, tuple[str, Any]] = {}  # what -> the settings that decide it, and what they gave
        self._prompts: dict[int, PromptCache] = {}
        self._shared: PromptCache | None = None

    def make_policy(self, group: Mapping[str, Any]) -> "Policy":
        """The policy of a method group."""
        return make_policy(group)

    def check_values(self, cfg: Mapping[str, Any]) -> None:
        """Refuse settings of a run that are wrong whatever its method, before the seconds of importing torch.

        Raises:
            ValueError: Names the setting, its value and the rule.
        """
        from kvbench.models.names import check_values
        from kvbench.runs.config import RunConfig
        from kvbench.tasks import check_settings

        config = RunConfig.read(cfg)
        check_values(config.model)
        check_settings(config.task, config.protocol)

    def check_task(self, config: Any) -> None:
        """Refuse a task that cannot be loaded with any model, before a model is loaded.

        Raises:
            MissingDataError: Names every part of the data that is missing.
            ValueError: A setting of the task is unknown or out of range.
        """
        from kvbench.tasks import check_task

        check_task(config.task, limit=config.limit, seed=config.seed, protocol=config.protocol)

    def check_chat(self, config: Any) -> None:
        """Refuse a task whose prompts the model's chat template cannot hold, before weights are loaded.

        Raises:
            ValueError: Names the task, the model and the remedy.
        """
        from kvbench.tasks import check_chat, requires_chat

        if (
            requires_chat(config.task) and config.model.get("kind") == "hf"
        ):  # others' tokenizers come with their weights
            from kvbench.models.load import load_outline

            check_chat(config.task, load_outline(config.model), config.protocol)

    def check_model(self, group: Mapping[str, Any]) -> None:
        """Refuse a model whose files are not there, or that the store cannot hold, before a job begins.

        Raises:
            MissingWeightsError: Names the searched folders.
            UnsupportedModel: Its attention cannot be held in the store.
            ValueError: The files are no model.
        """
        if group.get("kind") in ("hf", "gguf"):  # others have none, and the import takes seconds
            from kvbench.models.load import check_model

            check_model(group)
            self._check_supported(group)

    def check_fit(self, config: "RunConfig", policy: "Policy") -> None:
        """Refuse a method or settings that the model's layers do not support, before the model is loaded.

        Raises:
            UnsupportedModel: Its attention cannot be held in the store.
            ValueError: The method or the settings do not fit it.
        """
        self._kept("begun", as_dict(config.model), lambda: _begin(config.model))
        from kvbench.engine.hf import check_pass
        from kvbench.engine.supported import check_fit, small_store
        from kvbench.policy import check_sizes

        if (outline := self._outline(config.model)) is not None:
            shape = check_fit(outline, policy, config.store, config.prefill.chunk)
            check_sizes(policy, max_tokens=outline.max_tokens, num_layers=shape.num_layers)
            check_pass(outline.model, small_store(policy, shape, config.store))

    def try_out(self, experiment: Any, say: Callable[[str], None]) -> None:
        """Run a user's method on one short prompt; raises as `tryout.try_out`."""
        from kvbench.runs.tryout import try_out

        try_out(experiment, self.make_engine, say)

    def take_model(self, group: Mapping[str, Any], model: "LoadedModel") -> None:
        """Take a model that was loaded elsewhere as the one of a model group."""
        for what, value in (("begun", ""), ("outline", model), ("model", model)):
            self._kept(what, as_dict(group), repeat(value).__next__)

    def load_model(self, group: Mapping[str, Any]) -> "LoadedModel":
        """The model of a model group."""

        def load() -> "LoadedModel":
            self._kept("begun", as_dict(group), lambda: _begin(group))
            from kvbench.models.load import load_model

            self._check_supported(group)
            return load_model(group)

        return self._kept("model", as_dict(group), load)

    def _outline(self, group: Mapping[str, Any]) -> "LoadedModel | None":
        """Make the model without weights; None where that fails: loading it gives a better error."""

        def load() -> "LoadedModel | None":
            from kvbench.models.checkpoint import is_fault
            from kvbench.models.load import outline

            try:
                return outline(group)
            except BaseException as error:
                if isinstance(error, UnsupportedModel) or not is_fault(error):
                    raise
                return None

        model: LoadedModel | None = self._kept("outline", as_dict(group), load)
        return model

    def _check_supported(self, group: Mapping[str, Any]) -> None:
        from kvbench.engine.supported import check_supported

        if (outline := self._outline(group)) is not None:
            check_supported(outline.model, len(outline.device_spans), outline.tensor_parallel)

    def load_task(
        self, group: Mapping[str, Any], model: "LoadedModel", *, limit: int | str | None, seed: int, protocol: Mapping
    ) -> "TaskSet":
        """The task of a task group."""

        def load() -> "TaskSet":
            from kvbench.tasks import load_task
            from kvbench.tasks.task import watched

            with watched(steps_shown):
                return load_task(group, model, limit=limit, seed=seed, protocol=protocol)

        return self._kept("task", [as_dict(group), model.fingerprint, limit, seed, as_dict(protocol)], load)

    def make_engine(
        self, config: "RunConfig", model: "LoadedModel", policy: "Policy", *, prompts: "PromptCache | None" = None
    ) -> "Engine":
        """Make the engine of a run; refuses a method that does not fit the model.

        It shares the prompt cache of the other engines unless one is passed.
        """
        from kvbench.engine.engine import Engine, grouped
        from kvbench.engine.supported import num_full_layers
        from kvbench.policy import check_sizes

        check_sizes(policy, max_tokens=model.max_tokens, num_layers=num_full_layers(model.model.config))
        size, group = grouped(model, config.backend.name, config.batch_size)
        return Engine(
            model,
            policy,
            store=config.store,
            batch_size=size,
            group=group,
            seed=config.seed,
            backend=config.backend.name,
            decode=config.backend.decode,
            fidelity_max_tokens=config.fidelity.max_tokens,
            fidelity_per_token=config.fidelity.per_token,
            prompts=self.prompts(config.prompt_cache_bytes) if prompts is None else prompts,
            prefill_chunk=config.prefill.chunk,
        )

    def prompts(self, limit_bytes: int) -> "PromptCache":
        """The prompts that all engines with one `prompt_cache_bytes` share, or those of `sharing`."""
        from kvbench.engine.prompt_cache import PromptCache

        if self._shared is not None:
            return self._shared
        if limit_bytes not in self._prompts:
            self._prompts[limit_bytes] = PromptCache(limit_bytes, keeps_queries=True)
        return self._prompts[limit_bytes]

    @contextmanager
    def sharing(self, prompts: "PromptCache") -> Iterator[None]:
        """Give every engine that is made inside these prompts, whatever `prompt_cache_bytes` says."""
        self._shared = prompts
        try:
            yield
        finally:
            self._shared = None

    def _kept(self, what: str, key: object, load: Callable[[], Any]) -> Any:
        """Return the cached object where its settings are equal, else replace it by a new one."""
        text = json.dumps(key, sort_keys=True, default=str)
        if self._held.get(what, ("", None))[0] != text:
            self._held.pop(what, None)  # let go of the old one before the new one takes its memory
            self._held[what] = (text, load())
        return self._held[what][1]
