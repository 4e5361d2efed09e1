"""Where weights lie decides where the cache lies; what cannot lie beside them is refused with the remedy."""

import pytest
import torch
import transformers
from engine_helpers import random_tokens
from refusals import refused
from test_split_layers import CPU, in_two

from kvbench.cache.layout import DeviceSpan
from kvbench.cache.options import StoreOptions
from kvbench.cache.ranks import Ranks
from kvbench.cache.store import CompressedStore
from kvbench.engine import hf, placement
from kvbench.engine.decode_loop import CapturedSteps
from kvbench.engine.runner import Runner
from kvbench.engine.supported import model_shape
from kvbench.kernels.dispatch import get_backend
from kvbench.methods.full import Full
from kvbench.models.devices import Devices
from kvbench.models.load import LoadedModel
from kvbench.models.random_weights import random_config
from kvbench.policy import ScoreSpec, Statistic

META = torch.device("meta")


def outline(**overrides):
    """Returns a tiny model of four layers without memory."""
    config = random_config("tiny", num_layers=4, overrides=overrides)
    with META:
        return transformers.AutoModelForCausalLM.from_config(config)


def test_runs_of_layers_are_found_where_their_weights_lie(monkeypatch):
    """Layers on one device that follow one another are one place; a layer on two devices is refused by its number."""
    model = outline()
    assert placement.spans_of(model) == ()
    model.model.layers[2:].to_empty(device="cpu")
    assert placement.spans_of(model) == (DeviceSpan(META, 2), DeviceSpan(CPU, 2))
    model.model.layers[1].mlp.to_empty(device="cpu")
    with pytest.raises(hf.UnsupportedModel, match=r"layer 1 lies on cpu and meta, .* give whole layers to each device"):
        placement.spans_of(model)


@pytest.mark.parametrize("tied", [False, True])
def test_every_module_gets_a_device(tied):
    """The map names every weight once: layers in order and even, the head at the end unless it is the embedding."""
    first, last = torch.device("cuda:0"), torch.device("cuda:1")
    model = outline(tie_word_embeddings=tied)
    found = Devices((first, last)).module_map(model)
    assert [found[f"model.layers.{index}"] for index in range(4)] == [first, first, last, last]
    assert found["model.embed_tokens"] == found["model.rotary_emb"] == first and found["model.norm"] == last
    assert found["lm_head"] == (first if tied else last)
    for name, _ in model.named_parameters():
        assert sum(name.startswith(f"{module}.") for module in found) == 1, name
    assert Devices((CPU, CPU)).module_map(model) is None
    assert Devices((first, last, last)).spans(4) == ((first, 2), (last, 1), (last, 1))


def test_each_place_has_pages_of_its_own(tiny_model):
    """Each place holds tables of its own layers alone, and a limit on the pool is divided by layers."""
    loaded = in_two(tiny_model("llama", "gqa3", 64, num_layers=3))
    runner = Runner(loaded, Full(), options=StoreOptions(budget_bytes=3 << 20))
    runner.reserve(rows=2, prompt_tokens=20, new_tokens=4)
    row, _ = runner.read(random_tokens(20))
    one, two = runner.store.holding.parts
    assert [part.pages.shape for part in (one, two)] == [(2, 1, 2), (2, 2, 2)]
    assert one.pages.pool.pages.data_ptr() != two.pages.pool.pages.data_ptr()
    assert one.pages.pool.pages.nbytes == pytest.approx(1 << 20, rel=0.01)
    assert two.pages.pool.pages.nbytes == pytest.approx(2 << 20, rel=0.01)
    assert runner.bytes(row) == runner.report(row)[0]["resident_bytes"]
    assert runner.store.used_bytes == sum(part.pages.pool.num_used for part in (one, two)) * one.pages.pool.page_bytes
    runner.close(row)
    assert one.pages.pool.num_used == two.pages.pool.num_used == 0
    loaded.model.set_attn_implementation("sdpa")


def test_heads_that_cannot_be_divided_are_refused(monkeypatch):
    """The number of KV heads, that of processes and what would work are named, before a weight is looked at."""
    model = outline(num_attention_heads=4, num_key_value_heads=2)
    ranks = Ranks()
    ranks.size = 4
    model._tp_size = 4
    monkeypatch.setattr(placement, "ranks_of", lambda model: ranks)
    with pytest.raises(
        hf.UnsupportedModel, match=r"llama: 2 KV heads cannot be divided among 4 processes, .* use 2 processes, or"
    ):
        placement.check(model.to_empty(device="cpu"), "llama")
    ranks.size = 2
    placement.check(model, "llama")


def test_a_method_that_needs_whole_layers_is_refused_over_processes(tiny_model):
    """A statistic that looks at a layer's whole attention cannot be computed from some of its heads."""
    from dataclasses import dataclass, replace

    @dataclass(frozen=True)
    class Whole(Statistic):
        needs = frozenset({"attention_call"})

        def of_prompt(self, seen):
            return torch.zeros(seen.pos.shape)

    class LooksAtAll(Full):
        score = ScoreSpec(statistic=Whole())

    ranks = Ranks()
    ranks.size = 2
    shape = replace(model_shape(tiny_model("llama", "gqa3", 64).model), ranks=ranks)
    with refused("settings-conflict", "model.tensor_parallel", "LooksAtAll", "model.tensor_parallel=2"):
        CompressedStore(
            LooksAtAll(),
            shape,
            rows=1,
            max_prompt_tokens=8,
            max_new_tokens=1,
            options=StoreOptions(),
            backend=get_backend("torch", CPU),
        )


def test_chunks_and_captured_steps_are_of_one_place(tiny_model):
    """A runner whose cache lies in two places refuses prompts in chunks, and the loop that captures steps refuses it;
    both name the settings and what works instead."""
    loaded = in_two(tiny_model("llama", "gqa3", 64, num_layers=3))
    with refused("settings-conflict", "prefill.chunk", "prefill.chunk=8", "model.device"):
        Runner(loaded, Full(), chunk=8)
    runner = Runner(loaded, Full())
    runner.reserve(rows=1, prompt_tokens=20, new_tokens=4)
    with refused("unsupported", None, "model.device", "Runner.step"):
        CapturedSteps(runner, None)
    loaded.model.set_attn_implementation("sdpa")


def test_prompts_are_replayed_only_where_they_were_read():
    """What a prompt cache has of a model is not taken for the same weights quantised, or in other places."""
    plain = {"fingerprint": "weights", "dtype": torch.float32, "device": CPU, "name": "", "max_tokens": 1}
    plain |= {"model": None, "tokenizer": None, "chat_template": False}
    one = LoadedModel(**plain)
    others = [LoadedModel(**plain, quantisation="int8"), LoadedModel(**plain, device_spans=((CPU, 1), (META, 2)))]
    assert LoadedModel(**plain).decides == one.decides
    assert len({one.decides, *(other.decides for other in others)}) == 3
