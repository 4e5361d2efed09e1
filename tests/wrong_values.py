"""Values that a setting must refuse, by an independent reading of what its rule says."""

import math
from collections.abc import Iterator

from kvbench.policy.by_layer import TiersByLayer
from kvbench.policy.settings import BudgetRule, TierRule
from kvbench.rules import DAY, FLAG, TABLE_OR_PATH, VALUES, Choice, Declared, Number, Rule, Several, Text, Whole


def wrong(field: Declared) -> Iterator[object]:
    """Values that a field must refuse."""
    rule = field.rule
    if not field.optional:
        yield None
    if isinstance(rule, Several):
        yield from wrong_lists(rule)
        return
    yield from wrong_for(rule)


def wrong_lists(rule: Several) -> Iterator[object]:
    """Values that are no such list: a wrong one alone and among others, one twice, too few."""
    good = right(rule.item)
    if rule.least:
        yield []
    yield from ([good, good], [[good]], [None], [good, None], {"a": good}, {good})
    for value in wrong_for(rule.item):
        yield [value]
        if not isinstance(value, list) and not (rule.alone is not None and rule.alone.fits(value)):
            yield value
    if rule.alone is None:
        yield good
    else:
        yield from (value for value in wrong_for(rule.alone) if not isinstance(value, list))


def right(rule: Rule) -> object:
    """A value that a rule allows."""
    if isinstance(rule, Choice):
        return rule.options[0]
    return rule.low if isinstance(rule, Whole) else "text"


def wrong_for(rule: Rule | None) -> Iterator[object]:
    """Values that a rule must refuse; None is the field's own business."""
    yield from (math.nan, math.inf, -math.inf, {}, [{}])
    if rule is VALUES:
        yield from ({"a": {}}, {"a": None}, {"": 1}, {1: 1}, {"a": [[1]]}, {"a": math.nan}, 10**30, 0.5, 1)
    else:
        yield {"a": 1}
    yield []
    if rule is not TABLE_OR_PATH and not isinstance(rule, Text):
        yield from ("no such thing", "maybe", ["max"])
    if not (isinstance(rule, Text) and rule.empty):
        yield ""
    if rule is not TABLE_OR_PATH:
        yield [1]
    if rule is not FLAG:
        yield from (True, False)
    if rule is DAY:
        yield from ("2024-13-01", "2024-02-30", "24-1-1", "20240726", "today")
    if rule in (FLAG, TABLE_OR_PATH, DAY) or isinstance(rule, Choice | TierRule | Text):
        yield from (10**30, -(10**30), 0.5, 1.0, 0, 2.0)
    if rule is FLAG:
        yield from ("true", 1)
    if isinstance(rule, Whole):
        yield from (rule.low - 1 if rule.low - 1 not in rule.also else rule.low - 2, rule.high + 1, 10**30, -(10**30))
        yield from (float(rule.low), rule.low + 0.5, str(rule.low))
        if rule.odd or rule.multiple_of > 1:
            yield rule.low + 1
    if isinstance(rule, Number):
        yield from (rule.low - 1e-6, rule.high * (1 + 1e-6), 10**30, -(10**30), 1e300, str(rule.low))
        if rule.above:
            yield rule.low
    if isinstance(rule, BudgetRule):
        yield from (
            0,
            -1,
            0.0,
            -0.5,
            1.5,
            256.0,
            "0",
            "1e400",
            "0B",
            "1.2.3MiB",
            "99999999999999999999GiB",
            10**9,
            10**30,
        )
    if isinstance(rule, TierRule):
        yield from ("k5v5", "k8", "k99999v1", "fp32")
    if isinstance(rule, TiersByLayer):
        yield from (0, 1.0, "fp17", "0:fp16 int4", "0*int4", "9999*int4", "0:fp16/int4", "3:int4 3:int8", "1:", "*fp16")
