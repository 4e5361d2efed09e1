"""The base class of all methods."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from kvbench.policy.budget import Budget
from kvbench.policy.declare import CodeBooks, ReadSpec, Residual, ScoreSpec, TierTable
from kvbench.policy.plans import CompactPlan, DecodePlan, PrefillPlan
from kvbench.policy.tiers import Tier
from kvbench.policy.views import DecodeView, PrefillView
from kvbench.rules import check_settings, checked_first


class Declarations:
    """What a method declares: plain attributes, whose defaults suit a method that only decides about the prompt.

    A method assigns those that differ: in its class body (`scope = "layer"`) when they hold whatever its settings are,
    in `__post_init__` (`self.tiers = (Tier.parse(self.tier),)`) when they follow from its settings.

    Declarations are not settings: no YAML file lists them. This class is therefore not a dataclass, so that `Policy`
    and its subclasses, which are, do not take these annotations for fields. A method that leaves one of them to its
    user annotates it again and so makes a setting of it, as H2O does with `granularity`.

    Attributes:
        tiers: One to four precision formats; tier 0 takes new tokens.
        by_layer: Which of `tiers` tier 0 stands for in each layer and head (`ByLayer` makes it); plans then know no
            other tier than 0. None = each tier is what it is everywhere.
        codebooks: The tables of tiers whose codes are calibrated, which lie beside the pages; None = there are no such.
        score: The attention statistics that the method needs; none by default.
        reading: Which pages decode steps read; None = all of them.
        residual: The 16-bit buffer in front of tier 0; None = no buffer.
        scope: Whether tokens compete within a `head`, a `layer` or the whole `model`. A view of a prompt holds all
            layers for `model`, otherwise one.
        position_mode: How keys are stored: `absolute` with the rotary position of their token; `cache_relative` without
            it, and rotated to their index in the cache when they are read (see `cache_positions`); `pre_rope` without
            it, and rotated to their token's position when they are read: tokens stay where they are written, and
            where there are several tiers, the first ones of a prompt lie in the later tiers, in all heads alike.
        granularity: `kv_head`, or `q_head`, which stores every query head's copy and is billed for it.
        acts_in_decode: `plan_decode` may displace a token; question segments are then fed token by token.
        compact_every: Decode steps of a sequence between calls of `plan_compact`; 0 = never called. A method that
            defines `compact_due` sets 1 and says there before which steps.
        needs_instruction: The method asks how many first tokens of a prompt are its instruction.
        in_chunks: Its plan for a prompt may be made again and again while the prompt is read (`prefill.chunk`).
        budget_is_mean: The budget is a mean over lists; otherwise every list has to keep to it.
        budget_step: Budgets are rounded up to a multiple of so many tokens.
        fewest_tokens: The smallest budget that the method keeps to, in tokens per list.
    """

    tiers: tuple[Tier, ...] = (Tier(),)
    by_layer: TierTable | None = None
    codebooks: CodeBooks | None = None
    score: ScoreSpec = ScoreSpec()
    reading: ReadSpec | None = None
    residual: Residual | None = None
    scope: Literal["head", "layer", "model"] = "head"
    position_mode: Literal["absolute", "cache_relative", "pre_rope"] = "absolute"
    granularity: Literal["kv_head", "q_head"] = "kv_head"
    acts_in_decode: bool = False
    compact_every: int = 0
    needs_instruction: bool = False
    in_chunks: bool = True
    budget_is_mean: bool = False
    budget_step: int = 1
    fewest_tokens: int = 1


@dataclass(kw_only=True)
class Policy(Declarations):
    """A cache compression method: a dataclass whose fields are its settings, the keys of its YAML file.

    It declares what it needs (`Declarations`) and answers what becomes of the tokens (`plan_prefill`, `plan_decode`,
    `plan_compact`). Each field's annotation says what the setting may be (`kvbench.rules`); it is checked before the
    method's own `__post_init__` runs, which is left with what concerns several settings together.
    """

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        if (own := cls.__dict__.get("__post_init__")) is not None:
            setattr(cls, "__post_init__", checked_first(own))  # noqa: B010 - a method cannot forget what it does not call

    def __post_init__(self) -> None:
        check_settings(self)

    def check_model(self, num_layers: int, num_kv_heads: int) -> None:
        """Refuses a model that the method's settings do not fit, before anything is read. Default: fits all.

        Raises:
            ValueError: With what would fit.
        """

    def max_slots(self, num_prompt_tokens: int, num_new_tokens: int) -> int:
        """Upper bound on the slots of one list over all tiers, for sizing page tables. Default: every token."""
        return num_prompt_tokens + num_new_tokens

    @property
    def byte_budget(self) -> Budget | None:
        """The method's budget (`self._budget`), where it is in bytes: the cache then says how many tokens that is."""
        budget = getattr(self, "_budget", None)
        return budget if budget is not None and budget.unit == "bytes" else None

    def least_tokens(self, num_prompt_tokens: int) -> int:
        """The smallest budget that the method keeps to behind such a prompt, in tokens per list. Default:
        `fewest_tokens`."""
        return self.fewest_tokens

    def most_tokens(self, budget: int, num_prompt_tokens: int, num_new_tokens: int) -> int:
        """Most tokens that a list (the mean one, where lists share a budget) comes to hold, for budgets in bytes.

        Default: what stays of the prompt and every token behind it; with `acts_in_decode` one token beyond the budget,
        and with `compact_every` those that come in before the next eviction.

        Args:
            budget: Tokens per list that the budget allows.
            num_prompt_tokens: The prompt's.
            num_new_tokens: Those read behind it.
        """
        everything = num_prompt_tokens + num_new_tokens
        if self.acts_in_decode or self.compact_every:
            return min(everything, budget + min(num_new_tokens, max(1, self.compact_every)))
        return min(budget, num_prompt_tokens) + num_new_tokens

    @property
    def prompt_only(self) -> bool:
        """Whatever follows the prompt is kept whole and in 16 bits, and all of it is read."""
        new = self.tiers if self.by_layer is not None else self.tiers[:1]
        whole = all(tier.native or tier.k_bits == tier.v_bits == 16 for tier in new)
        acts = self.acts_in_decode or self.compact_every or self.reading is not None or self.residual is not None
        return whole and not acts

    def plan_prefill(self, view: PrefillView) -> PrefillPlan:
        """Decides where the prompt's tokens go. Default: all to tier 0."""
        return PrefillPlan(tier_of=view.filled(0))

    def plan_decode(self, view: DecodeView) -> DecodePlan:
        """Decides one decode step. Default: append to tier 0 everywhere."""
        return DecodePlan()

    def compact_due(self, view: DecodeView) -> Tensor:
        """bool [S]: sequences for which `plan_compact` comes before this step; only asked when `compact_every` > 0.

        Default: every `compact_every` tokens behind the prompt.
        """
        grown = view.tokens_seen - view.prompt_tokens
        return (grown > 0) & (grown % self.compact_every == 0)

    def plan_compact(self, view: DecodeView) -> CompactPlan:
        """Decides a bulk eviction for the sequences that `compact_due` named."""
        raise NotImplementedError(f"{type(self).__name__} sets compact_every but does not define plan_compact")

    def cache_positions(self, view: DecodeView, num_slots: int) -> Tensor:
        """int64 [S, num_slots]: each slot's index in the cache by age, the incoming token included; only for
        `cache_relative` methods.

        Args:
            view: The view that the step was planned from.
            num_slots: Slots to number; those past the end may hold anything.
        """
        raise NotImplementedError(f"{type(self).__name__} is cache_relative but does not define cache_positions")

    def check_outcome(self, record: dict) -> str | None:
        """Says what is wrong when a journal record shows that the method did not do its work, else None."""
        return None

    def remark(self, records: Sequence[dict]) -> str:
        """What readers of a run should know of what the method did, from its journal records. Default: nothing."""
        return ""

    def budget_complaint(
        self,
        record: dict,
        budget: Budget,
        *,
        at_least: int = 1,
        mean: bool = False,
        block: int = 1,
        spare_pages: int = 0,
        unspent: int = 0,
        at_end: int | None = None,
    ) -> str | None:
        """What is wrong when a record holds more prompt tokens than a budget allows, or over a page per list fewer.

        Args:
            record: A journal record.
            budget: What was asked.
            at_least: Tokens per list that the method keeps whatever the budget says.
            mean: The budget is a mean over lists; otherwise every list has to keep to it.
            block: The budget is rounded up to whole blocks of so many tokens.
            spare_pages: Pages per list that may be spent beyond the budget, for released code that rounds.
            unspent: Tokens per list that may be missing where that is more than a page.
            at_end: When not None, the sequence's last state must keep to the budget too, with this many tokens per list
                to spare.

        Returns:
            One line, or None when the budget was met.
        """
        kept = record.get("kept", {})
        if not kept:
            return None
        lists, prompt, page = kept["lists"], kept["prompt_tokens"], kept["page_tokens"]
        given = kept.get("budget_tokens") or budget.tokens(prompt, lists, kept["slot_bytes"])
        limit = max(at_least, -(-given // block) * block)
        allowed, average = min(prompt, limit), kept["prompt_slots"] / lists
        most = average if mean else kept["prompt_slots_max"]
        asked = f"the budget {budget.value:g} {budget.unit} allows"
        # Of a prompt that was read in chunks, what an early plan dropped cannot come back when shares move.
        least = 0 if kept.get("prompt_chunks", 1) > 1 else allowed - max(page, block, unspent)
        if most > allowed + spare_pages * page or average < least:
            return f"a head kept {most:g} of {prompt} prompt tokens ({average:g} on average), but {asked} {allowed}"
        resident = record.get("ledger", {}).get("resident_bytes", 0)
        if budget.unit == "bytes" and resident > budget.value:
            return f"{resident} bytes held at the end, but the budget allows {budget.value:g}"
        held = sum(kept["slots_per_tier"]) / lists if at_end is not None else 0
        if at_end is not None and held > limit + at_end:
            return f"{held:g} tokens per head held at the end, but {asked} {limit + at_end}"
        return None

    def share_complaint(
        self,
        record: dict,
        budget: Budget,
        window: int,
        *,
        at_least: int = 1,
        mean: bool = False,
        spare_pages: int = 0,
        unspent: int = 0,
    ) -> str | None:
        """`budget_complaint` of a method that evicts by `shrink_to_share`: after the prompt, and at the end where it
        also evicts while decoding."""
        complaint = self.budget_complaint(
            record, budget, at_least=at_least, mean=mean, spare_pages=spare_pages, unspent=unspent
        )
        kept = record.get("kept", {})
        if complaint or not kept or not self.compact_every:
            return complaint
        held = sum(kept["slots_per_tier"]) / kept["lists"]
        given = kept.get("budget_tokens") or budget.tokens(kept["tokens_seen"], kept["lists"], kept["slot_bytes"])
        share = max(window, given)
        limit = share + self.compact_every + spare_pages * kept["page_tokens"]
        if held <= limit:
            return None
        return f"{held:g} tokens per head held at the end, but the budget {budget.value:g} {budget.unit} allows {limit}"
