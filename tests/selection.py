"""Which cases of a test the default run takes; the others are marked `exhaustive`, and `make exhaustive` takes all.

Methods of one path through the store (`path_of`) differ in what they decide alone: the first method of each path is
tested in every variant, and the others in one.
"""

from collections.abc import Callable, Iterable, Iterator

import pytest
from engine_helpers import open_settings
from hydra.utils import instantiate
from omegaconf import OmegaConf
from places import CONF

from kvbench.policy import Policy

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
        frozenset((tier.k_axis, tier.k_code, tier.fp8, tier.turned, tier.k_kept < 1) for tier in policy.tiers),
    )


def method_of(name: str) -> Policy:
    """A method at the settings of its file; what the file leaves open fits a tiny model."""
    return instantiate(OmegaConf.load(CONF / "method" / f"{name}.yaml"), **open_settings(name))


def per_path(listed: list[str], policy_of: Callable[[str], Policy] = method_of) -> list:
    """Methods as parameters; those whose path an earlier one walks are exhaustive."""
    found = _spread(listed, policy_of, ("",), part=())
    return [pytest.param(name, id=name, marks=marks) for name, _, marks in found]


def spread(
    listed: list[str], policy_of: Callable[[str], Policy], variants: dict | tuple, part: tuple | None = None
) -> list:
    """Pairs of method and variant as parameters: every variant for the first method of each path, and for the others
    those named in `part`, or one in turn; the other pairs are exhaustive."""
    named = variants if isinstance(variants, dict) else {str(each): each for each in variants}
    found = _spread(listed, policy_of, tuple(named), part)
    return [pytest.param(name, named[key], id=f"{name}-{key}", marks=marks) for name, key, marks in found]


def _spread(listed: list[str], policy_of: Callable, variants: tuple, part: tuple | None) -> Iterator[tuple]:
    seen: set[tuple] = set()
    for index, name in enumerate(listed):
        path = path_of(policy_of(name))
        taken = variants if path not in seen else (variants[index % len(variants)],) if part is None else part
        seen.add(path)
        yield from ((name, key, () if key in taken else pytest.mark.exhaustive) for key in variants)
