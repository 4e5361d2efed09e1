"""Prompts in segments, and the gold continuation that rides along: what they may and may not influence."""

import pytest
import torch
from engine_helpers import (
    NATIVE_METHODS,
    answers,
    comparable,
    forced_logits,
    own_greedy,
    own_logits,
    random_tokens,
    request,
)
from selection import in_turn
from store_helpers import held_positions

from kvbench.methods.diffkv import DiffKV
from kvbench.methods.snapkv import SnapKV
from kvbench.methods.streaming_llm import StreamingLLM

METHODS = NATIVE_METHODS
NATIVE = METHODS["full"]
LOSSLESS = {
    "full": NATIVE,
    "snapkv": SnapKV(budget=1.0, tier="native"),
    "kivi": METHODS["kivi"],
    "diffkv": DiffKV(alpha_h=0, alpha_l=0, high="native", low="native"),
    "streaming_llm": StreamingLLM(budget=5000, tier="native"),
}


def slots_after_prompt(loaded, policy, asked) -> list[list[list[int]]]:
    """Positions per tier and list, as the first decode step leaves them (slots in order)."""
    seen = []

    def look(running, step):
        if not seen:
            tiers, row = range(len(running.store.pages.formats)), running.runner.open_rows[0]
            seen.extend(held_positions(running.store, row, tier) for tier in tiers)

    answers(loaded, policy, [asked], on_step=look, track=("pos",))
    return seen


# Segments ------------------------------------------------------------------------------------------------------------


@pytest.mark.every(2)
@pytest.mark.parametrize(("name", "cuts"), in_turn([*LOSSLESS], [(60, 61), (1, 30), (40, 41, 90)]))
def test_lossless_segments_equal_one_segment(loaded, name, cuts):
    """Context first and question later, in two to four segments, is the same prompt when nothing is lost."""
    prompt = random_tokens(100)
    segments = tuple(prompt[a:b] for a, b in zip((0, *cuts), (*cuts, 100), strict=True))
    whole = own_greedy(loaded, [prompt], 24)[0]
    outcome = answers(loaded, LOSSLESS[name], [request("a", *segments)])["a", 0]
    assert outcome.token_ids == whole
    assert outcome.num_prompt_tokens == 100
    assert outcome.kept["tokens_seen"] == 123
    assert sum(outcome.kept["slots_per_tier"]) == 123 * 4


@pytest.mark.parametrize("question_tokens", [1, 2, 30])
def test_no_question_token_influences_what_snapkv_keeps(loaded, question_tokens):
    """The context is compressed before the question is seen: another question, the same slots; then it is appended."""
    context, policy = random_tokens(120), METHODS["snapkv"]
    kept = []
    for seed in (1, 2):
        question = random_tokens(question_tokens, seed=seed)
        slots = slots_after_prompt(loaded, policy, request("a", context, question, max_new_tokens=3))[0]
        assert all(pos[60:] == list(range(120, 121 + question_tokens)) for pos in slots)
        kept.append([pos[:60] for pos in slots])
    assert kept[0] == kept[1]
    alone = slots_after_prompt(loaded, policy, request("a", context, max_new_tokens=3))[0]
    assert kept[0] == [pos[:60] for pos in alone]
    aware = slots_after_prompt(loaded, policy, request("a", context + random_tokens(30, seed=1), max_new_tokens=3))[0]
    assert [pos[:60] for pos in aware] != kept[0]  # in one segment the question does choose


@pytest.mark.every(2)
@pytest.mark.parametrize("name", METHODS)
def test_later_segments_are_fed_like_answers(loaded, name):
    """A question that is read at once, or token by token where methods act in decode, gives what an answer forced to it
    does."""
    context, question = random_tokens(90), random_tokens(21, seed=1)
    outcome = answers(loaded, METHODS[name], [request("a", context, question, max_new_tokens=1)])["a", 0]
    logits = forced_logits(loaded, METHODS[name], [context], [question])[0]
    assert outcome.token_ids == [int(logits[-1].argmax())]
    assert outcome.kept["tokens_seen"] == 111 and outcome.kept["prompt_tokens"] == 90
    if name == "streaming_llm":
        assert outcome.kept["slots_per_tier"] == [40 * 4]


@pytest.mark.every(2)
@pytest.mark.parametrize("name", METHODS)
def test_averages_are_over_the_answer_not_the_question(loaded, name):
    """A question fed step by step leaves no trace in the average bytes, which are those of the answer's steps."""
    asked = request("a", random_tokens(90), random_tokens(21, seed=1), max_new_tokens=2)
    held = answers(loaded, METHODS[name], [asked])["a", 0].ledger
    assert held["average_bytes"] == held["resident_bytes"]  # one step only
    assert held["average_ratio"] == pytest.approx(held["ratio"])
    assert held["peak_bytes"] >= held["resident_bytes"]


# Gold continuations ---------------------------------------------------------------------------------------------------


@pytest.mark.every(2)
@pytest.mark.parametrize(("name", "segments"), in_turn([*METHODS], (1, 2)))
def test_gold_influences_nothing_but_the_fidelity(loaded, name, segments):
    """With, without and with another gold continuation: the same slots, tokens and bytes; its NLL under the full cache
    is transformers' own, whatever the method compresses."""
    parts = (random_tokens(90),) if segments == 1 else (random_tokens(70), random_tokens(20, seed=1))
    golds = [(), random_tokens(12, seed=2), random_tokens(30, seed=3)]
    sizing = [request("a", *parts, gold=golds[2])]
    runs, slots = [], []
    for gold in golds:
        asked = request("a", *parts, gold=gold)
        fields = comparable(answers(loaded, METHODS[name], [asked], sizing=sizing)["a", 0])
        runs.append(fields)
        if (fidelity := fields.pop("fidelity")) is None:
            assert gold == ()
            continue
        logp = own_logits(loaded, [*asked.prompt, *gold], 89)[: len(gold)].log_softmax(-1)
        nll, first = -logp[torch.arange(len(gold)), torch.tensor(gold)], segments == 1  # whose first token is exact
        assert fidelity["nll_full"] == pytest.approx(float(nll[first:].mean()), abs=1e-4)
        assert (fidelity["num_tokens"], fidelity["num_measured"]) == (len(gold), len(gold) - first)
        if name != "kivi":  # which tokens it holds follows from their number
            slots.append(slots_after_prompt(loaded, METHODS[name], asked))
    assert runs[0] == runs[1] == runs[2]
    assert all(kept == slots[0] for kept in slots)


@pytest.mark.every(2)
@pytest.mark.parametrize("name", METHODS)
def test_fidelity_equals_a_plain_computation(loaded, name):
    """NLL, KL, agreement and matches of a forced continuation, computed from the two sets of logits by hand, all over
    the same tokens: those behind the first, which is exact for every method."""
    prompt, gold = random_tokens(90), random_tokens(12, seed=2)
    got = answers(loaded, METHODS[name], [request("a", prompt, gold=gold)])["a", 0].fidelity
    ours = forced_logits(loaded, METHODS[name], [prompt], [gold])[0][:12].double().log_softmax(-1)
    full = own_logits(loaded, [*prompt, *gold], 89)[:12].double().log_softmax(-1)
    kl = (full.exp() * (full - ours)).sum(-1)
    right = ours.argmax(-1) == torch.tensor(gold)
    assert got["nll"] == pytest.approx(-float(ours[torch.arange(12), torch.tensor(gold)][1:].mean()), abs=1e-4)
    assert got["kl_mean"] == pytest.approx(float(kl[1:].mean()), abs=1e-4)
    assert got["kl_max"] == pytest.approx(float(kl[1:].max()), abs=1e-4)
    assert got["top1_agreement"] == pytest.approx(float((ours.argmax(-1) == full.argmax(-1))[1:].double().mean()))
    assert got["gold_argmax_share"] == pytest.approx(float(right[1:].double().mean()))
    assert got["gold_exact"] == 0.0
    assert (got["kl_max"] < 1e-6) == (name in ("full", "kivi"))


@pytest.mark.parametrize(
    ("gold_tokens", "limit", "forced"), [(1, 64, 1), (20, 8, 8), (20, 0, None), (20, 64, 20), (20, None, 20)]
)
def test_how_many_gold_tokens_are_forced(loaded, gold_tokens, limit, forced):
    """Never more than fidelity_max_tokens; of a single token nothing was read from the cache yet."""
    asked = request("a", random_tokens(30), gold=random_tokens(gold_tokens, seed=2), max_new_tokens=3)
    fidelity = answers(loaded, NATIVE, [asked], fidelity_max_tokens=limit)["a", 0].fidelity
    assert (fidelity and fidelity["num_tokens"]) == forced
    if forced == 1:
        means = ("nll", "nll_full", "kl_mean", "kl_max", "top1_agreement", "gold_argmax_share")
        assert [fidelity[name] for name in means] == [None] * 6 and fidelity["num_measured"] == 0


def test_bins_add_up_to_the_means(loaded):
    """The sums along the answer are over the same tokens as the means; token i is in the last bin that begins at or
    before i, and the first token is in none."""
    asked = request("a", random_tokens(60), gold=random_tokens(40, seed=2), max_new_tokens=3)
    outcome = answers(loaded, METHODS["snapkv"], [asked])["a", 0]
    assert outcome.drift["tokens"] == [0.0, 15.0, 16.0, 8.0]  # 0; 1-15; 16-31; 32-39
    for name, key in (
        ("nll", "nll"),
        ("nll_full", "nll_full"),
        ("kl", "kl_mean"),
        ("same_first_choice", "top1_agreement"),
    ):
        assert sum(outcome.drift[name]) / 39 == pytest.approx(outcome.fidelity[key], rel=1e-5)
    apart = request("a", random_tokens(40), random_tokens(20, seed=1), gold=random_tokens(40, seed=2))
    assert answers(loaded, METHODS["snapkv"], [apart])["a", 0].drift["tokens"] == [1.0, 15.0, 16.0, 8.0]


@pytest.mark.parametrize("segments", [1, 2])
def test_the_full_caches_own_answer_is_forced(loaded, segments):
    """With `own` the full cache is forced to give its own answer, to the last token, and finds it the likeliest; a
    method that is forced to give it is measured over the same tokens."""
    parts = (random_tokens(90),) if segments == 1 else (random_tokens(70), random_tokens(20, seed=1))
    asked = [
        request(name, *parts, gold=random_tokens(5), max_new_tokens=count) for name, count in (("a", 20), ("b", 33))
    ]
    outcomes = answers(loaded, NATIVE, asked, own=True)
    for name, count in (("a", 20), ("b", 33)):
        outcome = outcomes[name, 0]
        assert len(outcome.token_ids) == outcome.fidelity["num_tokens"] == count
        assert (outcome.fidelity["gold_exact"], outcome.fidelity["top1_agreement"]) == (1.0, 1.0)
        assert outcome.fidelity["kl_max"] < 1e-4
        forced = request(name, *parts, gold=tuple(outcome.token_ids), max_new_tokens=count)
        got = answers(loaded, METHODS["snapkv"], [forced])[name, 0]
        assert got.fidelity["nll_full"] == pytest.approx(outcome.fidelity["nll_full"], abs=1e-4)
        assert got.fidelity["num_measured"] == outcome.fidelity["num_measured"] and got.fidelity["kl_mean"] > 1e-4
    (short,) = answers(loaded, NATIVE, asked[:1], own=True, fidelity_max_tokens=7).values()
    assert short.fidelity["num_tokens"] == 7
