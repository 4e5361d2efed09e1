"""Prompts that are read once and replayed for other settings: nothing but the time may differ."""

from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from engine_helpers import comparable, engine, random_tokens, request

from kvbench.cache.prompts import ScoredLayer
from kvbench.engine import hf
from kvbench.engine.prompt_cache import PromptCache, Recording
from kvbench.methods.critical import Critical
from kvbench.methods.diffkv import DiffKV
from kvbench.methods.expected_attention import ExpectedAttention
from kvbench.methods.full import Full
from kvbench.methods.h2o import H2O
from kvbench.methods.kivi import Kivi
from kvbench.methods.kv_compress import KVCompress
from kvbench.methods.snapkv import SnapKV
from kvbench.methods.streaming_llm import StreamingLLM
from kvbench.methods.think import ThinK
from kvbench.policy import LayerTensors, Need, Scored, Statistic

# Settings of several methods in an order in which they find scores of their own kind, of another kind, and none.
SWEEP = [
    DiffKV(alpha_h=0.0, alpha_l=0.0, window=16),
    DiffKV(alpha_h=2.0, alpha_l=0.5, window=16),
    Full(),
    SnapKV(budget=0.5, window=8),
    SnapKV(budget=0.3, window=8),
    SnapKV(budget=0.5, window=12),
    SnapKV(budget=0.5, window=12, granularity="q_head"),
    KVCompress(budget=0.5),
    H2O(budget=0.5),
    StreamingLLM(budget=40, position_mode="cache_relative"),
    Kivi(group=8, residual_tokens=16),
    DiffKV(alpha_h=1.0, alpha_l=0.2, window=16),
]
GOLD = random_tokens(9, seed=5)


def prompts_of_two_kinds():
    """Requests with and without gold tokens, one of them in two segments."""
    first, second, third = (random_tokens(n, seed=s) for n, s in ((70, 1), (33, 2), (90, 3)))
    fields = {"max_new_tokens": 6}
    return [
        request("whole", first, gold=GOLD, **fields),
        request("split", second, third[:11], gold=GOLD, **fields),
        request("plain", third, **fields),
    ]


def outcomes(loaded, policy, prompts=None, requests=None):
    """(sample, repeat) -> everything of the outcome but its time."""
    found = []
    with engine(loaded, policy, batch_size=2) as running:
        if prompts is not None:
            running.runner.prompts = prompts
        running.run(requests or prompts_of_two_kinds(), on_outcome=found.append)
    return {(o.sample_id, o.repeat): comparable(o) for o in found}


@pytest.fixture(scope="module")
def fresh():
    """Gives what a run without kept prompts says of a method, which is run once for all tests."""
    found = {}

    def of(loaded, policy):
        if repr(policy) not in found:
            found[repr(policy)] = outcomes(loaded, policy)
        return found[repr(policy)]

    return of


@pytest.fixture
def forwards(monkeypatch):
    """Counts the forward passes over prompts by their mode."""
    seen = {"prefill": 0, "dense": 0}
    plain = hf.forward

    def counted(model, session, *arguments):
        if (name := type(session).__name__.lower()) in seen:
            seen[name] += 1
        return plain(model, session, *arguments)

    monkeypatch.setattr(hf, "forward", counted)
    return seen


def test_reused_prompts_give_the_same_records(loaded, forwards, fresh):
    """A sweep over twelve settings of eight methods from one cache: the records are those of fresh runs, to the bit."""
    prompts = PromptCache(2**30)
    swept = [outcomes(loaded, policy, prompts) for policy in SWEEP]
    # Three prompts and one dense pass; read again for the other statistics only: SnapKV three
    # times, KV-Compress, H2O, and DiffKV after them. What wants no scores takes whatever is there.
    assert forwards == {"prefill": 3 * 7, "dense": 1}
    assert prompts.num_read == 22 and prompts.num_reused == 4 * len(SWEEP) - 22
    for policy, reused in zip(SWEEP, swept, strict=True):
        assert reused == fresh(loaded, policy), type(policy).__name__


def test_a_prompt_serves_no_model_that_computes_otherwise(loaded, tiny_model, forwards):
    """The same weights in another dtype or in another order of sums, and other weights: their prompts are read."""
    prompts, policy, requests = PromptCache(2**30), Full(), prompts_of_two_kinds()[2:]
    half = replace(tiny_model("llama", "gqa3", 64, "bfloat16", narrow=True), fingerprint=loaded.fingerprint)
    alike, other = replace(loaded, linear="packed"), tiny_model("llama", "gqa3", 64, seed=1, narrow=True)
    for number, model in enumerate((loaded, half, alike, other), start=1):
        assert outcomes(model, policy, prompts, requests) == outcomes(model, policy, None, requests)
        assert prompts.num_read == number and prompts.num_reused == 0
    assert outcomes(loaded, policy, prompts, requests) and prompts.num_reused == 1


def test_what_channels_are_worth_is_kept_with_the_scores(loaded):
    """Two settings of a method that orders key channels read a prompt once, and keep what fresh runs keep."""
    prompts = PromptCache(2**30)
    for keep in (1.0, 0.5):
        policy = ThinK(keep_channels=keep, window=8)
        assert outcomes(loaded, policy, prompts) == outcomes(loaded, policy)
    assert prompts.num_read == prompts.num_reused == 4


def test_kept_queries_serve_every_statistic(loaded, forwards, fresh):
    """With its queries kept, the model runs over a prompt once for all methods, and the records are still those of
    fresh runs to the bit."""
    settings = [
        *SWEEP,
        Critical(budget=0.5, window=8),
        ExpectedAttention(budget=0.5, sinks=2, decode_every=3),
        SnapKV(budget=0.5, window=8, decode_every=2),
        ThinK(window=8),
    ]
    prompts = PromptCache(2**30, keeps_queries=True)
    swept = [outcomes(loaded, policy, prompts) for policy in settings]
    assert forwards == {"prefill": 3, "dense": 1}
    assert prompts.num_read == 4 and prompts.num_reused == 4 * len(settings) - 4
    for policy, reused in zip(settings, swept, strict=True):
        assert reused == fresh(loaded, policy), type(policy).__name__


def test_what_others_measure_meanwhile_serves_them_without_queries(loaded, forwards, fresh):
    """Stores that come next measure a prompt while it is read: the model runs over it once, no query is kept, and the
    records are those of fresh runs. One whose measurement fails then reads the prompt itself."""
    others = [*SWEEP, ExpectedAttention(budget=0.5, sinks=2, decode_every=3), ThinK(window=8), Critical(budget=0.5)]
    prompts, fails = PromptCache(2**30), len(others) - 1
    with ExitStack() as stack:
        for policy in others:
            runner = stack.enter_context(engine(loaded, policy)).runner
            runner.reserve(rows=1, prompt_tokens=100, new_tokens=9)
            prompts.others = [*prompts.others, runner.store]
        prompts.others[fails].measure = lambda *given: 1 / 0
        swept = [outcomes(loaded, Full(), prompts)]
    prompts.others = ()
    assert not any(entry.queries for entry in prompts._entries.values())
    swept += [outcomes(loaded, policy, prompts) for policy in others[:fails]]
    assert forwards == {"prefill": 3, "dense": 1}
    swept.append(outcomes(loaded, others[fails], prompts))
    assert forwards == {"prefill": 6, "dense": 1}
    for policy, reused in zip([Full(), *others], swept, strict=True):
        assert reused == fresh(loaded, policy), type(policy).__name__


@dataclass(frozen=True)
class HiddenNorms(Statistic):
    """Ranks tokens by the norm of what their layer was given."""

    needs: ClassVar[frozenset[Need]] = frozenset({"hidden_states"})

    def of_prompt(self, seen: LayerTensors) -> torch.Tensor:
        return seen.hidden_states.float().norm(dim=-1)[None].repeat(seen.k.shape[0], 1)


@dataclass(kw_only=True)
class ByHidden(Scored):
    """Keeps the tokens with the largest hidden states."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.score_by(HiddenNorms())


def test_what_queries_do_not_tell_is_read_again(loaded, forwards):
    """A statistic of hidden states cannot be had from kept queries, so the model runs over the prompt again."""
    prompts = PromptCache(2**30, keeps_queries=True)
    outcomes(loaded, SWEEP[3], prompts)
    reused = outcomes(loaded, ByHidden(budget=0.5), prompts)
    assert forwards["prefill"] == 2 * 3
    assert reused == outcomes(loaded, ByHidden(budget=0.5))


def test_what_does_not_fit_is_read_again(loaded, forwards):
    """With room for one of three prompts the records stay the same, and no byte beyond the limit is held."""
    whole = PromptCache(2**30)
    fresh = outcomes(loaded, SWEEP[1], whole)
    sizes = [entry.num_bytes for entry in whole._entries.values()]
    assert whole.used_bytes == sum(sizes) and len(sizes) == 4
    small = PromptCache(sizes[0] + 10)
    forwards.update(prefill=0, dense=0)
    for _ in range(3):
        assert outcomes(loaded, SWEEP[1], small) == fresh
        assert 0 < small.used_bytes <= small.limit_bytes
    assert forwards["prefill"] == 3 + 2 + 2 and small.num_reused >= 2
    nothing = PromptCache(0)
    assert outcomes(loaded, SWEEP[1], nothing) == fresh
    assert nothing.used_bytes == 0 and nothing.num_reused == 0


def test_recording_never_holds_more_than_its_limit():
    """A prompt that grows over the limit is let go at once, layer by layer, not after its last layer."""
    layer = torch.zeros(2, 10, 8)
    recording = Recording(limit_bytes=3 * layer.nbytes)
    recording.add(ScoredLayer(layer, layer), layer, 1.0)
    assert len(recording.layers) == 1 and not recording.overflow
    recording.add(ScoredLayer(layer, layer), layer, 1.0)
    recording.add(ScoredLayer(layer, layer), layer, 1.0)
    assert recording.overflow and not recording.layers


def test_settle_leaves_room_for_the_next_group(loaded):
    """With room for two groups of prompts, the first stays for the next sweep and the later ones take turns."""
    groups = [[request(f"{i}", random_tokens(40, seed=i), max_new_tokens=1)] for i in range(3)]
    probe = PromptCache(2**30)
    outcomes(loaded, SWEEP[0], probe, groups[0])
    prompts = PromptCache(int(2.5 * probe.used_bytes))
    for group in groups:
        outcomes(loaded, SWEEP[0], prompts, group)
        assert prompts.num_reused == 0
        prompts.settle()
        assert prompts.used_bytes == probe.used_bytes
    outcomes(loaded, SWEEP[0], prompts, groups[0])
    assert prompts.num_reused == 1 and prompts.num_read == 3


def test_failed_prompt_is_not_kept(loaded, monkeypatch):
    """A prompt whose logits are not finite is recorded as such every time and never held."""
    weight = loaded.model.model.layers[0].self_attn.v_proj.weight
    kept = weight.data.clone()
    prompts = PromptCache(2**30)
    try:
        weight.data[0, 0] = float("nan")
        for _ in range(2):
            found = outcomes(loaded, SWEEP[1], prompts, [request("bad", random_tokens(20), max_new_tokens=2)])
            assert found[("bad", 0)]["status"] == "nan"
    finally:
        weight.data.copy_(kept)
    assert prompts.used_bytes == 0 and prompts.num_reused == 0
