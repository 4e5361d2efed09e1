"""Bulk evictions that are due: asked for before a step, or told after the one before, where the host does not wait."""

from collections.abc import Callable, Sequence
from functools import partial

from kvbench.cache.async_counts import AsyncCounts
from kvbench.cache.checks import CheckedPlans
from kvbench.policy import DecodeView, Policy


class EvictionDue:
    """The host's knowledge of the bulk evictions of rows. It is about all layers and heads, wherever they lie.

    Args:
        counts: Brings what the device knows.
        is_told: The device tells whether an eviction is due, and nobody asks it before every step.
    """

    def __init__(self, policy: Policy, plans: CheckedPlans, counts: AsyncCounts, is_told: bool) -> None:
        self._happens = policy.compaction is not None and policy.residual is None  # tokens behind rings are not evicted
        self._is_told = is_told
        self._plans, self._counts = plans, counts
        self._told: dict[int, int] = {}

    def forget(self, numbers: Sequence[int]) -> None:
        """Notes that what the host was told of rows holds no longer."""
        for number in numbers:
            self._told.pop(number, None)

    def tell(self, numbers: Sequence[int], view: Callable[[], DecodeView]) -> None:
        """Tells the host, later, of which rows an eviction is due before the next step; `view` shows them."""
        if self._happens and self._is_told:
            self._counts.post(self._plans.due(view()), lambda: partial(self.learn, tuple(numbers)))

    def learn(self, numbers: Sequence[int], due: Sequence[int]) -> None:
        """Takes in whether the bulk evictions of rows are due."""
        self._told |= zip(numbers, due, strict=True)

    def may_be(self, numbers: Sequence[int]) -> bool:
        """True if an eviction of rows is due before the next step, or the host was not told that it is not."""
        return self._happens and any(self._told.get(number) != 0 for number in numbers)

    def whose(self, numbers: Sequence[int], view: Callable[[], DecodeView]) -> list[int]:
        """The rows whose eviction is due now, of those that a step begins with; `view` shows these."""
        if not self._happens:
            return []
        told = [self._told.get(number) for number in numbers]
        self.forget(numbers)
        if None in told:
            told = self._plans.due(view()).tolist()
        return [number for number, is_due in zip(numbers, told, strict=True) if is_due]
