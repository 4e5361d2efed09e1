"""Statistics against what official code makes of the same tensors, number by number or choice by choice."""

import pytest
import torch
from official_helpers import official, read_official, watching

from kvbench.methods.chunkkv import ChunkKV
from kvbench.methods.critical import Critical
from kvbench.methods.expected_attention import ExpectedAttention
from kvbench.methods.keydiff import KeyDiff
from kvbench.methods.lagkv import LagKV
from kvbench.methods.r_kv import RKV


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
