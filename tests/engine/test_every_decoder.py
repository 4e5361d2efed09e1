"""Every causal decoder that transformers has, tiny and with random weights: kvbench gives its logits, or refuses it."""

import pytest
import torch
import transformers
from decoders import KINDS, logits_of, rows, shrink, tiny_model, try_family
from places import ROOT
from selection import few

from kvbench.errors import UnsupportedModel
from kvbench.models import matrices
from kvbench.models.load import load_model
from kvbench.models.random_weights import byte_tokenizer

# Models whose attention is another one in a way that no setting tells, and one that is taken.
TELLING = ("bert", "bloom", "diffllama", "doge", "gemma2", "gpt_oss", "hrm_text", "jetmoe", "llama", "minimax", "phi3")


@pytest.fixture(scope="module")
def document():
    """What docs/models.md says: family -> layers and words."""
    text = (ROOT / "docs" / "models.md").read_text()
    if f"transformers {transformers.__version__} " not in text:
        pytest.skip("docs/models.md is about another release of transformers")
    return {family: tuple(others) for family, *others in rows(text)}


def test_the_document_lists_every_family(document):
    """docs/models.md has a row for each decoder of transformers, and no other."""
    assert list(document) == KINDS, "run `make docs`"


@pytest.mark.parametrize("kind", few(KINDS, *TELLING))
def test_a_decoder_agrees_or_is_refused(kind, document):
    """No type gives other logits than transformers does, none ends in an error of another kind, and docs/models.md says
    which is which."""
    found = try_family(kind)
    # Sums of fp32 in another order, through four layers; a mask that is left out is 3e-2 of the logits' spread.
    assert found.difference is None or found.difference < 5e-4
    assert document[kind] == (found.layers, found.words), "run `make docs`"


@pytest.mark.parametrize("kind", few(KINDS, "llama", "gemma"))
def test_rows_are_alone_where_that_is_said(kind):
    """A model of which it is said that no row depends on the others gives each of five rows what it gives that alone,
    though no register divides the width of its activations."""
    model = tiny_model(kind, intermediate_size=90)
    if isinstance(model, str) or matrices.why_not("streamed", torch.float32, torch.device("cpu")):
        pytest.skip("the tiny sizes make no model of this type, or there is no compiler")
    matrices.stream(model)
    is_said = matrices.rows_are_alone(model)
    assert is_said or kind not in ("llama", "gemma", "qwen2", "qwen3", "mistral")
    if not is_said:
        return
    ids = torch.arange(3, 8)[:, None]
    with torch.no_grad():
        together = model(ids, use_cache=False).logits
        alone = torch.cat([model(row[None], use_cache=False).logits for row in ids])
    assert torch.equal(together, alone)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("bert", r"layer 0 uses later tokens \(is_causal=False\)"),
        ("diffllama", "layer 0 uses another number of calls of attention than one per layer"),
        ("doge", "layer 0 uses a mask of its own"),
        ("hrm_text", "attention 4 of a model with 4 layers: it reads its layers more than once"),
        ("jetmoe", "the model changes its keys between the cache and attention"),
        ("bloom", "bloom: its configuration has no context length"),
    ],
)
def test_the_reason_is_named(kind, message):
    """A refusal says what the model does, and what to use instead."""
    with pytest.raises(UnsupportedModel, match=f"{message}.*use a model with full attention"):
        logits_of(tiny_model(kind), torch.arange(3, 19)[None], 14)


@pytest.mark.parametrize(("window", "taken"), [(512, True), (511, False)])
def test_a_window_that_never_binds_is_none(window, taken):
    """Phi-4-mini and Phi-3.5 name a window as long as their context, which changes nothing."""
    model = tiny_model("phi3", sliding_window=window)
    ids = torch.arange(3, 19)[None]
    if taken:
        assert logits_of(model, ids, 14).shape == (1, 3, 96)
        return
    with pytest.raises(UnsupportedModel, match="phi3: sliding_window=511 in every layer leaves none for a method"):
        logits_of(model, ids, 14)


@pytest.mark.parametrize(
    ("kind", "rope"), [("qwen3_vl", [4, 2, 2]), ("mistral3", None), ("glm4v", [4, 2, 2]), ("llava", None)]
)
def test_the_text_part_of_a_model_that_sees_is_taken(kind, rope, tmp_path):
    """A checkpoint whose decoder can also be shown pictures loads like any other, and answers text as its own class."""
    config = transformers.AutoConfig.for_model(kind)
    text = shrink(config.get_text_config())
    shrink(config.vision_config).depth = 1
    if rope:
        text.rope_parameters = {**text.rope_parameters, "mrope_section": rope, "partial_rotary_factor": 1.0}
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config).eval()
    model.save_pretrained(tmp_path)
    byte_tokenizer(257).save_pretrained(tmp_path)
    loaded = load_model({"kind": "hf", "path": str(tmp_path)})
    ids = torch.randint(3, 90, (1, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted = model(ids, use_cache=False).logits[:, 19:].float()
    assert float((logits_of(loaded.model, ids, 20) - wanted).abs().max() / wanted.std()) < 5e-3
