"""The contract that methods are written against: declarations, the observation window's base class, the views."""

from dataclasses import dataclass, fields

import pytest
import torch
from refusals import refused
from store_helpers import prefill_view

from kvbench.methods.snapkv import SnapKV
from kvbench.policy import Budget, Compaction, Policy, ReadSpec, Residual, Scored, ScoreSpec, Tier


@dataclass(kw_only=True)
class Coded(Policy):
    """Declares everything that a method can, and leaves the granularity to its user."""

    bits: int = 8
    granularity: str = "kv_head"
    scope = "layer"
    acts_in_decode = True

    def declare(self) -> None:
        self.tiers = (Tier(k_bits=self.bits, v_bits=self.bits),)
        self.score = ScoreSpec(prefill_queries=self.bits)
        self.residual = Residual(num_tokens=self.bits)
        self.reading = ReadSpec(budget=Budget.parse(0.5))
        self.position_mode = "pre_rope"
        self.compaction = Compaction(self.bits)


@dataclass(kw_only=True)
class Half(SnapKV):
    """Ranks by the window, with one setting of its own."""

    extra: int = 3


class Plain(Scored):
    """Has the settings that all have."""


def settings_of(policy) -> set[str]:
    """What its constructor takes."""
    return {field.name for field in fields(policy) if field.init}


# Declarations ----


def test_a_method_that_declares_nothing_has_the_defaults():
    """One 16-bit tier, no statistics, no buffer, everything read, and no settings."""
    policy = Policy()
    assert (policy.tiers, policy.score, policy.residual, policy.reading) == ((Tier(),), ScoreSpec(), None, None)
    assert (policy.scope, policy.position_mode, policy.granularity) == ("head", "absolute", "kv_head")
    assert (policy.acts_in_decode, policy.compaction) == (False, None)
    assert settings_of(policy) == set()


def test_declarations_are_no_settings():
    """Neither what the class body declares nor what `declare` does is a setting; only what is redefined."""
    assert settings_of(Coded()) == {"bits", "granularity"}
    assert repr(Coded()) == "Coded(granularity='kv_head', bits=8)"
    with pytest.raises(TypeError, match="scope"):
        Coded(scope="head")


def test_one_policy_declares_nothing_for_another():
    """Two policies of a class each have their own, and the defaults of all others stay."""
    before = {name: getattr(Policy(), name) for name in Policy.__annotations__}
    small, large = Coded(bits=2), Coded(bits=8, granularity="q_head")
    assert (small.tiers[0].k_bits, large.tiers[0].k_bits) == (2, 8)
    assert (small.granularity, large.granularity) == ("kv_head", "q_head")
    assert (small.compaction, large.compaction) == (Compaction(2), Compaction(8))
    assert {name: getattr(Policy(), name) for name in Policy.__annotations__} == before
    assert small != large and small == Coded(bits=2)


# What an observation window brings ----


def test_the_window_declares_for_its_subclasses():
    """Tier, statistics and the interval of evictions follow from the shared settings; those are fields, beside own
    ones."""
    policy = Half(budget=0.5, window=4, pool="avg", pool_kernel=3, decode_every=6, tier="k8v4", granularity="q_head")
    assert policy.tiers == (Tier(k_bits=8, v_bits=4),)
    assert policy.score == ScoreSpec(
        prefill_queries=4, pool="avg", pool_kernel=3, decode_update=True, track=("score", "pos")
    )
    assert (policy.compaction, policy.granularity, policy.extra) == (Compaction(6), "q_head", 3)
    names = {"window", "pool", "pool_kernel", "granularity", "extra"}
    assert settings_of(policy) == settings_of(Plain()) | names
    assert Half().score == ScoreSpec(prefill_queries=32, pool="max", pool_kernel=7)


# Views ----


def test_a_view_without_statistics_says_what_to_declare():
    """Reading the score of a prompt that was not asked for is answered with the remedy; asked for, it is the tensor."""
    with refused("method-broken", None, "self.score", "ScoreSpec"):
        _ = prefill_view(None, 4).score
    score = torch.arange(4.0)[None]
    assert prefill_view(score, 4).score.equal(score[None])
