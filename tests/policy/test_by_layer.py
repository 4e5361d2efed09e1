"""Tables of precisions by layer: what is read and refused, and which tier each list of a model gets."""

import pytest
from refusals import refused

from kvbench.errors import NotForModel
from kvbench.methods.kivi import Kivi
from kvbench.methods.kvquant_style import KVQuantStyle
from kvbench.methods.snapkv import SnapKV
from kvbench.methods.uniform import Uniform
from kvbench.policy import Tier
from kvbench.policy.by_layer import read_table, write_table


def names(policy, num_layers=4, heads=2):
    """The format of every head of every layer, by name."""
    return [[policy.tiers[t].name for t in row] for row in policy.by_layer.of_model(num_layers, heads)]


@pytest.mark.parametrize(
    ("settings", "want"),
    [
        ({"protect_layers": [0, -1]}, ["k16v16", "k4v4", "k4v4", "k16v16"]),
        ({"protect_layers": [2], "protect_tier": "int8"}, ["k4v4", "k4v4", "k8v8", "k4v4"]),
        ({"tiers_by_layer": "fp16 2*int8 k2v2"}, ["k16v16", "k8v8", "k8v8", "k2v2"]),
        ({"tiers_by_layer": "1:fp8,-1:k4v2"}, ["k4v4", "fp8", "k4v4", "k4v2"]),
        ({"tiers_by_layer": "4*int8", "protect_layers": [-2]}, ["k8v8", "k8v8", "k16v16", "k8v8"]),
        ({"tiers_by_layer": "0:int8", "protect_layers": [0]}, ["k16v16", "k4v4", "k4v4", "k4v4"]),
    ],
)
def test_each_layer_has_its_precision(settings, want):
    """Listed, named or protected, from the front or from the end; what is said of no layer is the method's own."""
    assert names(Uniform(tier="int4", **settings)) == [[name] * 2 for name in want]
    assert names(SnapKV(tier="int4", **settings)) == [[name] * 2 for name in want]


def test_heads_of_a_layer_differ():
    """Parted by slashes, one per KV head; four precisions fit when the method's own is none of them."""
    policy = Uniform(tier="k1v1", tiers_by_layer="fp16/int8 int8/fp16 k4v2 k2v2")
    assert names(policy) == [["k16v16", "k8v8"], ["k8v8", "k16v16"], ["k4v2"] * 2, ["k2v2"] * 2]


@pytest.mark.parametrize("layers", [(), (0, -1)])
def test_layers_of_a_stored_run_are_those_of_a_new_one(layers):
    """JSON has lists, and `advise` puts rows of equal methods together."""
    one, other = Uniform(tier="int4", protect_layers=layers), Uniform(tier="int4", protect_layers=list(layers))
    assert one == other and repr(one) == repr(other)


def test_layers_of_a_method_with_keys_per_channel_keep_its_groups():
    """KIVI's other layers have its groups at other bits; 16-bit layers have none."""
    kivi = Kivi(bits=2, tiers_by_layer="0:k4v2", protect_layers=[1])
    assert kivi.tiers[1] == Tier(k_bits=4, v_bits=2, k_axis="channel", k_group=32, v_group=32)
    assert kivi.tiers[2] == Tier()
    kvquant = KVQuantStyle(tiers_by_layer="0:k2v2", v_splits=2, group=16)
    assert kvquant.tiers[1] == Tier(k_bits=2, v_bits=2, k_axis="channel", k_group=16, v_splits=2)


def test_nothing_said_is_nothing_declared():
    """Without these settings a method is what it was."""
    assert Uniform(tier="int4").by_layer is None and len(Uniform(tier="int4").tiers) == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tiers_by_layer": "fp17"}, ("setting-value", "method.tiers_by_layer", "fp17")),
        ({"tiers_by_layer": "0:fp16 int4"}, ("setting-value", "method.tiers_by_layer")),
        ({"tiers_by_layer": "0:fp16/int4"}, ("setting-value", "method.tiers_by_layer", "'0:fp16/int4'")),
        ({"tiers_by_layer": "0*int4"}, ("setting-value", "method.tiers_by_layer")),
        ({"tiers_by_layer": "9999*int4"}, ("setting-value", "method.tiers_by_layer")),
        ({"tiers_by_layer": " "}, ("setting-value", "method.tiers_by_layer", "tiers_by_layer=' '")),
        ({"tiers_by_layer": ["fp16"]}, ("setting-value", "method.tiers_by_layer")),
        (
            {"tiers_by_layer": "3:fp16 3:int8"},
            ("setting-value", "method.tiers_by_layer", "tiers_by_layer='3:fp16 3:int8'"),
        ),
        ({"tiers_by_layer": "fp16 int8 k4v2 k2v2 k1v1"}, ("setting-value", "method.tiers_by_layer", "5")),
        ({"tiers_by_layer": "0:fp16 1:int8 2:k4v2 3:k2v2"}, ("setting-value", "method.tiers_by_layer", "5")),
        ({"protect_layers": [0, 0]}, ("setting-value", "method.protect_layers", "protect_layers=[0")),
        ({"protect_tier": "k5v5"}, ("setting-value", "method.protect_tier", "k5v5")),
    ],
)
def test_what_is_no_table_is_refused(settings, message):
    """A refusal names the setting and what it may be."""
    with refused(*message):
        Uniform(tier="int4", **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tiers_by_layer": "3*int8"}, "has 3 layers, but the model has 4"),
        ({"tiers_by_layer": "4:int8"}, "tiers_by_layer names layer 4, but the model has layers 0 to 3"),
        ({"protect_layers": [-5]}, "protect_layers names layer -5, but the model has layers 0 to 3"),
        ({"protect_layers": [3, -1]}, "protect_layers names layer 3 twice"),
        ({"tiers_by_layer": "3*int4 int8/int4/int8"}, "has 3 heads in layer 3, but the model has 2 KV heads"),
    ],
)
def test_what_does_not_fit_a_model_is_refused(settings, message):
    """Before anything is read."""
    with pytest.raises(NotForModel, match=message):
        Uniform(tier="int4", **settings).check_model(4, 2)
    with pytest.raises(NotForModel, match=message):
        SnapKV(tier="int4", **settings).check_model(4, 2)


@pytest.mark.parametrize("tiers", [["fp16"], ["fp16", "fp16", "int4", "fp16"], ["k4v2"] * 30])
def test_a_table_that_is_written_is_read_again(tiers):
    """Equal neighbours are one entry."""
    text = write_table(tiers)
    assert read_table(text) == ([(tier,) for tier in tiers], {})
    assert len(text.split()) == 1 + sum(a != b for a, b in zip(tiers, tiers[1:], strict=False))
