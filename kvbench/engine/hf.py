"""The only file that touches the cache, attention and mask classes of transformers.

The adapter registers an attention function and a mask function under the name `kvbench`, and a Cache whose layers hand
the new keys on without concatenating anything. `update()` hangs its layer object on the key tensor; the attention
function finds it there. Nothing is patched but the objects of latent attention (`engine/latent.py`).
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, QuantizedCache, StaticCache
from transformers.generation.utils import GenerationMixin
from transformers.masking_utils import AttentionMaskInterface

from kvbench.cache.store import CompressedStore
from kvbench.engine import latent
from kvbench.engine.calls import attention_modules, calls_noted
from kvbench.engine.sessions import Session
from kvbench.engine.supported import REMEDY, check_supported, is_known, layer_kinds
from kvbench.errors import UnsupportedModel
from kvbench.models import fused

NAME = "kvbench"
TAG = "_kvbench_layer"  # the attribute of a key tensor that says which layer of which session it belongs to
CACHE_NAMES = ("cache", "past_key_values")  # what calls name the cache: since transformers 5.24, and before
# Arguments that models pass to every attention function and that change nothing in this one.
HARMLESS = {"position_ids", "use_cache", "output_attentions", "output_hidden_states", "output_router_logits"}


class _Layer(CacheLayerMixin):
    """One layer of a `SessionCache`: passes the new keys and values through, tagged with itself."""

    is_compileable = False

    def __init__(self, session: Session, index: int, past: int) -> None:
        super().__init__()
        self.session, self.index, self.past = session, index, past

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        setattr(key_states, TAG, self)
        return key_states, value_states

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        return self.past + (query_length if isinstance(query_length, int) else query_length.shape[0]), 0

    def get_seq_length(self, *args: Any) -> int:
        return self.past  # tokens seen, not tokens kept: positions must not shrink with the cache

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        return -1


HANDS_ON = ("update", "get_mask_sizes", "get_seq_length", "get_max_length", "get_max_cache_shape")


class _NotOurs(RuntimeError):
    """Attention was called with keys that no layer of a `SessionCache` handed on."""


class SessionCache(Cache):
    """The cache of one forward pass over a store, as transformers is given it."""

    def __init__(self, session: Session, num_layers: int, past: int) -> None:
        layers = [_Layer(session, index, past) for index in range(num_layers)]
        self._both = [
            (held, layers[index]) for index, held in session.states.items() if index in session.store.shape.kinds
        ]
        super().__init__(layers=[session.states.get(index) or layer for index, layer in enumerate(layers)])

    @contextmanager
    def in_both(self) -> Iterator[None]:
        """Lets layers with both a state and keys and values pass these on."""
        for held, native in self._both:
            vars(held).update({name: getattr(native, name) for name in HANDS_ON})
        try:
            yield
        finally:
            for held, _ in self._both:
                for name in HANDS_ON:
                    del vars(held)[name]

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        if layer_idx >= len(self.layers):
            raise UnsupportedModel(
                f"attention {layer_idx} of a model with {len(self.layers)} layers: it reads its layers more than once, "
                f"which the compressed store does not reproduce; {REMEDY}"
            )
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,  # before `scaling`, as in transformers' own: kvpress wraps every function when it is imported
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Registered attention function: query [B, Hq, n, D], key and value [B, H, n, D], to [B, n, Hq, D].

    Keys and queries are post-RoPE. Refuses a layer whose call the store does not reproduce: a mask, a window that
    binds, caps or sinks other than those of the store's softmax, later tokens, several calls, or an unknown argument.
    """
    layer = getattr(key, TAG, None)
    if layer is None:
        raise _NotOurs(
            "the kvbench attention runs only with a kvbench cache; call the model inside kvbench.compress(model, ...), "
            "or give it back its own attention with model.set_attn_implementation('sdpa')"
        )
    options = {name for name, value in kwargs.items() if value is not None} - HARMLESS
    session, scale = layer.session, scaling if scaling is not None else query.shape[-1] ** -0.5
    number, shape = layer.index, session.store.kind_of(layer.index)[0].shape
    attend = session.attend
    if session.store.shape.shared.get(index := getattr(module, "layer_idx", number)) == number:
        number, attend = index, session.attend_stored
    if "sliding_window" in options and is_known(shape.window, kwargs["sliding_window"], module.config):
        options.remove("sliding_window")
    if attention_mask is not None:  # `_no_mask` makes none, so the model made this one
        options.add("a mask of its own")
    if getattr(module, "is_causal", True) is False:
        options.add("later tokens (is_causal=False)")
    knows_cap = (kwargs.get("softcap") or 0.0) == shape.softmax.cap
    knows_sinks = kwargs.get("s_aux") is getattr(module, "sinks", None)
    for name, is_known_one in (("softcap", knows_cap), ("s_aux", knows_sinks)):  # as `softmax_of` found them
        options = options - {name} if is_known_one else options | {name}
    if session.store.shape.attending.index(number) != len(session.traces):
        options.add("another number of calls of attention than one per layer")
    if options:
        raise UnsupportedModel(
            f"layer {number} uses {', '.join(sorted(options))}, which the compressed store does not reproduce; {REMEDY}"
        )
    heads = query.shape[1], key.shape[1]
    if heads != (wanted := shape.heads_here):
        raise UnsupportedModel(
            f"layer {number} has {heads[0]} query heads on {heads[1]} KV heads, but the model's configuration "
            f"says {wanted[0]} on {wanted[1]} for each of {shape.ranks.size} processes; let kvbench load the "
            "model (model.tensor_parallel), or load it without tp_plan"
        )
    # Where kernels are launched; a model may lie on several.
    with torch.cuda.device(query.device) if query.is_cuda else nullcontext():
        if (turn := getattr(query, fused.TURN, None)) is not None:
            if attend == session.attend and session.turns(layer.index):
                attend = partial(session.attend_unrotated, turn=turn)
            else:
                query, key = fused.rotated(query, key, turn)
        if shape.keys_only:
            out = latent.attend(module, partial(attend, layer.index), query, key, scale)
        else:
            out = attend(layer.index, query, key, value, scale)
        session.traces.append(session.trace(out))
        return out.transpose(1, 2).to(query.dtype).contiguous(), None


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """Mask function without a mask: there is no padding, and the attention function is causal."""


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, _no_mask)


def detach(model: PreTrainedModel) -> None:
    """Gives the model back its own attention."""
    model.set_attn_implementation("sdpa" if getattr(model, "_supports_sdpa", False) else "eager")


def attach(model: PreTrainedModel) -> None:
    """Routes the model's attention through kvbench; refuses what `check_supported` does."""
    check_supported(model)
    for module in attention_modules(model):
        if latent.is_latent(module):
            setattr(module, latent.EXPAND, partial(latent.merged, module, TAG))
    model.set_attn_implementation(NAME)


@contextmanager
def attached(model: PreTrainedModel) -> Iterator[None]:
    """Routes the model's attention through kvbench, and gives it back its own, whichever that was, at the end."""
    before = model.config._attn_implementation
    attach(model)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


@functools.lru_cache
def cache_name(method: Callable[..., Any]) -> str:
    """Name of the cache argument of a model's method; code that came with weights may use the older one for ever."""
    return CACHE_NAMES[0] if CACHE_NAMES[0] in inspect.signature(method).parameters else CACHE_NAMES[1]


def generate_cache_name() -> str:
    """Name of the cache argument of `generate`."""
    return cache_name(GenerationMixin.prepare_inputs_for_generation)


NATIVE_CACHES = ("dynamic", "fp8", "quanto-4", "quanto-2", "hqq-4", "hqq-2")


def native_cache(model: PreTrainedModel, kind: str, max_tokens: int = 0) -> Cache:
    """An empty cache of transformers, for comparison; the model must not be attached then.

    The kind is `dynamic`; `static`, which holds `max_tokens`; `fp8`; or a package that quantises and its bits, such as
    `quanto-4`. Raises ImportError where transformers is too old for it, or the package is missing.
    """
    if kind == "dynamic":
        return DynamicCache(config=model.config)
    if kind == "static":
        return StaticCache(config=model.config, max_cache_len=max_tokens)
    backend, _, bits = kind.partition("-")
    try:
        return QuantizedCache(backend, model.config.get_text_config(), **({"nbits": int(bits)} if bits else {}))
    except ValueError as error:  # an unknown backend, or one whose package is missing
        raise ImportError(" ".join(str(error).split())) from error


def rewind(cache: Cache, tokens: int) -> None:
    """Truncates a static cache to its first tokens; tensors keep their addresses, as a CUDA graph needs.

    Raises ImportError where this transformers counts them in another way.
    """
    for layer in cache.layers:
        count = getattr(layer, "cumulative_length", None)
        if not isinstance(count, Tensor):
            raise ImportError(
                "this transformers' static cache has no counter on the device, so no graph can be captured"
            )
        count.fill_(tokens)


def native_cache_rows(cache: Cache) -> int:
    """Sequences that one of transformers' own caches holds."""
    return next(keys.shape[0] for layer in cache.layers if isinstance(keys := getattr(layer, "keys", None), Tensor))


def native_cache_bytes(cache: Cache) -> int:
    """Bytes of the tensors that one of transformers' own caches holds."""

    def held(value: object) -> int:
        if isinstance(value, Tensor):
            return value.nbytes
        if isinstance(value, dict):
            value = list(value.values())
        return sum(held(item) for item in value) if isinstance(value, list | tuple) else 0

    return sum(held(vars(layer)) for layer in cache.layers)


def forward(
    model: PreTrainedModel, session: Session, token_ids: Tensor, positions: Tensor, past: int, num_logits: int
) -> Tensor:
    """One forward pass through a session over tokens int64 [B, n] at their true positions int64 [B, n].

    They come after `past` tokens in transformers' count. Returns the last logits, fp32 [B, num_logits, vocabulary].
    """
    cache = SessionCache(session, model.config.get_text_config().num_hidden_layers, past)
    try:
        calls = calls_noted(model, session.note) if session.wants_calls else nullcontext()
        with session.without_grad(), calls, cache.in_both():
            out = model(
                input_ids=token_ids,
                position_ids=positions,
                use_cache=True,
                logits_to_keep=num_logits,
                return_dict=True,
                **{cache_name(type(model).forward): cache},
            )
            logits = out.logits[:, -num_logits:].float().to(token_ids.device)  # of several devices, the first one
    except _NotOurs:
        raise UnsupportedModel(
            "the model changes its keys between the cache and attention, which the compressed store does not "
            f"reproduce; {REMEDY}"
        ) from None
    if len(session.traces) != (wanted := len(session.store.shape.attending)):
        raise UnsupportedModel(
            f"the compressed store was asked for attention by {len(session.traces)} layers of {wanted}: the model does "
            f"it in a way of its own; {REMEDY}"
        )
    return logits


class _Outlined(Session):
    """A pass of a model without weights, which attends to nothing."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        return torch.empty_like(q)

    attend_stored = attend


def check_pass(model: PreTrainedModel, store: CompressedStore) -> None:
    """Refuses an outline of a model, on the meta device, whose attention the store does not reproduce.

    See `attention`. An operation that torch cannot do without numbers ends the pass; then the first pass with weights
    refuses.
    """
    session, held = _Outlined(store), native_cache(model, "dynamic").layers
    session.states = {number: held[number] for number in layer_kinds(model.config).states}
    tokens = torch.zeros(1, 2, dtype=torch.int64, device="meta")
    try:
        with attached(model):
            forward(model, session, tokens, tokens, past=0, num_logits=1)
    except UnsupportedModel:
        raise
    except Exception:  # of the model's code, of which anything may fail here
        return
