"""`kvbench.compress`: transformers' own generate over a compressed cache, and a model that is left as it was found."""

from itertools import takewhile

import pytest
import torch
from test_generate import METHODS, TEXTS
from transformers import DynamicCache, GenerationConfig, MistralConfig, MistralForCausalLM, StaticCache

import kvbench

NEW = 9


def padded(loaded, texts):
    """The texts as a batch that is padded at the left."""
    loaded.tokenizer.padding_side = "left"
    return loaded.tokenizer(texts, return_tensors="pt", padding=True)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("texts", [TEXTS[:1], TEXTS], ids=["one", "three"])
def test_it_gives_the_tokens_of_generate(tiny_model, method, texts):
    """Greedy answers are those of `kvbench.generate`, and so are the bytes, with a batch padded at the left too."""
    loaded, settings = tiny_model(), METHODS[method]
    inputs = padded(loaded, texts)
    with kvbench.compress(loaded.model, method, **settings) as cache:
        output = loaded.model.generate(**inputs, max_new_tokens=NEW, do_sample=False)
        inside = cache.bytes()
    expected = kvbench.generate(loaded.model, loaded.tokenizer, texts, method=method, max_new_tokens=NEW, **settings)
    rows = output[:, inputs["input_ids"].shape[1] :].tolist()
    assert [list(takewhile(lambda token: token not in loaded.eos_token_ids, row)) for row in rows] == expected.tokens
    if all(len(tokens) == NEW for tokens in expected.tokens):  # a row that ended goes on receiving padding
        assert [cache.bytes(row)["resident_bytes"] for row in range(len(texts))] == expected.bytes
        assert cache.bytes()["fp16_bytes"] == sum(expected.full_bytes)
    assert cache.bytes() == inside
    items = {name: count for name, count in inside.items() if name not in ("resident_bytes", "fp16_bytes")}
    assert sum(items.values()) == inside["resident_bytes"] > 0


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_full_cache_gives_the_models_own_tokens(tiny_model, attention):
    """Under `full` in the model's own dtype, greedy and sampled tokens are those of transformers' own cache, whatever
    attention the model came with."""
    loaded = tiny_model(seed=5)
    loaded.model.set_attn_implementation(attention)
    inputs = padded(loaded, TEXTS)
    asked = [{"do_sample": False}, {"do_sample": True, "temperature": 0.7}]

    def generated(settings):
        torch.manual_seed(0)
        return loaded.model.generate(**inputs, max_new_tokens=NEW, **settings).tolist()

    own = [generated(settings) for settings in asked]
    with kvbench.compress(loaded.model, "full", tier="native"):
        assert [generated(settings) for settings in asked] == own
        several = loaded.model.generate(**inputs, max_new_tokens=2, do_sample=True, num_return_sequences=2)
        assert len(several) == 2 * len(TEXTS)
    assert loaded.model.config._attn_implementation == attention
    loaded.model.set_attn_implementation("sdpa")


def test_a_second_generate_begins_a_new_cache(tiny_model):
    """The bytes are those of the last call, in the block and after it; its pages are free then."""
    loaded = tiny_model()
    with kvbench.compress(loaded.model, "full") as cache:
        with pytest.raises(RuntimeError, match="holds nothing yet"):
            cache.bytes()
        first = loaded.model.generate(**padded(loaded, TEXTS[:1]), max_new_tokens=3, do_sample=False)
        held = cache.bytes()
        loaded.model.generate(**padded(loaded, TEXTS[1:2]), max_new_tokens=3, do_sample=False)
        assert cache.bytes()["resident_bytes"] < held["resident_bytes"]
        again = loaded.model.generate(**padded(loaded, TEXTS[:1]), max_new_tokens=3, do_sample=False)
        assert torch.equal(first, again) and cache.bytes() == held
    assert cache.bytes() == held and cache._runner.store.used_bytes == 0
    with pytest.raises(IndexError):
        cache.bytes(1)


@pytest.mark.parametrize("limit", [{}, {"max_length": 30}, {"generation_config": GenerationConfig(max_new_tokens=21)}])
def test_a_limit_may_be_said_in_any_way(tiny_model, limit):
    """However the longest answer is said, or not at all, the cache has room for it, and the tokens are the same."""
    loaded, inputs = tiny_model(), padded(tiny_model(), TEXTS[1:2])
    own = loaded.model.generate(**inputs, do_sample=False, **limit)
    with kvbench.compress(loaded.model, "full", tier="native"):
        assert torch.equal(loaded.model.generate(**inputs, do_sample=False, **limit), own)


def test_a_streamer_sees_the_tokens(tiny_model):
    """Tokens are streamed while they are made, the prompt first."""
    loaded, inputs = tiny_model(), padded(tiny_model(), TEXTS[:1])

    class Streamer:
        def __init__(self):
            self.seen, self.ended = [], False

        def put(self, value):
            self.seen += value.flatten().tolist()

        def end(self):
            self.ended = True

    streamer = Streamer()
    with kvbench.compress(loaded.model, "snapkv", budget=0.5, window=8):
        output = loaded.model.generate(**inputs, max_new_tokens=4, do_sample=False, streamer=streamer)
    assert streamer.ended and streamer.seen == output[0].tolist()


def test_a_loop_of_ones_own(tiny_model):
    """Forward passes one after the other give what generate gives; several tokens on top of a cache are refused."""
    loaded = tiny_model()
    inputs = padded(loaded, TEXTS)
    with kvbench.compress(loaded.model, "kivi", **METHODS["kivi"]) as cache:
        expected = loaded.model.generate(**inputs, max_new_tokens=3, min_new_tokens=3, do_sample=False)
        out = loaded.model(**inputs, logits_to_keep=1)
        found = [out.logits[:, -1].argmax(-1)]
        for _ in range(2):
            out = loaded.model(found[-1][:, None], past_key_values=out.past_key_values)
            found.append(out.logits[:, -1].argmax(-1))
        assert out.past_key_values is cache and cache.get_seq_length() == inputs["input_ids"].shape[1] + 2
        with pytest.raises(ValueError, match="reads one more token of each"):
            loaded.model(inputs["input_ids"], past_key_values=cache)
    banned = set(loaded.eos_token_ids)
    if not banned & {int(token) for step in found for token in step}:  # generate bans them before min_new_tokens
        assert torch.equal(torch.stack(found, 1), expected[:, -3:])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_beams": 2}, "num_beams=2 asks for beam search"),
        ({"generation_config": GenerationConfig(num_beams=2)}, "num_beams=2 asks for beam search"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "contrastive search"),
        ({"prompt_lookup_num_tokens": 3}, "assisted generation"),
        ({"assistant_model": "itself"}, "assisted generation"),
        ({"cache_implementation": "static"}, "cache_implementation=static asks for a cache of transformers' own"),
        ({"past_key_values": DynamicCache()}, "past_key_values=DynamicCache asks for a cache that was made elsewhere"),
        ({"past_key_values": "static"}, "past_key_values=StaticCache"),
        ({"use_cache": False}, "generation without a cache"),
        ({"prefill_chunk_size": 8}, "a prompt in chunks"),
        ({"guidance_scale": 1.5}, "classifier-free guidance"),
        ({"output_attentions": True, "return_dict_in_generate": True}, "attention weights"),
        ({"output_hidden_states": True, "return_dict_in_generate": True}, "hidden states"),
        ({"max_new_tokens": None, "dola_layers": "high"}, "DoLa"),
    ],
)
def test_what_a_compressed_cache_cannot_do_is_refused(tiny_model, settings, words):
    """A request that needs another cache is refused in one sentence before a prompt is read, and the block still works
    afterwards."""
    loaded = tiny_model()
    inputs = padded(loaded, TEXTS[1:2])
    if settings.get("assistant_model"):
        settings = {"assistant_model": loaded.model}
    if settings.get("past_key_values") == "static":
        settings = {"past_key_values": StaticCache(config=loaded.model.config, max_cache_len=64)}
    with kvbench.compress(loaded.model, "full") as cache:
        with pytest.raises(ValueError, match=words):
            loaded.model.generate(**inputs, **({"max_new_tokens": 2} | settings))
        assert cache.get_seq_length() == 0
        loaded.model.generate(**inputs, max_new_tokens=2)


@pytest.mark.parametrize("name", ["reorder_cache", "crop", "batch_repeat_interleave"])
def test_a_cache_only_grows(tiny_model, name):
    """Whoever asks the cache itself to undo or reorder tokens is told that it cannot."""
    refused = pytest.raises(ValueError, match="only grow at their end")
    with kvbench.compress(tiny_model().model, "full") as cache, refused:
        getattr(cache, name)(1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x: x | {"attention_mask": x["attention_mask"].flip(1)}, "padding_side = 'left'"),
        (lambda x: x | {"attention_mask": x["attention_mask"] * 0}, "nothing but padding"),
        (lambda x: x | {"attention_mask": x["attention_mask"][:, 1:]}, "attention_mask has shape"),
        (lambda x: x | {"logits_to_keep": 0}, "pass logits_to_keep=1"),
        (lambda x: x | {"labels": x["input_ids"]}, "labels: a loss"),
        (lambda x: x | {"past_key_values": DynamicCache()}, "made elsewhere"),
        (lambda x: {"input_ids": torch.zeros(1, 4096, dtype=torch.long), "logits_to_keep": 1}, "leaves no room"),
        (lambda x: {"input_ids": torch.zeros(0, 4, dtype=torch.long), "logits_to_keep": 1}, "shape .batch, tokens."),
    ],
)
def test_a_forward_pass_that_does_not_fit_is_refused(tiny_model, change, words):
    """Padding elsewhere, other caches, losses and logits inside a prompt are refused; no row stays open."""
    loaded = tiny_model()
    inputs = change(dict(padded(loaded, TEXTS)) | {"logits_to_keep": 1})
    with kvbench.compress(loaded.model, "full") as cache, pytest.raises(ValueError, match=words):
        loaded.model(**inputs)
    assert not cache._runner.open_rows


def test_the_model_is_as_before_after_an_error(tiny_model):
    """After an error in the block, and where the block cannot begin, attention, forward and generate are the model's
    own."""
    loaded = tiny_model()
    model, inputs = loaded.model, padded(loaded, TEXTS[1:2])
    own = model.generate(**inputs, max_new_tokens=2, do_sample=False)

    def is_own():
        same = torch.equal(model.generate(**inputs, max_new_tokens=2, do_sample=False), own)
        return same and model.config._attn_implementation == "sdpa" and not {"forward", "generate"} & set(vars(model))

    with pytest.raises(ZeroDivisionError), kvbench.compress(model, "full"):
        model.generate(**inputs, max_new_tokens=2)
        _ = 1 / 0
    assert is_own()
    with pytest.raises(ValueError, match="does not exist"), kvbench.compress(model, "fool"):
        pass
    assert is_own()
    with pytest.raises(ValueError, match="already"), kvbench.compress(model, "full"), kvbench.compress(model, "full"):
        pass
    assert is_own()
    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 1, "num_key_value_heads": 1, "sliding_window": 4, "bos_token_id": 1}
    forgets = MistralForCausalLM(MistralConfig(**sizes))  # its layers do so on their own: the store does not take it
    with pytest.raises(ValueError, match="sliding_window=4"), kvbench.compress(forgets, "full"):
        pass


def test_a_forward_of_somebody_else_stays(tiny_model):
    """A library that put its own forward on the model, as accelerate does, finds it there afterwards."""
    model = tiny_model(seed=4).model
    calls, before = [], model.forward
    model.forward = lambda *args, **kwargs: calls.append(1) or before(*args, **kwargs)
    theirs = vars(model)["forward"]
    with kvbench.compress(model, "full"):
        model(torch.tensor([[5, 6, 7]]), logits_to_keep=1)
    assert vars(model)["forward"] is theirs and calls
    del model.forward
