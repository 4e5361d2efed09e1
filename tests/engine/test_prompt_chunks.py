"""Engines that read prompts in chunks: forced answers, prompt caches, memory that runs out, and the peak."""

import pytest
import torch
from engine_helpers import answers, engine, own_logits, random_tokens, request
from refusals import refused

from kvbench.engine.prompt_cache import PromptCache
from kvbench.engine.runner import Runner
from kvbench.methods.full import Full
from kvbench.methods.h2o import H2O
from kvbench.methods.kv_compress import KVCompress
from kvbench.methods.snapkv import SnapKV
from kvbench.policy import Policy
from kvbench.runs.verdict import complaint

LiveBytes = pytest.importorskip("kvbench.extensions.bench.chunks").LiveBytes

SNAPKV = SnapKV(budget=0.5, window=8, tier="native")


def test_forced_answers_are_compared_with_the_full_cache(loaded):
    """Nothing is predicted exactly where a prompt was compressed while it was read, and where nothing is lost nothing
    differs from the full cache."""
    gold = random_tokens(9, seed=3)
    asked = [request("a", random_tokens(100), max_new_tokens=4, gold=gold)]
    lossless, lossy, whole = (
        answers(loaded, policy, asked, prefill_chunk=chunk)["a", 0].fidelity
        for policy, chunk in ((Full(tier="native"), 32), (SNAPKV, 32), (SNAPKV, None))
    )
    assert lossless["kl_mean"] < 1e-6 and lossless["num_tokens"] == 9
    assert lossless["num_measured"] == lossy["num_measured"] == 9 and whole["num_measured"] == 8
    assert lossy["kl_mean"] > 1e-4


def test_a_prompt_cache_gives_no_prompt_that_was_read_otherwise(loaded):
    """A prompt that another run read at once is not taken for one that is read in chunks, nor the other way round."""
    prompts, prompt, found = PromptCache(1 << 30, keeps_queries=True), random_tokens(100), []
    for cache in (None, prompts):
        for chunk in (None, 32, None):
            runner = Runner(loaded, SNAPKV, prompts=cache, chunk=chunk)
            runner.reserve(rows=1, prompt_tokens=100, new_tokens=4)
            row, logits = runner.read(prompt)
            found.append(torch.cat([logits, runner.step([row], [5])]))
    loaded.model.set_attn_implementation("sdpa")
    assert prompts.num_read == 1 and prompts.num_reused == 1
    for fresh, cached in zip(found[:3], found[3:], strict=True):
        assert torch.equal(fresh, cached)
    assert not torch.equal(found[0], found[1])


def peaks(loaded, policy: Policy, prompt: tuple[int, ...], chunk: int | None) -> tuple[int, dict]:
    """Bytes of all tensors alive at the worst moment of reading a prompt, and the row's ledger after it."""
    with engine(loaded, policy, prefill_chunk=chunk) as running:
        running.runner.reserve(rows=1, prompt_tokens=len(prompt), new_tokens=1)
        with LiveBytes() as live:
            row, _ = running.runner.read(prompt)
        return live.peak_bytes, running.store.ledger.report(row)[0]


@pytest.mark.parametrize("policy", [SnapKV(budget=0.25), KVCompress(budget=0.25)], ids=["snapkv", "kv_compress"])
def test_the_peak_shrinks(loaded, policy):
    """At a budget of 0.25 everything that lies in memory at the worst moment is half as much, and what the ledger
    foretells of the prompt read at once is what it holds then. (16,384 tokens: results/history/performance.md.)"""
    prompt = random_tokens(1536)
    (whole, at_once), (chunked, ledger) = (peaks(loaded, policy, prompt, chunk) for chunk in (None, 128))
    assert whole > 2 * chunked
    assert ledger["one_shot_peak_bytes"] == at_once["peak_bytes"] > 1.9 * ledger["peak_bytes"]
    assert ledger["resident_bytes"] == at_once["resident_bytes"]
    assert "one_shot_peak_bytes" not in at_once


def test_tokens_ahead_need_an_uncompressed_prompt(loaded):
    """They are refused with what gives their logits."""
    with engine(loaded, SNAPKV, prefill_chunk=32) as running:
        running.runner.reserve(rows=1, prompt_tokens=64, new_tokens=4)
        with refused("unsupported", None, "64", "32", "full_logits"):
            running.runner.read(random_tokens(64), lookahead=(1, 2))
        assert running.runner.open_rows == []


def test_segments_behind_a_prompt_in_chunks(loaded):
    """A context that is read in chunks and a question behind it are the prompt that transformers reads at once, where
    nothing is lost; rotated channels and a copy per query head change nothing either."""
    prompt = random_tokens(130)
    want = own_logits(loaded, prompt, 129)[0]
    for policy, rotation in (
        (Full(tier="native"), "none"),
        (SnapKV(budget=1.0, window=8, tier="native"), "hadamard"),
        (SnapKV(budget=1.0, window=8, tier="native", granularity="q_head"), "none"),
    ):
        with engine(loaded, policy, prefill_chunk=32, rotation=rotation) as running:
            running.runner.reserve(rows=1, prompt_tokens=100, new_tokens=40)
            row, _ = running.runner.read(prompt[:100])
            got = running.runner.append(row, prompt[100:])
            assert running.store.ledger.report(row)[1]["prompt_chunks"] == 4
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)


def test_a_budget_in_bytes_is_of_the_whole_row(loaded):
    """It is solved for before the first chunk, and met at the end."""
    policy = SnapKV(budget="100000B", window=8)
    asked = [request("a", random_tokens(300), max_new_tokens=12)]
    held = answers(loaded, policy, asked, prefill_chunk=64)["a", 0]
    assert 90_000 < held.ledger["resident_bytes"] <= 100_000
    assert complaint(policy, {"ledger": held.ledger, "kept": held.kept}) is None
    assert held.ledger == answers(loaded, policy, asked)["a", 0].ledger | {
        name: held.ledger[name] for name in ("peak_bytes", "staging_peak_bytes", "one_shot_peak_bytes")
    }


def test_tables_on_a_device_give_the_same(loaded):
    """Triton's page tables, interpreted, move and count as the reference's do; plain torch does nothing.

    Keys and values stay in fp32: a last bit of attention would now and then round one to another number of 16 bits.
    """
    pytest.importorskip("triton")
    found = []
    for backend in ("torch", "triton"):
        with engine(loaded, H2O(budget=20, tier="native"), prefill_chunk=24, backend=backend) as running:
            runner = running.runner
            runner.reserve(rows=1, prompt_tokens=32, new_tokens=4)
            row, logits = runner.read(random_tokens(32))
            found.append((logits, runner.step([row], [5]), runner.store.ledger.report(row)))
            if backend == "triton":
                assert runner.backend.fallbacks == set()
    for got, want in zip(found[1][:2], found[0][:2], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert found[1][2] == found[0][2]
