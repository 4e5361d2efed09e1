"""Scores and choices against what official code made of small tensors (make_official.py says what each is), and VATP,
CriticalKV and ChunkKV against plain choices."""

import json
from functools import cache

import pytest
import torch
from places import TESTS
from store_helpers import causal_probabilities, held_positions, held_scores, prefill_view, step_one, watching

from kvbench.cache.layout import ModelShape
from kvbench.cache.options import StoreOptions
from kvbench.cache.store import CompressedStore
from kvbench.kernels.dispatch import get_backend
from kvbench.methods.ada_snapkv import AdaSnapKV
from kvbench.methods.chunkkv import ChunkKV
from kvbench.methods.critical import Critical
from kvbench.methods.expected_attention import ExpectedAttention
from kvbench.methods.keydiff import KeyDiff
from kvbench.methods.lagkv import LagKV
from kvbench.methods.r_kv import RKV
from kvbench.methods.vatp import VATP


@cache
def official() -> dict[str, torch.Tensor]:
    """The file's tensors by name."""
    data = json.loads((TESTS / "golden" / "official.json").read_text())
    return {name: torch.tensor(value) for name, value in data.items()}


def read_official(policy, length: int = 21):
    """A store that has read the official prompt's first tokens; also its row and the positions kept per head."""
    data = official()
    shape = ModelShape(
        num_layers=1,
        num_q_heads=4,
        num_kv_heads=2,
        head_dim=4,
        dtype=torch.float32,
        device=torch.device("cpu"),
        inv_freq=data["inv_freq"],
        output_projections=(data["output_projection"],),
    )
    room = {"rows": 1, "max_prompt_tokens": 64, "max_new_tokens": 64}
    store = CompressedStore(policy, shape, **room, options=StoreOptions(track=("pos",)), backend=get_backend("torch"))
    row = store.open_row()
    store.prefill_layer(row, 0, data["q"][:, :length], data["k"][:, :length], data["v"][:, :length], 0.5)
    return store, row, [sorted(positions) for positions in held_positions(store, row)]


def test_keydiff_scores_are_kvpress_s():
    """Every score is the golden one."""
    policy, seen = watching(KeyDiff, budget=5)
    read_official(policy)
    assert (seen[0].score[0] - official()["keydiff"]).abs().max() < 1e-5


def test_lagkv_ranks_are_kvpress_s():
    """Within each partition the golden ranks; sinks and the last tokens, 1 there, stand above all ranks here."""
    policy, seen = watching(LagKV, budget=5, sinks=2, lag=4)
    read_official(policy)
    score, want = seen[0].score[0], official()["lagkv"]
    ranked = slice(2, 14)
    assert score[:, ranked].tolist() == want[:, ranked].tolist()
    assert (want[:, [0, 1, *range(14, 21)]] == 1).all() and (score[:, [0, 1, *range(14, 21)]] >= 2).all()


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("expected_attention", {"epsilon": 0.01}),
        ("expected_attention_mean", {"covariance": False, "value_norm": False}),
    ],
)
def test_expected_attention_is_kvpress_s(name, settings):
    """Every score behind the sinks is the golden one, from queries that are turned back where kvpress projects them."""
    policy, seen = watching(ExpectedAttention, budget=5, sinks=2, future=7, **settings)
    read_official(policy)
    score, want = seen[0].score[0], official()[name]
    assert (score[:, 2:] - want[:, 2:]).abs().max() < 1e-5 * want[:, 2:].abs().max()
    assert (score[:, :2] > score[:, 2:].amax()).all()


def test_critical_norms_and_choice_are_kvpress_s():
    """The golden norms of projected values, and the golden tokens when as many beside the window go by attention."""
    policy, seen = watching(Critical, budget=11, window=3, pool="avg", pool_kernel=3)
    _, _, kept = read_official(policy)
    assert torch.allclose(seen[0].extra["norm"][0], official()["critical_norm"], rtol=1e-5)
    assert kept == official()["critical_kept"].tolist()


def test_chunkkv_keeps_kvpress_s_chunks():
    """With a window that is the last chunk, the golden chunks stay in both heads."""
    policy = ChunkKV(budget=12, window=4, chunk=4)
    _, _, kept = read_official(policy, length=20)
    assert kept == [official()["chunkkv_kept"].tolist()] * 2


def test_r_kv_keeps_the_original_s_tokens():
    """The golden tokens of each head, one of which repeats a key twice."""
    _, _, kept = read_official(RKV(budget=11, window=3, pool_kernel=3, mix=0.3))
    assert kept == official()["r_kv_kept"].tolist()


def best(score, count, among):
    """The `count` positions with the largest scores; of equal ones the earlier."""
    return sorted(among, key=lambda p: (-float(score[p]), p))[:count]


@pytest.mark.parametrize("window", [0, 5])
def test_vatp_keeps_sinks_recent_and_heavy_times_norm(window):
    """Per KV head: the sinks, half of the budget from the end, and the rest by attention times the value's L1 norm."""
    data = official()
    matrix = causal_probabilities(data["q"], data["k"], 0.5).view(2, 2, 21, 21).sum(1)
    weighed = matrix[:, -window:].sum(1) * data["v"].abs().sum(-1)
    _, _, kept = read_official(VATP(budget=9, sinks=2, window=window))
    want = [sorted([0, 1, *range(17, 21), *best(score, 3, range(2, 17))]) for score in weighed]
    assert kept == want


def test_vatp_weighs_tracked_attention_by_the_values_that_pages_hold():
    """Slots track plain attention, prompt and steps alike; an eviction ranks by it times the norm."""
    policy, seen = watching(VATP, budget=8, sinks=1, recent_share=0.25, decode_every=2)
    store, row, _ = read_official(policy)
    for head, stored in enumerate(held_scores(store, row)):
        assert stored == pytest.approx({p: float(seen[0].extra["attention"][0, head, p]) for p in stored})
    torch.manual_seed(0)
    new = torch.randn(2, 2, 2, 4)  # [step, key or value, head, D]
    for k, v in new:
        step_one(store, row, [(torch.randn(4, 4), k, v)], 0.5)
    values = torch.cat([official()["v"], new[:, 1].transpose(0, 1)], 1).abs().sum(-1)
    scores = held_scores(store, row)
    store.begin_step(torch.tensor([row]))
    for head, positions in enumerate(held_positions(store, row)):
        weighed = {p: s * float(values[head, p]) for p, s in scores[head].items()}
        free = [p for p in weighed if p != 0 and p < 21]
        assert sorted(positions) == sorted([0, 21, 22, 23, *best(weighed, 5, free)])


def test_vatp_s_small_budget_keeps_sinks_then_the_newest():
    """Sinks first, then the newest tokens, when a budget holds no more."""
    _, _, kept = read_official(VATP(budget=4, sinks=3, recent_share=0.99))
    assert kept == [[0, 1, 2, 20]] * 2


@pytest.mark.parametrize(("first_stage", "epsilon"), [(0.5, 1e-4), (0.0, 0.1), (1.0, 1e-4), (0.3, 0.0)])
def test_critical_chooses_in_two_stages(first_stage, epsilon):
    """The best by attention first, and then the best of the others by attention times the projected value."""
    policy, seen = watching(Critical, budget=10, window=2, pool="none", first_stage=first_stage, epsilon=epsilon)
    _, _, kept = read_official(policy)
    data = official()
    matrix = causal_probabilities(data["q"], data["k"], 0.5)[:, -2:].mean(1).view(2, 2, 21).mean(1)
    projected = torch.zeros(2, 21)
    for head in range(4):
        part = data["output_projection"][:, 4 * head : 4 * head + 4]
        projected[head // 2] += (data["v"][head // 2] @ part.T).abs().sum(-1) / 2
    for head in range(2):
        one = best(matrix[head], int(8 * first_stage), range(19))
        worth = (matrix[head] + epsilon) * projected[head]
        two = best(worth, 8 - len(one), [p for p in range(19) if p not in one])
        assert kept[head] == sorted([*one, *two, 19, 20])


def test_adaptive_critical_has_ada_snapkv_s_counts_and_its_own_tokens():
    """Heads get the budgets that Ada-SnapKV gives them, and fill them in two stages."""
    settings = {"budget": 11, "window": 2, "pool": "none", "alpha": 0.0}
    _, _, plain = read_official(AdaSnapKV(**settings))
    _, _, own = read_official(Critical(allocation="ada", first_stage=0.5, **settings))
    assert [len(p) for p in own] == [len(p) for p in plain] and len(set(map(len, own))) == 2
    _, _, same = read_official(Critical(allocation="ada", first_stage=1.0, **settings))
    assert own != plain and same == plain


@pytest.mark.parametrize("chunk", [1, 3, 4, 50])
def test_chunkkv_keeps_the_best_chunks(chunk):
    """Chunks by the mean of both heads' scores, best first, the last one cut where the budget ends."""
    torch.manual_seed(chunk)
    score = torch.rand(2, 25)
    plan = ChunkKV(budget=14, window=5, chunk=chunk).plan_prefill(prefill_view(score, 25, num_heads=2))
    total = score[:, :20].sum(0)
    chunks = [list(range(a, min(20, a + chunk))) for a in range(0, 20, chunk)]
    order = sorted(chunks, key=lambda own: (-float(total[own].mean()), own))
    want = sorted([*[p for own in order for p in own][:9], *range(20, 25)])
    assert all((own >= 0).nonzero()[:, 0].tolist() == want for own in plan.tier_of[0])


def test_chunkkv_reuses_a_layer_s_choice():
    """With reuse=2 layers 1 and 3 keep what 0 and 2 chose."""
    torch.manual_seed(1)
    score = torch.rand(4, 1, 30)
    view = prefill_view(score, 30, layers=range(4))
    policy = ChunkKV(budget=12, window=4, chunk=4, reuse=2)
    tier_of = policy.plan_prefill(view).tier_of
    assert policy.scope == "model" and ChunkKV().scope == "head"
    assert torch.equal(tier_of[0], tier_of[1]) and torch.equal(tier_of[2], tier_of[3])
    assert not torch.equal(tier_of[0], tier_of[2])
