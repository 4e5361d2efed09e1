"""Views that a policy plans from: copies, so that changes to them do not reach the cache.

Methods import these from `kvbench.policy`.
"""

from abc import ABC, abstractmethod
from typing import Any, Literal, Self

import torch
from torch import Tensor

from kvbench.errors import BrokenRule
from kvbench.policy.budget import Budget
from kvbench.policy.plans import Extreme, SlotArrays

GONE = torch.finfo(torch.float32).min  # score of a prompt token that an earlier chunk's plan dropped


class View(ABC):
    """Base of the views of a policy, which gets a read-only copy (`shown`)."""

    _is_shown = False
    _shown: Any = None

    def shown(self) -> Self:
        """Read-only copy of the view for a policy, with tensors of its own; made once."""
        if self._shown is None:
            self._shown = self.anew()
        return self._shown

    def anew(self) -> Self:
        """Another read-only copy."""
        view = object.__new__(type(self))
        vars(view).update(self._copied(), _is_shown=True)
        return view

    @abstractmethod
    def _copied(self) -> dict[str, Any]:
        """Attributes of a copy, with cloned tensors."""

    def __setattr__(self, name: str, value: object) -> None:
        if self._is_shown:
            raise AttributeError(f"the view's {name} was set, which is the cache's; keep it in a variable of your own")
        object.__setattr__(self, name, value)


class PrefillView(View):
    """View of one prompt, or of the part read so far (`prefill.chunk`).

    In the second case dropped tokens stay dropped, whatever their tier in the plan.

    Args:
        num_tokens: Prompt length N; in a prompt that is read in chunks, the tokens read so far.
        num_layers: Layers of the model.
        num_kv_heads: KV heads per layer.
        layers: int64 [V], the layers in this view: one for scope `head` and `layer`, all for scope `model`.
        score: fp32 [V, H, N] as defined by the policy's `ScoreSpec`, or None where that needs no statistics of a
            prompt. Dropped tokens have `GONE`, the smallest fp32 number.
        token_bytes: Bytes of one slot per tier (codes, metadata and tracked fields), the mean where lists differ.
        extra: The further numbers of the policy's statistic by name, fp32 [V, H, N] each.
        instruction_tokens: First tokens of the prompt that are its instruction; 0 unless `needs_instruction`.
        byte_tokens: Tokens per KV head within the method's budget in bytes; None = computed from slot bytes alone.
        prompt_tokens: Tokens of the whole prompt, to which budgets refer; None = N.
        held: bool [V, H, N] mask of tokens that were not dropped; None = all.
        channels: fp32 [V, H, D] weight of each key channel, from the policy's statistic; None where it measures none.
    """

    def __init__(
        self,
        *,
        num_tokens: int,
        num_layers: int,
        num_kv_heads: int,
        layers: Tensor,
        score: Tensor | None,
        token_bytes: tuple[float, ...],
        extra: dict[str, Tensor] | None = None,
        instruction_tokens: int = 0,
        byte_tokens: int | None = None,
        prompt_tokens: int | None = None,
        held: Tensor | None = None,
        channels: Tensor | None = None,
    ) -> None:
        self.num_tokens = num_tokens
        self.prompt_tokens = num_tokens if prompt_tokens is None else prompt_tokens
        self.held = held
        self.num_layers = num_layers
        self.num_kv_heads = num_kv_heads
        self.layers = layers
        self.token_bytes = token_bytes
        self.extra = extra or {}
        self.instruction_tokens = instruction_tokens
        self._byte_tokens = byte_tokens
        self._score, self._channels = score, channels

    def _copied(self) -> dict[str, Any]:
        fields = {name: x.clone() if isinstance(x, Tensor) else x for name, x in vars(self).items()}
        return fields | {"extra": {name: x.clone() for name, x in self.extra.items()}}

    @property
    def score(self) -> Tensor:
        """Score of each token, fp32 [V, H, N].

        Raises:
            ValueError: The policy declares no score.
        """
        if self._score is None:
            raise BrokenRule(
                "the view of a prompt has no score, since the method declares none; set self.score to a ScoreSpec with "
                "prefill_queries, or with a statistic that looks at no query"
            )
        return self._score

    @property
    def channels(self) -> Tensor:
        """Weight of each key channel, fp32 [V, H, D].

        Raises:
            ValueError: The policy's statistic does not measure channels.
        """
        if self._channels is None:
            raise BrokenRule(
                "the view of a prompt has no channels, since the method's statistic does not measure them; define "
                "of_channels"
            )
        return self._channels

    def budget_tokens(self, budget: Budget, tier: int = 0) -> int:
        """Tokens per KV head that a budget allows in a tier, at least 1 and at most the prompt."""
        if budget.unit == "bytes" and self._byte_tokens is not None:
            return min(self._byte_tokens, self.num_tokens)
        lists = self.num_layers * self.num_kv_heads
        return min(int(budget.tokens(self.prompt_tokens, lists, self.token_bytes[tier])), self.num_tokens)

    def filled(self, tier: int) -> Tensor:
        """Plan int8 [V, H, N] that sends every token to `tier`."""
        shape = (len(self.layers), self.num_kv_heads, self.num_tokens)
        return torch.full(shape, tier, dtype=torch.int8, device=self.layers.device)


class DecodeView(View):
    """View of all live sequences (S), layers (L) and KV heads (H) before a decode step.

    Implemented by the cache (`kvbench.cache.view`). Scores are those of earlier steps.

    Attributes:
        tokens_seen: int64 [S]: tokens before the incoming one, which is also the incoming token's position.
        prompt_tokens: int64 [S]: prompt length.
        prompt_slots: int64 [S, L, H]: slots that the prompt's plan gave each list; only with a `compaction` or
            `needs_prompt_slots`.
        instruction_tokens: int64 [S]: first tokens of the prompt that are its instruction; only with
            `needs_instruction`.
        shape: (S, L, H).
    """

    tokens_seen: Tensor
    prompt_tokens: Tensor
    prompt_slots: Tensor
    instruction_tokens: Tensor
    shape: tuple[int, int, int]

    @abstractmethod
    def budget_tokens(self, budget: Budget, tier: int = 0) -> Tensor:
        """Tokens per KV head that a budget allows each sequence, int64 [S], at least 1.

        A share of all tokens seen counts the incoming one.
        """

    @abstractmethod
    def num_slots(self, tier: int) -> Tensor:
        """Slots held in a tier, int64 [S, L, H]."""

    @abstractmethod
    def argmin(
        self,
        tier: int,
        *,
        by: Literal["mean", "score", "pos"],
        before: Tensor | None = None,
        first: int | Tensor = 0,
        over_layer: bool = False,
    ) -> Extreme:
        """Slot with the smallest value in each list; ties go to the lower position.

        Args:
            tier: Tier to search.
            by: `score` as stored, `mean` = score / queries counted so far, or `pos`.
            before: int64 [S]; only slots with a smaller position.
            first: Only slots with at least this position (lower ones are protected); int64 [S] or one number.
            over_layer: Compare the mean over the layer's heads, the same slot for all of them. For methods that decide
                once per layer, so that slot i holds the same token in every head.
        """

    @abstractmethod
    def find(self, tier: int, position: Tensor) -> Extreme:
        """Slot that holds a position (int64 [S], at most `tokens_seen`); its `value` is the mean score."""

    @abstractmethod
    def slots(self, tier: int) -> SlotArrays:
        """All slots of a tier at once. For planning in bulk (`plan_compact`), not for every step."""
