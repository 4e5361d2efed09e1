"""The contract between the methods, which decide, and the store, which executes.

A method is a `Policy`: it names the precision tiers it uses, the attention statistics it needs (`ScoreSpec`), how much of the cache
it must see at once (`scope`), and answers two questions with tensors: which tier does each prompt token go to (`plan_prefill`), and where
does the next token go, who makes room for it and what becomes of the one who does (`plan_decode`). A third, optional answer evicts in
bulk (`plan_compact`). A policy never sees keys or values, never counts bytes, never knows a backend.

How the methods of the field map onto it (issue A builds those marked *, the others need no change here):

| method | tiers | score | scope | prefill | decode |
|---|---|---|---|---|---|
| full*, int8, int4, fp8 | one | none | head | all tokens to tier 0 | append |
| streaming_llm* | k16v16 | none | head | sinks + recent | overwrite the oldest non-sink; `cache_relative` positions |
| h2o | k16v16 | all queries, sum, decode update | head | top heavy + recent | overwrite `view.argmin(by="score")` outside recent |
| snapkv*, pyramidkv | any token tier | last w, max-pool 7, group mean | head | top (C_l - w) + window | append |
| ada_snapkv | any token tier | as snapkv | layer | `view.score` of all heads of the layer ranked together | append |
| kivi* | channel keys | none | head | all | `Residual` (oldest value, all keys), after attention |
| minikv | channel keys | all queries, sum | head, model | heavy + recent | `Residual` (flush all), before attention |
| kv_compress | k16v16 | last 8 or all but near, squared, pooled | model | blocks ranked over all layers and heads | `plan_compact` every n steps |
| diffkv* | k8v4, k4v2 | all queries, mean, group max, decode update | head | thresholds alpha / N | demote, prune or append: `DecodePlan` |
| random | any | none | head | seeded choice | append |
| duo_attention | k16v16 | none | head | a table per layer and head | as streaming_llm for some heads |
"""

import re
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

EVICT = -1  # in a PrefillPlan: the token is not stored
APPEND = -1  # in a DecodePlan: a new slot at the end of the tier
ALL_QUERIES = -1  # in a ScoreSpec: every prompt query counts

INT_BITS = (1, 2, 4, 8)
ALLOWED_BITS = (*INT_BITS, 16)


@dataclass(frozen=True, kw_only=True)
class Tier:
    """A precision format: how one slot's key and value are stored.

    Args:
        k_bits: Bits per key element: 1, 2, 4, 8 are codes with scale and zero, 16 is fp16 (bf16 for bf16 models).
        v_bits: Bits per value element, likewise.
        k_axis: `token`: one scale per token vector (or part of it). `channel`: one scale per channel over `k_group` consecutive
            slots; such slots are immutable, so they can be neither evicted nor demoted one by one.
        k_group: Axis `token`: channels per scale, 0 = the whole vector. Axis `channel`: tokens per scale, > 0.
        v_group: Channels per value scale, 0 = the whole vector.
        k_splits: Number of equal groups a key vector is cut into when `k_group` is 0.
        v_splits: Likewise for values.
        symmetric: Codes are centred on zero and no zero point is stored.
        fp8: 8-bit sides are e4m3 floats without scale instead of integer codes.
        native: Store the model's own dtype; the bits are ignored. For exactness tests.
    """

    k_bits: int = 16
    v_bits: int = 16
    k_axis: Literal["token", "channel"] = "token"
    k_group: int = 0
    v_group: int = 0
    k_splits: int = 1
    v_splits: int = 1
    symmetric: bool = False
    fp8: bool = False
    native: bool = False

    def __post_init__(self) -> None:
        for side, bits in (("k_bits", self.k_bits), ("v_bits", self.v_bits)):
            if bits not in ALLOWED_BITS:
                raise ValueError(f"{side}={bits} is not one of {ALLOWED_BITS}; choose one of these bit widths")
        if self.k_axis not in ("token", "channel"):
            raise ValueError(f"k_axis={self.k_axis!r} must be 'token' or 'channel'")
        if self.k_axis == "channel" and self.k_group < 8 and not self.native:
            raise ValueError(f"k_group={self.k_group} with k_axis='channel' must be >= 8 tokens; 32 is usual")
        for name, value in (("k_group", self.k_group), ("v_group", self.v_group)):
            if value < 0:
                raise ValueError(f"{name}={value} must be >= 0 (0 = the whole vector)")
        for name, value in (("k_splits", self.k_splits), ("v_splits", self.v_splits)):
            if value < 1:
                raise ValueError(f"{name}={value} must be >= 1")

    @property
    def evictable(self) -> bool:
        """True when a single slot can be evicted, demoted or overwritten."""
        return self.native or self.k_axis == "token" or self.k_bits == 16

    @property
    def name(self) -> str:
        """Short label such as `k8v4`, `k2v2-channel32` or `native`."""
        if self.native:
            return "native"
        base = "fp8" if self.fp8 else f"k{self.k_bits}v{self.v_bits}"
        return base + (f"-channel{self.k_group}" if self.k_axis == "channel" else "")

    @staticmethod
    def parse(text: "str | Tier") -> "Tier":
        """Reads a tier from a config string: `k8v4`, `fp16`, `int8`, `int4`, `fp8`, `native`.

        Raises:
            ValueError: The text names no tier.
        """
        if isinstance(text, Tier):
            return text
        known = {
            "native": Tier(native=True),
            "fp16": Tier(),
            "int8": Tier(k_bits=8, v_bits=8),
            "int4": Tier(k_bits=4, v_bits=4),
            "fp8": Tier(k_bits=8, v_bits=8, fp8=True),
        }
        lowered = str(text).lower()
        if lowered in known:
            return known[lowered]
        match = re.fullmatch(r"k(\d+)v(\d+)", lowered)
        if match is None:
            raise ValueError(f"tier={text!r} is not a tier; write k<bits>v<bits> (for example k8v4) or one of {', '.join(known)}")
        return Tier(k_bits=int(match[1]), v_bits=int(match[2]))


@dataclass(frozen=True, kw_only=True)
class ScoreSpec:
    """Which attention statistics the kernels return and keep.

    Args:
        prefill_queries: Prompt queries that count: 0 none, w > 0 the last w, `ALL_QUERIES` all.
        skip_near: Query i does not count for key j when i - j < skip_near.
        power: Probabilities are raised to this power (1 or 2) before they are summed over queries.
        pool: `none`, `avg` (zero padding counts) or `max`, along the keys, stride 1.
        pool_kernel: Odd width of the pool.
        pool_stage: Pool each query head before the group is reduced, or the reduced score.
        pool_region: `prefix` pools only keys before the last `prefill_queries` tokens, `all` pools every key.
        group_reduce: How the query heads of a KV head are reduced, after summing over queries in prefill, per step in decode.
        decode_update: Every decode step adds its reduced probabilities to the slots' scores.
        track: Per-slot fields the store must keep (and bill): `score` (fp32) and `pos` (int32).
    """

    prefill_queries: int = 0
    skip_near: int = 0
    power: int = 1
    pool: Literal["none", "avg", "max"] = "none"
    pool_kernel: int = 1
    pool_stage: Literal["per_query_head", "after_group"] = "after_group"
    pool_region: Literal["prefix", "all"] = "prefix"
    group_reduce: Literal["sum", "mean", "max"] = "mean"
    decode_update: bool = False
    track: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.prefill_queries < ALL_QUERIES:
            raise ValueError(f"prefill_queries={self.prefill_queries} must be >= 0, or -1 for all queries")
        if self.power not in (1, 2):
            raise ValueError(f"power={self.power} must be 1 or 2")
        if self.pool != "none" and (self.pool_kernel < 1 or self.pool_kernel % 2 == 0):
            raise ValueError(f"pool_kernel={self.pool_kernel} must be odd and >= 1, so that the pool is centred")
        if unknown := set(self.track) - {"score", "pos"}:
            raise ValueError(f"track={sorted(unknown)} is unknown; the store can keep 'score' and 'pos'")
        if self.decode_update and "score" not in self.track:
            raise ValueError("decode_update=True needs track to hold 'score'")


@dataclass(frozen=True, kw_only=True)
class Residual:
    """A 16-bit buffer that new tokens pass through before they reach tier 0.

    Args:
        num_tokens: Length R, a multiple of the tier's token group.
        v_flush: `all`: values leave together with the keys when R are held; `oldest`: one value leaves whenever more than R are held.
        when: Flush after the attention of the step that filled the buffer, or before it (then the newest token is read quantised).
        hold_prompt: Prompt tokens stay in the buffer as KIVI does (keys N mod R, values the last R); otherwise only those that do not fill a group.
    """

    num_tokens: int
    v_flush: Literal["all", "oldest"] = "oldest"
    when: Literal["after_attention", "before_attention"] = "after_attention"
    hold_prompt: bool = True

    def __post_init__(self) -> None:
        if self.num_tokens < 1:
            raise ValueError(f"residual={self.num_tokens} must be >= 1 token")


@dataclass(frozen=True)
class Budget:
    """How much of the cache a method may keep: a ratio, tokens per KV head, or bytes per sequence.

    Written in a config as 0.25 (ratio in (0, 1]), 256 (tokens, an integer >= 2) or `8MiB` (bytes; B, KiB, MiB, GiB).
    """

    value: float
    unit: Literal["ratio", "tokens", "bytes"]

    @staticmethod
    def parse(text: "float | int | str | Budget") -> "Budget":
        """Reads a budget.

        Raises:
            ValueError: The text is none of the three forms, or out of range.
        """
        if isinstance(text, Budget):
            return text
        rule = "write a ratio in (0, 1], a whole number of tokens >= 2, or bytes such as 8MiB"
        match = re.fullmatch(r"\s*([0-9.]+)\s*(B|KiB|MiB|GiB)\s*", str(text))
        if match:
            scale = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}[match[2]]
            return Budget(float(match[1]) * scale, "bytes")
        try:
            value = float(text)
        except ValueError:
            raise ValueError(f"budget={text!r} is not a budget; {rule}") from None
        if 0 < value <= 1:
            return Budget(value, "ratio")
        if value >= 2 and value == int(value):
            return Budget(value, "tokens")
        raise ValueError(f"budget={text} is out of range; {rule}")

    def tokens(self, num_tokens: int, lists: int, token_bytes: float) -> int:
        """Tokens per list, >= 1, that the budget allows a sequence with a prompt of `num_tokens`.

        Args:
            num_tokens: Prompt length, which a ratio refers to.
            lists: Layers x KV heads.
            token_bytes: Bytes of one slot.

        Raises:
            ValueError: A byte budget is below one token per list.
        """
        if self.unit == "ratio":
            return max(1, int(self.value * num_tokens + 1e-9))  # 0.3 * 10 must give 3, not 2
        if self.unit == "tokens":
            return int(self.value)
        tokens = int(self.value / (lists * token_bytes))
        if tokens < 1:
            raise ValueError(
                f"budget={int(self.value)}B holds less than one token per KV head ({lists} lists x {token_bytes:g} B); raise it"
            )
        return tokens


@dataclass(kw_only=True)
class PrefillView:
    """What a policy sees of one prompt.

    Args:
        num_tokens: Prompt length N.
        num_layers: Layers of the model.
        num_kv_heads: KV heads per layer.
        layers: int64 [V], the layers in this view: one for scope `head` and `layer`, all for scope `model`.
        score: fp32 [V, H, N] exactly as the `ScoreSpec` says, or None.
        token_bytes: Bytes of one slot per tier (codes, metadata and tracked fields).
    """

    num_tokens: int
    num_layers: int
    num_kv_heads: int
    layers: Tensor
    score: Tensor | None
    token_bytes: tuple[float, ...]

    def budget_tokens(self, budget: Budget, tier: int = 0) -> int:
        """Tokens per KV head that a budget allows in a tier, at least 1 and at most the prompt."""
        lists = self.num_layers * self.num_kv_heads
        return min(int(budget.tokens(self.num_tokens, lists, self.token_bytes[tier])), self.num_tokens)

    def filled(self, tier: int) -> Tensor:
        """An int8 [V, H, N] plan that sends every token to `tier`."""
        shape = (len(self.layers), self.num_kv_heads, self.num_tokens)
        return torch.full(shape, tier, dtype=torch.int8, device=self.layers.device)


@dataclass(kw_only=True)
class PrefillPlan:
    """Where each prompt token goes.

    Args:
        tier_of: int8 [V, H, N]: the tier of each token, or `EVICT`.
        score: fp32 [V, H, N] to store with the slots instead of `view.score`, or None.
    """

    tier_of: Tensor
    score: Tensor | None = None


@dataclass(kw_only=True)
class Extreme:
    """Per list, the slot that a reduction picked: `value` fp32, `slot` int64 (-1 when no slot was eligible), `pos` int64; all [S, L, H]."""

    value: Tensor
    slot: Tensor
    pos: Tensor

    @property
    def found(self) -> Tensor:
        """bool [S, L, H]: an eligible slot existed."""
        return self.slot >= 0


class DecodeView:
    """What a policy sees before a decode step, for all live sequences (S), layers (L) and KV heads (H) together.

    The store's backend implements it. Scores are those of the steps before.

    Attributes:
        tokens_seen: int64 [S]: tokens before the incoming one, which is also the incoming token's position.
        prompt_tokens: int64 [S]: prompt length.
        shape: (S, L, H).
    """

    tokens_seen: Tensor
    prompt_tokens: Tensor
    shape: tuple[int, int, int]

    def budget_tokens(self, budget: Budget, tier: int = 0) -> Tensor:
        """int64 [S]: tokens per KV head that a budget allows each sequence, at least 1."""
        raise NotImplementedError

    def num_slots(self, tier: int) -> Tensor:
        """int64 [S, L, H]: slots held in a tier."""
        raise NotImplementedError

    def argmin(
        self, tier: int, *, by: Literal["mean", "score", "pos"], before: Tensor | None = None, first: int = 0
    ) -> Extreme:
        """The slot with the smallest value; ties go to the lower position.

        Args:
            tier: Which tier to search.
            by: `score` as stored, `mean` = score / queries counted so far, or `pos`.
            before: int64 [S]: only slots whose position is smaller.
            first: Only slots whose position is at least this (sinks below are protected).
        """
        raise NotImplementedError

    def find(self, tier: int, position: Tensor) -> Extreme:
        """The slot that holds a position (int64 [S]); its `value` is the mean score."""
        raise NotImplementedError

    def slots(self, tier: int) -> "SlotArrays":
        """All slots of a tier at once. For planning in bulk (`plan_compact`), not for every step."""
        raise NotImplementedError


@dataclass(kw_only=True)
class SlotArrays:
    """Padded per-slot fields of one tier: `score` fp32, `pos` int64 and `valid` bool, all [S, L, H, n]."""

    score: Tensor
    pos: Tensor
    valid: Tensor


@dataclass(kw_only=True)
class DecodePlan:
    """What happens in one decode step; every field is int64 [S, L, H] (or None for its default everywhere).

    Args:
        slot: Slot of tier `tier` that the incoming token takes, or `APPEND`. A token already there makes room: it is evicted, or demoted.
        demote_to: Tier that the displaced token is re-quantised to, or `EVICT`.
        demote_slot: Slot of that tier which the demoted token takes (its holder is evicted), or `APPEND`.
        tier: The incoming token's tier, the same for all lists.
    """

    slot: Tensor | None = None
    demote_to: Tensor | None = None
    demote_slot: Tensor | None = None
    tier: int = 0


@dataclass(kw_only=True)
class CompactPlan:
    """Bulk eviction: `keep[tier]` is bool [S, L, H, n] over the slots of `DecodeView.slots(tier)`, or None to keep all of a tier."""

    keep: list[Tensor | None]


@dataclass(kw_only=True)
class Policy:
    """A cache compression method. Subclasses are dataclasses whose fields are the hyper-parameters.

    Class attributes to override: `scope`, `position_mode`, `granularity`, `acts_in_decode`, `compact_every`. Override `tiers`, `score` and `residual` as properties.
    """

    scope: ClassVar[Literal["head", "layer", "model"]] = "head"
    position_mode: ClassVar[Literal["absolute", "cache_relative"]] = "absolute"
    granularity: ClassVar[Literal["kv_head", "q_head"]] = "kv_head"  # q_head stores every query head's copy and is billed for it
    acts_in_decode: ClassVar[bool] = False  # plan_decode may displace a token: question segments are then fed token by token
    compact_every: ClassVar[int] = 0  # > 0: plan_compact is called before every n-th decode step of a sequence

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """One to three tiers; tier 0 takes new tokens."""
        return (Tier(),)

    @property
    def score(self) -> ScoreSpec:
        """The statistics needed; none by default."""
        return ScoreSpec()

    @property
    def residual(self) -> Residual | None:
        """The 16-bit buffer in front of tier 0; none by default."""
        return None

    def max_slots(self, num_prompt_tokens: int, num_new_tokens: int) -> int:
        """Upper bound on the slots of one list over all tiers, for sizing page tables. Default: every token."""
        return num_prompt_tokens + num_new_tokens

    def plan_prefill(self, view: PrefillView) -> PrefillPlan:
        """Decides where the prompt's tokens go. Default: all to tier 0."""
        return PrefillPlan(tier_of=view.filled(0))

    def plan_decode(self, view: DecodeView) -> DecodePlan:
        """Decides one decode step. Default: append to tier 0 everywhere."""
        return DecodePlan()

    def plan_compact(self, view: DecodeView) -> CompactPlan:
        """Decides a bulk eviction; only called when `compact_every` > 0."""
        raise NotImplementedError(f"{type(self).__name__} sets compact_every but does not define plan_compact")

    def cache_positions(self, view: DecodeView, num_slots: int) -> Tensor:
        """int64 [S, num_slots]: each slot's index in the cache by age, the incoming token included; only for `cache_relative` methods.

        Args:
            view: The view that the step was planned from.
            num_slots: Slots to number; those past the end may hold anything.
        """
        raise NotImplementedError(f"{type(self).__name__} is cache_relative but does not define cache_positions")

    def check_outcome(self, record: dict) -> str | None:
        """Says what is wrong when a journal record shows that the method did not do its work, else None."""
        return None


def rank_descending(score: Tensor) -> Tensor:
    """Rank of each element along the last axis: score descending, then position ascending (stable); same shape, int64."""
    order = torch.argsort(score, dim=-1, descending=True, stable=True)
    return torch.empty_like(order).scatter_(-1, order, torch.arange(score.shape[-1], device=score.device).expand_as(order))
