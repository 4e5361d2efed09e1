"""Statistics that methods rank tokens by: a `Statistic` turns one layer's tensors into numbers per KV head and token.

A statistic sees queries, keys and values, so that the policy need not: the store runs it and shows the policy its
numbers. It is a frozen dataclass whose fields are its settings; two are the same measurement when class and fields are.
Methods import these from `kvbench.policy`.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from kvbench.errors import BrokenRule

Need = Literal["before_rope", "output_projection", "hidden_states", "attention_call", "replays"]
NEEDS: tuple[Need, ...] = get_args(Need)
Answer = Literal["of_slots", "of_token", "of_step", "of_channels"]


@dataclass(frozen=True)
class AttentionCall:
    """Arguments of the model's call of a layer's attention during a prompt.

    Args:
        module: The model's own attention module.
        hidden_states: [n, E] what queries, keys and values were projected from.
        position_embeddings: Cosines and sines [1, n, D_rot], where the model computes them outside.
        rotary: The module that computes them, where the model has one.
    """

    module: torch.nn.Module
    hidden_states: Tensor
    position_embeddings: tuple[Tensor, Tensor] | None
    rotary: torch.nn.Module | None


@dataclass(frozen=True, kw_only=True)
class Replay:
    """Tensors of one layer from a second pass over a prompt; see `Probe`.

    Args:
        first, end: The pass repeated the prompt's tokens from `first` up to `end`.
        q: [Hq, m, D] queries of the pass's own tokens, which stand after the whole prompt, with rotary positions.
        k: [H, m, D] their keys.
    """

    first: int
    end: int
    q: Tensor
    k: Tensor


class LayerTensors(ABC):
    """Tensors of one layer of one sequence, as a statistic reads them: a whole prompt, or the slots of its pages.

    Slots come in the order of their positions, with keys and values as the pages give them back. KV heads that hold
    different numbers of slots come in separate calls, so that no entry here is padding.

    Attributes:
        layer: Index of the layer.
        k, v: [H, n, D] keys, with their rotary positions, and values.
        pos: int64 [H, n] positions, ascending.
        tokens_seen: Tokens so far, which is also the position of the next one.
        scale: Factor on attention logits; NaN where no query counts.
        stored: fp32 [H, n] the slots' tracked scores; None for a prompt, and where none are tracked.
    """

    layer: int
    k: Tensor
    v: Tensor
    pos: Tensor
    tokens_seen: int
    scale: float
    stored: Tensor | None = None
    _q: Tensor | None = None
    _output_projection: Tensor | None = None
    _call: AttentionCall | None = None
    _needs: frozenset[Need] = frozenset()
    _replays: tuple[Replay, ...] = ()

    @property
    def q(self) -> Tensor:
        """Last queries [Hq, w, D], with their rotary positions `q_pos`.

        Of a prompt those that the ScoreSpec's `prefill_queries` counts, at a bulk eviction its `slot_queries`
        (multiplied by the model's factor on logits, so that `scale` is 1); fewer where fewer were seen. Query heads of
        one KV head are consecutive.
        """
        return self._require(
            self._q,
            "queries",
            "declare how many: self.score_by(..., prefill_queries=32), and slot_queries=32 for of_slots",
        )

    @property
    def q_pos(self) -> Tensor:
        """Positions of the queries, int64 [w]."""
        return torch.arange(self.tokens_seen - self.q.shape[1], self.tokens_seen, device=self.k.device)

    @property
    def output_projection(self) -> Tensor:
        """[Hq, D, E]: a query head's part of the output is its attention output times its matrix."""
        return self._require(self._output_projection, "output projection", "add 'output_projection' to its needs")

    @property
    def hidden_states(self) -> Tensor:
        """[n, E] what the layer's projections were computed from; of a prompt only."""
        states = self._call.hidden_states if self._call is not None and "hidden_states" in self._needs else None
        return self._require(states, "hidden states", "add 'hidden_states' to its needs, and use them in of_prompt")

    @property
    def attention_call(self) -> AttentionCall:
        """Arguments of the model's call of the layer's attention, of a prompt only; for bridges to other packages."""
        if self._call is None or "attention_call" not in self._needs:
            self._require(None, "call of attention", "add 'attention_call' to its needs, and use it in of_prompt")
        assert self._call is not None
        return self._call

    @property
    def replays(self) -> tuple[Replay, ...]:
        """Passes of the ScoreSpec's `probe`, in the order of what they repeat; of a prompt only."""
        remedy = "set probe of the ScoreSpec, add 'replays' to its needs, and use them in of_prompt"
        self._require(self._replays[0].k if self._replays else None, "second pass over the prompt", remedy)
        return self._replays

    @abstractmethod
    def attention(self) -> Tensor:
        """Attention fp32 [H, n] that each key receives from the queries, reduced as the ScoreSpec says.

        (Power, reduction over queries, pool, group.) For a prompt this is the backend's operation.
        """

    @abstractmethod
    def low_counts(self) -> Tensor:
        """Minus the count of queries with less than 1 / (keys they see) on a key, fp32 [H, n]; of a prompt only."""

    @abstractmethod
    def rotated(self, x: Tensor, position: Tensor) -> Tensor:
        """Applies rotary positions to vectors `x` [..., D] (negative ones undo them), fp32.

        `position` broadcasts against x[..., 0]. For statistics that declare `before_rope`.
        """

    @abstractmethod
    def of_these_heads(self, x: Tensor) -> Tensor:
        """Rows of the query heads of these KV heads, of `x` [all query heads of the layer, ...].

        `x` is a table of the method, for example.
        """

    def logits(self, which: slice | Tensor = slice(None)) -> Tensor:
        """Attention logits fp32 [Hq, w, n] of `q`, or some of its queries; minus infinity for later keys."""
        group, q_pos = self.q.shape[0] // self.k.shape[0], self.q_pos[which]
        keys, pos = (x.repeat_interleave(group, 0) for x in (self.k.float(), self.pos))
        logits = self.capped(torch.einsum("hid,hjd->hij", self.q[:, which].float() * self.scale, keys))
        return logits.masked_fill(pos[:, None, :] > q_pos[None, :, None], float("-inf"))

    def probabilities(self, which: slice | Tensor = slice(None)) -> Tensor:
        """Attention fp32 [Hq, w, n] of `q`, or some of its queries; 0 throughout for a query that sees no key."""
        logits, q_pos = self.logits(which), self.q_pos[which]
        blind = (self.pos[:, None, :] > q_pos[None, :, None]).all(-1, keepdim=True)
        return self.softmax(logits).masked_fill(blind.repeat_interleave(len(logits) // len(blind), 0), 0.0)

    def capped(self, products: Tensor) -> Tensor:
        """Logits from scaled products of queries and keys, with the cap of models that have one; before masking."""
        return products

    def softmax(self, logits: Tensor) -> Tensor:
        """Probabilities of logits [Hq, w, n] or [H, Hq / H, w, n]; of models with sinks they sum to less than 1."""
        return logits.softmax(-1)

    def grouped(self, x: Tensor) -> Tensor:
        """Reshape `x` [Hq, ...] to [H, Hq / H, ...]."""
        return x.unflatten(0, (self.k.shape[0], -1))

    def _require(self, tensor: Tensor | None, what: str, remedy: str) -> Tensor:
        if tensor is None:
            raise BrokenRule(f"the statistic looks at the {what}, which it did not ask for; {remedy}")
        return tensor


@dataclass(frozen=True)
class Statistic(ABC):
    """Numbers per KV head and token; the first of them is the score.

    A subclass is decorated with `@dataclass(frozen=True)`. It scores a prompt, and optionally more: `of_slots` is
    called at every bulk eviction, and the policy gets its result in `DecodeView.slots`; `of_token` is called when a
    token is written, and its result is stored where the ScoreSpec tracks `score`; `of_channels` is called with
    `of_prompt`, and its result orders the channels of keys (`PrefillPlan.channels`).

    Attributes:
        needs: Inputs other than queries, keys and values: `before_rope` rotary positions taken off or put on,
            `output_projection`, `hidden_states`, `attention_call` of the model itself, `replays` what the ScoreSpec's
            probe gives.
        also: Names of further numbers that it returns with the score; a policy finds them under `extra`.
        by_queries: It says something only where queries count.
        in_chunks: `of_prompt` answers, too, for what is held of the beginning of a prompt that is read in chunks: its
            positions have gaps, and differ from head to head; `q` are queries of the newest chunk, and `attention` of
            all queries adds to what earlier ones gave. Otherwise such prompts are refused.
        extremes: Where its numbers and not their order decide what is held: the smallest and the largest one, for
            projections of bytes without data.
        requires: Required values of fields of its ScoreSpec, where it does not support all.
        words: Description for docs/reference/methods.md.
    """

    needs: ClassVar[frozenset[Need]] = frozenset()
    also: ClassVar[tuple[str, ...]] = ()
    by_queries: ClassVar[bool] = False
    in_chunks: ClassVar[bool] = False
    extremes: ClassVar[tuple[float, float] | None] = None
    requires: ClassVar[Mapping[str, object]] = {}
    words: ClassVar[str] = ""

    @abstractmethod
    def of_prompt(self, seen: LayerTensors) -> Tensor:
        """Score fp32 [H, n], or with names in `also` [1 + len(also), H, n]; finite where the tensors are."""

    def of_slots(self, seen: LayerTensors) -> Tensor:
        """Numbers of the slots of pages."""
        raise NotImplementedError(f"{type(self).__name__} does not define of_slots")

    def of_token(self, k: Tensor, v: Tensor) -> Tensor:
        """Scores fp32 [...] of tokens as they are written, from keys and values [..., D].

        They must not depend on rotary positions, which are absent where a method stores keys without them.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define of_token")

    def of_step(self, probability: Tensor, num_keys: Tensor, step: Tensor) -> Tensor:
        """Summand of a decode step for tracked scores under `decode_update`.

        Args:
            probability: fp32 [S, H, n], the group reduced.
            num_keys: int64 [S, H, 1] keys that the step's queries saw.
            step: int64 [S, 1, 1] tokens after the prompt before this one.
        """
        return probability

    def of_channels(self, seen: LayerTensors) -> Tensor:
        """Worth of each channel of the keys of a prompt, fp32 [H, D]; plans get it as `view.channels`."""
        raise NotImplementedError(f"{type(self).__name__} does not define of_channels")

    def answers(self, what: Answer) -> bool:
        """True if it defines an optional method."""
        return getattr(type(self), what) is not getattr(Statistic, what)


@dataclass(frozen=True)
class Probability(Statistic):
    """Attention probability of a key, reduced over queries."""

    by_queries: ClassVar[bool] = True
    in_chunks: ClassVar[bool] = True

    def of_prompt(self, seen: LayerTensors) -> Tensor:
        return seen.attention()


@dataclass(frozen=True)
class BelowUniform(Statistic):
    """Minus 1 for every query that attends to a key with less than 1 / (keys it sees)."""

    by_queries: ClassVar[bool] = True
    in_chunks: ClassVar[bool] = True
    requires: ClassVar[Mapping[str, object]] = {
        "power": 1,
        "query_reduce": "sum",
        "pool": "none",
        "group_reduce": "max",  # the largest is low where all heads are
    }
    words: ClassVar[str] = "how often below 1 / n"

    def of_prompt(self, seen: LayerTensors) -> Tensor:
        return seen.low_counts()

    def of_step(self, probability: Tensor, num_keys: Tensor, step: Tensor) -> Tensor:
        # The largest probability of a group is below the threshold where all of them are: no kernel has to count.
        return -(probability < 1.0 / num_keys).float()


@dataclass(frozen=True)
class KeyNorms(Statistic):
    """Minus the Euclidean norm of the key, fixed when the slot is written; no query counts."""

    in_chunks: ClassVar[bool] = True
    requires: ClassVar[Mapping[str, object]] = {"prefill_queries": 0, "decode_update": False, "pool": "none"}
    words: ClassVar[str] = "norms of keys"

    def of_prompt(self, seen: LayerTensors) -> Tensor:
        return self.of_token(seen.k, seen.v)

    def of_token(self, k: Tensor, v: Tensor) -> Tensor:
        return -torch.linalg.vector_norm(k.float(), dim=-1)


@dataclass(frozen=True)
class WithValueNorms(Statistic):
    """Another statistic with, as `norm`, the L1 norm of each value times the output projection.

    The norm is the mean over the query heads of a KV head.

    Args:
        ranks: The other one, which alone is the score.

    Source: CriticalKV (Feng et al. 2025, arXiv 2502.03805); NVIDIA/kvpress criticalkv_press.py.
    """

    ranks: Statistic

    def __post_init__(self) -> None:
        inner = self.ranks
        for name, value in (
            ("needs", inner.needs | {"output_projection"}),
            ("also", (*inner.also, "norm")),
            ("by_queries", inner.by_queries),
            ("in_chunks", inner.in_chunks),
            ("requires", inner.requires),
            ("words", f"{inner.words}, then times the L1 norm of the projected value".removeprefix(", ")),
        ):
            object.__setattr__(self, name, value)  # class facts of others are an instance's here

    def of_prompt(self, seen: LayerTensors) -> Tensor:
        return self._with_norms(self.ranks.of_prompt(seen), seen)

    def of_slots(self, seen: LayerTensors) -> Tensor:
        return self._with_norms(self.ranks.of_slots(seen), seen)

    def of_token(self, k: Tensor, v: Tensor) -> Tensor:
        return self.ranks.of_token(k, v)

    def of_step(self, probability: Tensor, num_keys: Tensor, step: Tensor) -> Tensor:
        return self.ranks.of_step(probability, num_keys, step)

    def of_channels(self, seen: LayerTensors) -> Tensor:
        return self.ranks.of_channels(seen)

    def answers(self, what: Answer) -> bool:
        return self.ranks.answers(what)

    def _with_norms(self, score: Tensor, seen: LayerTensors) -> Tensor:
        shape = seen.k.shape[:2]
        return torch.cat([score.view(-1, *shape), self._norm(seen)[None]])

    def _norm(self, seen: LayerTensors) -> Tensor:
        """Norm fp32 [H, n], one query head at a time: a head's projected values are as wide as the model."""
        total = torch.zeros(seen.v.shape[:2], device=seen.v.device)
        weights = seen.grouped(seen.output_projection)
        for member in range(weights.shape[1]):
            total += (seen.v.float() @ weights[:, member].float()).abs().sum(-1)
        return total / weights.shape[1]
