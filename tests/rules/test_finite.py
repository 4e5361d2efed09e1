"""NaN passes every range that is written as two comparisons: no setting takes it, nor an infinity."""

import math

import pytest
from refusals import refused

from kvbench.cache.options import StoreOptions
from kvbench.config import files
from kvbench.config.methods import method_settings
from kvbench.rules import Number, declared
from kvbench.runs.config import RunConfig
from kvbench.runs.parts import policy_class
from kvbench.tasks import BENCHMARKS, settings_class
from kvbench.tasks.protocol import Protocol

STRANGE = [math.nan, math.inf, -math.inf]


def classes():
    """Every class whose fields are settings of a run."""
    methods = [policy_class(method_settings(name)["_target_"]) for name in files.options("method") if name != "kvpress"]
    tasks = [settings_class({"name": name}) for name in BENCHMARKS]
    return dict.fromkeys([RunConfig, StoreOptions, Protocol, settings_class({"harness": "lm_eval"}), *tasks, *methods])


def test_no_setting_takes_what_is_no_number():
    """Of all declared settings, those that are numbers of any kind; each has a rule."""
    tried = set()
    for kind in classes():
        for name, field in declared(kind).items():
            if not {int, float} & set(field.kinds) or name == "limit":  # which `Limit` reads
                continue
            assert field.rule is not None, (kind, name)
            for value in STRANGE:
                with refused("setting-value", None, f"{name}={value}"):
                    field.check(value)
            tried.add((kind, name))
    assert len(tried) > 200, "most settings are numbers"


@pytest.mark.parametrize("value", STRANGE)
@pytest.mark.parametrize("rule", [Number(), Number(0), Number(high=1), Number(0, 1), Number(0, 1, above=True)])
def test_no_range_takes_them(rule, value):
    """Whichever of its ends are open."""
    assert not rule.fits(value)
