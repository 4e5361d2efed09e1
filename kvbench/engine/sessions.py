"""Attention sessions of one forward pass: of a prompt, of the tokens after it, or of a decode step."""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvbench.cache.store import CompressedStore
from kvbench.engine.calls import first_tokens
from kvbench.engine.probe import Uncompressed
from kvbench.policy import AttentionCall

Turn = tuple[Tensor, Tensor]


@dataclass
class Session(ABC):
    """Handler of the attention function in one forward pass over a store.

    Attributes:
        call: The call of the layer's attention that runs; None unless a statistic needs it.
        states: States of layers, by their numbers, in transformers' classes.
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

    @abstractmethod
    def attend_stored(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Attention of a layer that shares the keys and values of `layer`, after its `attend`.

        In a prompt, some models pass their last tokens alone: q [B, Hq, m, D], m <= n.
        """

    def turns(self, layer: int) -> bool:
        """True if a layer has `attend_unrotated`."""
        return False

    def attend_unrotated(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, turn: Turn) -> Tensor:
        """See `attend`; queries and keys are unrotated, with cosines and sines [B * n, D / 2]."""
        raise NotImplementedError(f"{type(self).__name__} takes queries and keys as attention sees them")

    def trace(self, out: Tensor) -> Tensor:
        """A tensor that is finite where the output is; all of a prompt's would be too large."""
        return out.flatten(1).abs().amax(1)

    def without_grad(self) -> AbstractContextManager:
        """Gradient mode of the pass.

        A prompt makes tensors that are kept and written to later: pages of a pool that grows, copies for a prompt
        cache.
        """
        return torch.no_grad()

    def note(self, call: AttentionCall | None) -> None:
        self.call = call

    def first_bad_layer(self, index: int) -> int:
        """First layer whose attention output was not finite for a row of the batch; -1 when none."""
        flags = torch.stack([~torch.isfinite(trace[index]).all().cpu() for trace in self.traces]).nonzero()
        return self.store.shape.attending[int(flags[0, 0])] if len(flags) else -1


@dataclass
class Decode(Session):
    """One token for many rows."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        store, index = self.store.kind_of(layer)
        return store.attend(index, q[:, :, 0], k[:, :, 0], v[:, :, 0], scale)[:, :, None]

    def turns(self, layer: int) -> bool:
        store, index = self.store.kind_of(layer)
        return store.turns(index)

    def attend_unrotated(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, turn: Turn) -> Tensor:
        store, index = self.store.kind_of(layer)
        return store.attend(index, q[:, :, 0], k[:, :, 0], v[:, :, 0], scale, turn)[:, :, None]

    def attend_stored(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        store, index = self.store.kind_of(layer)
        return store.attend_stored(index, q[:, :, 0], k[:, :, 0], v[:, :, 0], scale)[:, :, None]

    def trace(self, out: Tensor) -> Tensor:
        return out

    def without_grad(self) -> AbstractContextManager:
        return torch.inference_mode()  # a step is mostly the overhead of small operations, of which it takes less


@dataclass
class Dense(Session):
    """A prompt, or a text read with the full cache, of which nothing is stored except `num_prompt_tokens` in `row`.

    Later tokens only attend, and see the uncompressed prompt. `uncompressed` holds it for the method's probe;
    `held_bytes` and `replay_tokens` are the bytes held and tokens read by the probe's passes.
    """

    row: int = -1
    num_prompt_tokens: int = 0
    uncompressed: Uncompressed | None = None
    held_bytes: int = field(default=0, init=False)
    replay_tokens: int = field(default=0, init=False)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        store, index = self.store.kind_of(layer)
        out, lse = store.prompt_attention(index, q[0], k[0], v[0], scale)
        self.keep(layer, q[0], k[0], v[0], scale, lse)
        return out[None]

    def attend_stored(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        store, index = self.store.kind_of(layer)
        past = k.shape[2] - q.shape[2]
        if not past:
            return store.prompt_attention(index, q[0], k[0], v[0], scale)[0][None]
        return store.replay_attention(
            index, q[0], k[0, :, past:], v[0, :, past:], k[0, :, :past], v[0, :, :past], scale
        )[None]

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
        tensors = q[:, :kept], k[:, :kept], v[:, :kept]
        call = None if self.call is None else first_tokens(self.call, kept)
        if self.uncompressed is not None:
            self.uncompressed.hold(layer, *tensors, scale, call)
        else:
            lse = None if lse is None else lse[:, :kept]
            store, number = self.store.kind_of(layer)
            store.prefill_layer(self.row, number, *tensors, scale, call, lse=lse)


@dataclass
class Replay(Session):
    """A probe's pass after an uncompressed prompt; nothing is stored."""

    uncompressed: Uncompressed

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        return self.uncompressed.attend(layer, q[0], k[0], v[0], scale)[None]

    def attend_stored(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        return self.uncompressed.attend_stored(layer, q[0], k[0], v[0], scale)[None]


@dataclass
class _Piece(Session):
    """Some tokens of a row that come at once."""

    row: int

    def attend_stored(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        raise AssertionError("the runner refuses chunks where layers share keys, and takes segments token by token")


@dataclass
class PromptChunk(_Piece):
    """The next chunk of a row's prompt."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        store, index = self.store.kind_of(layer)
        return store.read_chunk(self.row, index, q[0], k[0], v[0], scale)[None]


@dataclass
class Segment(_Piece):
    """Tokens after all that a row holds."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        store, index = self.store.kind_of(layer)
        return store.append_chunk(self.row, index, q[0], k[0], v[0], scale)[None]
