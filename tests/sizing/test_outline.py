"""Bytes from two shallow caches, beside those of the whole one; cards."""

from dataclasses import replace

import pytest

import kvbench.sizing.outline as sizing_outline
from kvbench.config.methods import method_settings
from kvbench.config.settings import as_dict
from kvbench.runs.parts import make_policy
from kvbench.sizing.outline import EXACT_TOKENS, outline
from kvbench.sizing.project import project, run
from kvbench.sizing.shapes import find_shape

SHAPE = replace(find_shape("smollm2-135m").store_shape, num_layers=9)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("full", {}),
        ("int4", {"protect_layers": [0, -1]}),
        ("kivi", {}),
        ("snapkv", {"budget": 0.25}),
        ("snapkv", {"budget": 3000}),
        ("snapkv", {"budget": "2MiB"}),
        ("pyramidkv", {}),
        ("minikv", {}),
        ("h2o", {}),
        ("int4", {"tiers_by_layer": "2*fp16 6*int4 1*fp16"}),
    ],
)
def test_shallow_caches_tell_what_the_whole_one_holds(name, settings):
    """Within 1 %, item by item of those that count: layers that differ, budgets of every kind, buffers, pyramids."""
    policy = make_policy(as_dict(method_settings(name)) | settings)
    found = outline(policy, SHAPE, EXACT_TOKENS, 24)
    _, whole = project(policy, SHAPE, EXACT_TOKENS, 24)
    assert found.fp16_bytes == whole.fp16_bytes
    assert found.resident_bytes == pytest.approx(whole.resident_bytes, rel=0.01)


@pytest.mark.parametrize("name", ["snapkv", "kivi", "h2o"])
def test_a_short_context_is_told_from_shallow_caches_too(name):
    """Pages that are not full are a larger part of it, and still as many in every layer; the steps are all counted."""
    policy = make_policy(method_settings(name))
    found, (_, whole) = outline(policy, SHAPE, 300, 70), project(policy, SHAPE, 300, 70)
    assert found.resident_bytes == pytest.approx(whole.resident_bytes, rel=0.01)


@pytest.mark.parametrize("length", [EXACT_TOKENS, 300])
def test_a_short_context_does_not_grow_with_the_depth_of_the_model(length, monkeypatch):
    """What is counted is two and four layers, whatever the model has."""
    seen = []

    def spied(policy, shape, *asked, **named):
        seen.append(shape.num_layers)
        return run(policy, shape, *asked, **named)

    monkeypatch.setattr(sizing_outline, "run", spied)
    assert outline(make_policy(method_settings("snapkv")), replace(SHAPE, num_layers=80), length, 8) is not None
    assert max(seen) == 4


def test_what_the_text_decides_needs_shares():
    """Without shares there is no one number; with them it is theirs. Steps decide where the prompt does not."""
    policy = make_policy(as_dict(method_settings("diffkv")) | {"alpha_l": 0, "alpha_h": 5})
    assert outline(policy, find_shape("llama3-8b").store_shape, 1984, 64) is None
    policy = make_policy(method_settings("diffkv"))
    assert outline(policy, SHAPE, EXACT_TOKENS, 24) is None
    assert outline(policy, SHAPE, EXACT_TOKENS, 24, [0.3, 0.2]).measured


def test_a_card_takes_longer_for_more():
    """Prompts, their length and answers each take time; the name is taken in any case."""
    find_card = pytest.importorskip("kvbench.extensions.advise.cards").find_card
    card, shape = find_card("l4"), find_shape("llama3.1-8b")
    assert card.name == "L4" and card.memory_bytes == 24 * 10**9
    base = card.seconds(shape, 100, 8000, 64)
    assert card.seconds(shape, 200, 8000, 64) == pytest.approx(2 * base)
    assert card.seconds(shape, 100, 16000, 0) > 2 * card.seconds(shape, 100, 8000, 0) > 0  # attention is a square
    assert base < card.seconds(shape, 100, 8000, 128)
    assert card.seconds(replace(shape, parameters=None), 1, 1, 1) is None
