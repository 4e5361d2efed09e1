"""When a record shows that a method missed its budget: every limit at its edge; and when bulk evictions are due."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from kvbench.policy import Budget, Policy, Scored, ScoreSpec

LISTS, PAGE = 4, 8


def record(most: float, average: float, end: float = 0.0, seen: int = 100) -> dict:
    """A record of 4 lists after a prompt of 100 tokens and a sequence of `seen`, in pages of 8 slots of 2 bytes."""
    kept = {"lists": LISTS, "prompt_tokens": 100, "tokens_seen": seen, "page_tokens": PAGE, "slot_bytes": 2.0}
    slots = {"prompt_slots_max": most, "prompt_slots": average * LISTS, "slots_per_tier": [end * LISTS - 4, 4]}
    return {"kept": kept | slots}


@pytest.mark.parametrize(
    ("budget", "rules", "allowed"),
    [
        (40, {}, 40),
        (0.4, {}, 40),
        (f"{40 * LISTS * 2}B", {}, 40),
        (200, {}, 100),
        (40, {"at_least": 50}, 50),
        (40, {"at_least": 200}, 100),
        (40, {"block": 16}, 48),
        (48, {"block": 16}, 48),
    ],
)
def test_lists_keep_what_the_budget_allows(budget, rules, allowed):
    """Not one token more in any list, and on average at most a page (or a block) less."""

    def complaint(most: float, average: float, **more: object) -> str | None:
        return Policy().budget_complaint(record(most, average), Budget.parse(budget), **rules | more)

    short = max(PAGE, rules.get("block", 1))
    assert complaint(allowed, allowed) is None and complaint(allowed, allowed - short) is None
    assert f"a head kept {allowed + 1} of 100" in complaint(allowed + 1, allowed)
    assert f"allows {allowed}" in complaint(allowed, allowed - short - 0.25)
    assert complaint(allowed + PAGE, allowed, spare_pages=1) is None
    assert complaint(allowed + PAGE + 1, allowed, spare_pages=1) is not None
    assert complaint(allowed + 9, allowed, mean=True) is None
    assert complaint(allowed + 9, allowed + 0.25, mean=True) is not None


def test_the_end_is_held_to_the_budget_where_asked():
    """A method that evicts while decoding may hold `at_end` tokens per list beyond the budget; others may hold all."""
    ask, budget = Policy().budget_complaint, Budget.parse(40)
    assert ask(record(40, 40, 99), budget) is None
    assert ask(record(40, 40, 40), budget, at_end=0) is None and ask(record(40, 40, 41), budget, at_end=1) is None
    assert "40.25 tokens per head held at the end" in ask(record(40, 40, 40.25), budget, at_end=0)
    assert "allows 41" in ask(record(40, 40, 41.25), budget, at_end=1)
    assert ask({}, budget) is None and ask({"kept": {}}, budget, at_end=0) is None


def test_what_grows_in_proportion_is_held_to_its_share():
    """Under `decode_every` the share of the whole sequence, or the window, and what one round adds; else nothing."""

    def complaint(end: float, budget: object = 0.4, every: int = 10, window: int = 0, **more: object) -> str | None:
        policy = Policy()
        policy.compact_every = every
        allowed = Budget.parse(budget).tokens(100, LISTS, 2.0)
        given = record(allowed, allowed, end, seen=200)
        return policy.share_complaint(given, Budget.parse(budget), window, **more)

    assert complaint(90) is None and "90.25 tokens per head held at the end" in complaint(90.25)
    assert complaint(50, budget=40) is None and "allows 50" in complaint(50.25, budget=40)
    assert complaint(105, window=95) is None and complaint(105.25, window=95) is not None
    assert complaint(98, spare_pages=1) is None and complaint(98.25, spare_pages=1) is not None
    assert complaint(199, every=0) is None
    missed = record(60, 60, 60)
    assert "a head kept 60" in Policy().share_complaint(missed, Budget.parse(40), 0)
    assert Policy().share_complaint(record(60, 40, 40), Budget.parse(40), 0, mean=True) is None
    policy = Policy()
    policy.compact_every = 3
    assert policy.share_complaint({}, Budget.parse(40), 0) is None


@pytest.mark.parametrize("protect", ["none", "answer"])
def test_a_protected_answer_may_stay_whole_and_no_more(protect):
    """Of 100 prompt tokens 10 at each end of 150: the answer's 50 on top where it is protected, and a round."""

    @dataclass(kw_only=True)
    class Answering(Scored):
        """Ranks, and shrinks every other token."""

        def __post_init__(self) -> None:
            super().__post_init__()
            self.rank_by(ScoreSpec(prefill_queries=-1, track=("score", "pos")))

        def always(self, budget: int) -> tuple[int, int]:
            return 0, 0

    policy = Answering(budget=10, decode_every=2, protect=protect)
    allowed = 10 if protect == "none" else 50
    assert policy.check_outcome(record(10, 10, allowed + 2, seen=150)) is None
    assert f"{allowed + 2.25} tokens per head held" in policy.check_outcome(record(10, 10, allowed + 2.25, seen=150))


@pytest.mark.parametrize("every", [1, 3])
def test_bulk_evictions_come_every_so_many_tokens(every):
    """Not before the first token behind the prompt, and then at each multiple, in every sequence by its own count."""

    @dataclass(kw_only=True)
    class Often(Policy):
        """Compacts."""

        compact_every = every

    grown = torch.arange(8)
    view = SimpleNamespace(tokens_seen=5 + grown, prompt_tokens=torch.full((8,), 5))
    due = Often().compact_due(view).tolist()
    assert due == [n > 0 and n % every == 0 for n in range(8)]


def test_room_is_made_for_every_token():
    """Page tables are sized for prompt and answer unless the method knows better."""
    assert Policy().max_slots(30, 4) == 34
