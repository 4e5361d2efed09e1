"""Models with random weights: presets, seeds, the byte tokenizer, and shapes that do not fit."""

import pytest
import torch
import transformers
from omegaconf import OmegaConf
from places import ROOT
from refusals import refused

from kvbench.models import random_weights as model_random
from kvbench.models.load import load_model

TINY = {"kind": "random", "preset": "tiny", "device": "cpu"}


def test_random_weights_follow_the_seed():
    """The same seed gives the same weights and fingerprint, another seed others; the global state is untouched."""
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first, again, other = (load_model(TINY | {"seed": seed}) for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), state)
    weights = [loaded.model.model.layers[1].self_attn.k_proj.weight for loaded in (first, again, other)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
    assert first.fingerprint == again.fingerprint != other.fingerprint
    assert first.name == "random-tiny"


def test_random_yaml_builds(monkeypatch):
    """conf/model/random.yaml is a valid configuration; a shorter model is named by its layers."""
    cfg = OmegaConf.load(ROOT / "conf/model/random.yaml")
    comment = (ROOT / "conf/model/random.yaml").read_text().partition("Presets: ")[2].partition(".\n")[0]
    assert comment.replace("\n#", "").split(", ") == list(model_random.presets())
    cfg.preset, cfg.num_layers, cfg.device = "smollm2-135m", 1, "cpu"
    loaded = load_model(cfg)
    assert loaded.name == "random-smollm2-135m-1layers"
    assert len(loaded.model.model.layers) == 1


BILLIONS = {
    "smollm2-135m": 0.1345,
    "qwen2.5-0.5b": 0.494,
    "llama3.2-1b": 1.236,
    "llama2-7b": 6.738,
    "mistral-7b": 7.248,
}
BILLIONS |= {"qwen2.5-7b": 7.616, "llama3-8b": 8.030, "llama3.1-8b": 8.030, "llama3.1-70b": 70.554}


@pytest.mark.parametrize(("preset", "billions"), BILLIONS.items())
def test_presets_have_the_published_number_of_parameters(preset, billions):
    """The shapes are those of the published models: their parameter counts agree to four digits."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_random.random_config(preset))
    assert sum(weight.numel() for weight in model.parameters()) / 1e9 == pytest.approx(billions, rel=1e-3)


@pytest.mark.parametrize("field", ["eos_token_id", "bos_token_id", "pad_token_id"])
def test_tokens_of_the_byte_tokenizer_are_no_override(field):
    """What begins, ends and pads a text follows from the tokenizer; asking for another token is an unknown field."""
    with refused("name-unknown", "model.overrides", f"model.overrides={field}"):
        model_random.random_config("tiny", overrides={field: 5})


def test_byte_tokenizer_covers_every_byte():
    """Any text survives the round trip at one token per byte; ids beyond the bytes decode to nothing."""
    tokenizer = model_random.byte_tokenizer(1000)
    text = "a\n b\t\u00e9 \u4f60\U0001f600 <|x|> \x00"
    tokens = tokenizer(text, add_special_tokens=False).input_ids
    assert len(tokens) == len(text.encode())
    assert tokenizer.decode(tokens) == text
    assert tokenizer.decode([*tokens, 999]) == text
    assert tokenizer.eos_token_id == 0 and 0 not in tokens
    with refused("setting-value", "model.overrides.vocab_size", "vocab_size=256", "257"):
        model_random.byte_tokenizer(256)


def test_weights_beyond_the_memory_are_refused_with_what_fits(monkeypatch):
    """The error says need, free memory and the number of layers that fits, before anything is allocated."""
    monkeypatch.setattr(model_random, "available_bytes", lambda device: 8 * 2**30)
    build, devices = transformers.AutoModelForCausalLM.from_config, []
    monkeypatch.setattr(
        transformers.AutoModelForCausalLM,
        "from_config",
        lambda *given, **named: devices.append(torch.empty(0).device.type) or build(*given, **named),
    )
    with refused("no-room", None, "15.0", "GiB", "32", "8.0", "model.num_layers=14"):
        load_model({"kind": "random", "preset": "llama3-8b", "dtype": "bfloat16", "device": "cpu"})
    with refused("no-room", None, "model.dtype=bfloat16"):
        load_model({"kind": "random", "preset": "llama3.1-70b", "dtype": "float32", "device": "cpu"})
    assert devices == ["meta", "meta"]
