"""Loads the model of an experiment: embedded default, hub id, folder, GGUF file, or random weights of a known shape."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from kvbench.config import garbage
from kvbench.config.settings import as_dict
from kvbench.errors import FileContent, MissingWeightsError, NameUnknown, check_name, check_whole, unknown_name
from kvbench.models import (
    cache,
    conversions,
    embedded,
    fetched,
    fields,
    files,
    gguf,
    matrices,
    quantised,
    random_weights,
    rotary,
)
from kvbench.models.checkpoint import SAFELY, How, check_complete, config_of, outline_of, read_weights, reading
from kvbench.models.devices import read_devices
from kvbench.models.names import DTYPES
from kvbench.models.processes import read_processes, started, tell
from kvbench.rules.counting import Mark, Outside, Through

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPES}
_COMMON_KEYS = {"kind", "name", "dtype", "device", "max_tokens", "linear", "quantisation", "tensor_parallel"}
# How the settings of a model count in a run's identity; one that is not listed counts as it stands.
_WEIGHTS = ("kind", "path", "revision", "fetch", "preset", "seed", "num_layers", "overrides")
_RESOLVED = ("dtype", "device", "max_tokens", "linear", "quantisation", "tensor_parallel")
MARKS: dict[str, Mark] = {
    "name": Outside("a label"),
    **{name: Through("model.fingerprint") for name in _WEIGHTS},
    **{name: Through(f"model.{name}") for name in _RESOLVED},
}


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model that is ready to run, with its properties for the rest of the harness.

    Args:
        model: A causal language model of transformers, in eval mode, without gradients, with the attention that
            transformers chooses (`sdpa`, or `eager` where a class has no other).
        tokenizer: Its tokenizer; one token per byte for random weights.
        name: Short name for tables and result folders, free of path separators.
        fingerprint: 64 hex digits over the source of the weights, the configuration and the tokenizer; dtype and device
            are not part of it.
        max_tokens: Context length: prompt and answer together must not exceed it.
        dtype: Dtype of the weights.
        device: Device of the weights; of several the first one, which takes prompts.
        chat_template: True when the tokenizer can render a chat.
        linear: Layout and kernels of its matrices, one of `matrices.LINEAR`; it decides in which order their
            sums are formed.
        remark: A sentence on settings that could not be met; empty when all were.
    """

    model: "PreTrainedModel"
    tokenizer: "PreTrainedTokenizerBase"
    name: str
    fingerprint: str
    max_tokens: int
    dtype: torch.dtype
    device: torch.device
    chat_template: bool
    linear: str = matrices.PLAIN
    remark: str = ""
    device_spans: tuple[tuple[torch.device, int], ...] = ()
    """Devices and how many layers each has, in the order of the layers, where `model.device` named several."""
    quantisation: str = ""
    """The quantisation of the weights, and the package that made it; empty = none."""
    tensor_parallel: int = 1
    """Processes among which the heads are divided."""

    @property
    def decides(self) -> tuple[str, ...]:
        """Everything that decides the numbers of a forward pass, to the last bit, and where they lie."""
        layers = str([(str(device), count) for device, count in self.device_spans])
        return self.fingerprint, str(self.dtype), str(self.device), self.linear, self.quantisation, layers

    @property
    def weights_bytes(self) -> int | None:
        """Bytes of its weights as they lie here, tied ones once; None of quantised ones, which hide their size."""
        if self.quantisation:
            return None
        return sum(weight.numel() * weight.element_size() for weight in self.model.parameters())

    @cached_property
    def rows_are_alone(self) -> bool:
        """True if a row's numbers are the same bits whatever other rows (`lengths`) share its pass."""
        return self.linear == matrices.STREAMED and matrices.rows_are_alone(self.model)

    @cached_property
    def lengths(self) -> rotary.Lengths:
        """The rotary tables that depend on a text's length: rows of other kinds need a pass of their own."""
        return rotary.lengths_of(self.model)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer: those of the generation config and the tokenizer's own, ascending."""
        ids: set[int] = set()
        for value in (self.model.generation_config.eos_token_id, self.tokenizer.eos_token_id):
            ids.update(value if isinstance(value, list | tuple) else () if value is None else (value,))
        return tuple(sorted(ids))


def load_model(cfg: Mapping[str, Any]) -> LoadedModel:
    """Loads the model that a `model` config group describes (conf/model/*.yaml explain the keys).

    Args:
        cfg: A dict or DictConfig with `kind` (embedded, hf, gguf or random) and that kind's keys.

    Raises:
        ValueError: A key or value is unknown, out of range, or does not fit the machine.
        MissingWeightsError: Files are not there; the message says where was looked and how to get them.
    """
    garbage.usual()
    settings = as_dict(cfg)
    kind = check_name("model.kind", settings.get("kind"), _LOADERS)
    loader, keys = _LOADERS[kind]
    for key in settings:
        if key not in _COMMON_KEYS | keys:
            what = f"key model.{key} for model.kind"
            raise unknown_name(what, kind, _COMMON_KEYS | keys, setting=f"model.{key}")
    devices = read_devices(settings.get("device", "auto"))
    processes = read_processes(settings.get("tensor_parallel"), str(kind), devices)
    dtype = _dtype(settings.get("dtype", "auto"), devices.first)
    quantisation = quantised.read_kind(settings.get("quantisation"), str(kind), devices.first, dtype, processes)
    linear = matrices.read_linear(settings.get("linear", matrices.AUTO), quantisation, processes)
    how = How(dtype, devices, quantisation, processes)
    if processes > 1 and started()[0] == 0:
        tell(("load", settings))
    model, tokenizer, name, fingerprint = loader(settings, how)
    if processes == 1:
        model = devices.spread(model)
    model = model.eval().requires_grad_(False)
    linear, remark = matrices.lay(model, linear, dtype, devices.first)
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        name=str(settings.get("name") or name).replace("/", "-"),
        fingerprint=fingerprint,
        max_tokens=rotary.context_length(model.config, settings.get("max_tokens")),
        dtype=dtype,
        device=devices.first if processes == 1 else model.device,
        chat_template=bool(tokenizer.chat_template),
        linear=linear,
        remark=remark,
        device_spans=devices.spans(model.config.get_text_config().num_hidden_layers),
        quantisation=quantised.in_words(quantisation),
        tensor_parallel=processes,
    )


def check_model(cfg: Mapping[str, Any]) -> None:
    """Refuses what `load_model` would refuse for missing files, whatever machine will load it.

    For a hub id, or a file that is known by name, it fetches them. Raises as that does.
    """
    settings = as_dict(cfg)
    if settings.get("kind") not in ("hf", "gguf"):
        return
    if _is_gguf(settings):
        gguf.check_gguf(_gguf_path(settings))
    else:
        files.check_config(files.find_model_folder(_path(settings), settings.get("revision")))


_Loaded = tuple["PreTrainedModel", "PreTrainedTokenizerBase", str, str]


def _load_embedded(settings: dict, how: How) -> _Loaded:
    """Loads the embedded default model."""
    return *_read_conversion(embedded.ensure_embedded(), how), embedded.NAME, embedded.embedded_fingerprint()


def _read_conversion(folder: Path, how: How) -> tuple["PreTrainedModel", "PreTrainedTokenizerBase"]:
    """Reads a folder that kvbench has converted, and that is whole."""
    model, tokenizer = _read_folder(folder, how, conversions.read_tokenizer)
    if damage := conversions.find_damage(folder):
        raise FileContent(f"in {folder} {damage}: it was changed while it was loaded; give the same command again")
    return model, tokenizer


def _load_hf(settings: dict, how: How) -> _Loaded:
    """Loads a folder or a hub id; a path that ends in .gguf is a GGUF file."""
    path = _path(settings)
    if _is_gguf(settings):
        return _load_gguf(settings, how)
    folder = files.find_model_folder(path, settings.get("revision"))
    before = files.folder_state(folder)
    model, tokenizer = _read_folder(folder, how)
    fingerprint = files.folder_fingerprint(folder)
    if files.folder_state(folder) != before:
        raise FileContent(f"{folder} was changed while it was loaded; try again when nothing writes there")
    # A folder is known by its own name, a hub id by what stands after the owner.
    return model, tokenizer, Path(path).expanduser().absolute().name, fingerprint


def _load_gguf(settings: dict, how: How) -> _Loaded:
    """Loads a GGUF file, which is converted once and then read from the cache."""
    path = _gguf_path(settings)
    gguf.check_gguf(path)
    if kept := gguf.ensure_converted(path, how.dtype):
        folder, fingerprint = kept
        return *_read_conversion(folder, how), path.stem, fingerprint
    before = cache.file_state(path)
    model, tokenizer = gguf.read_gguf(path, how.dtype)
    fingerprint = gguf.fingerprint(cache.file_digest(path), tokenizer)
    if cache.file_state(path) != before:
        raise FileContent(f"{path} was changed while it was loaded; try again when nothing writes there")
    return model, tokenizer, path.stem, fingerprint


def _load_random(settings: dict, how: How) -> _Loaded:
    """Builds random weights in the shape of a preset."""
    preset, seed, num_layers = settings.get("preset"), settings.get("seed", 0), settings.get("num_layers")
    check_whole("model.seed", seed, 0)
    config, tokenizer = _random_outline(settings)
    device = how.devices.builder
    model = random_weights.random_model(config, seed=seed, dtype=how.dtype, device=device)
    # The generator differs between kinds of device, and the weights are drawn in their dtype.
    shape = {key: value for key, value in config.to_dict().items() if key != "transformers_version"}
    parts = ["random", json.dumps(shape, sort_keys=True, default=str), str(seed), device.type, str(how.dtype)]
    name = (
        f"random-{preset}"
        + (f"-{num_layers}layers" if num_layers else "")
        + ("-changed" if settings.get("overrides") else "")
    )
    return model, tokenizer, name, files.combine_fingerprints(parts)


def _random_outline(settings: dict) -> "tuple[PretrainedConfig, PreTrainedTokenizerBase]":
    """The configuration and the tokenizer of a model with random weights."""
    config = random_weights.random_config(
        str(settings.get("preset")),
        num_layers=settings.get("num_layers"),
        max_tokens=settings.get("max_tokens"),
        overrides=settings.get("overrides"),
    )
    return config, random_weights.byte_tokenizer(config.vocab_size)


_Loader = Callable[[dict, How], _Loaded]
_LOADERS: dict[str, tuple[_Loader, set[str]]] = {
    "embedded": (_load_embedded, set()),
    "hf": (_load_hf, {"path", "revision"}),
    "gguf": (_load_gguf, {"path", "fetch"}),
    "random": (_load_random, {"preset", "seed", "num_layers", "overrides"}),
}


def load_outline(cfg: Mapping[str, Any]) -> LoadedModel:
    """An `outline` with its tokenizer, for callers that only make prompts; it gives no answers.

    The model of a GGUF file that cannot be converted is loaded whole.
    """
    settings = as_dict(cfg)
    if settings.get("kind") == "random":
        _, tokenizer = _random_outline(settings)
    elif folder_and_tokenizer := _folder_of(settings):
        folder, read_tokenizer = folder_and_tokenizer
        tokenizer = read_tokenizer(folder)
        fields.check_growth(folder, tokenizer)
    else:
        return load_model(cfg)
    bare = outline(settings | {"device": "cpu"})  # whatever the machine has that ran it
    return replace(bare, tokenizer=tokenizer, chat_template=bool(tokenizer.chat_template))


def outline(cfg: Mapping[str, Any]) -> LoadedModel:
    """Builds a model on the meta device, without weights and tokenizer, for checks before it is loaded.

    A GGUF file is not converted. Raises as `load_model` does.
    """
    settings = as_dict(cfg)
    devices = read_devices(settings.get("device", "auto"))
    dtype = _dtype(settings.get("dtype", "auto"), devices.first)
    with conversions.quiet_transformers():
        if settings.get("kind") == "random":
            config, _ = _random_outline(settings)
        elif settings.get("kind") == "gguf" or (settings.get("kind") == "hf" and _is_gguf(settings)):
            gguf.check_gguf(file := _gguf_path(settings))
            config = gguf.config_of(file, dtype)
        elif folder_and_tokenizer := _folder_of(settings):
            files.check_config(folder_and_tokenizer[0])
            config = config_of(folder_and_tokenizer[0])
        else:
            raise NameUnknown(f"model.kind={settings.get('kind')} is not known", setting="model.kind")
        model = outline_of(config, dtype)
    return LoadedModel(
        model=model,
        tokenizer=cast("PreTrainedTokenizerBase", None),
        name=str(settings.get("name") or settings.get("path") or settings.get("preset") or settings["kind"]),
        fingerprint="",
        max_tokens=rotary.context_length(config, settings.get("max_tokens")),
        dtype=dtype,
        device=torch.device("meta"),
        chat_template=False,
        device_spans=devices.spans(config.get_text_config().num_hidden_layers),
        tensor_parallel=check_whole("model.tensor_parallel", settings.get("tensor_parallel") or 1, 1),
    )


def outline_alone(path: Path) -> "PreTrainedModel":
    """Builds a model on the meta device from a configuration alone: neither weights nor a tokenizer need be there.

    Args:
        path: A folder with a config.json, or a GGUF file.

    Returns:
        The model, in the dtype that its configuration names; in bfloat16 where it names none, or is a GGUF file's.

    Raises:
        ValueError: transformers makes no model of it.
    """
    is_file = path.suffix.lower() == ".gguf"
    if is_file:
        gguf.check_gguf(path)
    else:
        files.check_config(path, has_weights=False)
    with reading(f"the model in {path}"), conversions.quiet_transformers():
        config = gguf.header_config(path) if is_file else config_of(path)
        named = None if is_file else getattr(config.get_text_config(), "dtype", None) or config.dtype
    dtype = check_name("dtype", str(named or torch.bfloat16).removeprefix("torch."), _DTYPES)
    with reading(f"the model in {path}"), conversions.quiet_transformers():
        return outline_of(config, _DTYPES[dtype])


def _folder_of(settings: dict) -> tuple[Path, Callable[[Path], "PreTrainedTokenizerBase"]] | None:
    """The folder that a model is read from, and what reads its tokenizer; None where it is no folder, or not known."""
    if settings.get("kind") == "embedded":
        return embedded.ensure_embedded(), conversions.read_tokenizer
    if settings.get("kind") not in ("gguf", "hf"):
        return None
    if not _is_gguf(settings):
        return files.find_model_folder(_path(settings), settings.get("revision")), _any_tokenizer
    gguf.check_gguf(file := _gguf_path(settings))
    device = read_devices(settings.get("device", "auto")).first
    kept = gguf.ensure_converted(file, _dtype(settings.get("dtype", "auto"), device))
    return (kept[0], conversions.read_tokenizer) if kept else None


def _any_tokenizer(folder: Path) -> "PreTrainedTokenizerBase":
    import transformers

    return transformers.AutoTokenizer.from_pretrained(folder, **SAFELY)


def _read_folder(
    folder: Path, how: How, read_tokenizer: Callable[[Path], "PreTrainedTokenizerBase"] = _any_tokenizer
) -> tuple["PreTrainedModel", "PreTrainedTokenizerBase"]:
    """Reads model and tokenizer from a checked folder, without any question to the hub."""
    files.check_config(folder)
    with reading(f"the model in {folder}"):
        with conversions.quiet_transformers():
            model, loaded = read_weights(folder, how)
        tokenizer = read_tokenizer(folder)
    check_complete(loaded, str(folder))
    fields.check_growth(folder, tokenizer)
    return model, tokenizer


def _is_gguf(settings: dict) -> bool:
    """True where the weights are a GGUF file's."""
    return settings["kind"] == "gguf" or _path(settings).lower().endswith(".gguf")


def _gguf_path(settings: dict) -> Path:
    """The file that model.path names, or that the model's name stands for."""
    if not (fetch := settings.get("fetch")):
        return Path(_path(settings)).expanduser()
    return fetched.path_of(fetch, str(settings.get("name") or fetch.get("file")), settings.get("path"))


def _path(settings: dict) -> str:
    """Returns model.path, or says that it is missing."""
    path = settings.get("path")
    if not path:
        raise MissingWeightsError(
            f"model.path is not set. model.kind={settings['kind']} needs it: model.path=FOLDER, a hub id (org/name) or "
            "a .gguf file.",
            setting="model.path",
        )
    return str(path)


def _dtype(name: object, device: torch.device) -> torch.dtype:
    """Turns model.dtype into a dtype; auto is float32 on the CPU and bfloat16 on a GPU."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return _DTYPES[check_name("model.dtype", name, ["auto", *_DTYPES])]
