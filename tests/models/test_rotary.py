"""Rotary tables that depend on a text's length: which texts share one is measured, whatever a type is called."""

import pytest
import torch
from decoders import tiny_model
from refusals import refused
from ropes import LONG, ROPES, settings_of
from transformers import LlamaConfig, PhimoeConfig

from kvbench.models.load import load_model, outline
from kvbench.models.rotary import FAR, Lengths, RotaryTable, context_length, lengths_of


@pytest.mark.parametrize("rope", ROPES)
def test_tables_are_those_of_the_embedding(rope):
    """Of a loaded model and of its outline: where the table changes, and whether it does again with every token; and a
    long text that was read before changes nothing."""
    loaded, wanted = load_model(settings_of(rope)), Lengths(ROPES[rope][1])
    assert loaded.lengths == wanted == outline(settings_of(rope)).lengths
    rotary = next(module for module in loaded.model.modules() if type(module).__name__.endswith("RotaryEmbedding"))
    for length in (300, 65, 63):
        rotary(torch.zeros(1, 1, 1), torch.arange(length)[None])
        assert lengths_of(loaded.model) == wanted


def test_each_kind_of_layer_has_its_own():
    """Gemma 3 has one embedding for windows and one for the others."""
    model = tiny_model("gemma3_text")
    assert not lengths_of(model)
    rotary = next(module for module in model.modules() if isinstance(getattr(module, "rope_type", 0), dict))
    rotary.rope_type["full_attention"] = "dynamic"
    rotary.config.rope_parameters["full_attention"] |= {"rope_type": "dynamic", "factor": 4.0}
    assert lengths_of(model).tables == (RotaryTable(512, True),)


def test_a_type_that_nobody_lists_is_measured():
    """An embedding of a name of its own that looks at the longest row, by a factor on its angles alone (as PhiMoE
    does), is found."""
    model = load_model(settings_of("default")).model
    rotary = next(module for module in model.modules() if type(module).__name__.endswith("RotaryEmbedding"))

    class Louder(type(rotary)):
        def forward(self, x, position_ids):
            cos, sin = super().forward(x, position_ids)
            loud = 1.0 + float(position_ids.max() >= 50)
            return cos * loud, sin * loud

    rotary.__class__ = Louder
    assert lengths_of(model).tables == (RotaryTable(50, False),)


def test_phimoe_is_measured():
    """Its embedding is a class of its own, with a factor for short texts and one for long ones."""
    scaling = LONG | {"short_mscale": 1.0, "long_mscale": 1.2, "original_max_position_embeddings": 64}
    scaling |= {"rope_type": "longrope", "rope_theta": 10000.0}
    scaling |= {"short_factor": [1.0] * 8, "long_factor": [1.0] * 8}
    from transformers.models.phimoe.modeling_phimoe import PhimoeRotaryEmbedding

    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    config = PhimoeConfig(**sizes, rope_parameters=scaling)
    model = torch.nn.Sequential(PhimoeRotaryEmbedding(config))
    assert lengths_of(model).tables == (RotaryTable(64, False),)


def test_kinds_and_borders():
    """Texts of one kind share every table; a table is crossed by what begins before its border and ends behind it, and
    one that grows by whatever ends behind it."""
    both, grows, jumps = (
        Lengths((RotaryTable(10, False), RotaryTable(20, True))),
        RotaryTable(20, True),
        RotaryTable(10, False),
    )
    assert [both.kind(length) for length in (10, 11, 20, 21, 22)] == [(0, 0), (1, 0), (1, 0), (1, 21), (1, 22)]
    assert [both.limit(length) for length in (1, 10, 11, 20, 21)] == [10, 10, 20, 20, FAR]
    assert [both.crossed(*each) for each in ((5, 10), (5, 11), (11, 20), (11, 21), (30, 31))] == [
        None, jumps, None, grows, grows
    ]  # fmt: skip
    assert Lengths().kind(5) == () and Lengths().crossed(1, FAR) is None and not Lengths()


@pytest.mark.parametrize("rope", ROPES)
def test_the_context_is_what_scaling_reaches(rope):
    """YaRN's lines of Qwen's model card give factor times the original length, and `dynamic` factor times its own; a
    shorter context may still be chosen, and a configuration that names the extended one keeps it."""
    assert load_model(settings_of(rope)).max_tokens == ROPES[rope][2]
    assert load_model(settings_of(rope) | {"max_tokens": 60}).max_tokens == 60
    if rope == "yarn":
        assert load_model(settings_of(rope, max_position_embeddings=512)).max_tokens == 512


def test_yarn_as_the_model_card_of_qwen_has_it():
    """`rope_scaling` as config.json names it."""
    lines = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    config = LlamaConfig(max_position_embeddings=32768, rope_scaling=lines)
    assert context_length(config, None) == 131072
    assert context_length(LlamaConfig(max_position_embeddings=40960, rope_scaling=lines), None) == 131072
    assert context_length(LlamaConfig(max_position_embeddings=163840, rope_scaling=lines), None) == 163840
    with refused("setting-value", "model.max_tokens", "model.max_tokens=131073", "131072"):
        context_length(config, 131073)
