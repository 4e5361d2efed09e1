"""The base class of all methods."""

from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from kvbench.errors import SettingValue
from kvbench.policy.bounds import Bounds, Extent
from kvbench.policy.budget import Budget, BudgetRule
from kvbench.policy.declare import CodeBooks, Compaction, HeadScales, ReadSpec, Residual, ScoreSpec, TierTable
from kvbench.policy.plans import CompactPlan, DecodePlan, PrefillPlan
from kvbench.policy.tiers import Tier
from kvbench.policy.views import DecodeView, PrefillView
from kvbench.rules import check_settings, declared


def _declared(default: Any) -> Any:
    """A field that no constructor takes, and that neither `==` nor `repr` looks at."""
    return field(init=False, repr=False, compare=False, default=default)


@dataclass(kw_only=True)
class Policy:
    """A cache compression method: a dataclass whose fields are its settings, the keys of its YAML file.

    It declares what it needs, and answers what becomes of the tokens (`plan_prefill`, `plan_decode`, `plan_compact`).
    Each setting's annotation says what it may be (`kvbench.rules`). All settings are checked before `declare` is
    called, which is left with what concerns several together.

    The attributes below are what a method declares; their defaults suit a method that only decides about the prompt. A
    method assigns those that differ: in its class body (`scope = "layer"`) when they hold whatever its settings are, in
    `declare` (`self.tiers = (Tier.parse(self.tier),)`) when they follow from its settings. They are fields that no
    constructor takes. A method that leaves one of them to its user, as H2O does with `granularity`, redefines it as a
    plain field, which makes a setting of it.

    Attributes:
        tiers: One to four precision formats; tier 0 takes new tokens.
        by_layer: The one of `tiers` that tier 0 stands for in each layer and head (`ByLayer` makes it); plans then have
            no other tier than 0. None = each tier is what it is everywhere.
        codebooks: Tables of tiers with calibrated codes, stored outside the pages; None = no such tiers.
        head_scales: Scales of tiers of 8-bit floats, from such a file too.
        score: The attention statistics that the method needs; none by default.
        limit: The budget, of which the cache says how many tokens it allows; None = the method has none.
        reading: Pages that decode steps read; None = all of them.
        residual: The 16-bit buffer in front of tier 0; None = no buffer.
        scope: Whether tokens compete within a `head`, a `layer` or the whole `model`. A view of a prompt holds all
            layers for `model`, otherwise one.
        position_mode: Form of stored keys: `absolute` with the rotary position of their token; `cache_relative` without
            it, and rotated to their index in the cache when they are read (see `cache_positions`); `pre_rope` without
            it, and rotated to their token's position when they are read: tokens stay where they are written, and
            where there are several tiers, the first ones of a prompt lie in the later tiers, in all heads alike.
        granularity: `kv_head`, or `q_head`, which stores every query head's copy and is billed for it.
        acts_in_decode: `plan_decode` may displace a token; question segments are then fed token by token.
        compaction: Before which steps `plan_compact` evicts in bulk, or that it does where pages run out; None = never.
        needs_instruction: The method reads how many first tokens of a prompt are its instruction.
        needs_prompt_slots: `plan_decode` reads each list's slots from the prompt's plan, as `plan_compact` may anyhow.
        no_upkeep: Why the method cannot keep to a share of all tokens seen while an answer grows (`50%seen`), as the
            end of `it ...`; empty = it does.
        in_chunks: Its plan for a prompt may be made again and again while the prompt is read (`prefill.chunk`).
        chooses_bits: The method chooses the bits of a token, so that a run reports their average.
        budget_is_mean: The budget is a mean over lists; otherwise every list has to keep to it.
        budget_step: Budgets are rounded up to a multiple of so many tokens.
        fewest_tokens: The smallest budget that the method keeps to, in tokens per list.
    """

    tiers: tuple[Tier, ...] = _declared((Tier(),))
    by_layer: TierTable | None = _declared(None)
    codebooks: CodeBooks | None = _declared(None)
    head_scales: HeadScales | None = _declared(None)
    score: ScoreSpec = _declared(ScoreSpec())
    limit: Budget | None = _declared(None)
    reading: ReadSpec | None = _declared(None)
    residual: Residual | None = _declared(None)
    scope: Literal["head", "layer", "model"] = _declared("head")
    position_mode: Literal["absolute", "cache_relative", "pre_rope"] = _declared("absolute")
    granularity: Literal["kv_head", "q_head"] = _declared("kv_head")
    acts_in_decode: bool = _declared(False)
    compaction: Compaction | None = _declared(None)
    needs_instruction: bool = _declared(False)
    needs_prompt_slots: bool = _declared(False)
    no_upkeep: str = _declared("has no rule for what leaves while an answer grows")
    in_chunks: bool = _declared(True)
    chooses_bits: bool = _declared(False)
    budget_is_mean: bool = _declared(False)
    budget_step: int = _declared(1)
    fewest_tokens: int = _declared(1)

    def __post_init__(self) -> None:
        check_settings(self, group="method.")
        self._check_upkeep()
        self.declare()

    def _check_upkeep(self) -> None:
        """Refuses a share of all tokens seen where the method cannot keep to it."""
        for name, field_ in declared(type(self)).items():
            value = getattr(self, name)
            if self.no_upkeep and isinstance(field_.rule, BudgetRule) and value is not None:
                budget = Budget.parse(value, name)
                if budget.of_seen:
                    raise SettingValue(
                        f"{name}={value} is a share of all tokens seen, which {type(self).__name__} cannot keep to: it "
                        f"{self.no_upkeep}; give a ratio of the prompt, such as {budget.value:g}, or another method",
                        setting=f"method.{name}",
                    )

    def declare(self) -> None:
        """Refuses settings that do not go together, and assigns what follows from the others. Default: nothing.

        Raises:
            ValueError: Names the settings, the rule and the remedy.
        """

    def check_model(self, num_layers: int, num_kv_heads: int) -> None:
        """Refuses a model that the method's settings do not fit, before anything is read. Default: fits all.

        Raises:
            ValueError: With what would fit.
        """

    # How many tokens it holds.

    def max_slots(self, num_prompt_tokens: int, num_new_tokens: int) -> int:
        """Upper bound on the slots of one list over all tiers, for sizing page tables. Default: every token."""
        return num_prompt_tokens + num_new_tokens

    @property
    def byte_budget(self) -> Budget | None:
        """The budget, where it is in bytes: the cache then says how many tokens that is."""
        return self.limit if self.limit is not None and self.limit.unit == "bytes" else None

    def least_tokens(self, num_prompt_tokens: int) -> int:
        """Smallest budget that the method can keep to after such a prompt, in tokens per list.

        Default: `fewest_tokens`.
        """
        return self.fewest_tokens

    def most_tokens(self, budget: int, num_prompt_tokens: int, num_new_tokens: int) -> int:
        """Most tokens that a list (the mean one, where lists share a budget) comes to hold, for budgets in bytes.

        Default: what stays of the prompt and every token after it; with `acts_in_decode` one token beyond the budget,
        and with `compaction` those that come in before the next eviction.

        Args:
            budget: Tokens per list that the budget allows.
            num_prompt_tokens: The prompt's.
            num_new_tokens: Those read after it.
        """
        everything = num_prompt_tokens + num_new_tokens
        compaction = self.compaction if self.compaction is not None and not self.compaction.when_full else None
        if self.acts_in_decode or compaction is not None:
            return min(everything, budget + min(num_new_tokens, compaction.every if compaction else 1))
        return min(budget, num_prompt_tokens) + num_new_tokens

    def bounds(self, extent: Extent) -> Bounds | None:
        """Bounds on the tokens that a sequence of these lengths may hold at its end; a run outside them fails.

        Default: of the prompt, on average, a page more than a setting `budget`, or else `limit`, allows; unbounded
        without one.
        """
        value = getattr(self, "budget", None)
        try:
            budget = self.limit if value is None else Budget.parse(value)
        except ValueError:  # a setting of that name that says something else
            budget = self.limit
        if budget is None:
            return None
        allowed = extent.allowed(budget, extent.prompt_tokens)
        why = f"the budget {budget.text} is {allowed} tokens, and with a page to spare allows"
        return Bounds(why=why, prompt_mean=(0, allowed + extent.page_tokens))

    @property
    def prompt_only(self) -> bool:
        """True if everything after the prompt is kept whole and in 16 bits, and all of it is read."""
        new = self.tiers if self.by_layer is not None else self.tiers[:1]
        whole = all(tier.native or tier.k_bits == tier.v_bits == 16 for tier in new)
        acts = self.acts_in_decode or any((self.compaction, self.reading, self.residual))
        return whole and not acts

    # Decisions about tokens.

    def plan_prefill(self, view: PrefillView) -> PrefillPlan:
        """Decides where the prompt's tokens go. Default: all to tier 0."""
        return PrefillPlan(tier_of=view.filled(0))

    def plan_decode(self, view: DecodeView) -> DecodePlan:
        """Decides one decode step. Default: append to tier 0 everywhere."""
        return DecodePlan()

    @property
    def decides_steps(self) -> bool:
        """True if `plan_decode` may decide anything but the default."""
        return type(self).plan_decode is not Policy.plan_decode

    def plan_compact(self, view: DecodeView) -> CompactPlan:
        """Decides a bulk eviction for sequences whose `compaction` is due, or for all decoded ones out of pages."""
        raise NotImplementedError(f"{type(self).__name__} sets compaction but does not define plan_compact")

    def cache_positions(self, view: DecodeView, num_slots: int) -> Tensor:
        """Each slot's index in the cache by age, int64 [S, num_slots], the incoming token included.

        Only for `cache_relative` methods.

        Args:
            view: The view that the step was planned from.
            num_slots: Slots to number; those past the end may hold anything.
        """
        raise NotImplementedError(f"{type(self).__name__} is cache_relative but does not define cache_positions")
