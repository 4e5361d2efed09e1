"""Checks every plan of a policy against the rules before it is carried out.

A slot past the end of its list belongs to another sequence; a tier that does not exist loses a token without a word.
Neither may reach the pages. A broken rule raises a ValueError of one sentence: which class, when, and which rule.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, reduce
from typing import Any, TypeVar

import torch
from torch import Tensor

from kvbench.cache.pages import Pages
from kvbench.cache.replay_check import NOISE, RULE, ReplayCheck, differ
from kvbench.cache.view import SlotsView
from kvbench.errors import BrokenRule, call_of
from kvbench.kernels.memory import is_out_of_memory
from kvbench.policy import APPEND, EVICT, CompactPlan, DecodePlan, DecodeView, Policy, PrefillPlan, PrefillView
from kvbench.rules import modes

Plan = TypeVar("Plan", PrefillPlan, DecodePlan, CompactPlan)
Rule = str | Callable[[], str]
Sound = Callable[[], Tensor] | None  # says whether statistics are all finite, bool [], and looks once

_OVERWRITTEN = "a slot is overwritten, which a method with acts_in_decode=False must not do"
_OURS = "kvbench.methods."  # whose plans change no mode, which spares the look
_WHOLE = frozenset((torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8))


class _PolicyCall:
    """A call of a policy about a view: checks the form of the answer, and names class, call and moment in errors."""

    def __init__(self, policy: Policy, call: str, view: PrefillView | DecodeView, device: torch.device) -> None:
        self._policy, self.call, self.view, self._device = policy, call, view, device
        self._modes = None if type(policy).__module__.startswith(_OURS) else modes.read(quick=True)

    def see(self) -> Any:
        """Copy of the view that the policy gets."""
        self._shown = self.view.shown()
        self._before = _versions(self._shown)
        return self._shown

    def error(self, rule: Rule) -> ValueError:
        """The error about a rule; the moment is read only now, since that synchronises."""
        said = rule if isinstance(rule, str) else rule()
        return BrokenRule(f"{call_of(self._policy, self.call)}, {self._moment()}: {said}")

    def _moment(self) -> str:
        view = self.view
        if isinstance(view, DecodeView):
            moment = "compaction" if self.call == "plan_compact" else "decode step"
            return f"{moment} at token {int(view.tokens_seen.max())}"
        first, *rest = view.layers.tolist()
        layers = f"layers {first} to {rest[-1]}" if rest else f"layer {first}"
        return f"prompt of {view.num_tokens} tokens, {layers}"

    def plan(self, plan: Plan, kind: type[Plan]) -> Plan:
        """The plan, once it is one and the view is as it was."""
        if not isinstance(plan, kind):
            raise self.error(f"it returned {_kind(plan)}, but it must return a {kind.__name__}")
        self.check_modes()
        # The view's lookups since then were new.
        if any(version != self._before.get(name, 0) for name, version in _versions(self._shown).items()):
            raise self.error("it changed a tensor of its view in place, which others read; clone it first")
        return plan

    def check_modes(self) -> None:
        """Refuse that a method of the user's own changes how the numbers of others come out."""
        if self._modes is not None and (changed := modes.changed_since(self._modes)):
            raise self.error(f"it {modes.rule(changed)}")

    def tensor(self, value: object, name: str, shape: tuple[int, ...]) -> Tensor:
        """The value, once it is a tensor of that shape where plans are made."""
        if not isinstance(value, Tensor):
            raise self.error(f"{name} is {_kind(value)}, but it must be a tensor")
        if value.layout != torch.strided or value.is_nested:
            raise self.error(f"{name} is sparse or nested, but it must be a dense tensor")
        if value.shape != shape:
            raise self.error(f"{name} has the shape {tuple(value.shape)}, but it must have {shape}")
        if value.device != self._device:
            raise self.error(f"{name} lies on {value.device}, but it must lie on {self._device}")
        return value

    def whole(self, value: object, name: str, shape: tuple[int, ...]) -> Tensor:
        """The value, checked as by `tensor`, of an integer dtype."""
        tensor = self.tensor(value, name, shape)
        if tensor.dtype not in _WHOLE:
            raise self.error(f"{name} is {_dtype(tensor)}, but it must hold integers")
        return tensor

    def mask(self, value: object, name: str, shape: tuple[int, ...]) -> Tensor:
        """The value, checked as by `tensor`, of dtype bool."""
        tensor = self.tensor(value, name, shape)
        if tensor.dtype != torch.bool:
            raise self.error(f"{name} is {_dtype(tensor)}, but it must be bool")
        return tensor


class CheckedPlans:
    """Asks a policy for its plans and refuses those that break a rule.

    On a CPU the values of a plan are looked at before it is carried out, so that a refusal has changed nothing. On
    another device the host does not wait for them: slots that may not be written are made new ones on the device, and
        the error comes with the other asynchronous counts (`Pages.counts`): when the next step begins, or with a row's
        report.
    """

    def __init__(self, policy: Policy, pages: Pages) -> None:
        self._policy, self._pages = policy, pages
        self.second: ReplayCheck[Policy] | None = None
        last = pages.num_planned - 1
        self._tiers = f"EVICT (-1) or tier 0{f' to {last}' if last else ''}, the tiers of the method"
        self._demote_rule = f"demote_to must hold {self._tiers}, and no token goes to the tier that it leaves"

    def _ask(self, call: str, view: PrefillView | DecodeView) -> _PolicyCall:
        return _PolicyCall(self._policy, call, view, self._pages.table.num_slots.device)

    def prefill(self, view: PrefillView, score: Tensor | None, begins: bool = True) -> PrefillPlan:
        """Plan for a prompt; `score` fp32 [V, H, N] is the view's statistics, or None.

        `begins` says whether these are the first of its layers.

        Raises:
            ValueError: It breaks a rule; where that shows only later, `Pages.counts` says so.
        """
        call, pages = self._ask("plan_prefill", view), self._pages
        plan = call.plan(self._policy.plan_prefill(call.see()), PrefillPlan)
        shape = (len(view.layers), view.num_kv_heads, view.num_tokens)
        tier_of = call.whole(plan.tier_of, "tier_of", shape)
        most, (lowest, highest) = tier_of.amax(-1), tier_of.aminmax()

        # Statistics that are not finite come from the model, whose logits will show it; no plan can follow them.
        sound = None if score is None else cache(lambda: torch.isfinite(score).all())

        def judge(broken: Tensor, rule: str) -> None:
            self._judge(call, broken, rule, sound)

        judge((lowest < EVICT) | (highest >= pages.num_planned), f"tier_of must hold {self._tiers}")
        judge(most < 0, "tier_of must keep at least one token of every head")
        if self._policy.position_mode == "pre_rope":
            moves = (tier_of < 0) | (tier_of != tier_of[:, :1])
            moves[..., 1:] |= tier_of[..., 1:] > tier_of[..., :-1]
            last = ", the first ones in later tiers and all heads alike" if pages.num_planned > 1 else " in tier 0"
            judge(moves, f"position_mode='pre_rope' must keep every token{last}")
        if plan.score is not None:
            plan_score = call.tensor(plan.score, "score", shape)
            if not plan_score.is_floating_point():
                raise call.error(f"score is {_dtype(plan_score)}, but it must be float32")
            judge(~torch.isfinite(plan_score), "score must be finite")
        if self._policy.score.orders_channels:
            dim = pages.formats[0].slot.head_dim
            order = call.whole(plan.channels, "channels", (*shape[:2], dim))
            each = torch.arange(dim, device=order.device)
            judge(order.long().sort(-1).values != each, "channels must name every key channel of a list once")
        elif plan.channels is not None:
            raise call.error("channels are ordered, but the method's statistic measures none")
        self._check_replay(call, plan, lambda other, shown: other.plan_prefill(shown), begins, sound)
        return plan

    def decode(self, view: DecodeView) -> DecodePlan:
        """The plan for a decode step; raises what `prefill` does."""
        call, last = self._ask("plan_decode", view), self._pages.num_planned - 1
        plan = call.plan(self._policy.plan_decode(call.see()), DecodePlan)
        if type(plan.tier) is not int or not 0 <= plan.tier <= last:
            raise call.error(f"tier={plan.tier!r}, but it must be a whole number of 0 to {last}")
        if plan.tier and self._policy.position_mode == "pre_rope":
            raise call.error(f"tier={plan.tier}, but position_mode='pre_rope' appends to tier 0")
        self._check_replay(call, plan, lambda other, shown: other.plan_decode(shown))
        return self._check_slots(call, plan, view) if plan.slot is not None else plan

    def due(self, view: DecodeView) -> Tensor:
        """Mask bool [S] of the sequences whose bulk eviction is due; raises ValueError for another answer."""
        call = self._ask("compaction", view)
        assert self._policy.compaction is not None, "the caller looked"
        due = call.mask(self._policy.compaction.due(call.see()), "the answer", (view.shape[0],))
        call.check_modes()
        self._check_replay(call, due, lambda other, shown: other.compaction and other.compaction.due(shown))
        return due

    def compact(self, view: SlotsView) -> CompactPlan:
        """The plan for a bulk eviction; raises what `prefill` does."""
        call, num_tiers = self._ask("plan_compact", view), self._pages.num_planned
        plan = call.plan(self._policy.plan_compact(call.see()), CompactPlan)
        if not isinstance(plan.keep, list | tuple) or len(plan.keep) != num_tiers:
            kind = f"{len(plan.keep)} entries" if isinstance(plan.keep, list | tuple) else _kind(plan.keep)
            raise call.error(f"keep is {kind}, but it must be a list of one per tier ({num_tiers})")
        held = [view.num_slots(tier) for tier in range(num_tiers)]
        stays: list[Tensor] = []
        for tier, keep in enumerate(plan.keep):
            if keep is None:
                stays.append(held[tier] > 0)
            else:
                mask = call.mask(keep, f"keep[{tier}]", (*view.shape, view.num_columns(tier)))
                valid = torch.arange(mask.shape[-1], device=mask.device) < held[tier][..., None]
                stays.append((mask & valid).any(-1))
        # A list of one token may give it up: the incoming one takes its place.
        emptied = (reduce(torch.add, held) > 1) > reduce(torch.logical_or, stays)  # the first, and not the second
        self._judge(call, emptied, "keep must leave at least one token in every list that holds more than one")
        self._check_replay(call, plan, lambda other, shown: other.plan_compact(shown))
        return plan

    def find(self, position: Tensor, view: DecodeView) -> None:
        """Refuses to look for a position (int64 [S]) that no token has yet."""
        rule = "find looks for a position behind the incoming token's, which no slot can hold"
        self._judge(self._ask("plan_decode", view), position > view.tokens_seen, rule)

    def judge_step(self, view: DecodeView) -> Callable[[Tensor], None]:
        """A taker of the rules that a step's plan broke, as `PageTable.take` finds them on a device."""
        call, named = self._ask("plan_decode", view), "is APPEND (-1) or lies within its list, and one that was named"
        slot_rule = f"a slot {named} does not" if self._policy.acts_in_decode else _OVERWRITTEN
        rules = slot_rule, self._demote_rule, f"demote_slot {named} does not"

        def receive(broken: list[int]) -> None:
            for is_broken, rule in zip(broken, rules, strict=True):
                if is_broken:
                    raise call.error(rule)

        return lambda broken: self._pages.counts.post(broken, lambda: receive)

    def _check_slots(self, call: _PolicyCall, plan: DecodePlan, view: DecodeView) -> DecodePlan:
        """Holds the slots of a step to its lists; the plan to carry out."""
        slot = call.whole(plan.slot, "slot", view.shape)
        for name in ("demote_to", "demote_slot"):
            if (value := getattr(plan, name)) is not None:
                call.whole(value, name, view.shape)
        if self._pages.on_device:  # values are looked at where the plan is carried out (`judge_step`)
            return plan
        rules: list[tuple[Tensor, Rule]] = []
        held = view.num_slots(plan.tier)
        if self._policy.acts_in_decode:
            wrong = (slot < APPEND) | (slot >= held)
            rules.append((wrong, lambda: f"{_where(wrong, slot, held)}; a slot is APPEND (-1) or lies within its list"))
        else:
            rules.append((slot != APPEND, _OVERWRITTEN))
        if plan.demote_to is not None:
            to = plan.demote_to
            rules.append(((to < EVICT) | (to >= self._pages.num_planned) | (to == plan.tier), self._demote_rule))
            if plan.demote_slot is not None:
                rules.append(self._demoted(plan, slot, to, plan.demote_slot, view))
        for broken, rule in rules:
            self._judge(call, broken, rule)
        if not self._pages.counts.is_late:
            return plan
        broken = reduce(torch.logical_or, (broken for broken, _ in rules))
        return replace(plan, slot=torch.where(broken, APPEND, slot))  # a new slot harms nobody

    def _demoted(
        self, plan: DecodePlan, slot: Tensor, to: Tensor, target: Tensor, view: DecodeView
    ) -> tuple[Tensor, Rule]:
        """The lists in which a demoted token takes a slot that does not exist in its new tier."""
        held = torch.zeros_like(slot)
        for tier in range(self._pages.num_planned):
            if tier != plan.tier:
                held = torch.where(to == tier, view.num_slots(tier), held)
        wrong = ((target < APPEND) | (target >= held)) & (slot != APPEND) & (to != EVICT)
        return wrong, lambda: f"demote_{_where(wrong, target, held)}; it is APPEND (-1) or lies within its list"

    def _check_replay(
        self,
        call: _PolicyCall,
        answer: object,
        ask: Callable[[Policy, Any], object],
        begins: bool = True,
        sound: Sound = None,
    ) -> None:
        """Refuses an answer that a fresh policy of the same settings does not give. A captured step is checked once."""
        if self.second is None or self._pages.counts.log is not None:
            return
        if (other := self.second.of(call.call, begins)) is None:
            return
        try:
            repeated = ask(other, call.view.anew())
        except Exception as error:  # it needs what it kept of an earlier call, unless there is no memory
            if is_out_of_memory(error):
                raise
            raise call.error(f"{RULE} ({type(error).__name__}: {error})") from error
        most = NOISE if self._pages.counts.is_late else 0.0
        differs = differ(answer, repeated, most)
        if isinstance(differs, bool):
            if not differs:
                return
            differs = torch.ones((), dtype=torch.bool, device=self._pages.table.num_slots.device)
        self._judge(call, differs, RULE, sound)

    def _judge(self, call: _PolicyCall, broken: Tensor, rule: Rule, sound: Sound = None) -> None:
        """Raises where an entry of `broken` is True, now or later; never where statistics are not `sound`."""
        flag, counts = broken.any(), self._pages.counts
        if not counts.is_late:
            if bool(flag) and (sound is None or bool(sound())):
                raise call.error(rule)
            return
        if sound is not None:
            flag = flag & sound()

        def receive(values: list[int]) -> None:
            if any(values):
                raise call.error(rule)

        counts.post(flag, lambda: receive)


def _versions(view: object) -> dict[str, int]:
    """The number of times that each tensor of a view was written to; one made in inference mode does not count."""
    tensors = {name: x for name, x in vars(view).items() if isinstance(x, Tensor)}
    return {name: x._version for name, x in tensors.items() if not x.is_inference()}


def _where(wrong: Tensor, slot: Tensor, held: Tensor) -> str:
    """The first slot that is wrong, and what its list holds."""
    at = tuple(wrong.nonzero()[0].tolist())
    return f"slot {int(slot[at])} was named of a list (layer {at[1]}, head {at[2]}) that holds {int(held[at])}"


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _kind(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
