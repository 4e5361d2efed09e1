"""Every causal decoder that transformers has, tiny and with random weights: kvbench gives its logits, or refuses it."""

from itertools import product

import pytest
import selection
import torch
import transformers
from decoders import KINDS, PROMPT, RUN, in_words, logits_of, rows, run, shrink, tiny_model, try_family
from places import ROOT
from selection import few

from kvbench.api.generate import begin
from kvbench.cache.options import StoreOptions
from kvbench.engine import hf
from kvbench.engine.hf import check_pass
from kvbench.engine.supported import check_fit, small_store
from kvbench.errors import UnsupportedModel
from kvbench.models import matrices
from kvbench.models.load import load_model
from kvbench.models.random_weights import byte_tokenizer

# Models whose attention is another one in a way that no setting tells, and one that is taken.
LATER = {"jetmoe"}  # needs numbers before it comes to attention
TELLING = ("bert", "bloom", "diffllama", "doge", "gemma2", "gpt_oss", "hrm_text", "jetmoe", "llama", "minimax", "phi3")


@pytest.fixture(scope="module")
def document():
    """What docs/reference/models.md says: family -> layers and words."""
    text = (ROOT / "docs" / "reference" / "models.md").read_text()
    if f"transformers {transformers.__version__} " not in text:
        pytest.skip("docs/reference/models.md is about another release of transformers")
    return {family: tuple(others) for family, *others in rows(text)}


def test_the_document_lists_every_family(document):
    """docs/reference/models.md has a row for each decoder of transformers, and no other."""
    assert list(document) == KINDS, "run `make docs`"


@pytest.mark.parametrize("kind", few(KINDS, *TELLING))
def test_a_decoder_agrees_or_is_refused(kind, document):
    """No type gives other logits than transformers does, none ends in an error of another kind, and
    docs/reference/models.md says which is which."""
    found = try_family(kind)
    # Sums of fp32 in another order, through four layers; a mask that is left out is 3e-2 of the logits' spread.
    assert found.difference is None or found.difference < 5e-4
    assert document[kind] == (found.layers, found.words), "run `make docs`"


@pytest.mark.parametrize("kind", few(KINDS, *TELLING, "falcon_h1", "gemma4_text", "deepseek_v3"))
def test_an_outline_is_refused_as_the_model_is(kind, document):
    """Without weights, and in the same words; a family that runs is not."""
    model = tiny_model(kind)
    if isinstance(model, str):
        pytest.skip(model)
    outline, words = model.to("meta"), "runs"
    try:
        loaded, policy = begin(outline, None, "full", {})
        shape = check_fit(loaded, policy, StoreOptions(), None)
        check_pass(outline, small_store(policy, shape, StoreOptions()))
    except UnsupportedModel as error:
        words = in_words(error)
    assert words == document[kind][1] or (words == "runs" and kind in LATER)


def greedy(model, ids: torch.Tensor, steps: int) -> tuple[torch.Tensor, torch.Tensor, object]:
    """What transformers' own cache gives: the prompts with that many tokens behind, the logits that chose them, and the
    cache."""
    cache, found, new = hf.native_cache(model, "dynamic"), [], ids
    named = {hf.cache_name(type(model).forward): cache, "use_cache": True}
    with torch.no_grad():
        for _ in range(steps + 1):
            positions = torch.arange(ids.shape[1] - new.shape[1], ids.shape[1]).expand(len(ids), -1)  # Bamba needs them
            found.append(model(new, position_ids=positions, **named).logits[:, -1].float())
            new = found[-1].argmax(-1, keepdim=True)
            ids = torch.cat([ids, new], 1)
    return ids[:, :-1], torch.stack(found, 1), cache


@pytest.mark.parametrize(("kind", "rows"), few(product(RUN, (1, 3)), ("gemma4_text", 3)))
def test_a_family_goes_on_as_with_its_own_cache(kind, rows):
    """64 greedy tokens behind prompts that no window holds, alone and three at a time; and an FP16 cache is as large as
    transformers' own would be in 16 bits, of the layers that see everything."""
    model = tiny_model(kind)
    generator = torch.Generator().manual_seed(2)
    steps = 64 if selection.FULL else 16
    ids, wanted, cache = greedy(model, torch.randint(3, 90, (rows, PROMPT), generator=generator), steps)
    with run(model, ids, "full", tier="native") as (runner, numbers, found):
        # As above: sums of fp32 in another order; a state of 84 tokens adds them up.
        assert float((found - wanted).abs().max() / wanted.std()) < 2e-3
        assert torch.equal(found.argmax(-1), wanted.argmax(-1))
        shape = runner.shape
        own = [cache.layers[number] for number in shape.numbers or range(shape.num_layers)]
        held = sum(layer.keys.nbytes + layer.values.nbytes for layer in own) // (wanted.element_size() // 2)
        ledgers = [runner.report(row)[0] for row in numbers]
        assert sum(ledger.get("full_layers_fp16_bytes", ledger["fp16_bytes"]) for ledger in ledgers) == held


SETTINGS = {
    "snapkv": {"budget": 0.5, "window": 4},
    "kivi": {"bits": 4, "group": 8, "residual_tokens": 16},
    "diffkv": {"alpha_h": 1.0, "alpha_l": 0.3, "window": 4},
    "kv_compress": {"budget": 0.5},
    "h2o": {"budget": 12},
}
TRIED = (("deepseek_v3", "kivi"), ("falcon_h1", "h2o"))


@pytest.mark.parametrize(("kind", "method"), few(product(RUN, SETTINGS), *TRIED))
def test_bytes_of_a_family_are_those_of_a_walk(kind, method):
    """Whatever is dropped or quantised, the rows' ledgers sum to what lies on pages, in rings, tables and states."""
    ids = torch.randint(3, 90, (2, PROMPT + 24), generator=torch.Generator().manual_seed(3))
    with run(tiny_model(kind), ids, method, **SETTINGS[method]) as (runner, rows, found):
        assert bool(torch.isfinite(found).all())
        held = sum(runner.report(row)[0]["resident_bytes"] for row in rows)
        pools = [each.pages.pool for each in (runner.store, *runner.store.other_kinds)]
        free = sum(pool.num_free * (pool.page_bytes + pool.free_list.element_size()) for pool in pools)
        layers = [vars(layer) for row in rows for layer in runner.states.of([row]).values()]
        states = [x for layer in layers for part in ("conv_states", "recurrent_states") for x in layer[part].values()]
        assert held == runner.store.allocated_bytes - free + sum(x.nbytes for x in states if x is not None)


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


@pytest.mark.every(2)
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
