"""When a record shows that a method missed its budget: every limit at its edge; and when bulk evictions are due."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch

from kvbench.methods.kivi import Kivi
from kvbench.methods.kvquant import KVQuant
from kvbench.methods.kvquant_style import KVQuantStyle
from kvbench.methods.snapkv import SnapKV
from kvbench.policy import Budget, BudgetText, Compaction, Policy, Scored, ScoreSpec, Shares, within
from kvbench.policy.bounds import Extent
from kvbench.runs.verdict import complaint

LISTS, PAGE = 4, 8


def record(most: float, average: float, end: float = 0.0, seen: int = 100) -> dict:
    """A record of 4 lists after a prompt of 100 tokens and a sequence of `seen`, in pages of 8 slots of 2 bytes."""
    kept = {"lists": LISTS, "prompt_tokens": 100, "tokens_seen": seen, "page_tokens": PAGE, "slot_bytes": 2.0}
    slots = {"prompt_slots_max": most, "prompt_slots": average * LISTS, "slots_per_tier": [end * LISTS - 4, 4]}
    return {"kept": kept | slots}


@dataclass(kw_only=True)
class Bounded(Policy):
    """Declares the bounds of a budget under some rules."""

    budget: BudgetText
    rules: dict = field(default_factory=dict)

    def bounds(self, extent):
        """As told."""
        return within(extent, Budget.parse(self.budget), **self.rules)


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

    def said(most: float, average: float, **more: object) -> str | None:
        return complaint(Bounded(budget=budget, rules=rules | more), record(most, average))

    short = max(PAGE, rules.get("block", 1))
    assert said(allowed, allowed) is None and said(allowed, allowed - short) is None
    assert f"a head kept {allowed + 1} of 100" in said(allowed + 1, allowed)
    assert f"allows {allowed} and no fewer than {allowed - short}" in said(allowed, allowed - short - 0.25)
    assert said(allowed + PAGE, allowed, spare_pages=1) is None
    assert said(allowed + PAGE + 1, allowed, spare_pages=1) is not None
    assert said(allowed + 9, allowed, mean=True) is None
    assert said(allowed + 9, allowed + 0.25, mean=True) is not None


def test_the_end_is_held_to_the_budget_where_asked():
    """A method that evicts while decoding may hold `at_end` tokens per list beyond the budget; others may hold all."""

    def said(end: float, at_end: int | None = None) -> str | None:
        return complaint(Bounded(budget=40, rules={"at_end": at_end}), record(40, 40, end))

    assert said(99) is None and said(40, at_end=0) is None and said(41, at_end=1) is None
    assert "40.25 tokens per head held at the end" in said(40.25, at_end=0)
    assert "allows 41" in said(41.25, at_end=1)
    assert complaint(Bounded(budget=40), {}) is None and complaint(Bounded(budget=40), {"kept": {}}) is None
    billed = record(40, 40) | {"ledger": {"resident_bytes": 321}}
    assert "321 bytes held at the end, but the budget allows 320" in complaint(Bounded(budget="320B"), billed)


@dataclass(kw_only=True)
class Answering(Scored):
    """Ranks, and shrinks every other token."""

    last: int = 0

    def declare(self) -> None:
        super().declare()
        self.rank_by(ScoreSpec(prefill_queries=-1, track=("score", "pos")))

    def always(self, budget: int) -> tuple[int, int]:
        return 0, self.last


def test_what_grows_in_proportion_is_held_to_its_share():
    """Under `decode_every` the share of the whole sequence, or the window, and what one round adds; else nothing."""

    def said(end: float, budget: object = 0.4, every: int = 10, window: int = 0, spare: bool = False) -> str | None:
        policy = Answering(budget=budget, decode_every=every, last=window)
        if spare:
            policy.shares = Shares(allocation="ada", official_rounding=True)
        return complaint(policy, record(40, 40, end, seen=200))

    assert said(90) is None and "90.25 tokens per head held at the end" in said(90.25)
    assert said(50, budget=40) is None and "allows 50" in said(50.25, budget=40)
    assert said(105, window=95) is None and said(105.25, window=95) is not None
    assert said(98, spare=True) is None and said(98.25, spare=True) is not None
    assert said(199, every=0) is None
    assert "a head kept 60" in complaint(Answering(budget=40), record(60, 60, 60))
    assert complaint(Answering(budget=40, allocation="pyramid"), record(60, 40, 40)) is None
    assert complaint(Answering(budget=40, decode_every=3), {}) is None


@pytest.mark.parametrize("protect", ["none", "answer"])
def test_a_protected_answer_may_stay_whole_and_no_more(protect):
    """Of 100 prompt tokens 10 at each end of 150: the answer's 50 on top where it is protected, and a round."""
    policy = Answering(budget=10, decode_every=2, protect=protect)
    allowed = 10 if protect == "none" else 50
    assert complaint(policy, record(10, 10, allowed + 2, seen=150)) is None
    assert f"{allowed + 2.25} tokens per head held" in complaint(policy, record(10, 10, allowed + 2.25, seen=150))


@pytest.mark.parametrize("every", [1, 3])
def test_bulk_evictions_come_every_so_many_tokens(every):
    """Not before the first token behind the prompt, and then at each multiple, in every sequence by its own count."""
    grown = torch.arange(8)
    view = SimpleNamespace(tokens_seen=5 + grown, prompt_tokens=torch.full((8,), 5))
    due = Compaction(every).due(view).tolist()
    assert due == [n > 0 and n % every == 0 for n in range(8)]


def test_room_is_made_for_every_token():
    """Page tables are sized for prompt and answer unless the method knows better."""
    assert Policy().max_slots(30, 4) == 34


@pytest.mark.parametrize(
    ("policy", "most"),
    [(Kivi(group=8, residual_tokens=8), 15), (KVQuantStyle(group=8), 16), (KVQuant(sinks=4, native=True), 4)],
)
def test_a_method_that_never_quantises_is_caught(policy, most):
    """As many tokens as buffer or sinks hold may all be in 16 bits; of one more something must be quantised."""

    def said(coded: int, whole: int) -> str | None:
        kept = {"lists": 1, "prompt_tokens": 4, "prompt_slots": 4, "page_tokens": 8, "tokens_seen": coded + whole}
        return complaint(policy, {"kept": kept | {"slots_per_tier": [coded, whole]}})

    assert said(0, most) is None and said(1, most) is None
    assert said(0, most + 1) == f"0 of {most + 1} tokens per head were quantised, but that should be at least 1"


@pytest.mark.parametrize(("settings", "fewest"), [({}, 7), ({"chunk": 4}, 7), ({"chunk": 4, "cut_chunk": False}, 5)])
def test_a_budget_is_spent(settings, fewest):
    """Except a token that rounding may leave; of chunks that stay whole the last may have no room."""
    extent = Extent(prompt_tokens=20, tokens_seen=20, lists=2, prompt_slots=16)
    assert SnapKV(budget=8, window=2, **settings).bounds(extent).prompt_mean == (fewest, 8)
