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
    ("diffkv", {"alpha_l": 0.5, "alpha_h": 0.4}, ("settings-conflict", "method.alpha_l", "alpha_l=0.5", "alpha_h=0.4")),
    ("diffkv", {"high": "k2v8"}, ("settings-conflict", "method.low", "low=k4v2", "high=k2v8")),
    ("diffkv", {"high": "k4v2"}, ("settings-conflict", "method.low", "high=k4v2", "low=k4v2")),
    ("snapkv", {"budget": "4096B", "protect": "instruction"}, ("settings-conflict", "method.protect", "budget=4096B")),
    ("h2o", {"one_shot": True, "protect": "answer"}, ("settings-conflict", "method.protect", "one_shot=false")),
    (
        "kivi",
        {"residual_tokens": 104},
        ("settings-conflict", "method.residual_tokens", "residual_tokens=104", "group=32"),
    ),
    ("kivi", {"bits": 3}, ("setting-value", "method.bits", "bits=3")),
    ("kvquant_style", {"bits": 3}, ("setting-value", "method.bits", "bits=3")),
    (
        "knorm",
        {"skip_layers": 1, "allocation": "pyramid"},
        ("settings-conflict", "method.skip_layers", "skip_layers=1"),
    ),
    (
        "knorm",
        {"skip_layers": 1, "threshold": 0.5, "budget": None},
        ("settings-conflict", "method.skip_layers", "skip_layers=1"),
    ),
    (
        "minikv",
        {"residual_tokens": 104},
        ("settings-conflict", "method.residual_tokens", "residual_tokens=104", "group=16"),
    ),
    ("minikv", {"heavy": 0.9}, ("settings-conflict", "method.heavy", "heavy=0.9", "recent=0.25")),
    ("qaq", {"value_low": 4}, ("settings-conflict", "method.value_low", "value_low=4", "value_high=4")),
    ("snapkv", {"budget": 32}, ("settings-conflict", "method.budget", "budget=32", "window=32")),
    ("streaming_llm", {"sinks": 8, "budget": 8}, ("settings-conflict", "method.budget", "budget=8", "sinks=8")),
    ("tova", {"cut_chunk": False}, ("settings-conflict", "method.cut_chunk", "cut_chunk=false", "chunk=1")),
    ("int8", {"tier": "k1v1", "symmetric": True}, ("settings-conflict", "method.symmetric", "symmetric=true")),
    ("int8", {"tier": "fp16"}, ("setting-value", "method.tier", "tier=fp16", "method=full")),
    ("int8", {"tier": "nvfp4", "splits": 2}, ("settings-conflict", "method.tier", "tier=nvfp4")),
    (
        "int8",
        {"tier": "turboquant_4bit", "symmetric": True},
        ("settings-conflict", "method.tier", "symmetric=false", "splits=1"),
    ),
    ("int8", {"tier": "lloyd-k8v4"}, ("setting-value", "method.tier", "k_bits=8")),
    ("keydiff", {"threshold": 0.5}, ("settings-conflict", "method.threshold", "budget=0.25", "threshold=0.5")),
    ("keydiff", {"budget": None}, ("settings-conflict", "method.threshold", "budget=None", "threshold=None")),
    (
        "keydiff",
        {"budget": None, "threshold": 0.5, "allocation": "ada"},
        ("settings-conflict", "method.threshold", "allocation=ada"),
    ),
    (
        "keydiff",
        {"budget": None, "threshold": 0.5, "value_aware": True},
        ("settings-conflict", "method.threshold", "value_aware=true"),
    ),
    ("keydiff", {"value_aware": True, "chunk": 4}, ("settings-conflict", "method.value_aware", "chunk=4")),
    ("keydiff", {"table": TABLE}, ("settings-conflict", "method.table", "allocation=table", "allocation=uniform")),
    ("keydiff", {"allocation": "table", "table": [[1.0, -1.0]]}, ("setting-value", "method.table", "weights")),
    ("keydiff", {"allocation": "table", "table": [[0.0, 0.0]]}, ("setting-value", "method.table", "weights")),
    ("keydiff", {"protect": "prompt"}, ("settings-conflict", "method.protect", "decode_every")),
    ("keydiff", {"protect": "answer"}, ("settings-conflict", "method.protect", "decode_every")),
    (
        "keydiff",
        {"allocation": "preference"},
        ("setting-value", "method.allocation", "allocation=preference", "KeyDiff"),
    ),
]


@pytest.mark.parametrize(("name", "settings", "message"), TOGETHER)
def test_settings_that_do_not_go_together_are_refused(name, settings, message):
    """Each alone is within its range; one sentence names them."""
    with refused(*message):
        class_of(name)(**settings)
