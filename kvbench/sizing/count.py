"""The bytes of a row, counted: a plan is made once for lists that cannot differ, and lists that hold the same are one.

A plan that treats two lists of the same content in two ways is acted out in all of them (`kvbench.sizing.shadow`), so
that no method has to say what it does.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kvbench.cache.async_counts import Rows
from kvbench.cache.buffered import Buffered
from kvbench.cache.layout import ModelShape
from kvbench.cache.options import StoreOptions
from kvbench.cache.prompts import ScoredLayer
from kvbench.cache.store import CompressedStore
from kvbench.cache.view import By, SlotsView
from kvbench.kernels.operands import PLAIN
from kvbench.policy import (
    Budget,
    Compaction,
    CompactPlan,
    DecodePlan,
    DecodeView,
    Extreme,
    Policy,
    PrefillPlan,
    PrefillView,
    SlotArrays,
)
from kvbench.sizing.shadow import act_out, measured, shadow_step, shadow_store, standing_for

LayerPlan = tuple[Tensor, Tensor | None]  # int8 [H, N] the tier of each token; fp32 [H, N] what the slots begin with
# Operations that do not depend on a tensor's numbers.
_OUTSIDE = {Tensor.device.__get__, Tensor.shape.__get__, Tensor.dtype.__get__, Tensor.size, Tensor.dim, Tensor.__len__}  # type: ignore[attr-defined]


class Unlike(Exception):
    """Lists of the same content are planned in different ways."""


def count(
    policy: Policy,
    shape: ModelShape,
    prompt_tokens: int,
    new_tokens: int,
    options: StoreOptions | None,
    *,
    is_even: bool,
) -> dict[str, int]:
    """Items of the ledger after a prompt and the steps of an answer: those of `act_out`, in a fraction of its time.

    Raises:
        ValueError: The method does not fit the model.
    """
    sizes = policy, shape, prompt_tokens, new_tokens, options
    if not all(each.is_whole for each in (shape, *shape.other_kinds)):
        return act_out(*sizes, is_even=is_even)
    store = shadow_store(*sizes, is_even=is_even)
    row = store.open_row()
    try:
        _fill(store, row, prompt_tokens, new_tokens, replace(options or StoreOptions(), budget_bytes=None))
        for each in store.other_kinds:
            _fill(each, row, prompt_tokens, new_tokens, StoreOptions())
    except Unlike:
        return act_out(*sizes, is_even=is_even)
    return store.ledger.itemise(row)


def _fill(store: CompressedStore, row: int, prompt_tokens: int, new_tokens: int, options: StoreOptions) -> None:
    """Puts into an empty row as many slots as it holds when the answer ends."""
    part, pages = store.holding.parts[0], store.pages
    plans = _plans(store, row, prompt_tokens, new_tokens)
    store.holding.hold(row, prompt_tokens)
    part.counters.prompt_tokens[row] = prompt_tokens
    lists, policy = part.lists(row), store.policy
    acts = policy.compaction is not None or policy.decides_steps
    if acts and pages.tier_map is None and not isinstance(part, Buffered):
        held = _stepped(store, row, plans, prompt_tokens, new_tokens, options)
    else:
        held = _counted(plans, pages.num_planned)
        if isinstance(part, Buffered):
            held[0] = _buffered(part, lists, held[0], new_tokens)
        else:
            held[0] = held[0] + new_tokens
    for planned, slots in enumerate(held):
        for tier, chosen in pages.tiers_of_rows(1, planned):
            pages.table.reserve(lists[chosen], tier, slots[chosen])
    store.holding.hold(row, prompt_tokens + new_tokens)


def _counted(plans: Sequence[LayerPlan], num_planned: int) -> list[Tensor]:
    """Tokens that the plans of a prompt keep, per planned tier int64 [lists of a row]."""
    counts = {id(tier_of): [(tier_of == tier).sum(-1) for tier in range(num_planned)] for tier_of, _ in plans}
    return [torch.cat([counts[id(tier_of)][tier] for tier_of, _ in plans]) for tier in range(num_planned)]


def _buffered(part: Buffered, lists: Tensor, kept: Tensor, new_tokens: int) -> Tensor:
    """Fills the rings of lists that keep so many tokens of a prompt and take more; slots in pages, int64 [M]."""
    ring = part.ring
    ring.hold(lists, *ring.split_prompt(kept), kept)
    for _ in range(new_tokens):
        ring.hold(lists, *ring.after_append(lists), ring.num_tokens[lists] + 1)
    return torch.maximum(ring.num_k[lists], ring.num_v[lists]).long()


# The plan of a prompt.


def _plans(store: CompressedStore, row: int, num_tokens: int, new_tokens: int) -> list[LayerPlan]:
    """The plan of each layer of a prompt; layers share one where the policy cannot have told them apart."""
    policy, num_layers, heads = store.policy, store.shape.num_layers, store.pages.shape[2]
    score, channels = measured(store, num_tokens)
    store.ledger.begin_prompt(row, num_tokens, new_tokens)

    def plan(layers: Sequence[int]) -> list[LayerPlan]:
        scores, worth = (None if x is None else x.expand(len(layers), *x.shape) for x in (score, channels))
        made, begins = store.prompts.plan(row, layers, heads, num_tokens, scores, channels=worth)
        return [(tier_of, None if begins is None else begins[i]) for i, tier_of in enumerate(made.tier_of)]

    if policy.scope == "model":
        return plan(range(num_layers))
    plans: list[LayerPlan] = []
    with _noted(policy) as looks:
        for layer in range(num_layers):
            plans += plan([layer]) if looks or not layer else plans[:1]
    return plans


@contextmanager
def _noted(policy: Policy) -> Iterator[list[bool]]:
    """Notes, in a list that is empty until then, that the policy's plans for prompts read the numbers of layers."""
    looks: list[bool] = []

    class Numbers(Tensor):
        """Numbers of layers that are not read unseen."""

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func not in _OUTSIDE:
                looks.append(True)
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))

    def plan_prefill(view: PrefillView) -> PrefillPlan:
        numbers = view.layers
        vars(view)["layers"] = numbers.as_subclass(Numbers)
        try:
            return type(policy).plan_prefill(policy, view)
        finally:
            vars(view)["layers"] = numbers

    vars(policy)["plan_prefill"] = plan_prefill
    try:
        yield looks
    finally:
        del vars(policy)["plan_prefill"]


# Steps of lists that policies act on.


def _stepped(
    store: CompressedStore,
    row: int,
    plans: Sequence[LayerPlan],
    prompt_tokens: int,
    new_tokens: int,
    options: StoreOptions,
) -> list[Tensor]:
    """Slots per tier int64 [lists of a row] after the steps of an answer, which each kind of list decides.

    Raises:
        Unlike: The policy parts lists that are alike.
    """
    kinds = _Kinds(store, row, plans)
    number = len(kinds.plans)
    shape = replace(
        store.shape,
        num_layers=number,
        num_q_heads=1,
        num_kv_heads=1,
        output_projections=None,
        softmax=PLAIN,
        window=None,
        other_kinds=(),
        numbers=(),
        state_bytes=0,
        shared={},
    )
    options = replace(options, key_offset="none")  # a table of other layers; how much lists hold does not depend on it
    is_even = store.backend.is_even  # type: ignore[attr-defined]
    few = shadow_store(kinds.policy(), shape, prompt_tokens, new_tokens, options, is_even=is_even)
    few_row = few.open_row()
    nothing = torch.zeros(1, 1, 1, dtype=shape.dtype).expand(1, prompt_tokens, 1)
    for layer in range(number):
        few.write_layer(few_row, layer, ScoredLayer(nothing, nothing))
    for _ in range(new_tokens):
        shadow_step(few, [few_row])
    each = few.holding.parts[0].lists(few_row)
    return [few.pages.held(tier, each)[kinds.kind.flatten()] for tier in range(len(few.pages.formats))]


class _Kinds:
    """Lists grouped by their content after a prompt's plan.

    `kind` int64 [L, H] names one of `plans`, and `first` the first list that has each.
    """

    def __init__(self, store: CompressedStore, row: int, plans: Sequence[LayerPlan]) -> None:
        self._policy, self._spec = store.policy, store.policy.score
        self._view = store.holding.view(Rows.of([row], store.shape.device))
        self._head_dim = store.shape.head_dim
        self.plans: list[LayerPlan] = []
        known: dict[tuple[bytes | None, ...], int] = {}
        rows: dict[int, list[int]] = {}  # of plans that layers share
        first: list[int] = []
        for layer, (tier_of, score) in enumerate(plans):
            if id(tier_of) in rows:
                continue
            rows[id(tier_of)] = []
            for head in range(len(tier_of)):
                plan = tier_of[head], None if score is None else score[head]
                key = tuple(None if x is None else x.numpy().tobytes() for x in plan)
                if key not in known:
                    known[key] = len(known)
                    self.plans.append(plan)
                    first.append(layer * len(tier_of) + head)
                rows[id(tier_of)].append(known[key])
        self.kind = torch.tensor([rows[id(tier_of)] for tier_of, _ in plans])
        self.first = torch.tensor(first)

    def policy(self) -> Policy:
        """Policy for a store of one list of each kind, which plans with the real one over all lists."""
        few = copy(self._policy)
        # Settings of the model's heads and layers, and a budget in bytes, do not apply to these.
        vars(few).update(scope="head", granularity="kv_head", limit=None, codebooks=None, head_scales=None)
        spec = self._spec
        if spec.probe is not None:  # the plans of the prompt are there
            spec = replace(spec, probe=None, statistic=standing_for(spec.statistic, is_probed=False))
        vars(few).update(check_model=lambda *_: None, score=spec)
        for name in ("plan_prefill", "plan_decode", "plan_compact"):
            vars(few)[name] = getattr(self, name)
        if few.compaction is not None:
            few.compaction = _Due(
                few.compaction.every, when_full=few.compaction.when_full, real=few.compaction, of=self.of
            )
        return few

    def of(self, view: DecodeView) -> "_AllLists":
        """All lists of the model, in place of one of each kind."""
        assert isinstance(view, SlotsView), "the cache's views are"
        return _AllLists(view, self._view, self.kind)

    def plan_prefill(self, view: PrefillView) -> PrefillPlan:
        tier_of, score = self.plans[int(view.layers[0])]
        channels = torch.arange(self._head_dim)[None, None] if self._spec.orders_channels else None
        return PrefillPlan(
            tier_of=tier_of[None, None], score=None if score is None else score[None, None], channels=channels
        )

    def plan_decode(self, view: DecodeView) -> DecodePlan:
        plan = self._policy.plan_decode(self.of(view))
        slots = {name: self._one_each(getattr(plan, name)) for name in ("slot", "demote_to", "demote_slot")}
        return DecodePlan(**slots, tier=plan.tier)

    def plan_compact(self, view: DecodeView) -> CompactPlan:
        plan = self._policy.plan_compact(self.of(view))
        return replace(plan, keep=[self._one_each(keep) for keep in plan.keep])

    def _one_each(self, x: Tensor | None) -> Tensor | None:
        """One list of each kind, [S, kinds, 1, ...], of all lists [S, L, H, ...]."""
        if x is None:
            return None
        if x.shape[1:3] != self.kind.shape:
            raise Unlike  # a plan of another form, which the store refuses
        lists = x.flatten(1, 2)
        first = lists[:, self.first]
        if len(self.first) < lists.shape[1] and not torch.equal(first[:, self.kind.flatten()], lists):
            raise Unlike
        return first[:, :, None]


@dataclass(frozen=True)
class _Due(Compaction):
    """A policy's own compaction, which sees all lists."""

    real: Compaction = field(default_factory=Compaction)
    of: Any = None

    def due(self, view: DecodeView) -> Tensor:
        return self.real.due(self.of(view))


class _AllLists(SlotsView):
    """View of all lists of a model, of which `few` has one of each kind.

    `kind` int64 [L, H] is each list's kind, and `budgets` is a view of the model's store.
    """

    def __init__(self, few: SlotsView, budgets: DecodeView, kind: Tensor) -> None:
        super().__init__(few._spec)
        self._few, self._budgets, self._kind = few, budgets, kind
        self._arrays: dict[int, SlotArrays] = {}
        self.tokens_seen, self.prompt_tokens = few.tokens_seen, few.prompt_tokens
        self.shape = (few.shape[0], *kind.shape)

    def _copied(self) -> dict[str, Any]:
        return {**vars(self), "_arrays": {}}

    def __getattr__(self, name: str) -> Tensor:
        """Attributes that few policies read."""
        if name == "prompt_slots":
            return self._of(self._few.prompt_slots)
        if name == "instruction_tokens":
            return self._few.instruction_tokens
        raise AttributeError(name)

    def _of(self, x: Tensor) -> Tensor:
        """[S, L, H, ...] of [S, kinds, 1, ...]."""
        return x.squeeze(2)[:, self._kind]

    def budget_tokens(self, budget: Budget, tier: int = 0) -> Tensor:
        # Where steps are counted is in the few lists' store; the model's has the bytes.
        return (self._few if budget.of_seen else self._budgets).budget_tokens(budget, tier)

    def num_columns(self, tier: int) -> int:
        return self._few.num_columns(tier)

    def num_slots(self, tier: int) -> Tensor:
        return self._of(self._few.num_slots(tier))

    def slots(self, tier: int) -> SlotArrays:
        if tier not in self._arrays:
            few = self._few.slots(tier)
            extra = {name: self._of(x) for name, x in few.extra.items()}
            score, pos, valid = (self._of(x) for x in (few.score, few.pos, few.valid))
            self._arrays[tier] = SlotArrays(score=score, extra=extra, pos=pos, valid=valid)
        return self._arrays[tier]

    def _search(self, tier: int, by: By, *, over_layer: bool = False, **conditions: Any) -> Extreme:
        if over_layer:  # a mean over heads, of each layer that differs
            layers, which = self._kind.unique(dim=0, return_inverse=True)
            each = _AllLists(self._few, self._budgets, layers)
            extreme = super(_AllLists, each)._search(tier, by, over_layer=True, **conditions)
            return _picked(extreme, lambda x: x[:, which])
        return _picked(self._few._search(tier, by, **conditions), self._of)


def _picked(extreme: Extreme, of: Any) -> Extreme:
    return Extreme(value=of(extreme.value), slot=of(extreme.slot), pos=of(extreme.pos))
