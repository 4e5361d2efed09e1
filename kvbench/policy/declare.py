"""Declarations of a method other than its tiers: attention statistics, residual buffer, reads, layers that differ.

Methods import these from `kvbench.policy`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from torch import Tensor

from kvbench.errors import BrokenRule, NotForModel
from kvbench.policy.budget import Budget
from kvbench.policy.statistics import NEEDS, Probability, Statistic
from kvbench.policy.views import DecodeView
from kvbench.rules import Choice, Whole, check_settings, shown

ALL_QUERIES = -1  # in a ScoreSpec: every prompt query counts


@dataclass(frozen=True, kw_only=True)
class Probe:
    """A second pass over a prompt while it is still uncompressed; its tokens are measured and not kept.

    The model is prompted to repeat the prompt and is fed that answer, in parts: after the whole prompt it reads
    a request, what closes a user's turn in the prompt, and a part of the prompt again. A statistic finds the passes
    under `replays`. The time that they take and what they hold are counted.

    Args:
        ask: Asks for the first part.
        go_on: Asks for any other part; the last tokens of the part before it follow.
        part_tokens: Tokens of a part; fewer where the model's context has no room for as many after the prompt.
        overlap_tokens: Tokens of the part before that follow `go_on`.
    """

    ask: str
    go_on: str
    part_tokens: Annotated[int, Whole(1)]
    overlap_tokens: Annotated[int, Whole(0)] = 0

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True, kw_only=True)
class ScoreSpec:
    """The statistic that scores tokens, and the numbers of it that pages keep.

    Args:
        statistic: Turns a layer's tensors into scores; by default `Probability`, the attention that a key receives.
        prefill_queries: Prompt queries that count: 0 none, w > 0 the last w, `ALL_QUERIES` all.
        slot_queries: Last queries that the statistic's `of_slots` looks at; a 16-bit ring of them is kept and billed.
        skip_near: Query i does not count for key j when i - j < skip_near; in decode steps too, which needs `pos`
            tracked.
        power: Probabilities are raised to this power (1 or 2) before they are reduced over queries.
        query_reduce: Reduction of a prompt's probabilities over the queries that count for a key: `sum`, `mean` or
            `max`.
        pool: `none`, `avg` (zero padding counts) or `max`, along the keys, stride 1.
        pool_kernel: Odd width of the pool.
        pool_stage: Pool each query head before the group is reduced, or the reduced score.
        pool_region: `prefix` pools only keys before the last `prefill_queries` tokens, `all` pools every key.
        group_reduce: Reduction of the query heads of a KV head, after the reduction over queries in prefill, per
            step in decode.
        decode_update: Every decode step adds its reduced probabilities to the slots' scores.
        decode_replace: With `decode_update`: a step's probabilities replace the scores instead.
        track: Per-slot fields the store must keep (and bill): `score` (fp32) and `pos` (int32).
        probe: A second pass over every prompt, for statistics that look at `replays`.
    """

    statistic: Statistic = field(default_factory=Probability)
    prefill_queries: Annotated[int, Whole(ALL_QUERIES)] = 0
    slot_queries: Annotated[int, Whole(0)] = 0
    skip_near: Annotated[int, Whole(0)] = 0
    power: Annotated[int, Choice((1, 2))] = 1
    query_reduce: Literal["sum", "mean", "max"] = "sum"
    pool: Literal["none", "avg", "max"] = "none"
    pool_kernel: int = 1
    pool_stage: Literal["per_query_head", "after_group"] = "after_group"
    pool_region: Literal["prefix", "all"] = "prefix"
    group_reduce: Literal["sum", "mean", "max"] = "mean"
    decode_update: bool = False
    decode_replace: bool = False
    track: tuple[str, ...] = ()
    probe: Probe | None = None

    def __post_init__(self) -> None:
        check_settings(self)
        if self.pool != "none" and (self.pool_kernel < 1 or self.pool_kernel % 2 == 0):
            raise BrokenRule(f"pool_kernel={self.pool_kernel} must be odd and >= 1, so that the pool is centred")
        if unknown := set(self.track) - {"score", "pos"}:
            raise BrokenRule(f"track={sorted(unknown)} is unknown; the store can keep 'score' and 'pos'")
        if self.decode_update and "score" not in self.track:
            raise BrokenRule("decode_update=True needs track to hold 'score'")
        if self.decode_replace and not self.decode_update:
            raise BrokenRule("decode_replace=True needs decode_update=True: it says how a step updates the scores")
        if self.decode_update and self.query_reduce != "sum":
            raise BrokenRule(f"query_reduce={self.query_reduce!r} must be 'sum' with decode_update=True, which adds")
        if self.decode_update and self.skip_near and "pos" not in self.track:
            raise BrokenRule(f"skip_near={self.skip_near} with decode_update=True needs track to hold 'pos'")
        self._check_statistic()

    def _check_statistic(self) -> None:
        """Refuses what is no statistic, or does not fit the other settings."""
        kind = type(self.statistic)
        if not isinstance(self.statistic, Statistic):
            raise BrokenRule(f"statistic={shown(self.statistic)} is no Statistic; give an object of a subclass of it")
        if not getattr(kind.__dict__.get("__dataclass_params__"), "frozen", False):
            raise BrokenRule(
                f"statistic={kind.__name__} is not a frozen dataclass of its own, so that two of them cannot be told "
                "apart by their settings; put @dataclass(frozen=True) above the class"
            )
        if unknown := self.statistic.needs - set(NEEDS):
            raise BrokenRule(f"{kind.__name__}.needs={sorted(unknown)} is unknown; known are {', '.join(NEEDS)}")
        if ("replays" in self.statistic.needs) != (self.probe is not None):
            raise BrokenRule(
                f"probe={self.probe} does not go with {kind.__name__}.needs={sorted(self.statistic.needs)}: a second "
                "pass is made for a statistic that looks at 'replays', and for no other; set both or neither"
            )
        if self.slot_queries and not self.statistic.answers("of_slots"):
            raise BrokenRule(f"slot_queries={self.slot_queries} must be 0 unless {kind.__name__} defines of_slots")
        for name, value in self.statistic.requires.items():
            if getattr(self, name) != value:
                needed = ", ".join(f"{each}={wanted!r}" for each, wanted in self.statistic.requires.items())
                raise BrokenRule(f"{name}={getattr(self, name)!r} does not go with {kind.__name__}; set {needed}")

    @property
    def measures_prompts(self) -> bool:
        """True if a prompt's tokens get scores."""
        return self.prefill_queries != 0 or not self.statistic.by_queries

    @property
    def orders_channels(self) -> bool:
        """True if the channels of a prompt's keys are scored too, so that plans order them."""
        return self.statistic.answers("of_channels")

    @property
    def only_keys_and_values(self) -> bool:
        """True if a prompt's scores depend on its keys and values alone, so that they can be computed at any time."""
        return not (self.prefill_queries or self.slot_queries or self.statistic.needs - {"before_rope"})


@dataclass(frozen=True)
class Compaction:
    """Trigger of `Policy.plan_compact`, which evicts many tokens at once; subclasses override the rule.

    Args:
        every: Most tokens of a sequence that come in between two of them.
        from_start: The first one is before the first token after the prompt.
        when_full: The setting, as messages name it, by which there is one only where the pages that requests share run
            out; `due` is not called then. Empty = before the steps for which it is due.
    """

    every: int = 1
    from_start: bool = False
    when_full: str = ""

    def due(self, view: DecodeView) -> Tensor:
        """Mask bool [S] of the sequences that evict before this step.

        Default: after every `every` tokens past the prompt.
        """
        grown = view.tokens_seen - view.prompt_tokens
        due = grown % self.every == 0
        return due if self.from_start else due & (grown > 0)


@dataclass(frozen=True, kw_only=True)
class Residual:
    """A 16-bit buffer that new tokens pass through before they reach tier 0.

    Args:
        num_tokens: Length R, a multiple of the tier's token group.
        v_flush: `all`: values leave together with the keys when R are held; `oldest`: one value leaves whenever more
            than R are held.
        when: Flush after the attention of the step that filled the buffer, or before it (then the newest token is read
            quantised).
        hold_prompt: Prompt tokens stay in the buffer as KIVI does (N mod R tokens; of the values the last R when
            `v_flush` is `oldest`); otherwise only those that do not fill a group.
    """

    num_tokens: Annotated[int, Whole(1, unit="tokens")]
    v_flush: Literal["all", "oldest"] = "oldest"
    when: Literal["after_attention", "before_attention"] = "after_attention"
    hold_prompt: bool = True

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True, kw_only=True)
class ReadSpec:
    """Selection of the pages that decode steps read, for methods that keep every token and read some of them.

    Every page carries the smallest and the largest value of each key channel. A step reads the pages with the largest
    bound on a logit, sum over channels of max(q * smallest, q * largest), and always the newest page.

    Args:
        budget: Tokens read per KV head and step; a ratio refers to the prompt, a share of all tokens seen to those held
            in the step, the incoming one counted.
        page_tokens: Slots per page, a multiple of 8.
        min_pages: Pages read at least, >= 1.
        dense_layers: First layers that read everything.
        group_reduce: Reduction of the bounds of a KV head's query heads.
    """

    budget: Budget
    page_tokens: Annotated[int, Whole(8, multiple_of=8, unit="tokens")] = 16
    min_pages: Annotated[int, Whole(1)] = 3
    dense_layers: Annotated[int, Whole(0)] = 2
    group_reduce: Literal["mean", "max"] = "max"

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True, kw_only=True)
class CodeBooks:
    """Calibrated tables of a model for tiers of the codes `book_channels` (keys) and `book` (values).

    Args:
        keys: Per layer, the level of each key code, in ascending order and from 0 to 255.
        values: The same for value codes.
        scale: Per layer, for each channel of each KV head what a key's level is multiplied by.
        zero: Zero points, added after the scale, in the same form.
    """

    keys: tuple[tuple[int, ...], ...]
    values: tuple[tuple[int, ...], ...]
    scale: tuple[tuple[float, ...], ...]
    zero: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, kw_only=True)
class HeadScales:
    """Divisors of keys and values before they become 8-bit floats; multiplied back on reading.

    Args:
        keys: Per layer, one number for all of its keys, or one for each KV head; those of other formats do not count.
        values: The same for values, as many as `keys`.
    """

    keys: tuple[tuple[float, ...], ...]
    values: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, kw_only=True)
class TierTable:
    """Tiers that stand for a method's tier 0, layer by layer or head by head.

    Args:
        rows: One per layer: a tier, or one per KV head; empty = all have tier 0.
        named: Layer -> tier where it differs from that; negative layers count from the last.
        protected: As many, which overrides both.
    """

    rows: tuple[tuple[int, ...], ...]
    named: Mapping[int, int]
    protected: Mapping[int, int]

    def of_model(self, num_layers: int, num_kv_heads: int) -> tuple[tuple[int, ...], ...]:
        """The tier of every KV head of every layer.

        Raises:
            NotForModel: The model has another number of layers or heads.
        """
        rows = self.rows or ((0,),) * num_layers
        if len(rows) != num_layers:
            raise NotForModel(
                f"method.tiers_by_layer has {len(rows)} layers, but the model has {num_layers}; give one precision for "
                "each, or name the layers that differ, such as '0:fp16 -1:fp16'",
                setting="method.tiers_by_layer",
            )
        chosen = _counted("tiers_by_layer", self.named, num_layers)
        chosen |= _counted("protect_layers", self.protected, num_layers)
        by_layer = [(chosen[layer],) if layer in chosen else row for layer, row in enumerate(rows)]
        for layer, row in enumerate(by_layer):
            if len(row) not in (1, num_kv_heads):
                raise NotForModel(
                    f"method.tiers_by_layer has {len(row)} heads in layer {layer}, but the model has {num_kv_heads} KV "
                    "heads; give one precision for each, or one for all",
                    setting="method.tiers_by_layer",
                )
        return tuple(row * num_kv_heads if len(row) == 1 else row for row in by_layer)


def _counted(setting: str, layers: Mapping[int, int], num_layers: int) -> dict[int, int]:
    """Layers counted from the first.

    Raises:
        NotForModel: A layer does not exist, or is named twice.
    """
    tier_of: dict[int, int] = {}
    for layer, tier in layers.items():
        if not -num_layers <= layer < num_layers:
            raise NotForModel(
                f"method.{setting} names layer {layer}, but the model has layers 0 to {num_layers - 1}, of which -1 is "
                "the last; name one of these",
                setting=f"method.{setting}",
            )
        if layer % num_layers in tier_of:
            raise NotForModel(
                f"method.{setting} names layer {layer % num_layers} twice; name it once", setting=f"method.{setting}"
            )
        tier_of[layer % num_layers] = tier
    return tier_of
