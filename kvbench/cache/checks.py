"""Holds every plan of a policy to the rules, in every run, where the plan is carried out.

A slot past the end of its list belongs to another sequence; a tier that does not exist loses a token without a word.
Neither may reach the pages. What breaks a rule is a ValueError of one sentence: which class, when, and which rule.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from typing import TypeVar

import torch
from torch import Tensor

from kvbench.cache.pages import Pages
from kvbench.policy import APPEND, EVICT, CompactPlan, DecodePlan, DecodeView, Policy, PrefillPlan, PrefillView

Plan = TypeVar("Plan", PrefillPlan, DecodePlan, CompactPlan)
Moment = Callable[[], str]  # says when; asked only for a message, since the host would wait for the numbers in it


class CheckedPlans:
    """Asks a policy for its plans and refuses those that break a rule.

    On a CPU the values of a plan are looked at before it is carried out, so that a refusal has changed nothing. On
    another device the host does not wait for them: slots that may not be written are made new ones on the device, and
    the error comes with what else the host learns late (`Pages.counts`): when the next step begins, or when a row's
    report is asked for.
    """

    def __init__(self, policy: Policy, pages: Pages) -> None:
        self._policy, self._pages = policy, pages
        self._device = pages.table.num_slots.device

    # Plans.

    def prefill(self, view: PrefillView, score: Tensor | None) -> PrefillPlan:
        """The plan for a prompt.

        Args:
            score: fp32 [V, H, N] the view's statistics, or None.

        Raises:
            ValueError: It breaks a rule; where that shows only later, `Pages.counts` says so.
        """
        before = _versions(view)
        plan = self._policy.plan_prefill(view)
        when = _prompt(view)
        self._check_kind(plan, PrefillPlan, "plan_prefill", when)
        self._check_untouched(before, view, "plan_prefill", when)
        shape = (len(view.layers), view.num_kv_heads, view.num_tokens)
        tier_of, num_tiers = self._whole(plan.tier_of, "tier_of", shape, "plan_prefill", when), self._num_tiers
        most = tier_of.amax(-1)

        def judge(broken: Tensor, rule: str) -> None:
            # Statistics that are not finite come from the model, whose logits will show it; no plan can follow them.
            self._judge(broken, self._later("plan_prefill", when, rule), unless_spoilt=score)

        judge((tier_of.amin() < EVICT) | (most.amax() >= num_tiers), f"tier_of must hold {self._tiers_in_words}")
        judge(most < 0, "tier_of must keep at least one token of every head")
        if self._policy.position_mode == "pre_rope":
            moves = (tier_of < 0) | (tier_of != tier_of[:, :1])
            moves[..., 1:] |= tier_of[..., 1:] > tier_of[..., :-1]
            last = ", the first ones in later tiers and all heads alike" if self._num_tiers > 1 else " in tier 0"
            judge(moves, f"position_mode='pre_rope' must keep every token{last}")
        if plan.score is not None:
            self._check_tensor(plan.score, "score", shape, "plan_prefill", when)
            if not plan.score.is_floating_point():
                raise self._error("plan_prefill", when, f"score is {_dtype(plan.score)}, but it must be float32")
            judge(~torch.isfinite(plan.score), "score must be finite")
        if self._policy.score.orders_channels:
            dim = self._pages.formats[0].slot.head_dim
            order = self._whole(plan.channels, "channels", (*shape[:2], dim), "plan_prefill", when)
            each = torch.arange(dim, device=order.device)
            judge(order.long().sort(-1).values != each, "channels must name every key channel of a list once")
        elif plan.channels is not None:
            raise self._error("plan_prefill", when, "channels are ordered, but the method's statistic measures none")
        return plan

    def decode(self, view: DecodeView) -> DecodePlan:
        """The plan for a decode step.

        Raises:
            ValueError: It breaks a rule; where that shows only later, `Pages.counts` says so.
        """
        before = _versions(view)
        plan = self._policy.plan_decode(view)
        when = _step(view)
        self._check_kind(plan, DecodePlan, "plan_decode", when)
        self._check_untouched(before, view, "plan_decode", when)
        if type(plan.tier) is not int or not 0 <= plan.tier < self._num_tiers:
            last = self._num_tiers - 1
            raise self._error("plan_decode", when, f"tier={plan.tier!r}, but it must be a whole number of 0 to {last}")
        if plan.tier and self._policy.position_mode == "pre_rope":
            raise self._error("plan_decode", when, f"tier={plan.tier}, but position_mode='pre_rope' appends to tier 0")
        return self._check_slots(plan, view, when) if plan.slot is not None else plan

    def due(self, view: DecodeView) -> Tensor:
        """bool [S]: the sequences whose bulk eviction is due.

        Raises:
            ValueError: The policy answers with something else.
        """
        assert self._policy.compaction is not None, "the caller looked"
        due = self._policy.compaction.due(view)
        self._check_tensor(due, "the answer", (view.shape[0],), "compaction", _step(view))
        if due.dtype != torch.bool:
            raise self._error("compaction", _step(view), f"the answer is {_dtype(due)}, but it must be bool")
        return due

    def compact(self, view: DecodeView) -> CompactPlan:
        """The plan for a bulk eviction.

        Raises:
            ValueError: It breaks a rule.
        """
        before = _versions(view)
        plan, call, when = self._policy.plan_compact(view), "plan_compact", _compaction(view)
        self._check_kind(plan, CompactPlan, call, when)
        self._check_untouched(before, view, call, when)
        if not isinstance(plan.keep, list | tuple) or len(plan.keep) != self._num_tiers:
            found = f"{len(plan.keep)} entries" if isinstance(plan.keep, list | tuple) else _kind(plan.keep)
            raise self._error(call, when, f"keep is {found}, but it must be a list of one per tier ({self._num_tiers})")
        held = [view.num_slots(tier) for tier in range(self._num_tiers)]
        stays: list[Tensor] = []
        for tier, keep in enumerate(plan.keep):
            if keep is None:
                stays.append(held[tier] > 0)
            else:
                valid = view.slots(tier).valid
                self._check_tensor(keep, f"keep[{tier}]", tuple(valid.shape), call, when)
                if keep.dtype != torch.bool:
                    raise self._error(call, when, f"keep[{tier}] is {_dtype(keep)}, but it must be bool")
                stays.append((keep & valid).any(-1))
        # A list of one token may give it up: the incoming one takes its place.
        emptied = (reduce(torch.add, held) > 1) > reduce(torch.logical_or, stays)  # the first, and not the second
        rule = "keep must leave at least one token in every list that holds more than one"
        self._judge(emptied, self._later(call, when, rule))
        return plan

    def find(self, position: Tensor, view: DecodeView) -> None:
        """Refuses to look for a position (int64 [S]) that no token has yet.

        Raises:
            ValueError: Names the rule.
        """
        rule = "find looks for a position behind the incoming token's, which no slot can hold"
        self._judge(position > view.tokens_seen, self._later("plan_decode", _step(view), rule))

    # Rules.

    def _check_slots(self, plan: DecodePlan, view: DecodeView, when: Moment) -> DecodePlan:
        """Holds the slots of a step to its lists; the plan to carry out."""
        call = "plan_decode"
        slot = self._whole(plan.slot, "slot", view.shape, call, when)
        for name in ("demote_to", "demote_slot"):
            if (value := getattr(plan, name)) is not None:
                self._whole(value, name, view.shape, call, when)
        rules: list[tuple[Tensor, Moment]] = []
        if self._pages.on_device:  # values are looked at where the plan is carried out (`judge_step`)
            return plan
        held = view.num_slots(plan.tier)
        if self._policy.acts_in_decode:
            wrong = (slot < APPEND) | (slot >= held)
            rules.append((wrong, lambda: f"{_where(wrong, slot, held)}; a slot is APPEND (-1) or lies within its list"))
        else:
            wrong = slot != APPEND
            rules.append((wrong, lambda: _OVERWRITTEN))
        if plan.demote_to is not None:
            demote_to = plan.demote_to
            beyond = (demote_to < EVICT) | (demote_to >= self._num_tiers) | (demote_to == plan.tier)
            rules.append((beyond, lambda: f"demote_to must hold {self._targets_in_words}"))
            if plan.demote_slot is not None:
                rules.append(self._demoted(plan, slot, demote_to, view))
        broken = reduce(torch.logical_or, (broken for broken, _ in rules))
        if not self._pages.counts.is_late and not bool(broken.any()):
            return plan
        for each, rule in rules:
            self._judge(each, lambda rule=rule: self._error(call, when, rule()))  # type: ignore[misc]
        return replace(plan, slot=torch.where(broken, APPEND, slot))  # a new slot harms nobody

    def _demoted(self, plan: DecodePlan, slot: Tensor, demote_to: Tensor, view: DecodeView) -> tuple[Tensor, Moment]:
        """The lists in which a demoted token takes a slot that does not exist in its new tier."""
        target = plan.demote_slot
        assert target is not None
        held = torch.zeros_like(slot)
        for tier in range(self._num_tiers):
            if tier != plan.tier:
                held = torch.where(demote_to == tier, view.num_slots(tier), held)
        wrong = ((target < APPEND) | (target >= held)) & (slot != APPEND) & (demote_to != EVICT)
        return wrong, lambda: f"demote_{_where(wrong, target, held)}; it is APPEND (-1) or lies within its list"

    def _check_kind(self, plan: Plan, kind: type[Plan], call: str, when: Moment) -> None:
        if not isinstance(plan, kind):
            raise self._error(call, when, f"it returned {_kind(plan)}, but it must return a {kind.__name__}")

    def _check_untouched(self, before: dict[str, int], view: object, call: str, when: Moment) -> None:
        # What the view looked up meanwhile was new then.
        if any(version != before.get(name, 0) for name, version in _versions(view).items()):
            raise self._error(call, when, "it changed a tensor of its view in place, which others read; clone it first")

    def _check_tensor(self, value: object, name: str, shape: tuple[int, ...], call: str, when: Moment) -> None:
        if not isinstance(value, Tensor):
            raise self._error(call, when, f"{name} is {_kind(value)}, but it must be a tensor")
        if value.shape != shape:
            raise self._error(call, when, f"{name} has the shape {tuple(value.shape)}, but it must have {shape}")
        if value.device != self._device:
            raise self._error(call, when, f"{name} lies on {value.device}, but it must lie on {self._device}")

    def _whole(self, value: Tensor | None, name: str, shape: tuple[int, ...], call: str, when: Moment) -> Tensor:
        """The value, once it is a tensor of whole numbers of that shape."""
        self._check_tensor(value, name, shape, call, when)
        assert value is not None
        if value.dtype not in WHOLE:
            raise self._error(call, when, f"{name} is {_dtype(value)}, but it must hold integers")
        return value

    @property
    def _targets_in_words(self) -> str:
        return f"{self._tiers_in_words}, and no token goes to the tier that it leaves"

    # Errors.

    @property
    def _num_tiers(self) -> int:
        return self._pages.num_planned

    @property
    def _tiers_in_words(self) -> str:
        last = self._num_tiers - 1
        return f"EVICT (-1) or tier 0{f' to {last}' if last else ''}, the tiers of the method"

    def _judge(self, broken: Tensor, error: Callable[[], ValueError], unless_spoilt: Tensor | None = None) -> None:
        """Raises where an entry of `broken` is True, now or later; never where `unless_spoilt` is not finite."""
        flag, counts = broken.any(), self._pages.counts
        if not counts.is_late:
            if bool(flag) and (unless_spoilt is None or bool(torch.isfinite(unless_spoilt).all())):
                raise error()
            return
        if unless_spoilt is not None:
            flag = flag & torch.isfinite(unless_spoilt).all()

        def receive(values: list[int]) -> None:
            if any(values):
                raise error()

        counts.post(flag, lambda: receive)

    def judge_step(self, view: DecodeView) -> Callable[[Tensor], None]:
        """A taker of the rules that a step's plan broke, as `PageTable.take` finds them on a device."""
        rules = (
            "a slot is APPEND (-1) or lies within its list, and one that was named does not"
            if self._policy.acts_in_decode
            else _OVERWRITTEN,
            f"demote_to must hold {self._targets_in_words}",
            "demote_slot is APPEND (-1) or lies within its list, and one that was named does not",
        )
        when = _step(view)

        def receive(broken: list[int]) -> None:
            for is_broken, rule in zip(broken, rules, strict=True):
                if is_broken:
                    raise self._error("plan_decode", when, rule)

        return lambda broken: self._pages.counts.post(broken, lambda: receive)

    def _later(self, call: str, when: Moment, rule: str) -> Callable[[], ValueError]:
        return lambda: self._error(call, when, rule)

    def _error(self, call: str, when: Moment, rule: str) -> ValueError:
        return ValueError(f"{type(self._policy).__name__}.{call}, {when()}: {rule}")


_OVERWRITTEN = "a slot is overwritten, which a method with acts_in_decode=False must not do"
WHOLE = frozenset((torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8))


def _versions(view: object) -> dict[str, int]:
    """The number of times that each tensor of a view was written to; one made in inference mode does not count."""
    tensors = {name: x for name, x in vars(view).items() if isinstance(x, Tensor)}
    return {name: x._version for name, x in tensors.items() if not x.is_inference()}


def _prompt(view: PrefillView) -> Moment:
    def when() -> str:
        first, *rest = view.layers.tolist()
        layers = f"layers {first} to {rest[-1]}" if rest else f"layer {first}"
        return f"prompt of {view.num_tokens} tokens, {layers}"

    return when


def _step(view: DecodeView) -> Moment:
    return lambda: f"decode step at token {int(view.tokens_seen.max())}"


def _compaction(view: DecodeView) -> Moment:
    return lambda: f"compaction at token {int(view.tokens_seen.max())}"


def _where(wrong: Tensor, slot: Tensor, held: Tensor) -> str:
    """The first slot that is wrong, and what its list holds."""
    at = tuple(wrong.nonzero()[0].tolist())
    return f"slot {int(slot[at])} was named of a list (layer {at[1]}, head {at[2]}) that holds {int(held[at])}"


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _kind(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
