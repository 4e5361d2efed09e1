"""The only file that touches the cache, attention and mask classes of transformers.

The adapter registers an attention function and a mask function under the name `kvbench`, and a Cache whose layers hand
the new keys on without concatenating anything. `update()` hangs its layer object on the key tensor; the attention
function finds it there. Nothing is patched.
"""

import functools
import inspect
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, QuantizedCache, StaticCache
from transformers.generation.utils import GenerationMixin
from transformers.masking_utils import AttentionMaskInterface

from kvbench.cache.store import CompressedStore
from kvbench.engine.calls import calls_noted, first_tokens
from kvbench.engine.probe import Uncompressed
from kvbench.engine.supported import REMEDY, check_supported, is_known
from kvbench.errors import UnsupportedModel
from kvbench.policy import AttentionCall

NAME = "kvbench"
TAG = "_kvbench_layer"  # the attribute of a key tensor that says which layer of which session it belongs to
CACHE_NAMES = ("cache", "past_key_values")  # what calls name the cache: since transformers 5.24, and before
# What models hand to every attention function and what changes nothing in this one.
HARMLESS = {"position_ids", "use_cache", "output_attentions", "output_hidden_states", "output_router_logits"}


@dataclass
class Session(ABC):
    """The work of the attention function in one forward pass over a store.

    Attributes:
        call: The call of the layer's attention that runs; None unless a statistic asks.
        states: By their numbers, the layers that hold neither keys nor values, as transformers knows them.
        traces: Per layer of attention, a tensor [batch, ...] that is finite where its output was; looked at only once
            logits are not finite.
        wants_calls: The calls of attention have to be handed on.
    """

    store: CompressedStore
    call: AttentionCall | None = field(default=None, init=False)
    states: dict[int, Any] = field(default_factory=dict, init=False)
    traces: list[Tensor] = field(default_factory=list, init=False)
    wants_calls = False

    @abstractmethod
    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Attention of one layer of the model, q [B, Hq, n, D], k and v [B, H, n, D], post-RoPE; [B, Hq, n, D]."""

    def trace(self, out: Tensor) -> Tensor:
        """A tensor that is finite where the output is; all of a prompt's would be too large."""
        return out.flatten(1).abs().amax(1)

    def without_grad(self) -> AbstractContextManager:
        """The mode that the pass runs in. A prompt makes tensors that stay and are written to later: pages of a pool
        that grows, copies for a prompt cache."""
        return torch.no_grad()

    def note(self, call: AttentionCall | None) -> None:
        self.call = call

    def first_bad_layer(self, index: int) -> int:
        """First layer whose attention output was not finite for a row of the batch; -1 when none."""
        flags = torch.stack([~torch.isfinite(trace[index]).all().cpu() for trace in self.traces]).nonzero()
        numbers = (number for number in itertools.count() if number not in self.states)
        return next(itertools.islice(numbers, int(flags[0, 0]), None)) if len(flags) else -1


@dataclass
class Decode(Session):
    """One token for many rows."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        store, own = self.store.kind_of(layer)
        return store.attend(own, q[:, :, 0], k[:, :, 0], v[:, :, 0], scale)[:, :, None]

    def trace(self, out: Tensor) -> Tensor:
        return out

    def without_grad(self) -> AbstractContextManager:
        return torch.inference_mode()  # a step is mostly the overhead of small operations, of which it takes less


@dataclass
class Dense(Session):
    """A prompt, or a text that is read with the full cache, of which nothing is stored: no more than
    `num_prompt_tokens`, in `row`. Later tokens only attend, and see the uncompressed prompt. `uncompressed` holds it
    for the method's probe; `held_bytes` and `replay_tokens` are what that one's passes held and read."""

    row: int = -1
    num_prompt_tokens: int = 0
    uncompressed: Uncompressed | None = None
    held_bytes: int = field(default=0, init=False)
    replay_tokens: int = field(default=0, init=False)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        store, own = self.store.kind_of(layer)
        out, lse = store.prompt_attention(own, q[0], k[0], v[0], scale)
        self.keep(layer, q[0], k[0], v[0], scale, lse)
        return out[None]

    def keep(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, lse: Tensor | None) -> None:
        """Stores what is to be stored of a layer; q [Hq, n, D], k and v [H, n, D], lse fp32 [Hq, n]."""


@dataclass
class Prefill(Dense):
    """A prompt for an empty row."""

    @property
    def wants_calls(self) -> bool:  # type: ignore[override]
        return not self.store.policy.score.statistic.needs.isdisjoint({"hidden_states", "attention_call"})

    def keep(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, lse: Tensor | None) -> None:
        kept = self.num_prompt_tokens
        own = q[:, :kept], k[:, :kept], v[:, :kept]
        call = None if self.call is None else first_tokens(self.call, kept)
        if self.uncompressed is not None:
            self.uncompressed.hold(layer, *own, scale, call)
        else:
            lse = None if lse is None else lse[:, :kept]
            store, number = self.store.kind_of(layer)
            store.prefill_layer(self.row, number, *own, scale, call, lse=lse)


@dataclass
class Replay(Session):
    """A probe's pass behind an uncompressed prompt; nothing is stored."""

    uncompressed: Uncompressed

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        return self.uncompressed.attend(layer, q[0], k[0], v[0], scale)[None]


@dataclass
class PromptChunk(Session):
    """The next chunk of a row's prompt."""

    row: int

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        store, own = self.store.kind_of(layer)
        return store.read_chunk(self.row, own, q[0], k[0], v[0], scale)[None]


@dataclass
class Segment(Session):
    """Tokens behind all that a row holds."""

    row: int

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        store, own = self.store.kind_of(layer)
        return store.append_chunk(self.row, own, q[0], k[0], v[0], scale)[None]


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


class _NotOurs(RuntimeError):
    """Attention was called with keys that no layer of a `SessionCache` handed on."""


class SessionCache(Cache):
    """The cache of one forward pass over a store, as transformers is given it."""

    def __init__(self, session: Session, num_layers: int, past: int) -> None:
        own = session.states
        super().__init__(layers=[own.get(index) or _Layer(session, index, past) for index in range(num_layers)])

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
    """The registered attention function: query [B, Hq, n, D], key and value [B, H, n, D], post-RoPE; returns [B, n, Hq,
    D]. Refuses a layer that asks for what the store does not reproduce: a mask, a window that binds, caps or sinks
    that are not those of the store's softmax, later tokens, several calls, or anything that is not known."""
    layer = getattr(key, TAG, None)
    if layer is None:
        raise _NotOurs(
            "the kvbench attention runs only with a kvbench cache; call the model inside kvbench.compress(model, ...), "
            "or give it back its own attention with model.set_attn_implementation('sdpa')"
        )
    asked = {name for name, value in kwargs.items() if value is not None} - HARMLESS
    session, scale = layer.session, scaling if scaling is not None else query.shape[-1] ** -0.5
    shape = session.store.kind_of(layer.index)[0].shape
    if "sliding_window" in asked and is_known(shape.window, kwargs["sliding_window"], module.config):
        asked.remove("sliding_window")
    if attention_mask is not None:  # `_no_mask` makes none, so the model made this one
        asked.add("a mask of its own")
    if getattr(module, "is_causal", True) is False:
        asked.add("later tokens (is_causal=False)")
    knows_cap = (kwargs.get("softcap") or 0.0) == shape.softmax.cap
    knows_sinks = kwargs.get("s_aux") is getattr(module, "sinks", None)
    for name, is_known_one in (("softcap", knows_cap), ("s_aux", knows_sinks)):  # as `softmax_of` found them
        asked = asked - {name} if is_known_one else asked | {name}
    if len(session.traces) != layer.index - sum(number < layer.index for number in session.states):
        asked.add("another number of calls of attention than one per layer")
    if asked:
        raise UnsupportedModel(
            f"layer {layer.index} uses {', '.join(sorted(asked))}, which the compressed store does not reproduce; "
            f"{REMEDY}"
        )
    heads = query.shape[1], key.shape[1]
    if heads != (wanted := shape.heads_here):
        raise UnsupportedModel(
            f"layer {layer.index} has {heads[0]} query heads on {heads[1]} KV heads, but the model's configuration "
            f"says {wanted[0]} on {wanted[1]} for each of {shape.ranks.size} processes; let kvbench load the "
            "model (model.tensor_parallel), or load it without tp_plan"
        )
    if not query.is_cuda:
        return _attend(session, layer.index, query, key, value, scale), None
    with torch.cuda.device(query.device):  # where kernels are launched; a model may lie on several
        return _attend(session, layer.index, query, key, value, scale), None


def _attend(session: Session, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    out = session.attend(layer, query, key, value, scale)
    session.traces.append(session.trace(out))
    return out.transpose(1, 2).to(query.dtype).contiguous()


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """No padding exists anywhere, so no mask is ever needed: causality is the attention function's business."""


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, _no_mask)


def detach(model: PreTrainedModel) -> None:
    """Gives the model back its own attention."""
    model.set_attn_implementation("sdpa" if getattr(model, "_supports_sdpa", False) else "eager")


def attach(model: PreTrainedModel) -> None:
    """Routes the model's attention through kvbench; refuses what `check_supported` does."""
    check_supported(model)
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
    """What a method of a model calls the cache; code that came with weights may use the older name for ever."""
    return CACHE_NAMES[0] if CACHE_NAMES[0] in inspect.signature(method).parameters else CACHE_NAMES[1]


def generate_cache_name() -> str:
    """What `generate` calls the cache that it is given."""
    return cache_name(GenerationMixin.prepare_inputs_for_generation)


OWN_CACHES = ("dynamic", "fp8", "quanto-4", "quanto-2", "hqq-4", "hqq-2")


def own_cache(model: PreTrainedModel, kind: str, max_tokens: int = 0) -> Cache:
    """One of transformers' own caches, empty, to compare with; the model must not be attached then. The kind is
    `dynamic`; `static`, which holds `max_tokens`; `fp8`; or a package that quantises and its bits, such as `quanto-4`.
    Raises ImportError where transformers is too old for it, or the package is missing."""
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
    """Makes a static cache forget all but the first tokens; its tensors stay where they are, as a CUDA graph needs.
    Raises ImportError where this transformers counts them in another way."""
    for layer in cache.layers:
        count = getattr(layer, "cumulative_length", None)
        if not isinstance(count, Tensor):
            raise ImportError(
                "this transformers' static cache has no counter on the device, so no graph can be captured"
            )
        count.fill_(tokens)


def own_cache_rows(cache: Cache) -> int:
    """Sequences that one of transformers' own caches holds."""
    return next(keys.shape[0] for layer in cache.layers if isinstance(keys := getattr(layer, "keys", None), Tensor))


def own_cache_bytes(cache: Cache) -> int:
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
    """One forward pass through a session over tokens int64 [B, n] at their true positions int64 [B, n], behind `past`
    tokens as far as transformers wants to know. Returns the last logits, fp32 [B, num_logits, vocabulary]."""
    cache = SessionCache(session, model.config.get_text_config().num_hidden_layers, past)
    try:
        with session.without_grad(), calls_noted(model, session.note) if session.wants_calls else nullcontext():
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
    if len(session.traces) != (wanted := len(cache.layers) - len(session.states)):
        raise UnsupportedModel(
            f"the compressed store was asked for attention by {len(session.traces)} layers of {wanted}: the model does "
            f"it in a way of its own; {REMEDY}"
        )
    return logits
