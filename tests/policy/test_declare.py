"""What a method may declare: every rule at its edge, from both sides, and the names of precisions."""

import re
from dataclasses import dataclass

import pytest
from refusals import refused

from kvbench.policy import (
    ALL_QUERIES,
    BelowUniform,
    Budget,
    KeyNorms,
    LayerTensors,
    ReadSpec,
    Residual,
    ScoreSpec,
    Statistic,
    Tier,
)

HALF = Budget.parse(0.5)


@dataclass(frozen=True)
class Ones(Statistic):
    """Looks at nothing, in a prompt and in slots."""

    def of_prompt(self, seen: LayerTensors):
        return seen.k.new_ones(seen.k.shape[:2])

    def of_slots(self, seen: LayerTensors):
        return self.of_prompt(seen)


@dataclass(frozen=True)
class Unrotated(Ones):
    """Looks at keys without their positions."""

    needs = frozenset({"before_rope"})


BLOCKS = {"k_group": 32, "v_group": 32, "rotated": "llama.cpp"}


@dataclass(frozen=True)
class Projected(Ones):
    """Looks at the output projection."""

    needs = frozenset({"output_projection"})


@pytest.mark.parametrize(
    ("text", "tier"),
    [
        ("fp16", {}),
        ("native", {"native": True}),
        ("int8", {"k_bits": 8, "v_bits": 8}),
        ("INT4", {"k_bits": 4, "v_bits": 4}),
        ("fp8", {"k_bits": 8, "v_bits": 8, "fp8": True}),
        ("k8v4", {"k_bits": 8, "v_bits": 4}),
        ("K1v16", {"k_bits": 1, "v_bits": 16}),
        ("k3v2", {"k_bits": 3, "v_bits": 2}),
        ("LLOYD-k4v3", {"k_bits": 4, "v_bits": 3, "k_code": "lloyd", "v_code": "lloyd", "rotated": "both"}),
        ("Q8_0-iq4_nl", {"k_bits": 8, "v_bits": 4, **BLOCKS, "k_code": "q8_0", "v_code": "iq4_nl"}),
        ("f16-q5_1", {"v_bits": 5, "v_group": 32, "v_code": "q5_1", "rotated": "llama.cpp"}),
        ("turboquant_3bit", {"k_bits": 3, "v_bits": 3, "k_code": "lloyd", "rotated": "keys"}),
    ],
)
def test_names_of_precisions(text, tier):
    """Every name gives its tier, whatever its case; a tier is given back as it is."""
    assert Tier.parse(text) == Tier(**tier)
    assert Tier.parse(given := Tier(**tier)) is given


@pytest.mark.parametrize(
    "text",
    ["k5v4", "lloyd-k4v8", "k8", "int2", "", None, 8, "k8v4x", "k00008v4", "k8v17", "f16", "f16-f16", "q8_0-int4"],
)
def test_what_names_no_precision_is_refused(text):
    """The message names the setting and the value, and never another error."""
    with refused("setting-value", "low"):
        Tier.parse(text, "low")


@pytest.mark.parametrize(
    ("tier", "name"),
    [
        (Tier(), "k16v16"),
        (Tier(native=True, k_bits=8), "native"),
        (Tier.parse("turboquant_k8v4"), "turboquant_k8v4"),
        (Tier.parse("lloyd-k3v2"), "lloyd-k3v2"),
        (Tier(k_bits=8, v_bits=8, symmetric=True), "int8_per_token_head"),
        (Tier(k_bits=8, v_bits=8, fp8=True), "fp8"),
        (Tier(k_bits=2, v_bits=4, k_axis="channel", k_group=32), "k2v4-channel32"),
        (Tier(k_bits=2, v_bits=4, k_group=32), "k2v4"),
        (Tier.parse("q8_0-q4_0"), "q8_0-q4_0"),
        (Tier.parse("q5_1-q5_1"), "q5_1"),
        (Tier.parse("f16-q4_1"), "f16-q4_1"),
    ],
)
def test_labels_of_precisions(tier, name):
    """Bits of keys and values, or the kind of number, and the length of groups along the tokens."""
    assert tier.name == name


def test_each_side_is_split_by_its_own_bits():
    """A side whose bits are not listed stays whole."""
    split = Tier(k_bits=4, v_bits=2).split_by_bits({4: 3, 2: 5})
    assert (split.k_splits, split.v_splits) == (3, 5)
    split = Tier(k_bits=8, v_bits=4, k_splits=7).split_by_bits({4: 3})
    assert (split.k_splits, split.v_splits) == (1, 3)
    split = Tier(k_bits=4, v_bits=8, v_splits=7).split_by_bits({4: 3})
    assert (split.k_splits, split.v_splits) == (3, 1)


@pytest.mark.parametrize(
    "declare",
    [
        lambda: Tier(k_axis="channel", k_group=8),
        lambda: Tier(k_axis="channel", k_group=0, native=True),
        lambda: Tier(k_group=0, v_group=0, k_splits=1, v_splits=1),
        lambda: Tier(k_bits=1, v_bits=16),
        lambda: ScoreSpec(prefill_queries=ALL_QUERIES),
        lambda: ScoreSpec(power=2),
        lambda: ScoreSpec(pool="max", pool_kernel=1),
        lambda: ScoreSpec(pool="avg", pool_kernel=3),
        lambda: ScoreSpec(pool="none", pool_kernel=2),
        lambda: ScoreSpec(decode_update=True, decode_replace=True, track=("score",)),
        lambda: ScoreSpec(decode_update=True, skip_near=1, track=("score", "pos")),
        lambda: ScoreSpec(decode_update=False, skip_near=1),
        lambda: ScoreSpec(decode_update=False, query_reduce="max"),
        lambda: ScoreSpec(statistic=Ones(), slot_queries=1),
        lambda: ScoreSpec(statistic=KeyNorms(), track=("score",)),
        lambda: ScoreSpec(statistic=BelowUniform(), group_reduce="max", prefill_queries=4),
        lambda: Residual(num_tokens=1),
        lambda: ReadSpec(budget=HALF, page_tokens=8, min_pages=1, dense_layers=0),
    ],
)
def test_what_lies_at_an_edge_is_allowed(declare):
    """The last value that a rule lets through; half of what keeps the rules where they are."""
    assert declare() is not None


@pytest.mark.parametrize(
    ("declare", "said"),
    [
        (lambda: Tier(k_bits=6), "k_bits=6 must be 1, 2, 3, 4, 5, 8 or 16 bits"),
        (lambda: Tier(k_bits=4, v_code="nf4"), "v_code='nf4' must be '', 'e4m3_scaled'"),
        (lambda: Tier(rotated="values"), "rotated='values' must be 'none', 'keys', 'both' or 'llama.cpp'"),
        (lambda: Tier(v_bits=17), "v_bits=17 must be 1"),
        (lambda: Tier(k_axis="head"), "k_axis='head' must be"),
        (lambda: Tier(k_axis="channel", k_group=7), "k_group=7 with k_axis='channel' must be >= 8"),
        (lambda: Tier(k_group=-1), "k_group=-1 must be a whole number, at least 0"),
        (lambda: Tier(v_group=-1), "v_group=-1 must be a whole number, at least 0"),
        (lambda: Tier(k_splits=0), "k_splits=0 must be a whole number, at least 1"),
        (lambda: Tier(v_splits=0), "v_splits=0 must be a whole number, at least 1"),
        (lambda: ScoreSpec(prefill_queries=-2), "prefill_queries=-2 must be a whole number, at least -1"),
        (lambda: ScoreSpec(query_reduce="min"), "query_reduce='min' must be 'sum', 'mean' or 'max'"),
        (lambda: ScoreSpec(pool="min"), "pool='min' must be 'none', 'avg' or 'max'"),
        (lambda: ScoreSpec(pool_stage="late"), "pool_stage='late' must be 'per_query_head'"),
        (lambda: ScoreSpec(pool_region="window"), "pool_region='window' must be 'prefix'"),
        (lambda: ScoreSpec(group_reduce="min"), "group_reduce='min' must be 'sum'"),
        (lambda: ScoreSpec(power=0), "power=0 must be 1 or 2"),
        (lambda: ScoreSpec(power=3), "power=3 must be 1 or 2"),
        (lambda: ScoreSpec(pool="max", pool_kernel=2), "pool_kernel=2 must be odd"),
        (lambda: ScoreSpec(pool="max", pool_kernel=-1), "pool_kernel=-1 must be odd and >= 1"),
        (lambda: ScoreSpec(track=("key",)), "track=['key'] is unknown"),
        (lambda: ScoreSpec(decode_update=True), "decode_update=True needs track to hold 'score'"),
        (lambda: ScoreSpec(decode_replace=True), "decode_replace=True needs decode_update=True"),
        (
            lambda: ScoreSpec(decode_update=True, track=("score",), query_reduce="mean"),
            "query_reduce='mean' must be 'sum' with decode_update=True",
        ),
        (
            lambda: ScoreSpec(decode_update=True, track=("score",), skip_near=1),
            "skip_near=1 with decode_update=True needs track to hold 'pos'",
        ),
        (lambda: ScoreSpec(statistic=Ones(), slot_queries=-1), "slot_queries=-1 must be a whole number, at least 0"),
        (lambda: ScoreSpec(slot_queries=1), "slot_queries=1 must be 0 unless Probability defines"),
        (lambda: ScoreSpec(statistic=KeyNorms(), prefill_queries=1), "prefill_queries=1 does not go with"),
        (lambda: ScoreSpec(statistic=KeyNorms(), decode_update=True, track=("score",)), "decode_update=True does"),
        (lambda: ScoreSpec(statistic=KeyNorms(), pool="max"), "pool='max' does not go with KeyNorms"),
        (lambda: ScoreSpec(statistic=BelowUniform()), "group_reduce='mean' does not go with BelowUniform"),
        (
            lambda: ScoreSpec(statistic=BelowUniform(), group_reduce="max", power=2),
            "power=2 does not go with BelowUniform",
        ),
        (lambda: Residual(num_tokens=0), "num_tokens=0 must be a whole number of tokens from 1"),
        (lambda: ReadSpec(budget=HALF, page_tokens=0), "page_tokens=0 must be a multiple of 8 tokens from 8"),
        (lambda: ReadSpec(budget=HALF, page_tokens=12), "page_tokens=12 must be a multiple of 8 tokens"),
        (lambda: ReadSpec(budget=HALF, min_pages=0), "min_pages=0 must be a whole number, at least 1"),
        (lambda: ReadSpec(budget=HALF, dense_layers=-1), "dense_layers=-1 must be a whole number, at least 0"),
        (lambda: ReadSpec(budget=HALF, group_reduce="sum"), "group_reduce='sum' must be 'mean' or 'max'"),
    ],
)
def test_what_lies_beyond_an_edge_is_refused(declare, said):
    """One ValueError that names the declaration and its value."""
    with pytest.raises(ValueError, match=re.escape(said) if ".*" not in said else said):
        declare()


def test_defaults_are_what_the_docstrings_say():
    """What a method gets that leaves a field out: those of Quest for reading, KIVI's flush, one whole vector per
    scale, and no statistics."""
    assert ReadSpec(budget=HALF) == ReadSpec(
        budget=HALF, page_tokens=16, min_pages=3, dense_layers=2, group_reduce="max"
    )
    assert Residual(num_tokens=8) == Residual(num_tokens=8, v_flush="oldest", when="after_attention", hold_prompt=True)
    assert Tier() == Tier(
        k_bits=16, v_bits=16, k_axis="token", k_group=0, v_group=0, k_splits=1, v_splits=1, symmetric=False, fp8=False
    )
    spec = ScoreSpec()
    assert (spec.prefill_queries, spec.slot_queries, spec.skip_near, spec.power, spec.pool_kernel) == (0, 0, 0, 1, 1)
    assert (spec.decode_update, spec.decode_replace, spec.track) == (False, False, ())


@pytest.mark.parametrize(
    ("spec", "measured", "alone"),
    [
        (ScoreSpec(), False, True),
        (ScoreSpec(prefill_queries=1), True, False),
        (ScoreSpec(prefill_queries=ALL_QUERIES), True, False),
        (ScoreSpec(statistic=BelowUniform(), group_reduce="max"), False, True),
        (ScoreSpec(statistic=Ones()), True, True),
        (ScoreSpec(statistic=Ones(), slot_queries=1), True, False),
        (ScoreSpec(statistic=Unrotated()), True, True),
        (ScoreSpec(statistic=Projected()), True, False),
    ],
)
def test_what_a_prompt_has_to_bring(spec, measured, alone):
    """A prompt is measured where queries count or none are needed; a prompt cache scores again what keys and values
    alone decide."""
    assert (spec.measures_prompts, spec.only_keys_and_values) == (measured, alone)
