"""What a budget may be written as, and that one, one point zero and true are three things."""

import math

import pytest
from refusals import refused

from kvbench.policy import Budget
from kvbench.policy.budget import BudgetRule, read_size


@pytest.mark.parametrize(
    ("text", "value", "unit"),
    [
        (1, 1, "tokens"),
        ("1", 1, "tokens"),
        (1.0, 1, "ratio"),
        ("1.0", 1, "ratio"),
        (0.25, 0.25, "ratio"),
        (256, 256, "tokens"),
        (2**24, 2**24, "tokens"),
        ("8MiB", 2**23, "bytes"),
        (" 0.5 KiB ", 512, "bytes"),
        ("1B", 1, "bytes"),
        ("50%seen", 0.5, "seen"),
        (" 12.50 % seen", 0.125, "seen"),
        ("100%seen", 1, "seen"),
    ],
)
def test_a_whole_number_is_tokens_and_a_point_makes_a_ratio(text, value, unit):
    """Ratios lie in (0, 1] and are written with a point; whole numbers are tokens; units make bytes."""
    assert Budget.parse(text) == Budget(value, unit) and Budget.parse(Budget.parse(text)) == Budget(value, unit)


@pytest.mark.parametrize(
    "text",
    [
        0,
        -1,
        1.5,
        256.0,
        2**24 + 1,
        10**40,
        math.nan,
        math.inf,
        "1e400",
        "0B",
        "0.5B",
        "2097152GiB",
        "0%seen",
        "100.1%seen",
    ],
)
def test_numbers_out_of_range_are_refused(text):
    """Absurd budgets would evict nothing, without a word."""
    with refused("setting-value", "read_budget"):
        Budget.parse(text, "read_budget")


@pytest.mark.parametrize(
    "text", [True, False, None, "lots", "", [1], {"a": 1}, "1.2.3MiB", "8 MB", "0x10", "50%", "0.5seen", "-5%seen"]
)
def test_what_is_no_number_is_refused(text):
    """Neither flags nor other text are budgets."""
    with refused("setting-value", "budget"):
        Budget.parse(text)


@pytest.mark.parametrize("text", ["33.3%seen", "7%seen", "0.01%seen", "100%seen"])
def test_a_share_of_what_was_seen_has_one_text(text):
    """Its canonical text, which identities hold, reads as itself; it allows what the same ratio of as many tokens
    does."""
    budget = Budget.parse(text)
    assert budget.text == BudgetRule().read(f" {text.replace('%', ' % ')}") == text
    assert [budget.tokens(n, 1, 1.0) for n in (1, 10, 999)] == [
        Budget(budget.value, "ratio").tokens(n, 1, 1.0) for n in (1, 10, 999)
    ]
    assert budget.of_seen and not Budget.parse(0.5).of_seen


@pytest.mark.parametrize(("text", "size"), [("1B", 1), ("1.5KiB", 1536), (".5GiB", 2**29), ("KiB", None), ("5", None)])
def test_sizes(text, size):
    """A number and one of four units, and nothing else."""
    assert read_size(text) == size


def test_bytes_hold_one_token_of_every_list_at_least():
    """Two lists with tokens of 4 bytes need 8 bytes, and have two tokens each from 16 on."""
    assert [Budget.parse(f"{size}B").tokens(50, 2, 4.0) for size in (8, 15, 16)] == [1, 1, 2]
    with refused("setting-value", "method.budget", "budget=7B"):
        Budget.parse("7B").tokens(50, 2, 4.0)
    assert Budget.parse(0.1).tokens(1, 2, 4.0) == 1 and Budget.parse(0.3).tokens(10, 2, 4.0) == 3
