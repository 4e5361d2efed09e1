"""Which rows a bulk eviction comes to next: asked for before a step, or told after the one before, where the host does
not wait."""

from collections.abc import Callable, Sequence
from functools import partial

from kvbench.cache.checks import CheckedPlans
from kvbench.cache.late import Late, Receiver
from kvbench.policy import DecodeView, Policy


class Due:
    """What the host knows of the bulk evictions of rows. It is about all layers and heads, wherever they lie.

    Args:
        policy: Decides.
        plans: Asks it.
        late: Brings what the device knows.
        is_told: The device tells whether an eviction is due, and nobody asks it before every step.
    """

    def __init__(self, policy: Policy, plans: CheckedPlans, late: Late, is_told: bool) -> None:
        self._happens, self._is_told = policy.compaction is not None, is_told
        self._plans, self._late = plans, late
        self._told: dict[int, int] = {}

    def forget(self, number: int) -> None:
        """Notes that what the host was told of a row holds no longer."""
        self._told.pop(number, None)

    def tell(self, numbers: Sequence[int], view: Callable[[], DecodeView]) -> None:
        """Tells the host, later, of which rows an eviction is due before the next step; `view` shows them."""
        if not (self._happens and self._is_told):
            return

        def bind() -> Receiver:
            return partial(self.learn, tuple(numbers))

        self._late.post(self._plans.due(view()), bind)

    def learn(self, numbers: Sequence[int], due: Sequence[int]) -> None:
        """Takes in whether the bulk evictions of rows are due."""
        self._told |= zip(numbers, due, strict=True)

    def may_be(self, numbers: Sequence[int]) -> bool:
        """Whether an eviction of rows is due before the next step, or the host was not told that it is not."""
        return self._happens and any(self._told.get(number) != 0 for number in numbers)

    def whose(self, numbers: Sequence[int], view: Callable[[], DecodeView]) -> list[int]:
        """The rows whose eviction is due now, of those that a step begins with; `view` shows these."""
        if not self._happens:
            return []
        told = [self._told.get(number) for number in numbers]

        def forget() -> None:
            for number in numbers:
                self.forget(number)

        self._late.also(forget)
        if None in told:
            told = self._plans.due(view()).tolist()
        return [number for number, is_due in zip(numbers, told, strict=True) if is_due]
