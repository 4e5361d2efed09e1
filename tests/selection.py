"""Which cases of a test the default run takes; the others are marked `exhaustive`, and `make exhaustive` takes all.

Methods of one path through the store (`path_of`) differ in what they decide alone. A test of the store takes one method
per path, and a test of what methods decide takes every method in one variant.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import cache

import pytest
from omegaconf import OmegaConf
from open_settings import open_settings
from places import CONF

from kvbench.policy import Policy
from kvbench.runs.parts import policy_class

FULL = False  # tests/conftest.py: exhaustive tests run too, so that tests that choose how much they do choose all


def few(listed: Iterable, *taken: object) -> list:
    """Cases as parameters; those that are not in `taken` are exhaustive. Tuples are the values of several arguments."""
    assert set(taken) <= {*(found := list(listed))}, "a case of the default run is none"
    marks = [() if case in taken else pytest.mark.exhaustive for case in found]
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=mark)
        for case, mark in zip(found, marks, strict=True)
    ]


def path_of(policy: Policy) -> tuple:
    """What of a method decides which code of the store it runs."""
    buffer, score = policy.residual, policy.score
    return (
        (policy.scope, policy.position_mode, policy.granularity, policy.acts_in_decode, policy.compaction is not None),
        buffer and (buffer.v_flush, buffer.when, buffer.hold_prompt),
        (policy.reading is None, policy.codebooks is None, policy.by_layer is None, len(policy.tiers)),
        (score.decode_update, score.decode_replace, score.probe is None),
        frozenset((tier.k_axis, tier.k_code, tier.fp8, tier.rotated, tier.k_kept < 1) for tier in policy.tiers),
    )


@cache
def method_of(name: str) -> Policy:
    """A method at the settings of its file; what the file leaves open fits a tiny model."""
    given = OmegaConf.to_container(OmegaConf.load(CONF / "method" / f"{name}.yaml"))
    return policy_class(given.pop("_target_"))(**given | open_settings(name))


def per_path(listed: list[str], policy_of: Callable[[str], Policy] = method_of, part: int | None = None) -> list:
    """Methods as parameters; those whose path an earlier one walks are exhaustive. Two tests that share the paths of a
    list among them have a `part` each, 0 and 1: every other path."""
    firsts = _firsts(listed, policy_of)
    if part is not None:
        firsts = set(sorted(firsts)[part::2])
    return [pytest.param(name, id=name, marks=() if name in firsts else pytest.mark.exhaustive) for name in listed]


def in_turn(ones: Sequence, others: Sequence) -> list:
    """Pairs as parameters: each of the first with one of the others in turn; the other pairs are exhaustive."""
    return [
        pytest.param(one, other, marks=() if at % len(others) == place else pytest.mark.exhaustive)
        for at, one in enumerate(ones)
        for place, other in enumerate(others)
    ]


def those_of(names: Iterable[str], listed: list) -> list:
    """Parameters as they are, but those whose first value is not among the names are exhaustive."""
    taken = set(names)
    return [
        each if each.values[0] in taken else pytest.param(*each.values, id=each.id, marks=pytest.mark.exhaustive)
        for each in listed
    ]


def by_path(listed: list[str], policy_of: Callable[[str], Policy], more: dict, less: dict) -> list:
    """Pairs of method and variant as parameters: the one that asks for more for the first method of each path, and the
    other one for the others; the other pairs are exhaustive. Both are `{name: value}`."""
    firsts = _firsts(listed, policy_of)
    return [
        pytest.param(name, value, id=f"{name}-{key}", marks=() if key in taken else pytest.mark.exhaustive)
        for name in listed
        for taken in (more if name in firsts else less,)
        for key, value in (more | less).items()
    ]


def _firsts(listed: list[str], policy_of: Callable[[str], Policy]) -> set[str]:
    return set({path_of(policy_of(name)): name for name in reversed(listed)}.values())
