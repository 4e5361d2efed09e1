"""`kvbench.compress`: transformers' own generate over a compressed cache, and a model that is left as it was found."""

import copy
from itertools import takewhile

import pytest
import torch
from engine_helpers import answers, random_tokens, request
from refusals import refused
from selection import in_turn
from test_generate import METHODS, TEXTS
from transformers import DynamicCache, GenerationConfig, MistralConfig, MistralForCausalLM, StaticCache

import kvbench
from kvbench.api.generate import choose_policy
from kvbench.engine.requests import Turn

NEW = 9


def padded(loaded, texts):
    """The texts as a batch that is padded at the left."""
    loaded.tokenizer.padding_side = "left"
    return loaded.tokenizer(texts, return_tensors="pt", padding=True)


@pytest.mark.every(2)
@pytest.mark.parametrize(("method", "count"), in_turn([*METHODS], [3, 1]))
def test_it_gives_the_tokens_of_generate(tiny_model, method, count):
    """Greedy answers are those of `kvbench.generate`, and so are the bytes, with a batch padded at the left too."""
    loaded, settings, texts = tiny_model(), METHODS[method], TEXTS[:count]
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
    """Forward passes one after the other give what generate gives; a batch of another size is refused."""
    loaded = tiny_model()
    inputs = padded(loaded, TEXTS)
    with kvbench.compress(loaded.model, "kivi", **METHODS["kivi"]) as cache:
        expected = loaded.model.generate(**inputs, max_new_tokens=3, min_new_tokens=3, do_sample=False)
        out = loaded.model(**inputs, logits_to_keep=1)
        found = [out.logits[:, -1].argmax(-1)]
        for _ in range(2):
            out = loaded.model(found[-1][:, None], past_key_values=out.past_key_values)
            found.append(out.logits[:, -1].argmax(-1))
        seen = inputs["input_ids"].shape[1] + 2
        assert out.past_key_values.get_seq_length() == cache.get_seq_length() == seen
        assert out.past_key_values.bytes() == cache.bytes()
        with refused("argument-value", "past_key_values", "3", "2"):
            loaded.model(inputs["input_ids"][:2, :1], past_key_values=cache)
        with refused("argument-value", "logits_to_keep", "logits_to_keep=1"):
            loaded.model(inputs["input_ids"], past_key_values=cache)
    banned = set(loaded.eos_token_ids)
    if not banned & {int(token) for step in found for token in step}:  # generate bans them before min_new_tokens
        assert torch.equal(torch.stack(found, 1), expected[:, -3:])


def test_an_old_cache_is_refused(tiny_model):
    """The cache of a prompt is refused once another was read, by forward and by generate, copies too; the cache that
    goes on is unharmed, and after a new `generate` without it."""
    loaded, prompt, other = tiny_model(), torch.tensor([random_tokens(20)]), torch.tensor([random_tokens(9)])
    model, step, more = loaded.model, torch.tensor([[7]]), torch.tensor([random_tokens(30)])
    with kvbench.compress(model, "full", tier="native") as cache:
        first = model(prompt, logits_to_keep=1)
        with pytest.raises(ValueError, match="copies"):
            copy.deepcopy(first.past_key_values)
        second = model(other, logits_to_keep=1)
        old, new = first.past_key_values, second.past_key_values
        held = cache.bytes()
        for ask in (
            lambda: model(step, past_key_values=old),
            lambda: model.generate(more, past_key_values=old, max_new_tokens=2),
            lambda: old.bytes(),
            lambda: old.get_seq_length(),
        ):
            with refused("argument-value", "past_key_values", "prompt 1"):
                ask()
        assert cache.bytes() == new.bytes() == held
        found = model(step, past_key_values=new).logits[:, -1]
        model.generate(other, max_new_tokens=2, do_sample=False)
        with refused("argument-value", "past_key_values", "prompt 2"):
            model(step, past_key_values=new)
    whole = model(torch.cat([other, step], 1)).logits[:, -1]
    assert torch.allclose(found, whole, atol=1e-4)


def test_a_generate_within_another_ends_it(tiny_model):
    """A prompt that is read between the begin of a `generate` and its first pass, or between two steps, as by another
    thread, leaves no cache to that one: it is refused, and the other answers as alone."""
    loaded, (prompt, other) = tiny_model(), torch.tensor([random_tokens(20), random_tokens(20, seed=1)])
    model, asked = loaded.model, {"max_new_tokens": 4, "do_sample": False}
    want, found = model.generate(other[None], **asked), []

    class Between:
        def put(self, value):
            if not found:
                found.append(model.generate(other[None], **asked))

        def end(self):
            pass

    def step(tokens, scores):
        Between().put(None)
        return scores

    for where in ({"streamer": Between()}, {"logits_processor": [step]}):
        found.clear()
        with kvbench.compress(model, "full", tier="native"), refused("argument-value", "past_key_values", "prompt 1"):
            model.generate(prompt[None], **asked, **where)
        assert torch.equal(found[0], want)


def test_a_cache_that_was_cleared_begins_nothing(tiny_model):
    """A step behind a prompt that was given up is no prompt of one token."""
    loaded = tiny_model()
    with kvbench.compress(loaded.model, "full") as cache:
        out = loaded.model(torch.tensor([random_tokens(20)]), logits_to_keep=1)
        with pytest.raises(ValueError, match="leaves no room"):
            loaded.model(torch.zeros(1, 4096, dtype=torch.long), logits_to_keep=1)
        with refused("argument-value", "past_key_values"):
            loaded.model(torch.tensor([[7]]), past_key_values=out.past_key_values, logits_to_keep=1)
        assert cache.get_seq_length() == 0


@pytest.mark.parametrize("width", [1, 4])
def test_positions_are_those_of_the_text(tiny_model, width):
    """Those that generate makes of a mask, and those that a model makes of columns, are taken, behind padding too; any
    others are refused before anything is read, in a prompt, a step and a turn."""
    loaded = tiny_model()
    model, tokens = loaded.model, torch.tensor([random_tokens(12, seed=1), random_tokens(12, seed=2)])
    mask = torch.ones_like(tokens)
    mask[1, :5] = 0
    counted, by_column = (mask.cumsum(1) - 1).masked_fill(mask == 0, 1), torch.arange(12)[None]
    begin, full = {"attention_mask": mask[:, : 12 - width], "logits_to_keep": 1}, {"attention_mask": mask}

    def read(positions, cache=None):
        own = slice(12 - width, None) if cache is not None else slice(12 - width)
        asked = begin if cache is None else full | {"logits_to_keep": 1}
        return model(tokens[:, own], position_ids=positions[..., own], past_key_values=cache, **asked)

    wrong = [by_column.flip(1), torch.zeros_like(counted), counted + 1, by_column + 100, counted.flip(0)]
    with kvbench.compress(model, "full") as cache:
        for positions in [*wrong, by_column[..., :3]]:
            with refused("argument-value", "position_ids"):
                read(positions)
            assert cache.get_seq_length() == 0
        found = []
        for positions in (counted, by_column, by_column[0], counted.expand(3, 2, 12)):
            out = read(positions)
            for other in wrong:
                with refused("argument-value", "position_ids"):
                    read(other, out.past_key_values)
            found.append(read(positions, out.past_key_values).logits)
        assert all(torch.equal(found[0], each) for each in found)
        with refused("argument-value", "position_ids"):
            model.generate(tokens, position_ids=by_column + 3, max_new_tokens=2)
        with refused("argument-value", "attention_mask"):
            out = read(counted)
            model(tokens[:, -1:], attention_mask=mask.flip(1), past_key_values=out.past_key_values, logits_to_keep=1)


@pytest.mark.parametrize(
    ("settings", "asked"),
    [({"budget": "200KiB", "window": 4}, {}), ({"budget": 30, "window": 4}, {"return_dict_in_generate": True})],
)
def test_a_row_of_a_batch_has_the_bytes_that_it_has_alone(tiny_model, settings, asked):
    """Neither the longest prompt of a batch nor the room that it leaves changes a row's bytes, or what a budget in
    bytes keeps of it."""
    loaded, texts, held = tiny_model(), [TEXTS[0] * 4, TEXTS[1]], []
    with kvbench.compress(loaded.model, "snapkv", **settings) as cache:
        for some in (texts, texts[1:]):
            inputs = padded(loaded, some)
            loaded.model.generate(**inputs, max_new_tokens=4, min_new_tokens=4, do_sample=False, **asked)
            held.append(cache.bytes(len(some) - 1))
    assert held[0] == held[1]


def say(loaded, tokens, cache=None, **asked):
    """What generate returns for a conversation [B, N] of which a cache has read all but what is new; no answer ends."""
    asked = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False} | asked
    asked |= {"attention_mask": torch.ones_like(tokens)} if "attention_mask" not in asked else {}
    return loaded.model.generate(tokens, past_key_values=cache, return_dict_in_generate=True, **asked)


def behind(said, *turns):
    """A conversation with the next turn of each row."""
    return torch.cat([said.sequences, torch.tensor(turns)], 1)


@pytest.mark.every(2)
@pytest.mark.parametrize("method", METHODS)
def test_later_turns_go_on_in_the_cache(tiny_model, method):
    """A conversation turn by turn, in whose cache nothing is read again, gives the answers and the bytes of one that
    the engine holds; beside another one, too."""
    loaded, settings = tiny_model(), METHODS[method]
    turns = [Turn(tokens=random_tokens(number, seed=number)) for number in (5, 9)]
    asked = request("a", random_tokens(50), turns=turns, max_new_tokens=NEW)
    expected = answers(loaded, choose_policy(method, settings), [asked], batch_size=1, fidelity_max_tokens=0)["a", 0]
    room = 3 * NEW + 5 + 9 - 1
    for prompts in ([asked.prompt], [random_tokens(50, seed=4), asked.prompt]):
        with kvbench.compress(loaded.model, method, room_tokens=room, **settings) as cache:
            said, found, held = say(loaded, torch.tensor(prompts)), [], []
            for turn in [*turns, None]:
                found.append(said.sequences[-1, -NEW:].tolist())
                held.append(cache.bytes(len(prompts) - 1)["resident_bytes"])
                if turn is not None:
                    said = say(loaded, behind(said, *[turn.tokens] * len(prompts)), said.past_key_values)
        assert found == [*(one["token_ids"] for one in expected.turns), expected.token_ids]
        assert held == [*(one["resident_bytes"] for one in expected.turns), expected.ledger["resident_bytes"]]


def test_turns_of_several_lengths(tiny_model):
    """Turns that are padded at their left give what each gives alone; the cache may be handed over from the start."""
    loaded = tiny_model()
    prompts, turns = [random_tokens(20, seed=1), random_tokens(20, seed=2)], [random_tokens(6), random_tokens(3)]
    with kvbench.compress(loaded.model, "snapkv", budget=12, window=4) as cache:
        alone = []
        for prompt, turn in zip(prompts, turns, strict=True):
            first = say(loaded, torch.tensor([prompt]))
            alone.append(say(loaded, behind(first, turn), first.past_key_values).sequences[0, -NEW:].tolist())
        cache._clear()
        said = say(loaded, torch.tensor(prompts), cache)
        tokens = behind(said, turns[0], (0, 0, 0, *turns[1]))
        mask = torch.ones_like(tokens)
        mask[1, -6:-3] = 0
        said = say(loaded, tokens, cache, attention_mask=mask)
        assert said.sequences[:, -NEW:].tolist() == alone
        mask = torch.ones_like(tokens := behind(said, turns[0], turns[0]))
        with pytest.raises(ValueError, match="hides tokens that the cache has read"):
            mask[0, 25] = 0
            say(loaded, tokens, cache, attention_mask=mask)
        with pytest.raises(ValueError, match="hides the last token"):
            loaded.model(tokens[:, -3:], attention_mask=mask[:, -3:] * 0, past_key_values=cache, logits_to_keep=1)


@pytest.mark.parametrize(
    ("change", "room", "words"),
    [
        (lambda tokens: tokens[:, -4:], None, ("argument-value", "input_ids", "28")),
        (lambda tokens: tokens + (torch.arange(32) == 3), None, ("argument-value", "input_ids", "28")),
        (lambda tokens: tokens.repeat(2, 1), None, ("argument-value", "input_ids", "(2, 32)")),
        (lambda tokens: tokens, 2 * NEW + 1, ("prompt-length", "room_tokens", "12", "11")),
    ],
)
def test_a_turn_that_does_not_fit_is_refused(tiny_model, change, room, words):
    """What is no continuation of what the cache has read, or has no room in it, is refused before it is read."""
    loaded = tiny_model()
    with kvbench.compress(loaded.model, "full", room_tokens=room) as cache:
        said = say(loaded, torch.tensor([random_tokens(20)]))
        held = cache.bytes()
        with refused(*words):
            say(loaded, change(behind(said, (5, 6, 7))), said.past_key_values)
        assert cache.bytes() == held


def test_a_block_is_no_cache(tiny_model):
    """Whoever forgets `with` is told so."""
    with pytest.raises(AttributeError, match=r"bytes: .* write `with kvbench.compress\(model, ...\) as cache:`"):
        kvbench.compress(tiny_model().model, "full").bytes()
    with refused("setting-value", "room_tokens", "room_tokens=0"):
        kvbench.compress(tiny_model().model, "full", room_tokens=0)


def test_a_compressed_model_does_not_draft(tiny_model):
    """A model in a block is refused as another one's assistant, and the other one answers without it."""
    model, drafts = tiny_model().model, tiny_model(seed=5).model
    tokens = torch.tensor([random_tokens(20)])
    with kvbench.compress(drafts, "full"), refused("argument-value", "is_assistant", "is_assistant=True"):
        model.generate(tokens, max_new_tokens=4, assistant_model=drafts)


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
    only_grows = pytest.raises(ValueError, match="only grow at their end")
    with kvbench.compress(tiny_model().model, "full") as cache, only_grows:
        getattr(cache, name)(1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x: x | {"attention_mask": x["attention_mask"].flip(1)}, "padding_side = 'left'"),
        (lambda x: x | {"attention_mask": x["attention_mask"] * 0}, "nothing but padding"),
        (lambda x: x | {"attention_mask": x["attention_mask"][:, 1:]}, "attention_mask has shape"),
        (lambda x: x | {"logits_to_keep": 0}, "pass logits_to_keep=1"),
        (lambda x: x | {"logits_to_keep": torch.tensor([3, 7])}, "pass logits_to_keep=1"),
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
    with refused("name-unknown", "method", "method=fool"), kvbench.compress(model, "fool"):
        pass
    assert is_own()
    with pytest.raises(ValueError, match="already"), kvbench.compress(model, "full"), kvbench.compress(model, "full"):
        pass
    assert is_own()
    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 1, "num_key_value_heads": 1, "sliding_window": 4, "bos_token_id": 1}
    forgets = MistralForCausalLM(MistralConfig(**sizes))  # its layers do so on their own: the store does not take it
    with refused("model-unsupported", None, "sliding_window=4"), kvbench.compress(forgets, "full"):
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
