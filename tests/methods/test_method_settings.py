"""Every setting of every method has a type, a range and a unit, and what lies outside is refused by name: generated
from what is declared, so that a new setting is covered without being named here."""

import inspect

import pytest
from conformance_helpers import METHODS, settings_of
from omegaconf import OmegaConf
from wrong_values import wrong

from kvbench.config.files import SHARED
from kvbench.policy.settings import BudgetRule, check_sizes
from kvbench.rules import Number, Text, Whole, declared
from kvbench.runs.parts import make_policy, policy_class
from kvbench.runs.verdict import complaint

# What the installed kvpress alone knows all of.
NAMES_OF_OTHERS = {("kvpress", "press")}
FIELDS = [(name, field) for name in METHODS for field in declared(policy_class(settings_of(name)._target_))]


def declarations() -> list:
    """Method and setting, as parameters; what a class inherits from one that came before is exhaustive."""
    found, seen = [], set()
    for name, setting in FIELDS:
        kinds = policy_class(settings_of(name)._target_).__mro__
        own = next(kind for kind in kinds if setting in inspect.get_annotations(kind)), setting
        found.append(pytest.param(name, setting, marks=pytest.mark.exhaustive if own in seen else ()))
        seen.add(own)
    return found


@pytest.mark.parametrize(("name", "setting"), declarations())
def test_a_wrong_value_is_refused_by_name(name, setting):
    """Wrong types, NaN, and what lies below or above the range: one ValueError that names the setting, from a
    configuration and from Python alike."""
    kind = policy_class(settings_of(name)._target_)
    field = declared(kind)[setting]
    defaults = OmegaConf.to_container(settings_of(name)) | {"_target_": None}
    del defaults["_target_"]
    for value in wrong(field):
        with pytest.raises(ValueError, match=rf"^(method\.)?{setting}\b"):
            kind(**defaults | {setting: value})
        if isinstance(value, set):  # which no configuration holds
            continue
        with pytest.raises(ValueError, match=rf"^method\.{setting}\b|^{setting}\b"):
            make_policy(OmegaConf.create({**settings_of(name), setting: value}))


def test_the_list_is_long():
    """What the test above tries: some hundreds of settings of all methods, and thousands of values."""
    fields = [declared(policy_class(settings_of(name)._target_))[setting] for name, setting in FIELDS]
    tried = [value for field in fields for value in wrong(field)]
    assert len(FIELDS) >= 100 and len(tried) >= 1000


def test_every_setting_says_what_it_may_be_both_ends_of_a_range_included():
    """A number has both ends of its range, and what the rule calls the smallest and the largest passes the rule."""
    for name, setting in FIELDS:
        rule = declared(policy_class(settings_of(name)._target_))[setting].rule
        assert rule is not None and (not isinstance(rule, Text) or (name, setting) in NAMES_OF_OTHERS), (name, setting)
        if isinstance(rule, Whole | Number):
            assert rule.low is not None and rule.high is not None, (name, setting)
        if isinstance(rule, Whole) and not (rule.odd or rule.multiple_of > 1):
            ends = (rule.low, rule.high, *rule.also)
            assert all(rule.fits(value) for value in ends), (name, setting)
        if isinstance(rule, Number):
            assert rule.fits(rule.low) is not rule.above and rule.fits(rule.high), (name, setting)


@pytest.mark.parametrize("name", METHODS)
def test_no_count_of_tokens_or_layers_is_beyond_the_model(name):
    """Each whole number of tokens or layers, and a budget in tokens, may reach the model's size, and not one more."""
    kind = policy_class(settings_of(name)._target_)
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
            with pytest.raises(
                ValueError, match=f"method.{setting}={limit + 1} is beyond the model, whose .* is {limit}"
            ):
                check_sizes(policy, max_tokens=4096, num_layers=30)
            checked += 1
    assert checked or kind.__name__ in ("Full", "Uniform")


@pytest.mark.parametrize("name", [n for n in METHODS if settings_of(n)._target_.split(".")[-2] in (n, f"{n}_control")])
def test_a_class_has_the_defaults_of_its_file(name):
    """Made in Python without a setting, a method is what its YAML file lists, which need not list what every ranking
    method shares; only gates belong to one model."""
    policy, listed = policy_class(settings_of(name)._target_)(), OmegaConf.to_container(settings_of(name))
    own = {field: getattr(policy, field) for field in declared(type(policy))}
    own = {field: list(value) if isinstance(value, tuple) else value for field, value in own.items()}
    assert {field: value for field, value in own.items() if field in listed or field not in SHARED} | {
        "table": None
    } == {**{key: value for key, value in listed.items() if key != "_target_"}, "table": None}
    assert complaint(policy, {}) is None  # a record without slots says nothing
