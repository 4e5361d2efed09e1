"""Every way to write a wrong plan is refused where it would be carried out, and nobody's tokens are touched."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import pytest
import torch
from store_helpers import make_store, read_random, step_random

from kvbench.cache.store import CompressedStore
from kvbench.policy import APPEND, EVICT, Compaction, CompactPlan, DecodePlan, Policy, PrefillPlan, ScoreSpec, Tier

LAYERS, HEADS, DIM, TOKENS = 2, 3, 16, 11
SHAPE = (2, LAYERS, HEADS)
BACKENDS = ("torch", "cpu")


@dataclass(frozen=True, kw_only=True)
class Told(Compaction):
    """Is due as told."""

    rule: Callable

    def due(self, view):
        return self.rule(view)


@dataclass(kw_only=True)
class Newcomer(Policy):
    """Two tiers, every third prompt token low; each of its answers may be replaced by a test's own."""

    prompt: Callable = lambda view: PrefillPlan(tier_of=thirds(view))
    step: Callable = lambda view: DecodePlan()
    drop: Callable = lambda view: CompactPlan(keep=[None, None])
    due: Callable = lambda view: torch.zeros(len(view.tokens_seen), dtype=torch.bool)
    tiers: ClassVar = (Tier(k_bits=8, v_bits=4), Tier(k_bits=4, v_bits=2))
    score: ClassVar = ScoreSpec(prefill_queries=4, decode_update=True, track=("score", "pos"))
    acts_in_decode: bool = True
    asked: list = field(default_factory=list)

    def declare(self):
        """Evicts in bulk as told."""
        self.compaction = Told(rule=self.due)

    def plan_prefill(self, view):
        """As told."""
        return self.prompt(view)

    def plan_decode(self, view):
        """As told."""
        return self.step(view) if callable(self.step) else self.step

    def plan_compact(self, view):
        """As told."""
        return self.drop(view)


def thirds(view) -> torch.Tensor:
    """Every third token low, the others high."""
    tier_of = view.filled(0)
    tier_of[..., ::3] = 1
    return tier_of


def store_of(policy: Policy, backend: str = "torch") -> CompressedStore:
    """A store of three rows."""
    shape = {"num_layers": LAYERS, "num_q_heads": HEADS, "num_kv_heads": HEADS, "head_dim": DIM}
    store = make_store(
        policy, **shape, rows=3, max_tokens=32, new_tokens=64, inv_freq=torch.ones(DIM // 2), backend=backend
    )
    store.pages.pool.pages.zero_()  # pages come as they lie in memory, and whole pages are compared here
    return store


def prefill(store: CompressedStore, seed: int = 0) -> int:
    """A prompt of 11 tokens in a new row."""
    return read_random(store, TOKENS, torch.Generator().manual_seed(seed))


def step(store: CompressedStore, rows: list[int]) -> None:
    """One decode step."""
    step_random(store, rows, torch.Generator().manual_seed(5))


def state(store: CompressedStore) -> list:
    """Everything that a refused step may not change: bytes of all pages in use, tables and counters."""
    table = store.pages.table
    return [
        store.pages.pool.pages[table.used_page_ids()].tolist(),
        table.num_slots.tolist(),
        sorted(store.pages.pool.free_ids().tolist()),
        store.counters.tokens_seen.tolist(),
    ]


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
        ValueError, match=rf"^Newcomer\.plan_prefill \(test_checks\.py:\d+\), prompt of 11 tokens, layer 0: {rule}$"
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
        ValueError, match=r"plan_prefill \(test_checks\.py:\d+\), prompt of 11 tokens, layers 0 to 1: tier_of is bool"
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
        ValueError, match=rf"^Newcomer\.plan_decode \(test_checks\.py:\d+\), decode step at token 11: {rule}"
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
        ValueError, match=rf"^Newcomer\.plan_decode \(test_checks\.py:\d+\), decode step at token 11: {rule}"
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
        (VALUES[4][0], "demote_to must hold EVICT"),
        (VALUES[6 + 1][0], "demote_slot is APPEND .* lies within its list, and one that was named does not"),
    ],
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_tables_on_a_device_make_a_wrong_slot_a_new_one_and_say_so(plan: Callable, rule: str):
    """The list appends, and the next step names the rule; the number of the slot is not told."""
    pytest.importorskip("triton", reason="triton is not installed (pip install 'kvbench[test]')")
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
        ValueError, match=rf"^Newcomer\.plan_decode \(test_checks\.py:\d+\), decode step at token 11: {rule}"
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
        ValueError, match=rf"^Newcomer\.plan_decode \(test_checks\.py:\d+\), decode step at token 11: {rule}$"
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
        ValueError, match=rf"^Newcomer\.plan_compact \(test_checks\.py:\d+\), compaction at token 11: {rule}"
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


@pytest.mark.parametrize("name", ["num_tokens", "num_kv_heads", "layers", "token_bytes", "score", "anything"])
def test_the_shape_of_a_prompt_is_the_stores(name: str):
    """A method cannot set what a view says: one that made its prompt 5 tokens long kept 5 of them without a word."""

    def plan(view):
        setattr(view, name, 5)
        return PrefillPlan(tier_of=view.filled(0))

    with pytest.raises(AttributeError, match=f"the view's {name} was set, which is the cache's; keep it in a variable"):
        prefill(store_of(Newcomer(prompt=plan)))
    ways = {"step": DecodePlan(), "drop": CompactPlan(keep=[None, None])}
    for way, answer in ways.items():
        due = (lambda view: torch.ones(1, dtype=torch.bool)) if way == "drop" else Newcomer.due
        store = store_of(Newcomer(due=due, **{way: lambda view, answer=answer: [setattr(view, name, 5), answer][1]}))
        row = prefill(store)
        with pytest.raises(AttributeError, match=f"the view's {name} was set"):
            step(store, [row])
    with pytest.raises(AttributeError):
        store.view(torch.tensor([row])).slots(0).valid = None


def overwritten(view, answer):
    """The answer, once everything that a view shows was overwritten behind torch's back."""
    shown = [getattr(view, name, None) for name in ("score", "layers", "held", "tokens_seen", "prompt_tokens")]
    if hasattr(view, "num_slots"):
        for tier in range(2):
            arrays = view.slots(tier)
            found = view.argmin(tier, by="score")
            shown += [arrays.score, arrays.pos, arrays.valid, found.slot, found.pos, view.num_slots(tier)]
    for number, x in enumerate(x for x in shown if isinstance(x, torch.Tensor)):
        if number % 2:
            x.data.fill_(1)
        else:
            x.numpy()[...] = 0
    return answer


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_a_method_writes_behind_torchs_back_reaches_nothing(backend: str):
    """Through `.data` and `.numpy()`, into everything that views show, in all its calls: pages, tables and attention
    are those of a method that writes nowhere; positions of tokens moved before."""

    def due(view):
        return view.tokens_seen % 2 == 1

    def drop(view):
        return CompactPlan(keep=[view.slots(0).pos != 4, None])

    def end(spoil):
        policy = Newcomer(
            prompt=lambda view: spoil(view, PrefillPlan(tier_of=thirds(view))),
            step=lambda view: spoil(view, DecodePlan(slot=view.argmin(0, by="mean").slot.clone())),
            drop=lambda view: spoil(view, drop(view)),
            due=lambda view: spoil(view, due(view)),
        )
        store = store_of(policy, backend)
        row = prefill(store)
        for _ in range(3):
            step(store, [row])
        return state(store)

    assert end(overwritten) == end(lambda view, answer: answer)


def test_a_method_cannot_hide_a_broken_rule_behind_its_view():
    """Statistics that it spoilt itself excuse nothing, and slots that it called valid count for none."""

    def plan(view):
        view.score.data.fill_(float("nan"))
        return PrefillPlan(tier_of=view.filled(0) + 7)

    with pytest.raises(ValueError, match=r"tier_of must hold EVICT \(-1\) or tier 0 to 1"):
        prefill(store_of(Newcomer(prompt=plan)))

    def drop(view):
        slots = [view.slots(tier) for tier in range(2)]
        for each in slots:
            each.valid.data.fill_(True)
        return CompactPlan(keep=[torch.arange(each.valid.shape[-1]).expand_as(each.valid) > 8 for each in slots])

    store = store_of(Newcomer(due=lambda view: torch.ones(1, dtype=torch.bool), drop=drop))
    row = prefill(store)
    with pytest.raises(ValueError, match="keep must leave at least one token in every list"):
        step(store, [row])
