"""A method sees copies: what it sets or writes there reaches nothing of the store."""

import pytest
import torch
from newcomer import BACKENDS, Newcomer, prefill, state, step, store_of, thirds

from kvbench.policy import CompactPlan, DecodePlan, PrefillPlan


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
