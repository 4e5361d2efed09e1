"""Every way to write a wrong plan is refused where it would be carried out, and nobody's tokens are touched."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from newcomer import BACKENDS, DIM, HEADS, LAYERS, SHAPE, TOKENS, Newcomer, prefill, state, step, store_of, thirds

from kvbench.policy import APPEND, EVICT, CompactPlan, DecodePlan, Policy, PrefillPlan


def whole(value: int, *, at: int = 0) -> torch.Tensor:
    """`APPEND` (which is also `EVICT`) everywhere, but a value in one list of row 1."""
    tensor = torch.full(SHAPE, APPEND)
    tensor[1, 1, at] = value
    return tensor


def changed(view):
    """A plan by a method that negates its view's scores in place."""
    view.score.neg_()
    return PrefillPlan(tier_of=view.filled(0))


def scored(value, dtype=torch.float32, tokens=TOKENS):
    """A plan with a score of its own."""
    return lambda view: PrefillPlan(
        tier_of=view.filled(0), score=torch.full((1, HEADS, tokens), value).to(dtype).contiguous()
    )


def tiers(change):
    """A plan whose `tier_of` was changed."""
    return lambda view: PrefillPlan(tier_of=change(view.filled(0)))


def with_one(value):
    """One token of head 2 in a tier of its own."""

    def change(tier_of):
        tier_of[0, 2, 4] = value
        return tier_of

    return change


def without_head_1(tier_of):
    """Head 1 loses everything."""
    tier_of[0, 1] = EVICT
    return tier_of


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("plan", "rule"),
    [
        (lambda view: None, "it returned None, but it must return a PrefillPlan"),
        (lambda view: view.filled(0), "it returned a Tensor, but it must return a PrefillPlan"),
        (lambda view: DecodePlan(), "it returned a DecodePlan, but it must return a PrefillPlan"),
        (lambda view: PrefillPlan(tier_of=[0]), "tier_of is a list, but it must be a tensor"),
        (tiers(lambda x: x[:, :1]), r"tier_of has the shape \(1, 1, 11\), but it must have \(1, 3, 11\)"),
        (tiers(lambda x: x[..., 1:]), r"tier_of has the shape \(1, 3, 10\), but it must have \(1, 3, 11\)"),
        (tiers(lambda x: x.to_sparse()), "tier_of is sparse or nested, but it must be a dense tensor"),
        (tiers(lambda x: x == 0), "tier_of is bool, but it must hold integers"),
        (tiers(lambda x: x.to("meta")), "tier_of lies on meta, but it must lie on cpu"),
        (tiers(lambda x: x + 0.4), "tier_of is float32, but it must hold integers"),
        (tiers(with_one(2)), r"tier_of must hold EVICT \(-1\) or tier 0 to 1, the tiers of the method"),
        (tiers(with_one(-2)), r"tier_of must hold EVICT \(-1\) or tier 0 to 1, the tiers of the method"),
        (tiers(without_head_1), "tier_of must keep at least one token of every head"),
        (tiers(lambda x: x.fill_(EVICT)), "tier_of must keep at least one token of every head"),
        (scored(1.0, tokens=TOKENS - 1), r"score has the shape \(1, 3, 10\), but it must have \(1, 3, 11\)"),
        (scored(1.0, dtype=torch.int64), "score is int64, but it must be float32"),
        (scored(float("nan")), "score must be finite"),
        (scored(float("inf")), "score must be finite"),
        (changed, "it changed a tensor of its view in place, which others read; clone it first"),
        (
            lambda view: PrefillPlan(tier_of=thirds(view), channels=torch.zeros(1, HEADS, DIM, dtype=torch.int64)),
            "channels are ordered, but the method's statistic measures none",
        ),
    ],
)
def test_a_wrong_plan_for_a_prompt_is_refused(plan: Callable, rule: str, backend: str):
    """One sentence names class, moment and rule; the row before keeps its bytes, and all pages come back."""
    policy = Newcomer()
    store = store_of(policy, backend)
    first = prefill(store)
    before = state(store)
    policy.prompt = plan
    with pytest.raises(
        ValueError, match=rf"^Newcomer\.plan_prefill \(newcomer\.py:\d+\), prompt of 11 tokens, layer 0: {rule}$"
    ):
        prefill(store, seed=1)
    store.close_row(1)
    assert state(store) == before
    policy.prompt = lambda view: PrefillPlan(tier_of=thirds(view))
    again = prefill(store, seed=1)
    step(store, [first, again])


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32])
def test_any_whole_numbers_name_tiers_and_slots(dtype: torch.dtype):
    """A plan in other integers is the same plan."""
    held = []
    for kind, slots in ((torch.int64, torch.int64), (dtype, torch.int32)):
        policy = Newcomer(prompt=lambda view, kind=kind: PrefillPlan(tier_of=thirds(view).to(kind)))
        policy.step = DecodePlan(slot=whole(3).to(slots))
        store = store_of(policy)
        step(store, [prefill(store), prefill(store, seed=1)])
        held.append(state(store))
    assert held[0] == held[1]


def test_a_plan_over_all_layers_names_them():
    """A method that ranks over the whole model is asked once."""
    policy = Newcomer(prompt=tiers(lambda x: x == 0))
    policy.scope = "model"
    with pytest.raises(
        ValueError, match=r"plan_prefill \(newcomer\.py:\d+\), prompt of 11 tokens, layers 0 to 1: tier_of is bool"
    ):
        prefill(store_of(policy))


def test_a_prompt_whose_statistics_are_not_finite_is_not_the_methods_fault():
    """A model that gives NaN is found by its logits; a method that then keeps nothing is not blamed."""
    policy = Newcomer(prompt=lambda view: PrefillPlan(tier_of=torch.where(view.score > 0, 0, EVICT), score=view.score))
    store = store_of(policy)
    row = store.open_row()
    for layer in range(LAYERS):
        store.prefill_layer(row, layer, *(torch.full((HEADS, TOKENS, DIM), float("nan")) for _ in range(3)), 0.25)
    assert store.pages.pool.num_used == 0


def test_keys_without_positions_must_all_stay():
    """A method whose slots are their positions may not drop a token."""

    @dataclass(kw_only=True)
    class Places(Policy):
        position_mode: str = "pre_rope"

        def plan_prefill(self, view):
            tier_of = view.filled(0)
            tier_of[..., 3] = EVICT
            return PrefillPlan(tier_of=tier_of)

    with pytest.raises(
        ValueError,
        match=r"^Places\.plan_prefill \(test_checks\.py:\d+\), .*: position_mode='pre_rope' must keep every token",
    ):
        prefill(store_of(Places()))


# After a prompt of 11 tokens each list holds 7 high and 4 low slots.
STEPS = [
    (lambda view: None, "it returned None, but it must return a DecodePlan"),
    (lambda view: whole(0), "it returned a Tensor, but it must return a DecodePlan"),
    (DecodePlan(slot=3), "slot is a int, but it must be a tensor"),
    (DecodePlan(slot=whole(0)[0]), r"slot has the shape \(2, 3\), but it must have \(2, 2, 3\)"),
    (DecodePlan(slot=whole(0).float()), "slot is float32, but it must hold integers"),
    (DecodePlan(slot=whole(0) >= 0), "slot is bool, but it must hold integers"),
    (DecodePlan(tier=2), "tier=2, but it must be a whole number of 0 to 1"),
    (DecodePlan(tier=True), "tier=True, but it must be a whole number of 0 to 1"),
    (DecodePlan(tier=-1), "tier=-1, but it must be a whole number of 0 to 1"),
    (DecodePlan(slot=whole(0), demote_to=whole(1).float()), "demote_to is float32, but it must hold integers"),
    (
        DecodePlan(slot=whole(0), demote_to=whole(1), demote_slot=whole(1)[:1]),
        r"demote_slot has the shape \(1, 2, 3\), but it must have \(2, 2, 3\)",
    ),
    (lambda view: [view.prompt_tokens.add_(1), DecodePlan()][1], "it changed a tensor of its view in place"),
]
OF = r"was named of a list \(layer 1, head 0\) that holds"
VALUES = [
    (DecodePlan(slot=whole(7)), rf"slot 7 {OF} 7; a slot is APPEND \(-1\) or lies within its list"),
    (DecodePlan(slot=whole(47, at=2)), r"slot 47 was named of a list \(layer 1, head 2\) that holds 7"),
    (DecodePlan(slot=whole(-2)), rf"slot -2 {OF} 7"),
    (DecodePlan(slot=whole(4), tier=1), rf"slot 4 {OF} 4"),
    (
        DecodePlan(slot=whole(0), demote_to=whole(2)),
        r"demote_to must hold EVICT \(-1\) or tier 0 to 1, the tiers of the method",
    ),
    (DecodePlan(slot=whole(0), demote_to=whole(-2)), r"demote_to must hold EVICT \(-1\) or tier 0 to 1"),
    (DecodePlan(slot=whole(0), demote_to=whole(0)), "demote_to .*no token goes to the tier that it leaves"),
    (
        DecodePlan(slot=whole(0), demote_to=whole(1), demote_slot=whole(4)),
        rf"demote_slot 4 {OF} 4; it is APPEND \(-1\) or lies within",
    ),
    (DecodePlan(slot=whole(0), demote_to=whole(1), demote_slot=whole(-7)), rf"demote_slot -7 {OF} 4"),
    (
        lambda view: [view.find(0, view.tokens_seen + 1), DecodePlan()][1],
        "find looks for a position behind the incoming token's, which no slot can hold",
    ),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("plan", "rule"), STEPS + VALUES)
def test_a_wrong_step_is_refused_and_changes_nothing(plan: Callable, rule: str, backend: str):
    """The bytes of all rows stay, and the step goes through once the method is repaired."""
    policy = Newcomer()
    store = store_of(policy, backend)
    rows = [prefill(store), prefill(store, seed=1)]
    before = state(store)
    policy.step = plan
    with pytest.raises(
        ValueError, match=rf"^Newcomer\.plan_decode \(newcomer\.py:\d+\), decode step at token 11: {rule}"
    ):
        step(store, rows)
    assert state(store) == before
    policy.step = lambda view: DecodePlan(slot=whole(6), demote_to=whole(1), demote_slot=whole(3))
    step(store, rows)
    assert store.pages.table.num_slots[:, 9].tolist() == [7, 4]
    assert store.pages.table.num_slots[:, 8].tolist() == [8, 4]


@pytest.mark.parametrize(("plan", "rule", "learns"), [(*each, how) for each in VALUES for how in ("step", "report")])
def test_where_the_host_does_not_wait_a_wrong_slot_harms_nobody(plan: Callable, rule: str, learns: str):
    """The step is carried out as if its wrong lists appended; the other row keeps its bytes; the next step, or the
    row's report, names the rule."""
    policy = Newcomer()
    store, told = store_of(policy), store_of(Newcomer())
    store.pages.counts.is_late = True
    for each in (store, told):
        prefill(each)
        prefill(each, seed=1)
    policy.step = plan
    step(store, [0, 1])
    told.policy.step = lambda view: DecodePlan(tier=int(rule.startswith("slot 4 ")))
    step(told, [0, 1])
    assert state(store) == state(told)
    policy.step = told.policy.step
    with pytest.raises(
        ValueError, match=rf"^Newcomer\.plan_decode \(newcomer\.py:\d+\), decode step at token 11: {rule}"
    ):
        store.ledger.report(0) if learns == "report" else step(store, [0, 1])
    assert state(store) == state(told)
    store.close_row(1)
    store.close_row(0)
    assert store.pages.pool.num_used == 0
    store.pages.counts.collect()  # it is raised once


@pytest.mark.parametrize(
    ("plan", "rule"),
    [
        (VALUES[0][0], "a slot is APPEND .* lies within its list, and one that was named does not"),
        pytest.param(VALUES[4][0], "demote_to must hold EVICT", marks=pytest.mark.exhaustive),
        pytest.param(
            VALUES[6 + 1][0],
            "demote_slot is APPEND .* lies within its list, and one that was named does not",
            marks=pytest.mark.exhaustive,
        ),
    ],
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_tables_on_a_device_make_a_wrong_slot_a_new_one_and_say_so(plan: Callable, rule: str):
    """The list appends, and the next step names the rule; the number of the slot is not told."""
    pytest.importorskip("triton", reason="triton is not installed (pip install -e '.[test]')")
    policy = Newcomer()
    store = store_of(policy, "triton")
    rows = [prefill(store), prefill(store, seed=1)]
    before = store.pages.table.num_slots.clone()
    policy.step = plan
    step(store, rows)
    grown = (store.pages.table.num_slots - before)[:, : 2 * LAYERS * HEADS]
    assert grown.tolist() == [[1] * (2 * LAYERS * HEADS), [0] * (2 * LAYERS * HEADS)]
    policy.step = lambda view: DecodePlan()
    with pytest.raises(
        ValueError, match=rf"^Newcomer\.plan_decode \(newcomer\.py:\d+\), decode step at token 11: {rule}"
    ):
        step(store, rows)


def test_where_the_host_does_not_wait_a_wrong_prompt_is_named_when_it_was_read():
    """Not at the next step, which may never come."""
    store = store_of(Newcomer(prompt=tiers(with_one(2))))
    store.pages.counts.is_late = True
    with pytest.raises(ValueError, match=r"tier_of must hold EVICT \(-1\) or tier 0 to 1, the tiers of the method"):
        prefill(store)


def test_a_method_that_leaves_tokens_alone_may_not_overwrite_one():
    """Without `acts_in_decode` question segments come at once, and such a method must append."""
    policy = Newcomer(acts_in_decode=False, step=lambda view: DecodePlan(slot=torch.zeros(1, LAYERS, HEADS).long()))
    store = store_of(policy)
    row = prefill(store)
    before = state(store)
    rule = "a slot is overwritten, which a method with acts_in_decode=False must not do"
    with pytest.raises(
        ValueError, match=rf"^Newcomer\.plan_decode \(newcomer\.py:\d+\), decode step at token 11: {rule}$"
    ):
        step(store, [row])
    assert state(store) == before


def test_where_the_host_does_not_wait_a_later_segment_names_the_step_before():
    """Before it writes anything."""
    policy = Newcomer(acts_in_decode=False, step=lambda view: DecodePlan(slot=torch.zeros(1, LAYERS, HEADS).long()))
    store = store_of(policy)
    store.pages.counts.is_late = True
    row = prefill(store)
    step(store, [row])
    before, q, k = state(store), torch.randn(HEADS, 2, DIM), torch.randn(HEADS, 2, DIM)
    with pytest.raises(ValueError, match="a slot is overwritten, which a method with acts_in_decode=False must not do"):
        store.append_chunk(row, 0, q, k, k, 0.25)
    assert state(store) == before


def masks(change):
    """A plan from the masks of the slots that are held."""
    return lambda view: CompactPlan(keep=change([view.slots(tier).valid.clone() for tier in range(2)]))


@pytest.mark.parametrize(
    ("plan", "rule"),
    [
        (lambda view: None, "it returned None, but it must return a CompactPlan"),
        (masks(lambda keep: keep[0]), "keep is a Tensor, but it must be a list of one per tier"),
        (masks(lambda keep: keep[:1]), "keep is 1 entries, but it must be a list of one per tier"),
        (masks(lambda keep: [keep[0].long(), None]), r"keep\[0\] is int64, but it must be bool"),
        (masks(lambda keep: [None, keep[1][..., :1]]), r"keep\[1\] has the shape \(2, 2, 3, 1\), but it must have"),
        (masks(lambda keep: [x & False for x in keep]), "keep must leave at least one token in every list"),
        (lambda view: [view.prompt_slots.zero_(), CompactPlan(keep=[None, None])][1], "it changed a tensor of its"),
    ],
)
def test_a_wrong_bulk_eviction_is_refused(plan: Callable, rule: str):
    """Nothing is evicted, and a right one goes through afterwards."""
    policy = Newcomer(due=lambda view: torch.ones(2, dtype=torch.bool), drop=plan)
    store = store_of(policy)
    rows = [prefill(store), prefill(store, seed=1)]
    before = state(store)
    with pytest.raises(
        ValueError, match=rf"^Newcomer\.plan_compact \(newcomer\.py:\d+\), compaction at token 11: {rule}"
    ):
        step(store, rows)
    assert state(store) == before
    policy.drop = masks(lambda keep: [None, keep[1] & False])  # a tier may become empty, a list not
    step(store, rows)
    assert store.pages.table.num_slots[:, :12].tolist() == [[8] * 12, [0] * 12]


@pytest.mark.parametrize(
    ("due", "rule"),
    [
        (torch.tensor([0, 1]), "the answer is int64, but it must be bool"),
        (torch.tensor([True]), r"the answer has the shape \(1,\), but it must have \(2,\)"),
        (None, "the answer is None, but it must be a tensor"),
    ],
)
def test_whose_turn_it_is_must_be_said_by_a_mask(due, rule: str):
    """Row numbers would be taken for rows of the step, which they are not."""
    store = store_of(Newcomer(due=lambda view: due))
    rows = [prefill(store), prefill(store, seed=1)]
    with pytest.raises(ValueError, match=rf"^Newcomer\.compaction, decode step at token 11: {rule}$"):
        step(store, rows)


@pytest.mark.parametrize("call", ["plan_prefill", "plan_decode"])
def test_a_plan_changes_no_mode_of_torch(call):
    """Every other method would be computed in it, under its usual hash; the mode is put back and named."""

    def switch(view):
        torch.set_autocast_enabled("cpu", True)
        return PrefillPlan(tier_of=view.filled(0)) if call == "plan_prefill" else DecodePlan()

    store = store_of(Newcomer(**{"prompt" if call == "plan_prefill" else "step": switch}))
    with pytest.raises(ValueError, match=rf"Newcomer\.{call} .* it changed torch.set_autocast_enabled.cpu from "):
        step(store, [prefill(store)])
    assert not torch.is_autocast_enabled("cpu")
