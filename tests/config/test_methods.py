"""What a method's file does not list, its class says: read from source, and the same as the class itself has."""

import subprocess
import sys

import pytest
from omegaconf import OmegaConf
from places import CONF
from refusals import refused
from selection import few

from kvbench.config import files, methods
from kvbench.config.compose import compose
from kvbench.rules import declared
from kvbench.runs.parts import make_policy, policy_class

READ = """
from dataclasses import dataclass, field
from typing import ClassVar
import kvbench.policy as kv
from kvbench.policy import Scored

LEAST = 3


@dataclass(kw_only=True)
class Mine(Scored):
    budget: kv.BudgetText = 0.5
    alpha: float = 0.4
    least: int = LEAST
    needed: int
    acts_in_decode = True
    words: ClassVar[str] = "none"
    inner: int = field(init=False, default=5)
"""
IMPORTED = READ.replace("LEAST = 3", "LEAST = len('abc')") + "    names: list = field(default_factory=lambda: [1, 2])\n"


NAMES = sorted(files.options("method"))
CLASSES = {OmegaConf.load(CONF / "method" / f"{name}.yaml")._target_: name for name in reversed(NAMES)}


@pytest.mark.every(3)
@pytest.mark.parametrize("name", few(NAMES, *CLASSES.values()))
def test_defaults_are_those_of_the_class(name):
    """Every value that the file leaves out, and every setting but those that all methods share."""
    listed, found = OmegaConf.load(CONF / "method" / f"{name}.yaml"), methods.method_settings(name)
    policy, rules = make_policy(found), declared(policy_class(found._target_))
    assert set(rules) - set(files.SHARED) <= set(found) - {"_target_"} <= set(rules)
    plain = OmegaConf.to_container(found)
    for setting in set(plain) - set(listed):
        default = type(policy).__dataclass_fields__[setting].default
        assert plain[setting] == (list(default) if isinstance(default, tuple) else default)
    assert OmegaConf.to_container(compose([f"method={name}"]).method) == plain | {"calibration": "auto"}


def test_composing_imports_neither_the_method_nor_torch():
    """The command line answers a slip before torch is there."""
    script = (
        "import sys; from kvbench.config.compose import compose; assert compose(['method=kivi']).method.bits == 2; "
    )
    subprocess.run([sys.executable, "-c", f"{script}assert 'torch' not in sys.modules"], check=True)


@pytest.mark.parametrize(("source", "more"), [(READ, {}), (IMPORTED, {"names": [1, 2]})])
def test_a_class_of_ones_own_is_read_or_imported(tmp_path, monkeypatch, source, more):
    """Constants, class variables, fields that no constructor takes, and defaults that only running it tells."""
    module = f"mine_{len(source)}"
    (tmp_path / f"{module}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    found = methods.with_defaults(OmegaConf.create({"_target_": f"{module}.Mine", "beta": 7}))
    wanted = {"_target_": f"{module}.Mine", "budget": 0.5, "alpha": 0.4, "least": 3, "tier": "fp16", "beta": 7}
    assert OmegaConf.to_container(found) == wanted | {"decode_every": 0} | more
    assert (module in sys.modules) == bool(more)


def test_a_file_that_names_no_class_is_left_as_it_is():
    """Whoever makes the method says what is wrong."""
    for listed in ({"bits": 2}, {"_target_": "nowhere.Nothing", "bits": 2}, {"_target_": 5}):
        assert methods.with_defaults(OmegaConf.create(listed)) == listed
    with refused("name-unknown", "method._target_", "method._target_=nowhere.Nothing"):
        make_policy(methods.with_defaults(OmegaConf.create({"_target_": "nowhere.Nothing"})))
