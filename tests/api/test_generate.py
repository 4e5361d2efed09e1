"""`kvbench.generate`: the engine's tokens, text for text, and a model that is left as it was found."""

import pytest
from engine_helpers import answers, request
from refusals import refused
from selection import in_turn

import kvbench
from kvbench.api.generate import choose_policy
from kvbench.config.compose import compose, hydra_value
from kvbench.methods.snapkv import SnapKV

TEXTS = ["A long prompt, of which a method may drop the middle part. " * 3, "Short.", "Something in between; " * 4]
# Settings at which short prompts are compressed.
METHODS = {
    "full": {},
    "snapkv": {"budget": 0.5, "window": 8},
    "kivi": {"group": 8, "residual_tokens": 16},
    "diffkv": {"alpha_h": 2.0, "alpha_l": 0.5, "window": 16},
}


@pytest.mark.every(2)
@pytest.mark.parametrize(("method", "batch"), in_turn([*METHODS], [3, 1]))
def test_it_gives_the_engines_tokens(tiny_model, method, batch):
    """Texts become prompts as the tokenizer makes them, and the answers are those of an engine over these prompts."""
    loaded, settings = tiny_model(), METHODS[method]
    found = kvbench.generate(loaded.model, loaded.tokenizer, TEXTS[:batch], method=method, max_new_tokens=9, **settings)
    prompts = [tuple(loaded.tokenizer(text)["input_ids"]) for text in TEXTS[:batch]]
    asked = [request(str(i), prompt, max_new_tokens=9, min_new_tokens=0) for i, prompt in enumerate(prompts)]
    expected = answers(loaded, choose_policy(method, settings), asked, batch_size=batch, fidelity_max_tokens=0)
    assert found.tokens == [expected[str(i), 0].token_ids for i in range(batch)]
    assert found.texts == [expected[str(i), 0].text for i in range(batch)]
    assert found.bytes == [expected[str(i), 0].ledger["resident_bytes"] for i in range(batch)]
    assert all(len(tokens) == 9 for tokens in found.tokens) or loaded.eos_token_ids


def test_one_text_is_one_answer(tiny_model):
    """A single text has its answer in `.text`; several have none there, and what is shown names tokens and bytes."""
    loaded = tiny_model()
    one = kvbench.generate(loaded.model, loaded.tokenizer, TEXTS[0], method=SnapKV(budget=20, window=4))
    assert one.text == one.texts[0] and 0 < one.bytes[0] < one.full_bytes[0]
    prompt, new = one.outcomes[0].num_prompt_tokens, len(one.tokens[0])
    assert repr(one).startswith(f"{prompt} + {new} tokens, {one.bytes[0]} bytes (")
    two = kvbench.generate(loaded.model, loaded.tokenizer, TEXTS[:2], method="full", max_new_tokens=1)
    with pytest.raises(ValueError, match="there are 2 answers"):
        _ = two.text


def test_sampling_is_by_seed(tiny_model):
    """The same seed gives the same text, another seed another; a text's answer does not depend on its neighbours."""
    loaded = tiny_model()

    def sampled(texts, seed):
        settings = {"method": "full", "tier": "native", "max_new_tokens": 12, "temperature": 1.0, "seed": seed}
        return kvbench.generate(loaded.model, loaded.tokenizer, texts, **settings).tokens

    assert sampled(TEXTS[0], 1) == sampled(TEXTS, 1)[:1]
    assert sampled(TEXTS[0], 1) != sampled(TEXTS[0], 2)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_model_keeps_its_own_attention(tiny_model, attention):
    """The attention that a model came with is what it has afterwards, also after an error."""
    loaded = tiny_model(seed=3)
    loaded.model.set_attn_implementation(attention)
    kvbench.generate(loaded.model, loaded.tokenizer, "x", method="full", max_new_tokens=1)
    assert loaded.model.config._attn_implementation == attention
    with pytest.raises(ValueError, match="must be > 0 and < the model's"):
        kvbench.generate(loaded.model, loaded.tokenizer, "", method="full", add_special_tokens=False)
    assert loaded.model.config._attn_implementation == attention
    loaded.model.set_attn_implementation("sdpa")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"method": "snapvk"}, ("name-unknown", "method", "method=snapvk")),
        ({"method": "snapkv", "budgte": 1}, ("setting-unknown", "method.budgte")),
        ({"method": "snapkv", "budget": {1, 2}}, ("setting-value", "method.budget", "method.budget={1")),
        ({"method": "snapkv", "window": -1}, ("setting-value", "method.window", "window=-1")),
        ({"method": SnapKV(), "budget": 0.5}, ("settings-conflict", "method.budget", "SnapKV")),
        (
            {"method": "diffkv", "calibration": "diffkv_smollm2-135m"},
            ("settings-conflict", "method.calibration", "calibration=diffkv_smollm2-135m"),
        ),
        ({"max_new_tokens": 0}, ("setting-value", "max_new_tokens", "max_new_tokens=0")),
        ({"temperature": -1.0}, ("setting-value", "temperature", "temperature=-1.0")),
        ({"top_p": 0.0}, ("setting-value", "top_p", "top_p=0.0")),
    ],
)
def test_a_bad_setting_is_named(tiny_model, settings, words):
    """A wrong name or value is refused in one sentence before anything is computed."""
    loaded = tiny_model()
    with refused(*words):
        kvbench.generate(loaded.model, loaded.tokenizer, "x", **settings)


@pytest.mark.every(2)
@pytest.mark.parametrize(
    "value",
    ["plain", "", "a b,c", "it's", "back\\slash", "ends\\", "a\\'b", "0.25", "null", "[1,2]", "k=v", 3, 0.1, 1e-7]
    + [True, None, [1, "two", None], {"a": [0.5, "x y"], "b": {"c": False}}, (1, 2)],
)
def test_a_value_arrives_as_it_was_given(value):
    """What Hydra composes from the words of a Python value is that value, text as text."""
    composed = compose([f"+extra={hydra_value('extra', value)}"]).extra
    expected = list(value) if isinstance(value, tuple) else value
    assert composed == expected and (isinstance(value, tuple | list | dict) or type(composed) is type(expected))


def test_numbers_of_numpy_are_numbers():
    """A budget out of `numpy.linspace` is a ratio, and a whole number of numpy's is one."""
    import numpy as np

    assert choose_policy("snapkv", {"budget": np.linspace(0.25, 1, 4)[0], "window": np.int64(8)}) == SnapKV(
        budget=0.25, window=8
    )
