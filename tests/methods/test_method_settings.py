"""Every setting of every method has a type, a range and a unit, and what lies outside is refused by name: generated
from what is declared, so that a new setting is covered without being named here."""

import inspect
from dataclasses import dataclass

import pytest
from conformance_helpers import METHODS, class_of, settings_of
from omegaconf import OmegaConf
from refusals import refused
from wrong_values import wrong

from kvbench.config.files import SHARED
from kvbench.policy import Policy
from kvbench.policy.settings import BudgetRule, check_sizes
from kvbench.rules import Number, Text, Whole, declared
from kvbench.runs.parts import make_policy
from kvbench.runs.verdict import complaint

# What the installed kvpress alone knows all of.
NAMES_OF_OTHERS = {("kvpress", "press")}
FIELDS = [(name, field) for name in METHODS for field in declared(class_of(name))]


def declarations() -> list:
    """Method and setting, as parameters; what a class inherits from one that came before is exhaustive."""
    found, seen = [], set()
    for name, setting in FIELDS:
        kinds = class_of(name).__mro__
        own = next(kind for kind in kinds if setting in inspect.get_annotations(kind)), setting
        found.append(pytest.param(name, setting, marks=pytest.mark.exhaustive if own in seen else ()))
        seen.add(own)
    return found


@pytest.mark.every(3)
@pytest.mark.parametrize(("name", "setting"), declarations())
def test_a_wrong_value_is_refused_by_name(name, setting):
    """Wrong types, NaN, and what lies below or above the range: one ValueError that names the setting, from a
    configuration and from Python alike."""
    kind = class_of(name)
    field = declared(kind)[setting]
    listed = OmegaConf.to_container(settings_of(name))
    defaults = {key: value for key, value in listed.items() if key != "_target_"}
    for value in wrong(field):
        with refused("setting-value", f"method.{setting}"):
            kind(**defaults | {setting: value})
        if isinstance(value, set):  # which no configuration holds
            continue
        with refused("setting-value", f"method.{setting}"):
            make_policy(OmegaConf.create(listed | {setting: value}))


def test_the_list_is_long():
    """What the test above tries: some hundreds of settings of all methods, and thousands of values."""
    fields = [declared(class_of(name))[setting] for name, setting in FIELDS]
    tried = [value for field in fields for value in wrong(field)]
    assert len(FIELDS) >= 100 and len(tried) >= 1000


def test_every_setting_says_what_it_may_be_both_ends_of_a_range_included():
    """A number has both ends of its range, and what the rule calls the smallest and the largest passes the rule."""
    for name, setting in FIELDS:
        rule = declared(class_of(name))[setting].rule
        assert rule is not None and (not isinstance(rule, Text) or (name, setting) in NAMES_OF_OTHERS), (name, setting)
        if isinstance(rule, Whole | Number):
            assert rule.low is not None and rule.high is not None, (name, setting)
        if isinstance(rule, Whole) and not (rule.odd or rule.multiple_of > 1):
            ends = (rule.low, rule.high, *rule.also)
            assert all(rule.fits(value) for value in ends), (name, setting)
        if isinstance(rule, Number):
            assert rule.fits(rule.low) is not rule.above and rule.fits(rule.high), (name, setting)


@pytest.mark.parametrize("annotation", ["no such type", "(", "missing.Name"])
def test_an_annotation_that_is_none_is_refused(annotation):
    """What evaluating the text raises becomes one sentence with the class; it was called a fault of kvbench."""
    kind = dataclass(type("Toy", (Policy,), {"__annotations__": {"share": annotation}, "share": 0.5}))
    with pytest.raises(ValueError, match=r"annotations of Toy cannot be read \((SyntaxError|NameError): "):
        declared(kind)


@pytest.mark.parametrize("name", METHODS)
def test_no_count_of_tokens_or_layers_is_beyond_the_model(name):
    """Each whole number of tokens or layers, and a budget in tokens, may reach the model's size, and not one more."""
    kind = class_of(name)
    checked = 0
    for setting, field in declared(kind).items():
        policy = make_policy(settings_of(name))
        check_sizes(policy, max_tokens=4096, num_layers=30)
        limit = {"tokens": 4096, "layers": 30}.get(
            field.rule.unit, 4096 if isinstance(field.rule, BudgetRule) else None
        )
        if limit is not None:
            setattr(policy, setting, limit)
            check_sizes(policy, max_tokens=4096, num_layers=30)
            setattr(policy, setting, limit + 1)
            with refused("setting-value", f"method.{setting}", f"={limit + 1}", limit):
                check_sizes(policy, max_tokens=4096, num_layers=30)
            checked += 1
    assert checked or kind.__name__ in ("Full", "Uniform")


@pytest.mark.parametrize("name", [n for n in METHODS if class_of(n).__module__.split(".")[-1] in (n, f"{n}_control")])
def test_a_class_has_the_defaults_of_its_file(name):
    """Made in Python without a setting, a method is what its YAML file lists, which need not list what every ranking
    method shares; only gates belong to one model."""
    policy, listed = class_of(name)(), OmegaConf.to_container(settings_of(name))
    own = {field: getattr(policy, field) for field in declared(type(policy))}
    own = {field: list(value) if isinstance(value, tuple) else value for field, value in own.items()}
    assert {field: value for field, value in own.items() if field in listed or field not in SHARED} | {
        "table": None
    } == {**{key: value for key, value in listed.items() if key != "_target_"}, "table": None}
    assert complaint(policy, {}) is None  # a record without slots says nothing


TABLE = [[4.0, 1.0], [0.0, 2.0], [1.0, 8.0]]
TOGETHER = [
    ("diffkv", {"alpha_l": 0.5, "alpha_h": 0.4}, "alpha_l=0.5 and alpha_h=0.4 must satisfy"),
    ("diffkv", {"high": "k2v8"}, "low=k4v2 must not hold more bits per key or value than high=k2v8"),
    ("diffkv", {"high": "k4v2"}, "high=k4v2 and low=k4v2 are one precision"),
    ("h2o", {"one_shot": True, "protect": "answer"}, "evictions while decoding.*; set one_shot=false"),
    ("kivi", {"residual_tokens": 104}, "residual_tokens=104 must be a positive multiple of group=32"),
    ("kivi", {"bits": 3}, "bits=3 must be 1, 2, 4 or 8 bits"),
    ("kvquant_style", {"bits": 3}, "bits=3 must be 1, 2, 4 or 8 bits"),
    ("knorm", {"skip_layers": 1, "allocation": "pyramid"}, "skip_layers=1 divides a budget among layers"),
    ("knorm", {"skip_layers": 1, "threshold": 0.5, "budget": None}, "skip_layers=1 divides a budget among layers"),
    ("minikv", {"residual_tokens": 104}, "residual_tokens=104 must be a multiple of group=16"),
    ("minikv", {"heavy": 0.9}, "heavy=0.9 and recent=0.25 are shares of one prompt"),
    ("qaq", {"value_low": 4}, "value_low=4 must be fewer bits than value_high=4"),
    ("snapkv", {"budget": 32}, "budget=32 tokens must exceed window=32; raise the budget"),
    ("streaming_llm", {"sinks": 8, "budget": 8}, "budget=8 tokens leaves no recent token beside sinks=8"),
    ("tova", {"cut_chunk": False}, "cut_chunk=false is about chunks, and chunk=1 makes none"),
    ("int8", {"tier": "k1v1", "symmetric": True}, "symmetric=true needs at least 2 bits"),
    ("int8", {"tier": "fp16"}, "tier=fp16 leaves 16-bit elements, as method=full does"),
    ("int8", {"tier": "nvfp4", "splits": 2}, "tier=nvfp4 says itself how its scales are made"),
    ("int8", {"tier": "turboquant_4bit", "symmetric": True}, "leave symmetric=false and splits=1"),
    ("int8", {"tier": "lloyd-k8v4"}, "k_bits=8 has no codebook; choose 2, 3 or 4 bits"),
    ("keydiff", {"threshold": 0.5}, "budget=0.25 and threshold=0.5: one of them"),
    ("keydiff", {"budget": None}, "budget=None and threshold=None: one of them"),
    ("keydiff", {"budget": None, "threshold": 0.5, "allocation": "ada"}, "leaves allocation=ada no budget"),
    ("keydiff", {"budget": None, "threshold": 0.5, "value_aware": True}, "leaves value_aware=true no budget"),
    ("keydiff", {"value_aware": True, "chunk": 4}, "which chunk=4 does not allow"),
    ("keydiff", {"table": TABLE}, "table is for allocation=table, but allocation=uniform"),
    ("keydiff", {"allocation": "table", "table": [[1.0, -1.0]]}, "weights below 0"),
    ("keydiff", {"allocation": "table", "table": [[0.0, 0.0]]}, "nothing but 0"),
    ("keydiff", {"protect": "prompt"}, "these settings make none; set decode_every"),
    ("keydiff", {"protect": "answer"}, "these settings make none; set decode_every"),
    ("keydiff", {"allocation": "preference"}, "say what a prompt's layers are worth, and KeyDiff does not"),
]


@pytest.mark.parametrize(("name", "settings", "message"), TOGETHER)
def test_settings_that_do_not_go_together_are_refused(name, settings, message):
    """Each alone is within its range; one sentence names them."""
    with pytest.raises(ValueError, match=message):
        class_of(name)(**settings)
