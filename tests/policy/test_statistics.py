"""What a statistic may be, and what a ScoreSpec refuses of it."""

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from refusals import refused
from store_helpers import filled, make_store, random_layer, watching

from kvbench.methods.snapkv import SnapKV
from kvbench.policy import ALL_QUERIES, Compaction, Scored, ScoreSpec, Statistic


@dataclass(frozen=True)
class Newest(Statistic):
    """A statistic of one setting, for prompts only."""

    weight: float = 1.0

    def of_prompt(self, seen):
        return seen.pos * self.weight


def scored_by(statistic):
    """A method that ranks by a statistic."""

    class Method(Scored):
        def __post_init__(self):
            super().__post_init__()
            self.score_by(statistic)

    return Method(budget=4)


def read(statistic, scale=1.0) -> None:
    """Has a store read ten tokens under a statistic, whose keys are so large."""
    q, k, v = random_layer(0, 1, 1, 10, 8)
    filled(scored_by(statistic), [(q, scale * k, v)])


@pytest.mark.parametrize("asked", [lambda of: of.of_slots(None), lambda of: of.of_token(None, None)])
def test_what_a_statistic_does_not_measure_it_says_so(asked):
    """Not a None that comes to light elsewhere."""
    with pytest.raises(NotImplementedError, match="Newest does not define of_"):
        asked(Newest())


def test_two_are_one_measurement_when_class_and_settings_are():
    """Equality decides what a prompt cache replays: by class and settings, not by object."""

    @dataclass(frozen=True)
    class Newer(Newest):
        """The same settings in another class."""

    assert Newest(2.0) == Newest(2.0) and ScoreSpec(statistic=Newest(2.0)) == ScoreSpec(statistic=Newest(2.0))
    assert Newest(2.0) != Newest(3.0) and Newest(2.0) != Newer(2.0)
    assert hash(ScoreSpec(statistic=Newest(2.0))) == hash(ScoreSpec(statistic=Newest(2.0)))


def test_what_cannot_be_told_apart_is_refused():
    """A subclass that is no frozen dataclass of its own would equal another one with other settings."""

    class Careless(Newest):
        """Inherits the equality of its base, whatever its own attributes are."""

    with refused("method-broken", None, "statistic=Careless"):
        ScoreSpec(statistic=Careless())
    with refused("method-broken", None, "statistic='probability'"):
        ScoreSpec(statistic="probability")


def test_needs_are_known_names():
    """A misspelt need is named with those that exist."""

    @dataclass(frozen=True)
    class Wishful(Newest):
        """Wants what there is not."""

        needs: ClassVar = frozenset({"gradients"})

    with refused("method-broken", None, "Wishful.needs=['gradients']", "before_rope"):
        ScoreSpec(statistic=Wishful())


def test_queries_are_kept_only_for_what_asks_for_them():
    """A ring of queries goes with of_slots, and with a method that evicts in bulk."""
    with refused("method-broken", None, "slot_queries=4", "of_slots"):
        ScoreSpec(statistic=Newest(), slot_queries=4)

    @dataclass(frozen=True)
    class Held(Newest):
        """Answers for slots."""

        def of_slots(self, seen):
            return self.of_prompt(seen)

    policy = scored_by(Held())
    policy.score = replace(policy.score, slot_queries=4)
    with refused("method-broken", None, "slot_queries=4"):
        make_store(policy)
    policy.score, policy.compaction = ScoreSpec(statistic=Held()), Compaction(4)
    with refused("method-broken", None, "ScoreSpec.track"):
        make_store(policy)
    policy.score, policy.tiers = ScoreSpec(statistic=Held(), track=("pos",)), policy.tiers * 2
    with pytest.raises(ValueError, match="slots are measured where one tier holds every token"):
        make_store(policy)


@pytest.mark.parametrize("need", ["before_rope", "output_projection"])
def test_what_a_model_lacks_is_refused_before_a_prompt(need):
    """A model without a plain rotary embedding or without o_proj is named when the cache is made."""

    @dataclass(frozen=True)
    class Needy(Newest):
        """Looks at more than keys and values."""

        needs: ClassVar = frozenset({need})

    with pytest.raises(ValueError, match="Method with Needy looks at .* choose another method for"):
        make_store(scored_by(Needy()))


@pytest.mark.parametrize(
    ("look", "remedy"),
    [
        (lambda seen: seen.q.sum(), ("method-broken", None, "score_by", "prefill_queries=32")),
        (lambda seen: seen.attention(), ("method-broken", None, "prefill_queries=32")),
        (lambda seen: seen.hidden_states.sum(), ("method-broken", None, "hidden_states")),
        (lambda seen: seen.output_projection.sum(), ("method-broken", None, "output_projection")),
        (lambda seen: seen.rotated(seen.k, seen.pos), ("method-broken", None, "before_rope")),
    ],
)
def test_what_was_not_asked_for_is_not_there(look, remedy):
    """A statistic that looks at more than it declares fails with the line that is missing, whatever the model has."""

    @dataclass(frozen=True)
    class Curious(Newest):
        """Looks without asking."""

        def of_prompt(self, seen):
            look(seen)
            return seen.pos.float()

    with refused(*remedy):
        read(Curious())


@pytest.mark.parametrize(
    ("answer", "rule"),
    [
        (lambda seen: seen.pos[:, 1:].float(), r"gave torch.float32 \(1, 9\), but .* shape \(1, 10\)"),
        (lambda seen: seen.pos, r"gave torch.int64 \(1, 10\), but it must give a floating-point tensor"),
        (lambda seen: None, "gave NoneType, but it must give"),
        (lambda seen: seen.pos / 0.0, r"gave nan at \[0, 0\] of a .* shape \(1, 10\), for tensors that are finite"),
    ],
)
def test_an_answer_is_held_to_the_contract(answer, rule):
    """A wrong shape, type or number is named with the class and the call."""

    @dataclass(frozen=True)
    class Wrong(Newest):
        """Breaks the contract."""

        def of_prompt(self, seen):
            return answer(seen)

    with pytest.raises(ValueError, match=rf"Wrong.of_prompt \(test_statistics.py:\d+\) {rule}"):
        read(Wrong())
    if "finite" in rule:  # of a prompt that the model spoilt, the model is to blame
        read(Wrong(), scale=float("nan"))


@pytest.mark.parametrize("reduce", ["sum", "mean", "max"])
@pytest.mark.parametrize(("queries", "near"), [(ALL_QUERIES, 0), (4, 0), (ALL_QUERIES, 2), (50, 1)])
def test_reductions_over_queries(reduce, queries, near):
    """Sum, mean and maximum of the plain causal attention, over the queries that count for each key."""
    q, k, _ = random_layer(3, 1, 2, 10, 8)
    policy, seen = watching(SnapKV, budget=8, window=2)
    policy.score = ScoreSpec(prefill_queries=queries, skip_near=near, query_reduce=reduce, group_reduce="sum")
    filled(policy, [(q, k, k)], scale=0.7)
    logits = torch.einsum("hid,jd->hij", q, k[0]) * 0.7
    first = 0 if queries < 0 else max(0, 10 - queries)
    for j in range(10):
        want = 0.0
        for head in range(2):
            rows = [logits[head, i, : i + 1].softmax(0)[j] for i in range(max(first, j + near), 10)]
            own = torch.stack(rows) if rows else torch.zeros(1)
            want += float({"sum": own.sum(), "mean": own.mean(), "max": own.max()}[reduce])
        assert float(seen[0].score[0, 0, j]) == pytest.approx(want, abs=1e-6)
