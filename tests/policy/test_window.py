"""How prompt-only methods shrink while decoding, beside plain lists; and what a budget means in views."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from store_helpers import make_store, prefill_view

from kvbench.methods.full import Full
from kvbench.policy import Budget, Scored, ScoreSpec, SlotArrays, shrink_to_share
from kvbench.policy.eviction import answer_share


def view_of(prompt: int, seen: list[int], share: int, held: int, *, allowed: int = 0, score=None) -> SimpleNamespace:
    """Rows of one list each, which hold the first `held` of the tokens they have seen, the newest first."""
    rows = len(seen)
    pos = torch.arange(held - 1, -1, -1).expand(rows, 1, 1, held)
    valid = pos < torch.tensor(seen).view(rows, 1, 1, 1)
    score = torch.zeros(rows, 1, 1, held) if score is None else torch.tensor(score).expand(rows, 1, 1, held)
    return SimpleNamespace(
        tokens_seen=torch.tensor(seen),
        prompt_tokens=torch.full((rows,), prompt),
        prompt_slots=torch.full((rows, 1, 1), share),
        slots=lambda tier: {0: SlotArrays(score=score, pos=pos, valid=valid)}[tier],
        budget_tokens=lambda budget: torch.full((rows,), allowed),
    )


def kept(view, budget, window: int = 0, **more) -> list[list[int]]:
    """Positions per row that a bulk eviction leaves."""
    (keep,) = shrink_to_share(view, Budget.parse(budget), window, **more).keep
    slots = view.slots(0)
    return [sorted(p[k & v].tolist()) for p, k, v in zip(slots.pos, keep, slots.valid, strict=True)]


@pytest.mark.parametrize("percent", [1, 29, 42, 53, 59, 84, 100])
def test_a_ratio_of_a_prompt_without_a_share_is_the_budget_s(percent):
    """Row by row what `Budget.tokens` gives: 0.29 x 100 is below 29 in fp64, and 0.53 x 100 below 53 in fp32."""
    seen = list(range(1, 301))
    view = view_of(1, seen, 1, 300)
    found = [len(tokens) for tokens in kept(view, percent / 100)]
    assert found == [min(n, Budget.parse(percent / 100).tokens(n, 1, 1.0)) for n in seen]


def test_a_share_grows_with_the_sequence():
    """3 of a prompt of 10 are 3 in 10 of everything, rounded down; where the ratio gives the prompt just one token,
    that one is its share."""
    assert [len(tokens) for tokens in kept(view_of(10, [10, 13, 14, 20], 3, 20), 0.25)] == [3, 3, 4, 6]
    assert [len(tokens) for tokens in kept(view_of(4, [8, 20], 1, 20), 0.25)] == [2, 5]
    assert [len(tokens) for tokens in kept(view_of(3, [8, 20], 1, 20), 0.25)] == [2, 5]
    assert [len(tokens) for tokens in kept(view_of(4, [8, 20], 2, 20), 0.25)] == [4, 10]  # of more than the mean


@pytest.mark.parametrize(("prompt", "share", "count"), [(11, 5, 5), (10, 4, 10), (9, 9, 10)])
def test_tokens_do_not_grow(prompt, share, count):
    """A list keeps its share; a prompt that fitted the budget of 10 grows up to it."""
    assert [len(tokens) for tokens in kept(view_of(prompt, [20], share, 20, allowed=10), 10)] == [count]


def test_the_lightest_go_and_the_window_stays():
    """By the slots' scores, or by those that are given; of equal ones the earlier slot stays."""
    score = [5.0, 1.0, 4.0, 1.0, 3.0, 1.0, 2.0, 1.0]  # of positions 7, 6, .., 0
    assert kept(view_of(9, [8], 4, 8, score=score), 4) == [[1, 3, 5, 7]]
    assert kept(view_of(9, [8], 4, 8, score=score), 4, 2) == [[3, 5, 6, 7]]
    assert kept(view_of(9, [8], 4, 8, score=score), 4, 6) == [[2, 3, 4, 5, 6, 7]]
    given = -torch.tensor(score).expand(1, 1, 1, 8)
    assert kept(view_of(9, [8], 3, 8, score=score), 4, score=given) == [[2, 4, 6]]
    assert kept(view_of(9, [8], 0, 8, score=score), 4) == [[7]]


@pytest.mark.parametrize(("budget", "share"), [(0.25, [10, 10, 12, 13]), (7, [17, 17, 17, 17])])
def test_a_share_of_the_answer_comes_on_top_of_the_prompt(budget, share):
    """A ratio counts the answer's tokens, rounded down; a number is that many."""
    view = view_of(10, [10, 13, 18, 25], 3, 25)
    view.shape = (4, 1, 1)
    assert answer_share(view, Budget.parse(budget)).flatten().tolist() == share


@dataclass(kw_only=True)
class Light(Scored):
    """Ranks by the slots' scores, and shrinks at every step."""

    decode_every: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        self.rank_by(ScoreSpec(prefill_queries=-1, decode_update=False, track=("score", "pos")))

    def always(self, budget):
        return 0, 0


def stays(policy, view, score=None) -> list[list[int]]:
    """Positions per row that a method leaves when it shrinks."""
    (keep,) = policy.shrink(view, score).keep
    slots = view.slots(0)
    return [sorted(p[k & v].tolist()) for p, k, v in zip(slots.pos, keep, slots.valid, strict=True)]


def test_what_reaches_the_threshold_stays_by_the_scores_that_count():
    """The slots' own, or those that are given; the best stays where none reaches it, and so does the newest."""
    score = [5.0, 1.0, 4.0, 1.0, 3.0, 1.0, 2.0, 1.0]  # of positions 7, 6, .., 0
    view = view_of(8, [8], 8, 8, score=score)
    assert stays(Light(budget=None, threshold=3.0), view) == [[3, 5, 7]]
    assert stays(Light(budget=None, threshold=9.0), view) == [[7]]
    given = -torch.tensor(score).expand(1, 1, 1, 8)
    assert stays(Light(budget=None, threshold=-1.5), view, given) == [[0, 2, 4, 6]]


@pytest.mark.parametrize(
    ("protect", "left"),
    [
        ("none", {7}),
        ("sinks", {0, 1, 7}),
        ("instruction", {0, 1, 2, 7}),
        ("prompt", {*range(6), 7}),
        ("answer", {6, 7}),
    ],
)
def test_what_is_protected_stays_and_its_neighbour_does_not(protect, left):
    """Of eight equal tokens, six of them prompt and three instruction, a threshold leaves one and what is protected."""
    view = view_of(6, [8], 8, 8, score=[1.0] * 8)
    view.instruction_tokens = torch.tensor([3])
    policy = Light(budget=None, threshold=2.0, protect=protect, protect_tokens=2)
    assert stays(policy, view) == [sorted(left)]


@pytest.mark.parametrize("budget", [0.29, 1.0, 7, 500, "4096B", "1MiB"])
@pytest.mark.parametrize("length", [1, 100])
def test_a_budget_is_one_number_in_both_views(budget, length):
    """Of prompt and of step, over all layers and heads and by the bytes of the tier's slot; no prompt holds more than
    it has."""
    store = make_store(Full(tier="k8v4"), num_layers=3, num_q_heads=4, num_kv_heads=2, head_dim=16)
    size = store.pages.formats[0].slot.slot_bytes
    store.counters.prompt_tokens[0] = length
    tokens = Budget.parse(budget).tokens(length, 6, size)
    view = prefill_view(None, length, 2, (1.0, size), num_layers=3)
    assert view.budget_tokens(Budget.parse(budget), 1) == min(tokens, length)
    assert store.view(torch.tensor([0])).budget_tokens(Budget.parse(budget)).tolist() == [tokens]
    assert view.filled(1).tolist() == [[[1] * length] * 2]
