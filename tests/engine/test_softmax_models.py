"""Models whose softmax is not plain, soft-capped logits and sinks, against transformers' own attention."""

from itertools import product
from types import SimpleNamespace

import pytest
import torch
from decoders import tiny_model
from engine_helpers import random_tokens
from selection import few

from kvbench.api.generate import begin
from kvbench.engine import hf
from kvbench.engine.runner import Runner
from kvbench.errors import UnsupportedModel
from kvbench.kernels.operands import Softmax

PROMPT, ANSWER = 20, 4
KINDS = ("gpt_oss", "gemma2")
BACKENDS = ("torch", "cpu", "triton")

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, of what Triton's interpreter passes over


def model_of(kind: str):
    """A random model of two layers that look at everything, whose caps and sinks change its logits by a lot."""
    model = tiny_model(kind, num_hidden_layers=2, layer_types=["full_attention"] * 2, sliding_window=512)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.scaling *= 4  # logits of several units, which a cap of 2 bends
            if hasattr(layer.self_attn, "attn_logit_softcapping"):
                model.config.attn_logit_softcapping = layer.self_attn.attn_logit_softcapping = 2.0
            if hasattr(layer.self_attn, "sinks"):
                layer.self_attn.sinks.copy_(torch.randn_like(layer.self_attn.sinks) * 2)
    return model


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest):
    """One of the models, under transformers' own attention that can do what it asks for."""
    return model_of(request.param)


@pytest.fixture(scope="module")
def own(model):
    """Its tokens, and what its own attention makes of them: logits [n, V], and probabilities [L, Hq, n, n]."""
    ids = torch.tensor([random_tokens(PROMPT + ANSWER, vocabulary=90)])
    model.set_attn_implementation("eager")
    with torch.no_grad():
        out = model(ids, use_cache=False, output_attentions=True)
    return ids[0].tolist(), out.logits[0].float(), torch.cat(out.attentions).float()


def run(model, ids, method: str, backend: str, **settings):
    """Logits behind the prompt and behind every later token, and the runner with the row still open."""
    loaded, policy = begin(model, None, method, settings)
    try:
        runner = Runner(loaded, policy, backend=backend)
        runner.reserve(rows=1, prompt_tokens=PROMPT, new_tokens=ANSWER)
        row, logits = runner.read(ids[:PROMPT])
        steps = [runner.step([row], [token]) for token in ids[PROMPT:]]
    finally:
        hf.detach(model)
    return torch.cat([logits[:], *steps]), runner, row


@pytest.mark.parametrize("backend", few(BACKENDS, "torch", "cpu"))
def test_logits_are_those_of_the_model(model, own, backend: str):
    """A prompt and steps behind it, in the model's own 32 bits; without caps or sinks they are another model's."""
    ids, wanted, _ = own
    found, runner, _ = run(model, ids, "full", backend, tier="native")
    # fp32 sums in another order, through two layers
    torch.testing.assert_close(found, wanted[PROMPT - 1 :], rtol=0, atol=1e-4)
    assert not runner.shape.softmax.is_plain
    assert backend == "torch" or runner.backend.fallbacks <= {"chunk_attention"}  # of prompts, where logits are capped


@pytest.mark.parametrize("backend", few(BACKENDS, "torch", "cpu"))
def test_scores_are_the_model_s_attention(model, own, backend: str):
    """What H2O adds up, over the prompt and every step, is what the model attended with: of heads with sinks less than
    one for each query."""
    ids, _, attention = own
    _, runner, row = run(model, ids, "h2o", backend, budget=64, tier="native")
    slots = runner.store.view(torch.tensor([row])).slots(0)
    score = torch.zeros(slots.score.shape[1:3] + (len(ids),))
    score.scatter_(-1, slots.pos[0].clamp(min=0).long(), slots.score[0] * slots.valid[0])
    heads = score.shape[1]
    wanted = attention.sum(2).unflatten(1, (heads, -1)).sum(2)
    torch.testing.assert_close(score, wanted, rtol=0, atol=1e-4)
    if runner.shape.softmax.sinks is not None:
        assert float(score.sum(-1).min()) < 0.95 * len(ids) * attention.shape[1] / heads


SETTINGS = {
    "kivi": {"bits": 8, "group": 8, "residual_tokens": 8},
    "diffkv": {"alpha_h": 1.0, "alpha_l": 0.3, "window": 4},
    "snapkv": {"budget": 0.5, "window": 4},
    "quest": {"read_budget": 0.5, "page_tokens": 8},
}


@pytest.mark.every(2)
@pytest.mark.parametrize(("method", "backend"), few(product(SETTINGS, BACKENDS[1:]), *product(SETTINGS, ["cpu"])))
def test_methods_agree_whatever_computes_them(model, own, method: str, backend: str):
    """Rings, tiers, windows and chosen pages: compiled kernels give what plain torch gives."""
    ids, _, _ = own
    wanted, found = (run(model, ids, method, name, **SETTINGS[method])[0] for name in ("torch", backend))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-3)  # sums in another order, then 16 bits


def test_chunks_and_segments_see_the_same_softmax(model, own):
    """A prompt that is read in chunks, and tokens behind it that come at once."""
    ids, wanted, _ = own
    loaded, policy = begin(model, None, "full", {"tier": "native"})
    try:
        runner = Runner(loaded, policy, backend="cpu", chunk=7)
        runner.reserve(rows=1, prompt_tokens=PROMPT, new_tokens=ANSWER)
        row, logits = runner.read(ids[:PROMPT])
        last = runner.append(row, ids[PROMPT:])
    finally:
        hf.detach(model)
    torch.testing.assert_close(torch.stack([logits[-1], last]), wanted[[PROMPT - 1, -1]], rtol=0, atol=1e-4)


@pytest.mark.parametrize(("known", "asked"), [((0.0, None), {"softcap": 3.0}), ((2.0, None), {})])
def test_a_cap_that_is_not_the_known_one_is_refused(known, asked):
    """A layer that caps otherwise than the configuration says."""
    refuse(Softmax(*known), None, asked, "softcap")


@pytest.mark.parametrize("passed", [False, True])
def test_sinks_that_are_not_the_module_s_are_refused(passed: bool):
    """Sinks that a layer has and does not use, or uses without having them by the name that is looked for."""
    sinks = torch.zeros(2)
    refuse(Softmax(), None if passed else sinks, {"s_aux": sinks} if passed else {}, "s_aux")


def refuse(softmax: Softmax, sinks: torch.Tensor | None, asked: dict, name: str) -> None:
    """Calls attention of a layer that asks for a softmax that the store does not know."""
    shape = SimpleNamespace(softmax=softmax, window=None, shared={}, attending=(0,))
    held = SimpleNamespace(shape=shape, kind_of=lambda layer: (held, layer))
    layer = SimpleNamespace(session=SimpleNamespace(store=held, traces=[], attend=None))
    layer.index, key = 0, torch.zeros(1, 2, 3, 8)
    setattr(key, hf.TAG, layer)
    with pytest.raises(UnsupportedModel, match=f"layer 0 uses {name}, which"):
        hf.attention(SimpleNamespace(sinks=sinks), torch.zeros(1, 2, 3, 8), key, key, None, **asked)
