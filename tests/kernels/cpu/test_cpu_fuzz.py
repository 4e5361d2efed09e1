"""A short run of the fuzzer, without sanitizers; `make fuzz` runs more cases, with them."""

import pytest
from kernel_fuzz import run

from kvbench.kernels.cpu import abi as cpu_abi
from kvbench.kernels.cpu.build import BuildError

try:
    cpu_abi.load()
    ABSENT = ""
except BuildError as error:
    ABSENT = str(error)


@pytest.mark.skipif(bool(ABSENT), reason=ABSENT)
def test_random_calls_are_right_or_refused():
    """Some dozens of calls of all operations: as the oracle says in contract, an exception and no byte outside it."""
    tally = run(cases=80, seed=1)
    assert tally.findings == []
    assert len({name for name, _ in tally.calls}) == 8  # operations
    assert 20 < sum(n for (_, kind), n in tally.calls.items() if kind == "in contract") < 60
