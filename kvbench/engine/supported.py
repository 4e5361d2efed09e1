"""Supported models, and the shape of one for the store."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.cache.layout import DeviceSpan, ModelShape
from kvbench.cache.offsets import check_key_offset
from kvbench.cache.options import StoreOptions
from kvbench.cache.store import CompressedStore
from kvbench.engine import latent, placement
from kvbench.engine.calls import OutputProjections, attention_modules
from kvbench.errors import SettingsConflict, Unsupported, UnsupportedModel
from kvbench.kernels.backend import Backend
from kvbench.kernels.dispatch import get_backend
from kvbench.kernels.names import TRITON
from kvbench.kernels.operands import Softmax, Window
from kvbench.models import rotary
from kvbench.models.load import LoadedModel
from kvbench.models.matrices import PackedLinear
from kvbench.policy import Policy, check_chunk, check_chunk_devices

REMEDY = "use a model with full attention in some layers and windows in the others (Llama, Qwen3, Gemma 3, ...)"
# Rotary layouts in which channel i is paired with channel i + D_rot / 2, at frequencies that do not depend on the
# length.
PLAIN_ROPE_MODELS = {"llama", "mistral", "qwen2", "qwen3", "granite", "olmo2", "smollm3", "phi3"}
# Types of layers that look back so far and no further: the size's name in a configuration, and whether that is a
# chunk's.
WINDOWS = {
    "sliding_attention": ("sliding_window", False),
    "hybrid_sliding": ("sliding_window", False),
    "chunked_attention": ("attention_chunk_size", True),
}
STATES = {"linear_attention", "conv", "moe", "mlp"}  # a state, or nothing at all, in place of keys and values
BOTH = {"hybrid", "hybrid_sliding"}


def binds(window: int, config: Any) -> bool:
    """True when a sliding window is shorter than the context, so that the layer itself drops tokens."""
    return window < (rotary.context_of(config) or float("inf"))


def is_known(window: Window | None, num_tokens: int, config: Any) -> bool:
    """True if the window of a layer's attention call is the one that its store has, or never binds."""
    return num_tokens == window.num_tokens if window is not None else not binds(num_tokens, config)


@dataclass(frozen=True)
class LayerKinds:
    """Layers of a model by what they hold of a text.

    Everything, a window, a state (some hold keys and values, too), or nothing, because they share another layer's keys
    and values.
    """

    full: tuple[int, ...]
    windows: dict[Window, tuple[int, ...]]
    states: tuple[int, ...]
    shared: dict[int, int]  # a layer -> the one whose keys and values it attends over


def layer_kinds(config: Any) -> LayerKinds:
    """The kinds of a model's layers by its configuration; refuses other kinds, and a model without full layers."""
    config = config.get_text_config()
    types = getattr(config, "layer_types", None)
    if types is None:
        always = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
        types = ["sliding_attention" if always else "full_attention"] * config.num_hidden_layers
    if unknown := sorted({*types} - {"full_attention", *WINDOWS, *STATES, *BOTH}):
        raise UnsupportedModel(f"{config.model_type}: layers of type {unknown} are not supported; {REMEDY}")
    full: list[int] = []
    states: list[int] = []
    windows: dict[Window, list[int]] = {}
    modes = getattr(config, "kv_sharing_modes", None) or [None] * len(types)
    last = {kind: number for number, (kind, mode) in enumerate(zip(types, modes, strict=True)) if mode == "store"}
    shared = {number: last[types[number]] for number, mode in enumerate(modes) if mode == "reuse"}
    for number, kind in enumerate(types):
        if number in shared:
            continue
        name, in_chunks = WINDOWS.get(kind, ("", False))
        size = getattr(config, name) if name else None
        if kind in STATES or kind in BOTH:
            states.append(number)
        if kind in STATES:
            continue
        if size is not None and binds(size, config):
            windows.setdefault(Window(size, in_chunks), []).append(number)
        else:
            full.append(number)
    if not full and windows:
        name = WINDOWS[next(kind for kind in types if kind in WINDOWS)][0]
        raise UnsupportedModel(
            f"{config.model_type}: {name}={getattr(config, name)} in every layer leaves none for a method to act on; "
            f"{REMEDY}, or set {name}: null"
        )
    if not full:
        raise UnsupportedModel(f"{config.model_type}: no layer has keys and values of the whole text; {REMEDY}")
    return LayerKinds(
        tuple(full), {window: tuple(indices) for window, indices in windows.items()}, tuple(states), shared
    )


def num_full_layers(config: Any) -> int:
    """Layers that a policy acts on."""
    return len(layer_kinds(config).full)


def check_supported(model: PreTrainedModel, num_devices: int = 1, processes: int = 1) -> None:
    """Refuses models whose attention the store does not reproduce (`UnsupportedModel`), with a remedy.

    Of an outline, which has no weights yet, `num_devices` and `processes` will share them.
    """
    config, module = model.config.get_text_config(), sys.modules[type(model).__module__]
    name, kinds, rank = config.model_type, layer_kinds(config), getattr(config, "kv_lora_rank", None)
    processes = max(processes, placement.ranks_of(model).size)
    if kinds.states and processes > 1:
        raise UnsupportedModel(
            f"{name}: some of its layers hold a state, which is not divided over processes; spread the layers instead "
            "(model.device=[cuda:0,cuda:1])",
            setting="model.tensor_parallel",
        )
    if kinds.states and (caches := _native_caches(module)):
        raise UnsupportedModel(f"{name}: its layers with a state want a cache of their own ({caches}); {REMEDY}")
    if rank and not all(latent.is_latent(module) for number, module in _modules(model).items() if number in kinds.full):
        raise UnsupportedModel(
            f"{name}: kv_lora_rank={rank} changes attention in a way the store does not reproduce; {REMEDY}"
        )
    values = None if rank else getattr(config, "v_head_dim", None)
    if values and values != (key_channels := heads_of(config, 0)[2]):
        raise UnsupportedModel(
            f"{name}: its values have {values} channels (v_head_dim) and its keys {key_channels}, and a page holds "
            f"both in one width; {REMEDY}"
        )
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"{name} is an encoder-decoder model; {REMEDY}")
    placement.check(model, name)
    if (rank or kinds.shared) and (processes > 1 or max(num_devices, len(placement.spans_of(model))) > 1):
        raise UnsupportedModel(
            f"{name}: its layers {'have latent attention' if rank else 'share keys'}, and lie on several devices or in "
            "several processes, which the store does not reproduce; name one device (model.device=cuda:0)"
        )
    asks = hasattr(module, "ALL_ATTENTION_FUNCTIONS")  # some do, and do not say so
    if not (asks or getattr(model, "_supports_attention_backend", False)):
        raise UnsupportedModel(f"{name}: this transformers class does not go through AttentionInterface; {REMEDY}")


def _native_caches(module: ModuleType) -> str:
    """The classes of caches that the module of a model defines; empty where it takes transformers' common ones."""
    names = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
    return ", ".join(name for name in names if name.endswith("Cache"))


def check_fit(
    model: LoadedModel, policy: Policy, options: StoreOptions, chunk: int | None, shares_pool: bool = False
) -> ModelShape:
    """Refuses a method, or settings, that do not fit a model's layers: with an outline, before there are weights.

    Args:
        model: A loaded model, or an outline.
        policy: The method.
        options: The layout of its memory.
        chunk: Tokens of a prompt that are read at once; None = all.
        shares_pool: A request's kept tokens may depend on those that share the pool with it.

    Returns:
        The model's shape, without the bytes of states.

    Raises:
        UnsupportedModel: Its attention cannot be held in the store.
        ValueError: The policy or the options do not fit it.
    """
    check_chunk(policy, chunk)
    if policy.compaction is not None and policy.compaction.when_full and not shares_pool:
        raise SettingsConflict(
            f"method.{policy.compaction.when_full} evicts where the pages that requests share run out, so that what a "
            "request keeps depends on its neighbours; `kvbench bench what=serve` alone takes it, elsewhere choose "
            "another value",
            setting=f"method.{policy.compaction.when_full.partition('=')[0]}",
        )
    check_key_offset(options.key_offset, policy, chunk)
    check_supported(model.model, len(model.device_spans), model.tensor_parallel)
    shape = model_shape(model.model, model.device_spans)
    check_chunk_devices(chunk, len(shape.device_spans), max(shape.ranks.size, model.tensor_parallel))
    if chunk is not None and shape.shared:
        raise UnsupportedModel(
            f"prefill.chunk={chunk}: {model.model.config.model_type} has layers that share the keys of others, which "
            "are compressed by the time that a chunk comes to these; set prefill.chunk=null",
            setting="prefill.chunk",
        )
    policy.check_model(shape.num_layers, shape.num_kv_heads)
    small_store(policy, shape, options)  # it refuses what a large one would
    return shape


def small_store(policy: Policy, shape: ModelShape, options: StoreOptions) -> CompressedStore:
    """A store for one row of two tokens, in main memory, whatever device the model is on."""
    return CompressedStore(
        policy,
        shape.on_host(),
        rows=1,
        options=replace(options, budget_bytes=None),
        backend=get_backend("torch", torch.device("cpu")),
        max_prompt_tokens=1,
        max_new_tokens=1,
    )


def model_shape(model: PreTrainedModel, spans: Sequence[tuple[torch.device, int]] = ()) -> ModelShape:
    """Heads, dims, dtype and rotary frequencies of a supported model.

    `spans` are devices with their number of layers of the cache; without it those of the weights.
    """
    config = model.config.get_text_config()
    parts = tuple(DeviceSpan(*each) for each in spans) or placement.spans_of(model)
    kinds = layer_kinds(config)

    def of_kind(numbers: tuple[int, ...], **more: Any) -> ModelShape:
        lie = placement.of_layers(parts, numbers)
        num_q_heads, num_kv_heads, head_dim = heads_of(config, numbers[0])
        return ModelShape(
            num_layers=len(numbers),
            num_q_heads=num_q_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            keys_only=bool(getattr(config, "kv_lora_rank", None)),
            dtype=model.dtype,
            device=lie[0].device if lie else model.device,
            device_spans=lie if len(lie) > 1 else (),
            ranks=placement.ranks_of(model),
            softmax=softmax_of(model, numbers),
            numbers=numbers if len(numbers) < config.num_hidden_layers else (),
            **more,
        )

    if len(heads := {heads_of(config, number) for number in kinds.full}) > 1:
        raise UnsupportedModel(
            f"{config.model_type}: its layers of full attention differ in query heads, KV heads or head dim "
            f"{sorted(heads)}, and a method acts on layers that are alike; {REMEDY}"
        )
    latents = getattr(config, "kv_lora_rank", None)
    return of_kind(
        kinds.full,
        inv_freq=_plain_inv_freq(model),
        output_projections=None if latents else _output_projections(model, kinds.full),
        key_biases=None if latents else _key_biases(model, kinds.full),
        other_kinds=tuple(
            of_kind(tuple(layers), window=window)
            for window, numbers in kinds.windows.items()
            for _, layers in groupby(sorted(numbers, key=partial(heads_of, config)), partial(heads_of, config))
        ),
        shared=kinds.shared,
    )


def backend_of(name: str, device: torch.device, decode: str = TRITON) -> Backend:
    """Backend of a run, as `get_backend`, whose ValueErrors have no code, since kernels/ know no other room.

    Raises:
        Unsupported: There is none of that name, it has no such choice, or it cannot run here.
    """
    try:
        return get_backend(name, device, decode)
    except ValueError as error:
        raise Unsupported(str(error), setting="backend") from error


def heads_of(config: Any, layer: int) -> tuple[int, int, int]:
    """Query heads, KV heads and head dim of a layer in the cache.

    Latent attention has one head, as wide as a latent vector and a rotary key.
    """
    layer_config = config.per_layer_config[layer] if getattr(config, "is_heterogeneous", False) else config
    by_layer = getattr(config, "num_attention_heads_per_layer", None)  # Laguna
    heads = by_layer[layer] if by_layer else layer_config.num_attention_heads
    if rank := getattr(config, "kv_lora_rank", None):
        return heads, 1, rank + config.qk_rope_head_dim
    head_dim = getattr(layer_config, "head_dim", None) or layer_config.hidden_size // heads
    return heads, getattr(layer_config, "num_key_value_heads", None) or heads, head_dim


def softmax_of(model: PreTrainedModel, layers: Sequence[int]) -> Softmax:
    """Caps and sinks of these layers; a layer without sinks has minus infinity."""
    sinks: Tensor | None = None
    for number, module in _modules(model).items():
        if number in layers and isinstance(sink := getattr(module, "sinks", None), Tensor):
            sink = (
                getattr(sink, "to_local", lambda sink=sink: sink)().detach().float()
            )  # of a DTensor this process's part
            if sinks is None:
                sinks = sink.new_full((len(layers), len(sink)), float("-inf"))
            sinks[layers.index(number)] = sink
    return Softmax(getattr(model.config.get_text_config(), "attn_logit_softcapping", None) or 0.0, sinks)


def _modules(model: PreTrainedModel) -> dict[int, torch.nn.Module]:
    """The modules of attention by their layers' numbers."""
    return {int(getattr(module, "layer_idx")): module for module in attention_modules(model)}  # noqa: B009 - for mypy


def _output_projections(model: PreTrainedModel, layers: Sequence[int]) -> OutputProjections | None:
    """The weights after attention, of these layers; None where not every layer has one."""
    modules = _modules(model)
    outs = [modules[layer].o_proj for layer in layers if layer in modules]
    whole = len(outs) == len(layers)
    known = all(isinstance(out, PackedLinear) or isinstance(getattr(out, "weight", None), Tensor) for out in outs)
    return OutputProjections(outs) if whole and known else None


def _key_biases(model: PreTrainedModel, layers: Sequence[int]) -> list[Tensor] | None:
    """The biases of the key projections of these layers; None where not every layer has one, or normalises keys."""
    modules = _modules(model)
    owners = [modules[layer] for layer in layers if layer in modules]
    biases = [getattr(getattr(module, "k_proj", None), "bias", None) for module in owners]
    normalised = any(getattr(module, "k_norm", None) is not None for module in owners)
    local = [
        getattr(bias, "to_local", lambda bias=bias: bias)().detach() for bias in biases if isinstance(bias, Tensor)
    ]
    return local if len(local) == len(layers) and not normalised else None


def _plain_inv_freq(model: PreTrainedModel) -> Tensor | None:
    """Inverse frequencies fp32 [D_rot / 2] if keys rotate by angles position x inv_freq, else None."""
    config = model.config.get_text_config()
    if config.model_type not in PLAIN_ROPE_MODELS or 0 in (getattr(config, "no_rope_layers", None) or ()):
        return None  # SmolLM3 leaves every fourth layer without rotary positions
    for module in model.modules():
        inv_freq = getattr(module, "inv_freq", None)
        if type(module).__name__.endswith("RotaryEmbedding") and isinstance(inv_freq, Tensor):
            return None if rotary.lengths_of(model) else inv_freq.detach().float()
    return None
