"""A short run of the fuzzer, without sanitizers; `make fuzz` runs more cases, with them."""

import random

import pytest
from fuzz_calls import random_slot
from kernel_fuzz import CALLS, run
from selection import FULL
from test_cpu import pytestmark  # noqa: F401
from test_cpu_pages import isa  # noqa: F401

from kvbench.kernels.codes import BITS, NAMES, code_of


def test_random_calls_are_right_or_refused():
    """Some dozens of calls of all operations: as the oracle says in contract, an exception and no byte outside it."""
    tally = run(cases=80, seed=1)
    assert tally.findings == []
    assert len({name for name, _ in tally.calls}) == len(CALLS)
    assert 20 < sum(n for (_, kind), n in tally.calls.items() if kind == "in contract") < 60


@pytest.mark.parametrize("name", ["move", "search", "add_scores", "decode", "step"])
def test_each_operation_is_right_on_every_build(name: str, isa: str):  # noqa: F811
    """Of random formats, lists, tiers, rings and rules: the reference's bytes, and an oracle's numbers in fp64."""
    for number in range(80 if FULL else 40):
        call = CALLS[name](random.Random(f"{name} {number}"))
        assert call.judge() == "", call.said()


def test_every_code_is_drawn():
    """A code that is declared is a code that the fuzzer tries, without being named there."""
    dice, drawn, others = random.Random(0), set(), set()
    for _ in range(1500):
        slot = random_slot(dice, 64, ())
        for side, apart, table in ((slot.keys, slot.k_apart, slot.k_table), (slot.values, slot.v_apart, slot.v_table)):
            if side is not None:
                drawn.add(side if not table else code_of(side.name, side.bits))
                others |= {(side.name, "apart")} if apart else set()
                others |= {(side.name, "table")} if table else set()
        others |= {("elements", "thin")} if 0 < slot.k_channels < 64 else set()
    declared = set()
    for name in NAMES:
        for bits in BITS:
            try:
                declared.add(code_of(name, bits))
            except ValueError:
                continue
    assert drawn == declared
    books = {(name, what) for name in NAMES if name.startswith("book") for what in ("apart", "table")}
    assert others == {("elements", "thin")} | books
    assert len(declared) > 15
