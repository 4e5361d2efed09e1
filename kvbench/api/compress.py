"""transformers' own `generate` over a compressed cache.

Inside `compress`, the model's `forward` is redirected to a `Runner`: a prompt of a batch is read row by row without its
padding, each later token is one step for all rows, and a later turn of a conversation is read after what a row holds,
as the engine does it. Only the object is changed, never its class, and the change ends with the block.
"""

import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from kvbench.api.columns import Columns
from kvbench.api.generate import begin
from kvbench.api.refusals import REFUSED, check, check_forward
from kvbench.engine import hf
from kvbench.engine.admission import keep_tables
from kvbench.engine.runner import Runner
from kvbench.errors import ArgumentValue, PromptLength, Unsupported, check_whole
from kvbench.models.load import LoadedModel
from kvbench.policy import Policy

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.modeling_outputs import CausalLMOutputWithPast

_IS_OURS = "_kvbench_door"


class _Cache:
    """Methods that transformers calls on a cache."""

    is_compileable = False  # before it compiles a decode step
    is_linear = (False,)  # since 5.24, of every layer: whether it has a state instead of keys and values

    def _refuse(self, *args: object, **kwargs: object) -> NoReturn:
        raise Unsupported(
            "rows of a compressed cache only grow at their end: beams, candidates, copies and undone tokens are not "
            "possible inside kvbench.compress; use greedy decoding or sampling"
        )

    reorder_cache = crop = batch_repeat_interleave = batch_select_indices = activate_past_recording = _refuse
    __copy__ = __deepcopy__ = __reduce_ex__ = _refuse


class CompressedCache(_Cache):
    """Cache of the last prompts read, returned by `compress`, and the bytes that it holds."""

    def __init__(self, model: LoadedModel, policy: Policy, backend: str, room_tokens: int | None) -> None:
        self._max_tokens, self._room_tokens = model.max_tokens, room_tokens
        self._runner = Runner(model, policy, backend=backend)
        self._rows: list[int] = []
        self._columns = Columns()
        self._batch = BatchCache(self, 0, None)  # of the last prompts
        self._lock = threading.RLock()  # a pass is whole: other threads come before it or after it
        self._left = 0  # tokens that each row still has room for
        self._last: list[dict[str, int]] = []  # the ledgers of rows that are closed

    def bytes(self, row: int | None = None) -> dict[str, int]:
        """Bytes of the cache, item by item; after the block, those at its end.

        Args:
            row: Row of the batch; None for the sum over all.

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
        return len(self._columns)

    def _ledgers(self) -> list[dict[str, int]]:
        store, shape = self._runner.store, self._runner.shape
        return [
            store.ledger.itemise(row) | {"fp16_bytes": shape.fp16_bytes(store.counters.seen[row])} for row in self._rows
        ]

    def _clear(self) -> None:
        """Free the pages of the last batch, and keep its ledgers."""
        if self._rows:
            self._last = self._ledgers()
        self._rows, self._columns = [], Columns()
        self._runner.close_all()

    @contextmanager
    def _all_or_none(self) -> Iterator[None]:
        """Close all rows if reading fails for one."""
        try:
            yield
        except BaseException:
            self._rows, self._columns = [], Columns()
            self._runner.close_all()
            raise

    def _next_batch(self, new_tokens: int | None) -> "BatchCache":
        return BatchCache(self, self._batch.number + 1, new_tokens)

    def _begin(self, batch: "BatchCache", tokens: Tensor, mask: Tensor | None, positions: Tensor | None) -> Tensor:
        """Read the prompts of a batch (int64 [B, N], padded at the left); logits [B, vocabulary] after them."""
        kept = self._columns.of_prompt(tokens, mask, positions)
        self._clear()
        self._batch, batch.is_read = batch, True
        prompts = [row[row_mask].tolist() for row, row_mask in zip(tokens, kept, strict=True)]
        longest = max(map(len, prompts))
        if longest >= self._max_tokens:
            raise PromptLength(
                f"a prompt of {longest} tokens leaves no room in the model's context, {self._max_tokens}"
            )
        rooms = [self._max_tokens - len(prompt) for prompt in prompts]
        limits = [room if batch.new_tokens is None else min(batch.new_tokens, room) for room in rooms]
        lengths, is_said = self._runner.lengths, batch.new_tokens is not None
        sizes = [{len(prompt)} for prompt in prompts]
        limits = [keep_tables(lengths, *one, is_said=is_said) for one in zip(sizes, limits, strict=True)]
        # At the border of a batch's width Phi-3 lets go of a cache, too.
        self._left = keep_tables(lengths, {tokens.shape[1]}, min(limits), is_said=is_said)
        self._runner.reserve(rows=len(prompts), prompt_tokens=longest, new_tokens=max(1, *limits))
        logits = []
        with self._all_or_none():
            for prompt, limit in zip(prompts, limits, strict=True):
                row, read = self._runner.read(prompt, new_tokens=limit)  # its own, whatever the batch has room for
                self._rows.append(row)
                logits.append(read[-1])
        self._columns.append(tokens, kept)
        return torch.stack(logits)

    def _go_on(self, tokens: Tensor, mask: Tensor | None, positions: Tensor | None) -> Tensor:
        """Reads more of every row (int64 [B, n]); returns logits [B, vocabulary] after it.

        A step of one token, or the next turn of a conversation, which may have padding in front.
        """
        width = tokens.shape[1]
        if len(tokens) != len(self._rows):
            raise ArgumentValue(
                f"the cache of kvbench.compress holds {len(self._rows)} rows, not {len(tokens)}; a new prompt begins a "
                "new cache: leave past_key_values out",
                setting="past_key_values",
            )
        self._check_room(width)
        kept = self._columns.of_turn(tokens, mask, positions)
        with self._all_or_none():
            if width == 1:
                logits = self._runner.step(self._rows, tokens[:, 0].tolist()).clone()  # not of inference mode
            else:
                turns = [row[row_mask].tolist() for row, row_mask in zip(tokens, kept, strict=True)]
                each = [self._runner.append(row, turn) for row, turn in zip(self._rows, turns, strict=True)]
                logits = torch.stack(each)
        self._columns.append(tokens, kept)
        self._left -= width
        return logits

    def _expect(
        self, arguments: dict[str, Any], prompt: Tensor | None, most: int | None, returned: bool
    ) -> "BatchCache":
        """Cache with which `generate` reads a prompt (int64 [B, N]) and adds `most` tokens.

        None = not set; the last token is not read. A new cache, or the one passed if it holds rows: then ValueError is
        raised unless the next turn fits.
        """
        if (held := _taken(arguments, self)) is not None:
            self._check_room(self._columns.check_conversation(prompt) + (most or 1) - 1)
            return held
        new_tokens, is_passed = self._room_tokens, any(arguments.get(name) is self for name in hf.CACHE_NAMES)
        if new_tokens is None and most is not None and not is_passed and not returned:  # else another turn may come
            new_tokens = max(0, most - 1)
        self._clear()
        self._batch = self._next_batch(new_tokens)
        return self._batch

    def _check_room(self, more: int) -> None:
        """Raises ValueError unless every row has room for more tokens."""
        if more > self._left:
            raise PromptLength(
                f"{more} more tokens do not fit into a cache that has room for {self._left}: give compress "
                "room_tokens=..., all that comes behind a prompt, or hand the cache to the first generate, too; the "
                f"model's context is {self._max_tokens} tokens",
                setting="room_tokens",
            )

    def _forward(self, arguments: dict[str, Any]) -> "CausalLMOutputWithPast":
        """One call of the model's `forward`, with the arguments that it was given."""
        from transformers.modeling_outputs import CausalLMOutputWithPast

        batch, tokens = _taken(arguments, self), check_forward(arguments)
        goes_on = batch is not None and batch.is_read
        last = arguments.get("logits_to_keep")
        if not (goes_on and tokens.shape[1] == 1) and not (isinstance(last, int) and last == 1):
            raise ArgumentValue(
                f"logits_to_keep={last!r}: inside kvbench.compress a prompt gives the logits "
                "after its last token; pass logits_to_keep=1, as generate does",
                setting="logits_to_keep",
            )
        model_inputs = tokens.to(self._runner.device), arguments.get("attention_mask"), arguments.get("position_ids")
        if goes_on:
            logits = self._go_on(*model_inputs)
        else:
            logits = self._begin(batch or self._next_batch(self._room_tokens), *model_inputs)
        cache_field: dict[str, Any] = {hf.generate_cache_name(): self._batch}
        return CausalLMOutputWithPast(logits=logits[:, None], **cache_field)


class BatchCache(_Cache):
    """Cache of a batch of prompts, returned by forward passes as `past_key_values`; valid until others are read.

    Args:
        cache: That of the block.
        number: Number of the batch in the block, from 1 on.
        new_tokens: Most tokens that are read after a prompt; None = all that the context has room for.

    Attributes:
        is_read: The prompts were read; False until `generate` reads them.
    """

    def __init__(self, cache: CompressedCache, number: int, new_tokens: int | None) -> None:
        self.number, self.new_tokens, self.is_read, self._cache = number, new_tokens, False, cache

    def bytes(self, row: int | None = None) -> dict[str, int]:
        """Bytes of the cache, as `CompressedCache.bytes`; raises ValueError once other prompts were read."""
        self._check_last()
        return self._cache.bytes(row)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns of the batch that were read; raises ValueError once other prompts were read."""
        self._check_last()
        return self._cache.get_seq_length()

    def _check_last(self) -> None:
        if self._cache._batch is not self:
            raise self._gone(f"prompt {self._cache._batch.number} now: a block holds one at a time")

    def _check_held(self) -> None:
        """Raises ValueError where nothing can be read with this cache."""
        self._check_last()
        if self.is_read and not self._cache._rows:
            raise self._gone("nothing any more")

    def _gone(self, held: str) -> ArgumentValue:
        text = f"past_key_values is the cache of prompt {self.number} of this kvbench.compress block, which holds "
        return ArgumentValue(f"{text}{held}; read the whole text again", setting="past_key_values")


class _Block(AbstractContextManager[CompressedCache]):
    """The `with` block that `compress` returns; used as if it were the cache, it raises an error that says so."""

    def __init__(self, block: AbstractContextManager[CompressedCache]) -> None:
        self._block = block

    def __enter__(self) -> CompressedCache:
        return self._block.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return self._block.__exit__(kind, error, trace)

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"{name}: kvbench.compress(...) is a `with` block, and nothing is compressed outside of it; write "
            "`with kvbench.compress(model, ...) as cache:`, and call model.generate and the cache inside"
        )


def compress(
    model: "PreTrainedModel",
    method: str | Policy = "diffkv",
    *,
    backend: str = "auto",
    room_tokens: int | None = None,
    **settings: Any,
) -> AbstractContextManager[CompressedCache]:
    """Let a model of transformers generate over a compressed cache inside a `with` block.

    `model.generate(**inputs)` works as ever: greedy or sampled, batches that are padded at the left, streamers, logits
    processors, stopping criteria. Every call begins a new cache, unless it is given the one before, with the whole
    conversation: then it reads what is new. A block holds one batch of prompts at a time: the `past_key_values` of an
    earlier one are refused, and so are `position_ids` that are not those of the text. The model gets its own attention
    back at the end of the block, whatever happens in it.

    Args:
        model: A causal language model with full attention in some of its layers, under any attention implementation.
        method: Name in conf/method, or a policy.
        backend: `auto` or the name of a backend.
        room_tokens: Most tokens that come after a prompt, those of later turns included, >= 1; None = max_new_tokens,
            and where `generate` is handed the cache or returns it, all that the model's context has room for.
        **settings: Of the method, for example `bits=2`.

    Returns:
        A context manager; in its block, the cache, with its memory as `bytes()`.

    Raises:
        ValueError: In the block or as it begins: a setting is unknown or out of range, the model cannot be held in the
            store (`UnsupportedModel`), it is compressed already, or `generate` gets arguments that a compressed cache
            cannot support.
    """
    if room_tokens is not None:
        check_whole("room_tokens", room_tokens, 1, ", or None")
    return _Block(_compressed(model, method, backend, room_tokens, settings))


@contextmanager
def _compressed(
    model: "PreTrainedModel", method: str | Policy, backend: str, room_tokens: int | None, settings: dict[str, Any]
) -> Iterator[CompressedCache]:
    if hasattr(model.forward, _IS_OURS):
        raise Unsupported("the model is inside a kvbench.compress block already; leave that one first")
    loaded, policy = begin(model, None, method, settings)
    with hf.attached(model):
        cache = CompressedCache(loaded, policy, backend, room_tokens)
        with (
            _patched(model, "forward", _wrapped_forward(model, cache)),
            _patched(model, "generate", _wrapped_generate(model, cache)),
        ):
            try:
                yield cache
            finally:
                cache._clear()


def _wrapped_forward(model: "PreTrainedModel", cache: CompressedCache) -> Callable[..., Any]:
    """Wrap `forward` to go through the cache, except where the cache's runner calls it."""
    forward = model.forward

    @functools.wraps(forward)
    def door(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(kwargs.get(name), hf.SessionCache) for name in hf.CACHE_NAMES):
            return forward(*args, **kwargs)
        with cache._lock:
            return cache._forward(_arguments(type(model).forward, model, args, kwargs))

    setattr(door, _IS_OURS, True)
    return door


def _wrapped_generate(model: "PreTrainedModel", cache: CompressedCache) -> Callable[..., Any]:
    """Wrap `generate` to refuse unsupported arguments before anything is read, and to begin a new cache."""
    untyped: Any = model  # the types of transformers give `generate` to the classes of the models only
    generate: Callable[..., Any] = untyped.generate

    @functools.wraps(generate)
    def entry(*args: Any, **kwargs: Any) -> Any:
        arguments = _arguments(type(untyped).generate, model, args, kwargs)
        generation_config = arguments.get("generation_config")
        sources = (
            arguments,
            {} if generation_config is None else vars(generation_config),
            vars(model.generation_config),
        )

        def wanted(name: str, places: int = 3) -> Any:
            return next((source[name] for source in sources[:places] if source.get(name) is not None), None)

        _taken(arguments, cache)
        for name in REFUSED:
            if name not in hf.CACHE_NAMES:
                check(name, wanted(name))
        prompt = arguments["inputs"] if arguments.get("inputs") is not None else arguments.get("input_ids")
        new_tokens = None
        if (most := wanted("max_new_tokens")) is not None:
            new_tokens = int(most)
        elif (length := wanted("max_length", places=2)) is not None and prompt is not None:
            new_tokens = int(length) - prompt.shape[1]  # a model's own may be a default that adds to the prompt
        with cache._lock:
            batch = cache._expect(arguments, prompt, new_tokens, bool(wanted("return_dict_in_generate")))
        kwargs = {name: value for name, value in kwargs.items() if name not in hf.CACHE_NAMES}
        return generate(*args, **kwargs | {hf.generate_cache_name(): batch})

    return entry


def _arguments(
    method: Callable[..., Any], model: "PreTrainedModel", args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Arguments of a call by name, by the signature of the class's method: a library may have patched the object's."""
    bound = inspect.signature(method).bind(model, *args, **kwargs).arguments
    return bound | bound.pop("kwargs", {})


def _taken(arguments: dict[str, Any], cache: CompressedCache) -> BatchCache | None:
    """Cache of prompts among the arguments of a call: this one or the block's last one.

    None without one, or where the block's is empty. Any other cache is refused, under each of its names.
    """
    batch = None
    for name in hf.CACHE_NAMES:
        value = arguments.get(name)
        if isinstance(value, BatchCache) and value._cache is cache:
            value._check_held()
            batch = value
        elif value is not cache:
            check(name, value)
        elif cache._rows:
            batch = cache._batch
    return batch


@contextmanager
def _patched(model: "PreTrainedModel", name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Replace a method of an object by a function inside the block."""
    attributes = vars(model)
    had, before = name in attributes, attributes.get(name)
    attributes[name] = function
    try:
        yield
    finally:
        if had:
            attributes[name] = before
        else:
            del attributes[name]
