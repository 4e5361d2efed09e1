"""The settings of one run: read once from a composed configuration, checked, and frozen."""

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from kvbench.cache.options import OFFSETS, StoreOptions
from kvbench.config import extensions
from kvbench.config.files import FULL, FULL_STORE
from kvbench.config.settings import as_dict, read_data, read_settings
from kvbench.errors import FileContent, SettingsConflict, unknown_name
from kvbench.kernels.names import BACKEND_NAMES, DECODES
from kvbench.results.record import CHUNK_LABEL
from kvbench.results.shards import Shard
from kvbench.results.writing import check_writable
from kvbench.rules import Choice, Form, Whole, check_settings, shown
from kvbench.rules.counting import Outside, Through
from kvbench.rules.sizes import read_bytes
from kvbench.rules.tables import read_table

GOLD, FULL_ANSWER = "gold", "own"  # which answer is forced: the task's, or the one that the full cache gives
AUTO, NONE = "auto", "none"
NEEDED = ("method", "task", "model")  # groups of which no run has none


@dataclass(frozen=True, kw_only=True)
class Fidelity:
    """The answers that are forced and compared with the full cache, as conf/config.yaml says."""

    on: Annotated[str, Choice((GOLD, FULL_ANSWER))] = GOLD
    max_tokens: Annotated[int | None, Whole(0, unit="tokens")] = 256
    per_token: bool = False

    def __post_init__(self) -> None:
        check_settings(self, "fidelity.")


@dataclass(frozen=True, kw_only=True)
class Prefill:
    """The way prompts are read."""

    chunk: Annotated[int | None, Whole(1, unit="tokens"), Through(f"task.protocol.{CHUNK_LABEL}")] = None

    def __post_init__(self) -> None:
        check_settings(self, "prefill.")


@dataclass(frozen=True, kw_only=True)
class BackendChoice:
    """The kernels that run."""

    name: Annotated[str, Choice((AUTO, *BACKEND_NAMES)), Through("backend")] = AUTO
    decode: Annotated[str, Choice(DECODES), Through("backend_decode")] = DECODES[0]

    def __post_init__(self) -> None:
        check_settings(self, "backend.")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Settings of a run; conf/config.yaml describes each.

    The groups `method`, `task`, `model` and `protocol` are mappings: the class that each of them names reads it.
    A setting is part of the run's identity as it stands, unless it is marked `Outside` or `Through`.

    Raises:
        ValueError: Names the setting, its value, the rule and the remedy.
    """

    seed: Annotated[int, Whole(0, 2**63 - 1)] = 0
    limit: Annotated[int | str | None, Through("task.limit")] = None
    batch_size: Annotated[
        int | Literal["auto"], Whole(1, 2**16, unit="samples", also=("auto",)), Through("batch_size")
    ] = "auto"
    results_dir: Annotated[
        str,
        Form("the path of a folder, for example results_dir=results", lambda x: isinstance(x, str) and bool(x)),
        Outside("where records land"),
    ] = "results"
    shard: Annotated[Shard | None, Outside("which samples a process computes")] = None
    resume: Annotated[bool, Outside("whether stored samples are kept")] = True
    prompt_cache_bytes: Annotated[int, Outside("how many prompts are read once for several methods")] = 0
    tracker: Annotated[str, Outside("where numbers are sent, too")] = NONE
    reference: Annotated[str, Choice((AUTO, NONE)), Outside("whether the full cache runs, too")] = AUTO
    method: Annotated[Mapping[str, Any], Through("method")] = field(default_factory=dict)
    task: Annotated[Mapping[str, Any], Through("task")] = field(default_factory=dict)
    model: Annotated[Mapping[str, Any], Through("model")] = field(default_factory=dict)
    protocol: Annotated[Mapping[str, Any], Through("generation")] = field(default_factory=dict)
    backend: BackendChoice = field(default_factory=BackendChoice)
    fidelity: Fidelity = field(default_factory=Fidelity)
    prefill: Prefill = field(default_factory=Prefill)
    store: StoreOptions = field(default_factory=StoreOptions)

    def __post_init__(self) -> None:
        check_settings(self)
        from kvbench.tasks.task import Limit

        Limit.read(self.limit)
        if self.tracker != NONE:
            checks = list(extensions.hooks("tracker.check"))
            if not checks:
                raise unknown_name("tracker", self.tracker, (NONE,))
            for check in checks:
                check(self.tracker)
        if self.shard and not self.resume:
            raise SettingsConflict(
                f"shard={self.shard} with resume=false would throw away what the other shards finished; give the "
                "command once without shard=, or remove the run's folder",
                setting="shard",
            )
        if self.prefill.chunk is not None:
            from kvbench.policy import check_chunk_devices

            # Its loader refuses other values.
            devices, processes = self.model.get("device"), self.model.get("tensor_parallel")
            places = len(devices) if isinstance(devices, list) else 1
            check_chunk_devices(self.prefill.chunk, places, processes if isinstance(processes, int) else 1)

    @classmethod
    def read(cls, cfg: "Mapping[str, Any] | RunConfig") -> "RunConfig":
        """Read a composed configuration, or a stored config.yaml; missing settings take their defaults.

        Raises:
            ValueError: Names the setting, its value, the rule and the remedy; or the results folder cannot be written.
        """
        if isinstance(cfg, RunConfig):
            return cfg
        values = as_dict(cfg)
        for name, kind in (("backend", BackendChoice), ("fidelity", Fidelity), ("prefill", Prefill)):
            values[name] = read_settings(kind, values.get(name) or {}, f"{name}.")
        values["store"] = store_options(values.get("store") or {})
        values["shard"] = Shard.read(values.get("shard"))
        values["prompt_cache_bytes"] = read_bytes("prompt_cache_bytes", values.get("prompt_cache_bytes", 0))
        config = read_settings(cls, values)
        check_writable(Path(config.results_dir), "results_dir")
        return config

    @property
    def forces_full_answer(self) -> bool:
        """True where the full cache's generated answers are forced."""
        return self.fidelity.on == FULL_ANSWER and self.fidelity.max_tokens != 0

    def with_method(self, method: Mapping[str, Any]) -> "RunConfig":
        """The same settings with another method group."""
        return replace(self, method=as_dict(method))

    def of_full(self) -> "RunConfig":
        """The same experiment with the full cache.

        The byte budget is lifted: a budget for a compressed cache would only make the reference fail. Nothing is
        rotated or shifted, and windows are exact, so that one reference serves runs with and without. Prompts are read
        as in the experiment: in chunks, the full cache differs only in the rounding of its pages.
        """
        from kvbench.config.methods import method_settings  # needs the library of settings; a bench has no run

        method = as_dict(method_settings(FULL))
        return replace(self, method=method, store=replace(self.store, **FULL_STORE))

    def settings(self) -> dict[str, Any]:
        """The settings as config.yaml has them. Which shard a process worked on is no part of the run."""
        return asdict(replace(self, shard=None))


def read_stored(folder: Path) -> dict[str, Any]:
    """Read the settings in the config.yaml of a stored run, which is untrusted; missing ones take their defaults.

    Raises:
        ValueError: Names the file, and the group that is missing or none.
    """
    path = folder / "config.yaml"
    settings = read_data(path)
    for item in fields(RunConfig):
        if item.default_factory is not MISSING:  # the groups
            held = settings.setdefault(item.name, {})
            if not isinstance(held, dict) or (item.name in NEEDED and not held):
                raise FileContent(
                    f"{path}: {item.name}={shown(held)} is no group of settings; restore the file, or run the "
                    "experiment again",
                    setting=item.name,
                )
    return settings


def store_options(values: Mapping[str, Any]) -> StoreOptions:
    """Read the store options of the `store` group."""
    options = as_dict(values)
    if isinstance(options.get("budget_bytes"), str):
        options["budget_bytes"] = read_bytes("store.budget_bytes", options["budget_bytes"])
    parsed = read_settings(StoreOptions, options, "store.")
    if parsed.key_offset in OFFSETS:
        return parsed
    # The numbers themselves, so that a run's identity does not hang on a path.
    return replace(parsed, key_offset=read_table(parsed.key_offset, "store.key_offset"))
