"""A cache whose layers lie in two places gives the tokens and the bytes of one place, to the last digit."""

from dataclasses import replace

import pytest
import torch
from engine_helpers import answers, comparable, random_tokens, request
from open_settings import kvquant_books

from kvbench.methods.diffkv import DiffKV
from kvbench.methods.full import Full
from kvbench.methods.h2o import H2O
from kvbench.methods.kivi import Kivi
from kvbench.methods.kv_compress import KVCompress
from kvbench.methods.kvquant import KVQuant
from kvbench.methods.snapkv import SnapKV
from kvbench.methods.uniform import Uniform

CPU = torch.device("cpu")
METHODS = {
    "full": Full(),
    "snapkv": SnapKV(budget=0.5, window=8, decode_every=4),
    "snapkv, bytes": SnapKV(budget="60KiB", window=8, decode_every=4),
    "snapkv, global": SnapKV(budget=0.5, window=8, allocation="global"),
    "snapkv, global, again": SnapKV(budget=0.5, window=8, allocation="global", decode_every=2),
    "kivi": Kivi(group=8, residual_tokens=16),
    "diffkv": DiffKV(alpha_h=2.0, alpha_l=0.5, window=16),
    "kv_compress": KVCompress(budget=32, block=8, continual=True),
    "h2o": H2O(budget=24),
    "kvquant": KVQuant(bits=3, books=kvquant_books(layers=3)),
    "uniform, by layer": Uniform(tier="int4", protect_layers=[0]),
    "kivi, by layer": Kivi(group=8, residual_tokens=16, tiers_by_layer="k2v2,k4v4,k2v2"),
    "snapkv, by head, bytes": SnapKV(budget="50KiB", window=8, tiers_by_layer="fp16/int4,int4,int4/fp16"),
}


def in_two(loaded, first=1):
    """Returns the same model with its layers in two places, `first` of them in the first."""
    layers = loaded.model.config.num_hidden_layers
    return replace(loaded, device_spans=((CPU, first), (CPU, layers - first)))


def requests():
    """Returns prompts of two lengths: one with a second segment and two answers, one whose answer is forced, too."""
    return [
        request("a", random_tokens(41), random_tokens(3, seed=1), max_new_tokens=6, num_samples=2),
        request("b", random_tokens(60), gold=random_tokens(6, seed=2), max_new_tokens=6),
    ]


def same(one, two):
    """Asserts that two runs agree on everything but time, and that they held something."""
    assert {key: comparable(outcome) for key, outcome in one.items()} == {
        key: comparable(outcome) for key, outcome in two.items()
    }
    assert all(outcome.status == "ok" and outcome.ledger["resident_bytes"] > 0 for outcome in two.values())


@pytest.mark.every(2)
@pytest.mark.parametrize("name", METHODS)
def test_two_places_answer_as_one(tiny_model, name):
    """Tokens, ledgers, peaks, what was kept and fidelity are those of one store, over one layer and two; and over two
    and one where all layers are planned together."""
    loaded = tiny_model("llama", "gqa3", 64, num_layers=3)
    policy = METHODS[name]
    whole = answers(loaded, policy, requests())
    for first in (1, 2) if policy.scope == "model" else (1,):
        same(whole, answers(in_two(loaded, first), policy, requests()))
