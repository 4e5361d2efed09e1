"""The bridge to kvpress, over a stand-in for it (tests/kvpress.py): what a scorer gets, and what is refused."""

import sys

import kvpress
import pytest
import torch
from engine_helpers import answers, engine, random_tokens, request
from refusals import refused
from store_helpers import watching
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvbench.methods.keydiff import KeyDiff
from kvbench.methods.kvpress import KVPress, scorer, value_of
from kvbench.policy import NotForModel


def test_a_scorer_gets_what_the_model_gives_its_layer(tiny_model):
    """Scores follow from the layer's own projection, its input, and the model's rotary embedding; tokens behind the
    prompt that are read in the same pass are not among them, and the model is as before."""
    loaded, prompt = tiny_model("llama", "gqa3", 64), random_tokens(40)
    policy, seen = watching(KVPress, press="ProjectedPress", settings=["factor=2.5", "name=q"], budget=0.5)
    with engine(loaded, policy) as running:
        running.runner.reserve(rows=1, prompt_tokens=40, new_tokens=4)
        running.runner.read(prompt, lookahead=[5, 6, 7])
    layers = loaded.model.model.layers
    assert not any(hasattr(layer.self_attn, "rotary_emb") for layer in layers)
    with torch.no_grad():
        hidden = layers[0].input_layernorm(loaded.model.model.embed_tokens(torch.tensor(prompt)))
        module = layers[0].self_attn
        want = 2.5 * module.q_proj(hidden).view(40, 2, -1).sum(-1).T
        want = want + module.v_proj(hidden).view(40, 2, 64).sum(-1).T
    assert (seen[0].score[0] - want).abs().max() < 1e-3


def test_it_keeps_its_best_scores(tiny_model):
    """As many tokens as the budget says, and other ones than a method with another statistic; allocations compose."""
    loaded, asked = tiny_model("llama", "gqa3", 64), [request("0", random_tokens(60), max_new_tokens=8)]
    for allocation in ("uniform", "global"):
        ours = answers(loaded, KVPress(budget=0.3, allocation=allocation), asked)["0", 0]
        other = answers(loaded, KeyDiff(budget=0.3, allocation=allocation), asked)["0", 0]
        assert ours.kept["prompt_slots"] == 4 * 18 and ours.ledger["payload_bytes"] == other.ledger["payload_bytes"]
        assert ours.token_ids != other.token_ids


def test_a_scorer_is_told_its_ratio(tiny_model):
    """Of a ratio and of tokens; a budget in bytes says none, which matters to a scorer that looks at it alone."""
    loaded = tiny_model("llama", "gqa3", 64)
    for budget in (0.3, 18):
        policy, seen = watching(KVPress, press="RatioPress", budget=budget)
        outcome = answers(loaded, policy, [request("0", random_tokens(60), max_new_tokens=2)])["0", 0]
        assert outcome.status == "ok" and (seen[0].score == 1).sum(-1).eq(18).all()
        assert (policy.plan_prefill(seen[0]).tier_of >= 0).nonzero()[:, 2].unique().tolist() == list(range(18))
    answers(loaded, KVPress(budget="200KiB"), [request("0", random_tokens(60), max_new_tokens=2)])
    with refused("settings-conflict", "method.budget", "RatioPress"):
        answers(loaded, KVPress(press="RatioPress", budget="200KiB"), [request("0", random_tokens(60))])


def test_a_scorer_may_load_what_was_trained_for_a_name(tiny_model, monkeypatch):
    """It sees the model's name and type alone, loads once, and ranks keys by what it loaded."""
    loaded = tiny_model("llama", "gqa3", 64)
    monkeypatch.setattr(loaded.model.config, "name_or_path", "org/Tiny-1B")
    policy, seen = watching(KVPress, press="NamedPress", budget=0.5)
    outcome = answers(loaded, policy, [request("0", random_tokens(40), max_new_tokens=2)])["0", 0]
    assert outcome.status == "ok" and kvpress.NamedPress.loaded == ["Tiny-1B"]
    plain, others = watching(KVPress, press="KeyDiffPress", budget=0.5)  # the first channel of the same keys
    answers(loaded, plain, [request("0", random_tokens(40), max_new_tokens=2)])
    assert seen[0].score.shape == others[0].score.shape and not torch.equal(seen[0].score, others[0].score)
    call, layer = {}, loaded.model.model.layers[0].self_attn
    monkeypatch.setattr(kvpress.NamedPress, "score", lambda made, *given: call.setdefault("keys", given[2])[..., 0])
    answers(loaded, policy, [request("0", random_tokens(40), max_new_tokens=2)])
    want = -(torch.arange(64.0) * call["keys"].float()).sum(-1)
    assert layer.config is loaded.model.config and torch.allclose(seen[0].score[0], want[0], rtol=1e-3, atol=1e-2)


def test_lots_are_drawn_the_same_every_time(tiny_model):
    """Whatever was drawn before, and what is drawn after goes on as if nothing had been."""
    loaded, scores, after = tiny_model("llama", "gqa3", 64), [], []
    for _ in range(2):
        policy, seen = watching(KVPress, press="DrawingPress")
        torch.manual_seed(len(scores))
        answers(loaded, policy, [request("0", random_tokens(60), max_new_tokens=2)])
        after.append(torch.rand(3))
        scores.append(seen[0].score)
        torch.manual_seed(len(after) - 1)
        assert torch.equal(after[-1], torch.rand(3))
    assert torch.equal(*scores) and scores[0].std() > 0.1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"press": "NoPress"}, ("setting-value", "method.press", "NoPress", "ChoosingPress", "DrawingPress")),
        ({"press": "BasePress"}, ("setting-value", "method.press")),
        ({"press": "ScorerPress"}, ("setting-value", "method.press")),
        ({"press": "PreparedPress"}, ("setting-value", "method.press", "method.press=PreparedPress")),
        ({"press": "NamedPress"}, ("setting-value", "method.press", "method.press=NamedPress")),
        ({"press": "ChoosingPress"}, ("setting-value", "method.press", "method.press=ChoosingPress")),
        ({"settings": ["typo=3"]}, ("setting-value", "method.settings", "KeyDiffPress")),
        ({"settings": ["compression_ratio=0.5"]}, ("setting-value", "method.settings", "compression_ratio")),
    ],
)
def test_what_is_no_scorer_is_refused_before_anything_is_read(tiny_model, settings, message):
    """With the names that there are."""
    with refused(*message):
        answers(tiny_model("llama", "gqa3", 64), KVPress(**settings), [request("0", random_tokens(9))])


def test_a_prompt_that_a_scorer_cannot_score_is_named(tiny_model):
    """What the scorer says, with the length."""
    policy = KVPress(press="WindowPress", settings=["window_size=20"])
    with refused("setting-value", "method.press", "WindowPress", "20"):
        answers(tiny_model("llama", "gqa3", 64), policy, [request("0", random_tokens(20))])


def test_without_the_package_the_command_that_installs_it_is_named(monkeypatch):
    """Not before the model is asked for: the method is listed and documented without it."""
    monkeypatch.setitem(sys.modules, "kvpress", None)
    policy = KVPress()
    with pytest.raises(
        NotForModel, match=r"needs the package kvpress .*; install it with: pip install --no-deps kvpress"
    ):
        policy.check_model(2, 2)


def test_settings_are_read_as_python_has_them():
    """Numbers, truth values and names."""
    assert [value_of(text) for text in ("3", "0.5", "True", "false", "mean")] == [3, 0.5, True, False, "mean"]
    assert scorer("ProjectedPress", ("factor=2",)).factor == 2


def test_a_package_may_wrap_every_attention_function(tiny_model, monkeypatch):
    """As kvpress does when it is imported, with the dropout by its place: answers are the same."""
    loaded, asked = tiny_model("llama", "gqa3", 64), [request("0", random_tokens(40), max_new_tokens=5)]
    plain, calls = ALL_ATTENTION_FUNCTIONS["kvbench"], []

    def wrapper(module, query, key, value, attention_mask, dropout, **kwargs):
        calls.append(dropout)
        return plain(module, query, key, value, attention_mask, dropout, **kwargs)

    want = answers(loaded, KVPress(), asked)["0", 0]
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "kvbench", wrapper)
    found = answers(loaded, KVPress(), asked)["0", 0]
    assert (found.token_ids, found.kept) == (want.token_ids, want.kept) and len(calls) == 2 * 5
