"""Methods that make room at every step, under a threshold and with protected tokens, against a plain list; and what is
said of thresholds."""

import pytest
import torch
from store_helpers import causal_probabilities, held_positions, kept_of, make_store, prefill_view, step_at

from kvbench.methods.h2o import H2O
from kvbench.methods.snapkv import SnapKV
from kvbench.methods.tova import TOVA
from kvbench.runs.verdict import complaint, remark

PROMPT, STEPS, DIM = 30, 25, 8


def run(policy):
    """Positions that one head holds behind a prompt and random steps, what a plain list would, and queries and keys."""
    make = torch.Generator().manual_seed(3)
    q, k = 3 * torch.randn(1, PROMPT + STEPS, DIM, generator=make), torch.randn(1, PROMPT + STEPS, DIM, generator=make)
    store = make_store(policy, head_dim=DIM, track=("pos",))
    row = store.open_row(instruction_tokens=5)
    store.prefill_layer(row, 0, q[:, :PROMPT], k[:, :PROMPT], k[:, :PROMPT], 0.5)
    yield held_positions(store, row)[0], q, k
    for position in range(PROMPT, PROMPT + STEPS):
        step_at(store, row, [(q, k, k)], position, 0.5)
        yield sorted(held_positions(store, row)[0]), q, k


@pytest.mark.parametrize("threshold", [0.0, 0.02, 0.05, 2.0])
def test_h2o_drops_what_is_below_a_threshold(threshold):
    """Per step the token with the least attention per query goes where that is below the threshold, and the last fifth
    of the prompt's length stays."""
    recent, states = PROMPT // 5, run(H2O(budget=None, threshold=threshold, recent_share=0.2))
    held, q, k = next(states)
    share = causal_probabilities(q[:, :PROMPT], k[:, :PROMPT], 0.5)[0].sum(0)
    mean = share / PROMPT
    best = int(share.argmax())
    assert held == [j for j in range(PROMPT) if mean[j] >= threshold or j >= PROMPT - recent or j == best]
    score = {j: float(share[j]) for j in held}
    for position, (now, _, _) in enumerate(states, PROMPT):
        lightest = min(
            (j for j in score if j < position - recent), key=lambda j: score[j] / max(1, position - j), default=None
        )
        if lightest is not None and position > PROMPT and score[lightest] / (position - lightest) < threshold:
            del score[lightest]
        score[position] = 0.0
        assert now == sorted(score)
        ids = sorted(score)
        weight = torch.softmax(k[0, ids].double() @ q[0, position].double() * 0.5, 0)
        for j, add in zip(ids, weight.tolist(), strict=True):
            score[j] += add


@pytest.mark.parametrize("share", [25, 50, 85, 100])
@pytest.mark.parametrize("recent", [0.0, 0.4])
def test_h2o_holds_its_share_of_what_was_seen(share, recent):
    """Each step the token with the least attention outside of the recent window makes room, unless the share has grown
    by a token; the window is a share of what may be held, the incoming token counted."""
    states = run(H2O(budget=f"{share}%seen", recent_share=recent))
    held, q, k = next(states)
    sums = causal_probabilities(q[:, :PROMPT], k[:, :PROMPT], 0.5)[0].sum(0)
    score = {j: float(sums[j]) for j in held}
    assert len(held) == share * PROMPT // 100
    for position, (now, _, _) in enumerate(states, PROMPT):
        room = share * (position + 1) // 100
        if len(score) == room:
            last = position + 1 - max(0, min(int(recent * room), room))
            del score[min((j for j in score if j < last), key=lambda j: score[j])]
        score[position] = 0.0
        assert now == sorted(score) and len(now) == room
        ids = sorted(score)
        weight = torch.softmax(k[0, ids].double() @ q[0, position].double() * 0.5, 0)
        for j, add in zip(ids, weight.tolist(), strict=True):
            score[j] += add


def test_tova_drops_what_the_last_query_is_below_a_threshold_for():
    """With a threshold below every probability nothing goes; with one above all, each step drops one as with a budget
    of one more token than the prompt kept."""
    *_, (kept, _, _) = run(TOVA(budget=None, threshold=0.0))
    assert kept == list(range(PROMPT + STEPS))
    sizes = [len(held) for held, _, _ in run(TOVA(budget=None, threshold=1.1))]
    assert sizes == [1, 2] + [2] * (STEPS - 1)


@pytest.mark.parametrize(
    ("protect", "stays"),
    [
        ("sinks", range(4)),
        ("instruction", range(5)),
        ("prompt", range(PROMPT)),
        ("answer", range(PROMPT, PROMPT + STEPS)),
    ],
)
@pytest.mark.parametrize("kind", [H2O, TOVA])
def test_protected_tokens_stay_and_the_others_go(kind, protect, stays):
    """At every step what is protected and was seen is there, and the list is as long as the budget and one token, or as
    what is protected beside it."""
    for step, (held, _, _) in enumerate(run(kind(budget=3, protect=protect))):
        assert {j for j in stays if j < PROMPT + step} <= set(held)
        answer, limit = step, {"sinks": 4, "instruction": 5, "prompt": PROMPT + 3, "answer": max(3, step - 1)}[protect]
        assert len(held) <= limit + 1 and (answer < 5 or len(held) >= min(limit, PROMPT + answer))


def test_chunks_stay_whole_where_they_are_not_cut():
    """Of chunks of 4 with a budget of 10, two stay; a budget below a chunk leaves a part of one, or nothing beside
    what always stays."""
    view = prefill_view(torch.arange(20.0)[None].flip(1), 20)
    for policy, kept in (
        (TOVA(budget=10, chunk=4), list(range(10))),
        (TOVA(budget=10, chunk=4, cut_chunk=False), list(range(8))),
        (TOVA(budget=3, chunk=4, cut_chunk=False), [0, 1, 2]),
        (H2O(budget=6, chunk=4, cut_chunk=False, recent_share=0.5), [17, 18, 19]),
    ):
        assert kept_of(policy.plan_prefill(view)) == kept


def sample(slots: int, lists: int = 4, tokens: int = 100) -> dict:
    """A record of a prompt of which the lists hold so many tokens together."""
    return {"kept": {"prompt_slots": slots, "prompt_tokens": tokens, "lists": lists}}


def test_what_a_threshold_kept_is_said():
    """The share over all prompts, and that it was everything, or nothing but what stays anyhow."""
    policy = SnapKV(budget=None, threshold=0.01, window=8)
    assert (
        remark(policy, [sample(100), sample(60), {"kept": {}}]) == "threshold=0.01 kept 20.0 % of the prompts' tokens"
    )
    assert "100.0 % of the prompts' tokens: every score reaches it" in remark(policy, [sample(400), sample(400)])
    assert "no score reaches it" in remark(policy, [sample(4 * 9), sample(20, tokens=5)])
    assert "no score" not in remark(policy, [sample(4 * 9 + 1)])
    assert remark(policy, []) == "" and remark(SnapKV(budget=0.5), [sample(100)]) == ""


def test_a_protected_prompt_is_held_to_its_budget():
    """All of the prompt, and of 50 answer tokens a tenth, the window, and what may come in before the next eviction."""
    kept = {"prompt_slots": 400, "prompt_tokens": 100, "tokens_seen": 150, "lists": 4, "page_tokens": 8}

    def said(window: int, **more: object) -> str | None:
        policy = SnapKV(budget=0.1, window=window, protect="prompt", decode_every=1)
        return complaint(policy, {"kept": kept | more})

    assert said(3, slots_per_tier=[4 * 106]) is None
    assert "106.25 tokens per head" in said(3, slots_per_tier=[4 * 106 + 1])
    assert said(8, slots_per_tier=[4 * 109]) is None
    assert "but protect=prompt keeps all, and with the budget allows 100" in said(3, prompt_slots=399)
    assert complaint(SnapKV(protect="prompt", decode_every=1), {}) is None
    assert complaint(H2O(budget=0.1, protect="prompt"), {"kept": kept | {"slots_per_tier": [4 * 106]}}) is None
    assert "106.25" in complaint(H2O(budget=0.1, protect="prompt"), {"kept": kept | {"slots_per_tier": [425]}})


def test_a_method_that_used_one_of_its_tiers_says_so():
    """Where nothing is low or dropped, it only quantises; a token elsewhere, or a list that is shorter, ends that."""
    from kvbench.methods.diffkv import DiffKV

    def sample(*slots, ratio=1.0):
        return {"kept": {"slots_per_tier": list(slots), "slot_ratio": ratio}}

    policy = DiffKV(alpha_h=0.0, alpha_l=0.0)
    assert "k8v4" in remark(policy, [sample(90, 0), sample(30, 0), {"kept": {}}])
    for samples in ([sample(90, 0), sample(30, 1)], [sample(90, 0, ratio=0.99)], []):
        assert remark(policy, samples) == ""
