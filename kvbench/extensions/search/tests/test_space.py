"""A search varies what methods declare."""

from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf
from refusals import refused

from kvbench.config import files
from kvbench.config.methods import method_settings
from kvbench.config.settings import read_config
from kvbench.extensions.search.space import read_space
from kvbench.methods.kivi import Kivi
from kvbench.methods.minikv import MiniKV
from kvbench.rules import declared
from kvbench.runs.parts import make_policy


def search(**changes):
    """The `search` settings as they are shipped, with changes."""
    cfg = read_config(files.path_of("command", "search")).search
    for key, value in changes.items():
        OmegaConf.update(cfg, key.replace("__", "."), value, force_add=True)
    return cfg


def test_knobs_are_what_is_declared():
    """A budget has a range, a tier the precisions asked for, `bits` and `allocation` their own options; nothing of a
    method of the user's own has to be listed anywhere."""
    space = {item.method: {knob.name: knob for knob in item.knobs} for item in read_space(search())}
    assert set(space["snapkv"]) == {"budget", "tier"}
    assert (space["snapkv"]["budget"].low, space["snapkv"]["budget"].high) == (0.05, 0.9)
    assert space["snapkv"]["tier"].options == ("fp16", "int8", "int4", "k8v4", "k4v2")
    assert space["kivi"]["bits"].options == declared(Kivi)["bits"].rule.options
    assert space["minikv"]["allocation"].options == declared(MiniKV)["allocation"].rule.options
    assert set(space["diffkv"]) == {"alpha_h", "alpha_l", "high", "low"} and space["diffkv"]["alpha_l"].options[0] == 0
    assert all(type(value) is float for value in space["diffkv"]["alpha_h"].options)
    assert "full" not in space
    assert len({"engine_format", "fp8", "int4", "int8"} & set(space)) == 1, "they differ in the tier alone"
    assert "pool" in {knob.name for knob in read_space(search(also=["pool"], methods="snapkv"))[0].knobs}


@pytest.mark.parametrize("end", [0, 1])
def test_every_proposal_can_be_made(end):
    """At both ends of all ranges each method with a budget takes what is proposed. Elsewhere a combination may be none,
    such as two tiers in the wrong order; a search leaves it out and goes on."""
    corner = SimpleNamespace(  # a trial that proposes an end of every range
        suggest_float=lambda name, *ends, log: ends[end], suggest_categorical=lambda name, choices: choices[-end]
    )
    for item in read_space(search()):
        if not any(knob.high for knob in item.knobs):
            continue
        cfg = method_settings(item.method)
        for name, value in item.suggest(corner).items():
            cfg[name] = value
        make_policy(cfg)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"methods": ["snapvk"]}, ("name-unknown", "search.methods", "search.methods=snapvk", "mean snapkv")),
        ({"methods": "full"}, ("setting-value", "search.methods", "search.methods=full")),
        ({"budget": [0.9, 0.1]}, ("setting-value", "search.budget", "search.budget=[0.9, 0.1]")),
        ({"budget": 0.5}, ("setting-value", "search.budget", "search.budget=0.5")),
        ({"precision": ["int3"]}, ("setting-value", "search.precision", "search.precision='int3'")),
        ({"grid__alpha_l": [-1]}, ("setting-value", "search.grid.alpha_l", "search.grid.alpha_l=-1")),
    ],
)
def test_wrong_spaces_are_refused(changes, error):
    """The message names the setting and the value."""
    with refused(*error):
        read_space(search(**changes))
