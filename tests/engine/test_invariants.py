"""Exactness against transformers, and the same in any batch; tests/methods/test_conformance.py has what holds for every
method."""

from pydoc_data.topics import topics

import pytest
import torch
from engine_helpers import (
    NATIVE_METHODS,
    answers,
    comparable,
    forced_logits,
    own_greedy,
    own_logits,
    own_steps,
    random_tokens,
    request,
)
from places import ROOT
from selection import FULL

from kvbench.methods.full import Full
from kvbench.methods.streaming_llm import StreamingLLM

# Model type, heads and head dim; all of them in fp32 and three in bf16.
MODELS = [
    ("llama", "mha", 64),
    ("llama", "gqa3", 128),
    ("mistral", "gqa3", 64),
    ("mistral", "gqa7", 64),
    ("qwen2", "gqa7", 64),
    ("qwen2", "mha", 128),
]
LENGTHS = [1, 7, 37, 64, 65, 130, 200, 90] if FULL else [1, 37, 65, 130, 90]

# Settings at which every method drops or moves tokens on prompts of these lengths, in the model's own dtype.
EXACT = NATIVE_METHODS | {"streaming_llm_absolute": StreamingLLM(budget=0.5, position_mode="absolute", tier="native")}


@pytest.mark.every(2)
@pytest.mark.parametrize(("model_type", "heads", "head_dim"), MODELS)
def test_full_native_equals_transformers(tiny_model, model_type, heads, head_dim):
    """The uncompressed store gives generate()'s greedy tokens, and its logits within 1e-4 (fp32)."""
    loaded = tiny_model(model_type, heads, head_dim)
    prompts = [random_tokens(n, seed=1) for n in (1, 33, 150)]
    own = [own_greedy(loaded, [prompt], 12)[0] for prompt in prompts]
    asked = [request(str(i), prompt, max_new_tokens=12) for i, prompt in enumerate(prompts)]
    outcomes = answers(loaded, Full(tier="native"), asked)
    assert [outcomes[str(i), 0].token_ids for i in range(len(prompts))] == own
    forced = forced_logits(loaded, Full(tier="native"), prompts, own)
    for prompt, tokens, logits in zip(prompts, own, forced, strict=True):
        want = own_logits(loaded, [*prompt, *tokens], len(prompt) - 1)
        assert (logits - want).abs().max() < 1e-4
        assert want.std() > 0.1  # the logits are not all alike, so that 1e-4 means something


def test_qwen2_biases_are_there(tiny_model):
    """The Qwen2 models of these tests have biases in the key projection, or they would test nothing new."""
    layer = tiny_model("qwen2", "gqa7", 64).model.model.layers[0]
    assert layer.self_attn.k_proj.bias is not None


@pytest.mark.parametrize(("model_type", "heads", "head_dim"), [MODELS[1], MODELS[3], MODELS[4]])
def test_full_native_in_bf16_is_as_exact_as_transformers(tiny_model, model_type, heads, head_dim):
    """In bf16 the logits are no farther from the fp32 model's than transformers' own bf16 logits are.

    Tolerance: bf16 keeps 8 bits, so each of the two implementations rounds differently in every layer and neither is
    right. The fp32 model with the same (bf16-rounded) weights is the judge: our root-mean-square error against it may
    exceed transformers' own by 20 %, which covers rounding luck over these 75 rows of logits, and not more.
    """
    loaded = tiny_model(model_type, heads, head_dim, "bfloat16")
    prompts = [random_tokens(n, seed=2) for n in (1, 33, 150)]
    forced_tokens = [random_tokens(24, seed=3)] * 3
    ours = torch.cat(forced_logits(loaded, Full(tier="native"), prompts, forced_tokens))
    spans = [(list(p) + list(t), len(p) - 1) for p, t in zip(prompts, forced_tokens, strict=True)]
    own = torch.cat([own_logits(loaded, *span) for span in spans])
    try:
        loaded.model.float()
        exact = torch.cat([own_logits(loaded, *span) for span in spans])
    finally:
        loaded.model.bfloat16()
    own_error, our_error = ((x - exact).square().mean().sqrt() for x in (own, ours))
    assert 0 < our_error < 1.2 * own_error


@pytest.mark.every(2)
@pytest.mark.parametrize("name", EXACT)
def test_ragged_batches_equal_single_rows(tiny_model, name):
    """Five prompts (exhaustive: eight) of different lengths give, in groups of 8 and 3, the tokens and bytes that
    each gives alone."""
    loaded = tiny_model("llama", "gqa3", 64, narrow=True)
    requests = [
        request(str(i), random_tokens(n, seed=6), max_new_tokens=10 + 3 * i, gold=random_tokens(5) if i % 2 else ())
        for i, n in enumerate(LENGTHS)
    ]
    alone = answers(loaded, EXACT[name], requests, batch_size=1)
    for batch_size in (3, 8):
        together = answers(loaded, EXACT[name], requests, batch_size=batch_size)
        for key, outcome in together.items():
            fields, want = comparable(outcome), comparable(alone[key])
            if not loaded.rows_are_alone:  # sums over matrix products of another shape
                assert fields.pop("fidelity") == pytest.approx(want.pop("fidelity"), abs=1e-4)
            assert fields == want


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("num_rows", "num_steps"), [(2, 8), pytest.param(16, 126, marks=pytest.mark.exhaustive)])
def test_embedded_model_through_the_store_step_by_step(embedded_model, num_rows, num_steps):
    """On SmolLM2-135M (fp32), tokens fed one by one give the exact logits, as transformers does: 18 in
    2 rows, and 2,032 in 16 rows (`make test-exact`).

    The text is the one that longctx fills its prompts with. Exact are the logits of the same weights in float64: on
    logits that reach 43, both caches stay within 1e-4 of them (own: 8.2e-5, ours: 7.7e-5 on one machine). Their
    distance from each other is bounded by the two errors together, and no greedy token differs.
    """
    paragraphs = " ".join(topics[name] for name in sorted(topics))
    text = torch.tensor(embedded_model.tokenizer(paragraphs[:80_000]).input_ids)
    tokens = torch.stack([text[1000 * row :][: 40 + num_steps] for row in range(num_rows)])
    forced = forced_logits(embedded_model, Full(tier="native"), tokens[:, :40].tolist(), tokens[:, 40:].tolist())
    own = own_steps(embedded_model, tokens, 40)
    assert own.shape[:2] == (num_rows, num_steps + 1)
    ours = torch.stack(list(forced))
    try:
        with torch.no_grad():
            exact = embedded_model.model.double()(tokens, logits_to_keep=num_steps + 1).logits
    finally:
        embedded_model.model.float()  # float32 -> float64 -> float32 gives every weight back
    own_error, our_error = ((x.double() - exact).abs().max() for x in (own, ours))
    assert our_error < 1e-4
    assert (ours - own).abs().max() <= own_error + our_error + 1e-5
    assert torch.equal(ours.argmax(-1), own.argmax(-1))


@pytest.mark.exhaustive  # the default run compares the logits of single steps, above
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("num_tokens", "distinct"), [(8, 10), (50, 40)])
def test_embedded_model_generates_the_tokens_of_transformers(embedded_model, num_tokens, distinct):
    """On SmolLM2-135M, greedy tokens, four prompts in one batch, equal those of generate() with its own cache."""
    text = embedded_model.tokenizer((ROOT / "LICENSE").read_text()).input_ids
    prompts = [tuple(text[begin : begin + 20]) for begin in (0, 400, 800, 1200)]
    requests = [request(str(i), p, max_new_tokens=num_tokens) for i, p in enumerate(prompts)]
    outcomes = answers(embedded_model, Full(tier="native"), requests)
    own = own_greedy(embedded_model, prompts, num_tokens)
    assert [outcomes[str(i), 0].token_ids for i in range(4)] == own
    assert len({token for tokens in own for token in tokens}) > distinct
