"""A step's plan held to its lists on a device, and the slots that it takes, against plain loops."""

import math

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed (pip install -e '.[test]')")

from triton_helpers import DEVICE, poisoned_memory  # noqa: F401

from kvbench.kernels.dispatch import gpu_backend
from kvbench.kernels.pool import PoolExhausted

SHAPE, SIZES, ENTRIES = (2, 2, 3), (3, 4, 5), 9  # rows, layers, heads; slots per page by tier


def tables(tiers: int, held: list[list[int]], pages: int = 60):
    """Tables whose lists hold so many slots by tier."""
    _, table = gpu_backend(DEVICE).tables(32, pages, SIZES[:tiers], SHAPE, ENTRIES, DEVICE)
    lists = torch.arange(math.prod(SHAPE), device=DEVICE)
    for tier in range(tiers):
        table.reserve(lists, tier, torch.tensor(held[tier], device=DEVICE))
    return table, lists


def slow_take(table, tier, slot, to, at, held, acts):
    """What each list writes, by tier: the slot or -1; new counts; and which rules were broken."""
    tiers, writes, broken = len(held), [], [0, 0, 0]
    after = [list(counts) for counts in held]
    for i, given in enumerate(slot):
        goes, onto = (to[i] if to else -1), (at[i] if at else -1)
        wrong = not -1 <= given < held[tier][i] if acts else given != -1
        beyond = goes < -1 or goes >= tiers or goes == tier
        off = bool(at) and given != -1 and goes != -1 and not -1 <= onto < held[max(0, min(goes, tiers - 1))][i]
        broken = [a or int(b) for a, b in zip(broken, (wrong, beyond, off), strict=True)]
        given = -1 if wrong or beyond or off else given
        mine = [-1] * tiers
        if given < 0:
            mine[tier], goes = held[tier][i], -1
            after[tier][i] += 1
        else:
            mine[tier] = given
        if goes >= 0:
            mine[goes] = onto if onto >= 0 else held[goes][i]
            after[goes][i] += onto < 0
        writes.append(mine)
    return writes, after, broken


CASES = {
    "one tier": (1, 0, [[0, 1, 3, 4, 7, 2, 0, 9, 5, 6, 3, 3]], [-1, 0, -1, 3, 6, -1, -1, 8, 4, -1, 2, 0], None, None),
    "demoted": (
        3, 0, [[2, 3, 4] * 4, [0, 4, 8] * 4, [5, 1, 0] * 4], [-1, 2, 0, 1, 0, 3, 1, -1, 3, 0, 1, 2],
        [-1, 1, 2, -1, 1, 2, 2, 1, 1, 2, -1, 1], [-1, 3, -1, -1, -1, -1, 4, -1, 7, 0, -1, -1],
    ),
    "from the second tier": (
        2, 1, [[2, 3, 4] * 4, [1, 4, 8] * 4], [0, 2, 7, -1] * 3, [0, 0, -1, -1] * 3, None,
    ),
    "wrong": (
        2, 0, [[2] * 12, [3] * 12], [2, -2, 0, 1, 0, 1, 0, 0, -1, 1, 0, 0], [-1, -1, 2, -2, 0, 1, 1, -1, 5, 1, 1, 1],
        [-1, -1, -1, -1, -1, 3, -2, -1, -1, 2, -1, 0],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_plan_takes_the_slots_that_loops_say(case: tuple):
    """New slots, overwritten ones, demotions to new slots and over others; what breaks a rule appends and is named."""
    tiers, tier, held, *plan = case
    table, lists = tables(tiers, held)
    want, after, broken = slow_take(table, tier, *plan, held, True)
    given = [None if x is None else torch.tensor(x, device=DEVICE) for x in plan]
    page, inside, found = table.take(lists, tier, *given, acts=True, unshare_all=False, done=[])
    assert found.tolist() == broken
    assert table.num_slots.tolist() == after
    for each in range(tiers):
        at = torch.tensor([line[each] for line in want], device=DEVICE)
        want_page, want_slot = table.lookup(lists, each, at)
        assert page[each].tolist() == want_page.tolist()
        assert torch.equal(inside[each][at >= 0], want_slot[at >= 0])


def test_a_method_that_does_not_act_may_only_append():
    """Whatever slot it names is a new one."""
    held = [[1] * 12]
    table, lists = tables(1, held)
    slot = torch.tensor([0] + [-1] * 11, device=DEVICE)
    _, inside, broken = table.take(lists, 0, slot, None, None, acts=False, unshare_all=False, done=[])
    assert broken.tolist() == [1, 0, 0] and inside[0].tolist() == [1] * 12
    page, inside, broken = table.take(lists, 0, None, None, None, acts=False, unshare_all=False, done=[])
    assert broken is None and inside[0].tolist() == [2] * 12 and page[0].min() >= 0


def test_what_was_taken_before_pages_run_out_is_told():
    """The second tier finds no page: the caller knows what to give back."""
    held = [[2] * 12, [0] * 12]
    table, lists = tables(2, held, pages=12)
    done: list = []
    slot = torch.zeros(12, dtype=torch.int64, device=DEVICE)
    with pytest.raises(PoolExhausted, match="pages"):
        table.take(lists, 0, slot, slot + 1, None, acts=True, unshare_all=False, done=done)
    assert [(tier, before.tolist()) for _, tier, before in done] == [(0, [2] * 12)]
    assert table.num_slots.tolist() == held
