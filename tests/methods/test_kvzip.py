"""KVzip: scores against a plain replay, and which tokens stay."""

from dataclasses import dataclass

import pytest
import torch
from engine_helpers import answers, engine, random_tokens, request
from refusals import refused
from store_helpers import make_store, watching
from transformers import DynamicCache

from kvbench.cache.replay_check import ReplayCheck
from kvbench.kernels.operands import PLAIN, Softmax
from kvbench.methods.full import Full
from kvbench.methods.kvzip import KVzip, Reconstruction
from kvbench.policy import Probe, Replay, ScoreSpec


def plain_scores(q, k, replays, scale, sinks, softmax=PLAIN) -> torch.Tensor:
    """The largest attention that keys k [H, N, D] receive, one query at a time, in float64."""
    score = torch.zeros(k.shape[:2])
    for replay in replays:
        first, end = replay.first, replay.end
        seen = [*range(min(sinks, first)), *range(first, end)]
        for head in range(replay.q.shape[0]):
            own = head // (replay.q.shape[0] // k.shape[0])
            for i, query in enumerate(replay.q[head].double()):
                keys = torch.cat([k[own, seen], replay.k[own, : i + 1]]).double()
                logits = keys @ query * scale
                if softmax.cap:
                    logits = softmax.cap * torch.tanh(logits / softmax.cap)
                if softmax.sinks is not None:
                    logits = torch.cat([logits, softmax.sinks[0, head, None].double()])
                found = torch.softmax(logits, 0)[len(seen) - (end - first) : len(seen)]
                score[own, first:end] = torch.maximum(score[own, first:end], found.float())
    return score


@pytest.mark.parametrize(
    ("sinks", "softmax"), [(0, PLAIN), (3, PLAIN), (20, PLAIN), (3, Softmax(1.5, torch.linspace(-2, 3, 6)[None]))]
)
def test_scores_are_those_of_a_plain_replay(sinks, softmax):
    """Two passes, one of them longer than what is computed at once, over 25 tokens of two heads with three queries; of
    a model that caps its logits and has sinks, too."""
    torch.manual_seed(sinks)
    k, v = torch.randn(2, 2, 25, 16)
    replays = tuple(
        Replay(first=a, end=b, q=torch.randn(6, m, 16), k=torch.randn(2, m, 16))
        for a, b, m in ((0, 18, 70), (18, 25, 9))
    )
    policy, seen = watching(KVzip, budget=10, sinks=sinks)
    store = make_store(policy, num_q_heads=6, num_kv_heads=2, head_dim=16, softmax=softmax)
    store.prefill_layer(store.open_row(), 0, None, k, v, 0.25, None, replays)
    assert (seen[0].score[0] - plain_scores(None, k, replays, 0.25, sinks, softmax)).abs().max() < 1e-6


def test_a_spec_has_both_or_neither():
    """A probe for a statistic that looks at none, and a statistic without its probe, are refused; so are odd sizes."""
    for settings in ({"probe": Probe(ask="a", go_on="b", part_tokens=4)}, {"statistic": Reconstruction(4)}):
        with pytest.raises(ValueError, match="set both or neither"):
            ScoreSpec(**settings)
    with refused("setting-value", "part_tokens", "part_tokens=0"):
        Probe(ask="a", go_on="b", part_tokens=0)


def test_the_second_pass_is_billed(tiny_model):
    """Time, tokens and bytes: while the prompt is compressed all of it lies there, and the passes' queries and keys; of
    two prompts in one batch each has its own."""
    loaded = tiny_model("llama", "gqa3", 64)
    asked = [request(str(n), random_tokens(n), max_new_tokens=4) for n in (30, 90)]
    found, plain = answers(loaded, KVzip(budget=0.5, part=40), asked), answers(loaded, Full(), asked)
    ask, more = (len(loaded.tokenizer.encode(text, add_special_tokens=False)) for text in texts())
    for length, passes in ((30, 1), (90, 3)):
        outcome, layers, token_bytes = found[str(length), 0], 2, 64 * 4
        replayed = length + ask + (passes - 1) * (more + 8)
        assert outcome.kept["replay_tokens"] == replayed
        # Keys and values of the prompt, queries of six heads and keys of two of the passes, in fp32.
        held = layers * token_bytes * (2 * 2 * length + (6 + 2) * replayed)
        assert outcome.ledger["staging_peak_bytes"] == held
        assert outcome.ledger["peak_bytes"] > held > plain[str(length), 0].ledger["peak_bytes"]
        assert 0 < outcome.timing["probe_s"] < outcome.timing["prefill_s"]
        assert "probe_s" not in plain[str(length), 0].timing and "replay_tokens" not in plain[str(length), 0].kept


def texts() -> tuple[str, str]:
    """What the method asks for the first part, and for others."""
    probe = KVzip().score.probe
    return probe.ask, probe.go_on


def test_a_pass_sees_the_whole_prompt(tiny_model, monkeypatch):
    """The queries that a statistic finds are those of transformers' own pass over prompt, request and part."""
    monkeypatch.setattr(ReplayCheck, "of", lambda *_, **__: None)  # which would be asked, too
    loaded, prompt, seen = tiny_model("llama", "gqa3", 64), random_tokens(50), []

    @dataclass(frozen=True)
    class Watched(Reconstruction):
        def of_prompt(self, tensors):
            seen.append(tensors.replays)
            return super().of_prompt(tensors)

    policy = KVzip(budget=0.5, part=30)
    policy.score = ScoreSpec(statistic=Watched(4), probe=policy.score.probe)
    closing = (5, 6, 7)
    with engine(loaded, policy) as running:
        running.runner.reserve(rows=1, prompt_tokens=50, new_tokens=4)
        running.runner.read(prompt, closing=closing)
    ask, go_on = (loaded.tokenizer.encode(text, add_special_tokens=False) for text in texts())
    passes = [[*ask, *closing, *prompt[:30]], [*go_on, *prompt[22:30], *closing, *prompt[30:]]]
    assert [(replay.first, replay.end) for replay in seen[1]] == [(0, 30), (30, 50)]
    for index, tokens in enumerate(passes):
        keys = own_keys(loaded, [*prompt, *tokens])
        for layer in range(2):
            assert (seen[layer][index].k - keys[layer][:, 50:]).abs().max() < 1e-4


@torch.no_grad()
def own_keys(loaded, tokens) -> list[torch.Tensor]:
    """Keys [H, n, D] of every layer, from transformers' own cache."""
    cache = DynamicCache(config=loaded.model.config)
    loaded.model(torch.tensor([tokens]), past_key_values=cache)
    return [layer.keys[0] for layer in cache.layers]
