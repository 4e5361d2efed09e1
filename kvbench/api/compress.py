"""transformers' own `generate` over a compressed cache.

Inside `compress`, the model's `forward` is a door to a `Runner`: a prompt of a batch is read row by row without its
padding, and each later call is one step for all rows, as the engine does it. Only the object is changed, never its
class, and the change ends with the block.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from kvbench.api.generate import begin
from kvbench.engine import hf
from kvbench.engine.runner import Runner
from kvbench.models.load import LoadedModel
from kvbench.policy import Policy

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.modeling_outputs import CausalLMOutputWithPast

# Requests of `generate` that need more of a cache than rows that grow at their end: the values that ask for nothing,
# and what asks for more.
_REFUSED: dict[str, tuple[tuple[object, ...], str]] = {
    "num_beams": ((None, 1), "beam search"),
    "constraints": ((None,), "constrained beam search"),
    "force_words_ids": ((None,), "constrained beam search"),
    "penalty_alpha": ((None, 0), "contrastive search"),
    "dola_layers": ((None,), "DoLa decoding"),
    "assistant_model": ((None,), "assisted generation"),
    "prompt_lookup_num_tokens": ((None,), "assisted generation by prompt lookup"),
    "assistant_early_exit": ((None,), "assisted generation by early exit"),
    "use_mtp": ((None, False), "assisted generation by multi-token prediction"),
    "cache_implementation": ((None, "dynamic"), "a cache of transformers' own"),
    "cache": ((None,), "a cache that was made elsewhere"),
    "past_key_values": ((None,), "a cache that was made elsewhere"),
    "use_cache": ((None, True), "generation without a cache"),
    "prefill_chunk_size": ((None,), "a prompt in chunks"),
    "guidance_scale": ((None, 1), "classifier-free guidance"),
    "token_healing": ((None, False), "token healing"),
    "custom_generate": ((None,), "a decoding loop from elsewhere"),
    "output_attentions": ((None, False), "attention weights"),
    "output_hidden_states": ((None, False), "hidden states"),
    "inputs_embeds": ((None,), "a prompt of embeddings"),
}
_IS_OURS = "_kvbench_door"


class CompressedCache:
    """What `compress` gives: the cache of the last prompts that were read, and how many bytes it holds."""

    is_compileable = False  # transformers asks before it compiles a decode step
    is_linear = (False,)  # and, since 5.24, of every layer whether it has a state in place of keys and values

    def __init__(self, model: LoadedModel, policy: Policy, backend: str) -> None:
        self._max_tokens = model.max_tokens
        self._runner = Runner(model, policy, backend=backend)
        self._rows: list[int] = []
        self._seen = 0  # columns of the batch that were read, padding included
        self._new_tokens: int | None = None  # what `generate` will add at most; None when it did not say
        self._last: list[dict[str, int]] = []  # the ledgers of rows that are closed

    def bytes(self, row: int | None = None) -> dict[str, int]:
        """What the cache holds, item by item; after the block, what it held at its end.

        Args:
            row: Of one row of the batch; None for the sum over all.

        Returns:
            The items of the ledger, `resident_bytes` (their sum), and `fp16_bytes`: an FP16 full cache of the same
            tokens. A row that has ended goes on receiving the padding that `generate` feeds it.

        Raises:
            RuntimeError: No prompt was read yet.
            IndexError: There is no such row.
        """
        ledgers = self._ledgers() if self._rows else self._last
        if not ledgers:
            raise RuntimeError("the cache holds nothing yet; call model.generate(...) inside the block first")
        chosen = ledgers if row is None else [ledgers[row]]
        return {name: sum(ledger[name] for ledger in chosen) for name in chosen[0]}

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns of the batch that were read, which is what transformers counts by."""
        return self._seen

    def _refuse(self, *args: object, **kwargs: object) -> NoReturn:
        raise ValueError(
            "rows of a compressed cache only grow at their end: beams, candidates and undone tokens are not possible "
            "inside kvbench.compress; use greedy decoding or sampling"
        )

    reorder_cache = crop = batch_repeat_interleave = batch_select_indices = activate_past_recording = _refuse

    def _ledgers(self) -> list[dict[str, int]]:
        store, shape = self._runner.store, self._runner.shape
        return [
            store.ledger.itemise(row) | {"fp16_bytes": shape.fp16_bytes(store.counters.seen[row])} for row in self._rows
        ]

    def _clear(self) -> None:
        """Gives back the pages of the last batch, and remembers what they were."""
        if self._rows:
            self._last = self._ledgers()
        self._rows, self._seen, self._new_tokens = [], 0, None
        self._runner.close_all()

    def _begin(self, tokens: Tensor, mask: Tensor | None) -> Tensor:
        """Reads the prompts of a batch (int64 [B, N], padded at the left); logits [B, vocabulary] after them."""
        paddings = _paddings(tokens, mask)
        new_tokens = self._new_tokens
        self._clear()
        prompts = [row[padding:].tolist() for row, padding in zip(tokens, paddings, strict=True)]
        longest = max(map(len, prompts))
        if longest >= self._max_tokens:
            raise ValueError(f"a prompt of {longest} tokens leaves no room in the model's context, {self._max_tokens}")
        room = self._max_tokens - longest
        new_tokens = room if new_tokens is None else max(1, min(new_tokens, room))
        self._runner.reserve(rows=len(prompts), prompt_tokens=longest, new_tokens=new_tokens)
        logits = []
        try:
            for prompt in prompts:
                row, read = self._runner.read(prompt)
                self._rows.append(row)
                logits.append(read[-1])
        except BaseException:
            self._rows = []
            self._runner.close_all()
            raise
        self._seen = tokens.shape[1]
        return torch.stack(logits)

    def _step(self, tokens: Tensor) -> Tensor:
        """Reads one token for every row (int64 [B, 1]); logits [B, vocabulary] after them."""
        if tokens.shape != (len(self._rows), 1):
            raise ValueError(
                f"the cache of kvbench.compress holds {len(self._rows)} rows and reads one more token of each at a "
                f"time, not {tuple(tokens.shape)}; a new prompt begins a new cache: leave past_key_values out"
            )
        logits = self._runner.step(self._rows, tokens[:, 0].tolist())
        self._seen += 1
        return logits.clone()  # outside of inference mode it is an ordinary tensor

    def _forward(self, asked: dict[str, Any]) -> "CausalLMOutputWithPast":
        """One call of the model's `forward`, with the arguments that it was given."""
        from transformers.modeling_outputs import CausalLMOutputWithPast

        tokens, held = asked.get("input_ids"), _taken(asked, self)
        for name in ("use_cache", "inputs_embeds", "output_attentions", "output_hidden_states"):
            _check(name, asked.get(name))
        if asked.get("labels") is not None:
            raise ValueError("labels: a loss needs every logit of an uncompressed pass; compute it outside the block")
        if tokens is None or tokens.ndim != 2 or not tokens.numel():
            raise ValueError("kvbench.compress needs input_ids of shape [batch, tokens], with at least one of each")
        is_step = held and bool(self._rows)
        if not is_step and asked.get("logits_to_keep") != 1:
            raise ValueError(
                f"logits_to_keep={asked.get('logits_to_keep')!r}: inside kvbench.compress a prompt gives the logits "
                "after its last token; pass logits_to_keep=1, as generate does"
            )
        tokens = tokens.to(self._runner.device)
        logits = self._step(tokens) if is_step else self._begin(tokens, asked.get("attention_mask"))
        given: dict[str, Any] = {hf.generate_cache_name(): self}
        return CausalLMOutputWithPast(logits=logits[:, None], **given)


@contextmanager
def compress(
    model: "PreTrainedModel", method: str | Policy = "diffkv", *, backend: str = "auto", **settings: Any
) -> Iterator[CompressedCache]:
    """Let a model of transformers generate over a compressed cache inside a `with` block.

    `model.generate(**inputs)` works as ever: greedy or sampled, batches that are padded at the left, streamers, logits
    processors, stopping criteria. Every call begins a new cache. The model gets its own attention back at the end of
    the block, whatever happens in it.

    Args:
        model: A causal language model with full attention in every layer, under any attention implementation.
        method: Name in conf/method, or a policy.
        backend: `auto` or the name of a backend.
        **settings: Of the method, for example `bits=2`.

    Yields:
        The cache; its `bytes()` say what it holds.

    Raises:
        ValueError: A setting is unknown or out of range, the model cannot be held in the store (`UnsupportedModel`), it
            is compressed already, or `generate` is asked for what a compressed cache cannot do.
    """
    if hasattr(model.forward, _IS_OURS):
        raise ValueError("the model is inside a kvbench.compress block already; leave that one first")
    loaded, policy = begin(model, None, method, settings)
    with hf.attached(model):
        cache = CompressedCache(loaded, policy, backend)
        with _instead(model, "forward", _door(model, cache)), _instead(model, "generate", _entry(model, cache)):
            try:
                yield cache
            finally:
                cache._clear()


def _door(model: "PreTrainedModel", cache: CompressedCache) -> Callable[..., Any]:
    """A `forward` that goes through the cache, except where the cache's own runner calls it."""
    forward = model.forward

    @functools.wraps(forward)
    def door(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(kwargs.get(name), hf.SessionCache) for name in hf.CACHE_NAMES):
            return forward(*args, **kwargs)
        return cache._forward(_arguments(type(model).forward, model, args, kwargs))

    setattr(door, _IS_OURS, True)
    return door


def _entry(model: "PreTrainedModel", cache: CompressedCache) -> Callable[..., Any]:
    """A `generate` that refuses what a compressed cache cannot do before anything is read, and begins a new cache."""
    own: Any = model  # the types of transformers give `generate` to the classes of the models only
    generate: Callable[..., Any] = own.generate

    @functools.wraps(generate)
    def entry(*args: Any, **kwargs: Any) -> Any:
        asked = _arguments(type(own).generate, model, args, kwargs)
        given = asked.get("generation_config")
        sources = (asked, {} if given is None else vars(given), vars(model.generation_config))

        def wanted(name: str, places: int = 3) -> Any:
            return next((source[name] for source in sources[:places] if source.get(name) is not None), None)

        for name in _REFUSED:
            _check(name, wanted(name))
        cache._clear()
        prompt = asked["inputs"] if asked.get("inputs") is not None else asked.get("input_ids")
        if (new_tokens := wanted("max_new_tokens")) is not None:
            cache._new_tokens = int(new_tokens)
        elif (length := wanted("max_length", places=2)) is not None and prompt is not None:
            cache._new_tokens = int(length) - prompt.shape[1]  # a model's own may be a default that adds to the prompt
        return generate(*args, **kwargs | {hf.generate_cache_name(): cache})

    return entry


def _arguments(
    method: Callable[..., Any], model: "PreTrainedModel", args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """The arguments of a call by name, as a method of the class calls them: one that a library put on the object may
    hide that."""
    bound = inspect.signature(method).bind(model, *args, **kwargs).arguments
    return bound | bound.pop("kwargs", {})


def _taken(asked: dict[str, Any], cache: CompressedCache) -> bool:
    """True if a call was handed the block's cache; refuses any other, under each of its names."""
    given = [asked.get(name) for name in hf.CACHE_NAMES]
    for name, value in zip(hf.CACHE_NAMES, given, strict=True):
        if value is not cache:
            _check(name, value)
    return cache in given


@contextmanager
def _instead(model: "PreTrainedModel", name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Put a function in the place of an object's method for a while."""
    own = vars(model)
    had, before = name in own, own.get(name)
    own[name] = function
    try:
        yield
    finally:
        if had:
            own[name] = before
        else:
            del own[name]


def _check(name: str, value: object) -> None:
    """Raise ValueError when a value asks for what a compressed cache cannot do."""
    harmless, what = _REFUSED[name]
    if any(value is known or (isinstance(value, bool | int | float | str) and value == known) for known in harmless):
        return
    shown = value if isinstance(value, bool | int | float | str) else type(value).__name__
    raise ValueError(
        f"{name}={shown} asks for {what}, which a compressed cache does not do; inside kvbench.compress use greedy "
        "decoding or sampling, one pass over each prompt, and no other cache"
    )


def _paddings(tokens: Tensor, mask: Tensor | None) -> list[int]:
    """How many columns of padding each row has at its left."""
    if mask is None:
        return [0] * len(tokens)
    if mask.shape != tokens.shape:
        raise ValueError(f"attention_mask has shape {tuple(mask.shape)}; give one of input_ids' {tuple(tokens.shape)}")
    kept = mask.to(tokens.device).bool()
    counts = kept.sum(1)
    expected = torch.arange(tokens.shape[1], device=tokens.device) >= tokens.shape[1] - counts[:, None]
    if not bool((kept == expected).all()):
        raise ValueError(
            "attention_mask hides tokens elsewhere than at the left of a row; set tokenizer.padding_side = 'left'"
        )
    if not bool(counts.all()):
        raise ValueError("a row of the batch has nothing but padding; leave it out")
    return (tokens.shape[1] - counts).tolist()
