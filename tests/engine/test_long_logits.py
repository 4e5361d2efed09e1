"""Logits of long texts, made a piece at a time: they are the model's own, and never all there."""

import pytest
import torch
from engine_helpers import NATIVE_METHODS, answers, engine, own_logits, random_tokens, request
from transformers import GraniteConfig, GraniteForCausalLM

from kvbench.engine import hf, long_logits, runner
from kvbench.engine.prompt_cache import PromptCache
from kvbench.engine.runner import NotFinite

PIECE = 16


@pytest.fixture
def loaded(tiny_model, monkeypatch):
    """The tiny Llama with three query heads per KV head, in fp32, with pieces of 16 positions."""
    monkeypatch.setattr(long_logits, "PIECE", PIECE)
    monkeypatch.setattr(runner, "PIECE", PIECE)
    return tiny_model("llama", "gqa3", 64)


@pytest.mark.parametrize("segments", [1, 2])
@pytest.mark.parametrize("own", [False, True])
def test_they_are_those_of_one_pass(loaded, monkeypatch, segments, own):
    """NLL under the full cache is transformers' own, and no pass gives logits for more than a piece."""
    parts = (random_tokens(50),) if segments == 1 else (random_tokens(30), random_tokens(20, seed=1))
    asked = request("a", *parts, gold=random_tokens(45, seed=2), max_new_tokens=45)
    most, before = [], hf.forward

    def forward(model, session, ids, positions, past, num_logits):
        most.append(num_logits)
        return before(model, session, ids, positions, past, num_logits)

    monkeypatch.setattr(hf, "forward", forward)
    outcome = answers(loaded, NATIVE_METHODS["full"], [asked], own=own, fidelity_per_token=True)["a", 0]
    assert max(most) == 1
    gold = outcome.token_ids if own else asked.gold
    logp = own_logits(loaded, [*asked.prompt, *gold], 49)[:45].log_softmax(-1)
    wanted = (-logp[torch.arange(45), list(gold)]).tolist()
    assert outcome.per_token["nll_full"] == pytest.approx(wanted, abs=1e-3)
    assert outcome.fidelity["kl_mean"] < 1e-6 and outcome.fidelity["num_tokens"] == 45


@pytest.mark.parametrize("count", [PIECE, PIECE + 1, 3 * PIECE, 40])
def test_any_position_in_any_order(loaded, count):
    """A piece is made again when it is looked at again; what is behind the end is refused."""
    text = random_tokens(60)
    wanted = own_logits(loaded, text, 60 - count)
    with engine(loaded, NATIVE_METHODS["full"]) as running:
        running.runner.reserve(rows=1, prompt_tokens=1, new_tokens=1)
        found = running.runner.full_logits(text, num_logits=count)
        assert isinstance(found, torch.Tensor) == (count <= PIECE) and len(found) == count
        for place in (count - 1, 0, count // 2, 1):
            assert torch.allclose(found[place], wanted[place], atol=1e-4)
        picked = long_logits.take(found, [3, 1, count - 1])
        assert torch.allclose(picked[2], wanted[count - 1], atol=1e-4) and len(picked) == 3
        assert long_logits.take(found, [0, 1]) is found
        with pytest.raises(IndexError):
            found[count]


def test_what_the_model_does_behind_its_head_is_done(loaded):
    """Granite divides its logits; a model that is spread over devices keeps its own way in."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = GraniteForCausalLM(GraniteConfig(vocab_size=50, num_key_value_heads=2, logits_scaling=7.0, **sizes)).eval()
    ids = torch.arange(40)[None]
    with torch.no_grad():
        wanted = model(ids).logits[0]
        found = long_logits.read_long(model, 33, lambda: model(ids, logits_to_keep=1).logits)
    assert torch.allclose(torch.stack([found[place] for place in range(33)]), wanted[-33:], atol=1e-6)
    way_in = model.model.forward
    model.model.forward = way_in
    assert torch.allclose(found.take([32])[0], wanted[-1], atol=1e-6) and model.model.forward is way_in
    assert found.nbytes == 33 * 32 * 4 + PIECE * 50 * 4


def test_numbers_that_are_not_finite_are_found(loaded, tiny_model):
    """In a text of which only the end is looked at, too."""
    text = random_tokens(60)
    weight = loaded.model.get_input_embeddings().weight
    before = weight[text[30]].clone()
    with torch.no_grad():
        weight[text[30]] = float("nan")
    try:
        with engine(loaded, NATIVE_METHODS["full"]) as running:
            running.runner.reserve(rows=1, prompt_tokens=1, new_tokens=1)
            with pytest.raises(NotFinite):
                running.runner.full_logits(text, num_logits=40)
    finally:
        with torch.no_grad():
            weight[text[30]] = before


def test_a_prompt_cache_holds_what_they_are_made_from(loaded):
    """A replayed prompt gives the same numbers, and its bytes are those that are held."""
    asked = request("a", random_tokens(50), gold=random_tokens(45, seed=2), max_new_tokens=2)
    cache, found = PromptCache(1 << 30), []
    for _ in range(2):
        with engine(loaded, NATIVE_METHODS["snapkv"]) as running:
            running.runner.prompts = cache
            running.run([asked], on_outcome=found.append)
    assert (cache.num_read, cache.num_reused) == (1, 1)
    assert found[0].fidelity == found[1].fidelity
    (entry,) = cache._entries.values()
    assert entry.logits.nbytes < 45 * loaded.model.config.vocab_size * 4 + 45 * loaded.model.config.hidden_size * 4
