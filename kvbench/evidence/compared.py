"""Paired difference of two runs, its interval and tests, and the verdict that they allow."""

from dataclasses import dataclass

from kvbench.evidence.legends import EQUAL_LEVEL
from kvbench.evidence.load import StoredRun
from kvbench.evidence.samples import Change, Pairs
from kvbench.results.measures import Measure
from kvbench.show.terminal import number, span
from kvbench.stats.paired import ALPHA
from kvbench.stats.shares import Difference

TOO_FEW, NO_VERDICT = "too few answers", "no verdict"


@dataclass(kw_only=True)
class ComparedRun:
    """One run, its reference, and the result of their comparison."""

    what: Measure
    pairs: Pairs
    difference: Difference
    extremes: tuple[Difference | None, Difference | None] | None
    """The same with every missing answer as bad, and as good, as it can be: `Pairs.extremes`."""
    margin: float
    """Largest difference that counts as none."""
    null: float
    """The difference that `p` refuses: none (0), or for nearness to the full cache one of at most the margin."""
    changes: list[Change]
    """Samples that got worse or better by more than noise."""
    longer: Difference | None = None
    """The same of the tokens of an answer; None without answers, and without verdicts."""
    num_family: int = 1
    """Rows that were corrected together."""
    p_holm: float | None = None
    """`p` after Holm's correction over all rows of the command; None where it is not known."""
    p_equal_holm: float | None = None
    """`p_equal` after the same correction."""

    @property
    def label(self) -> str:
        """Name of the run, or of the value that was interpolated between runs."""
        return self.pairs.mine.label

    @property
    def run(self) -> StoredRun | None:
        """The run; None for an interpolated value."""
        return self.pairs.mine.run

    @property
    def value(self) -> float:
        """Mean difference, run minus other, in the metric's unit."""
        return self.difference.value

    @property
    def interval(self) -> tuple[float, float] | None:
        """95 % interval of it; None where nothing can be said."""
        return self.difference.interval[0]

    @property
    def p(self) -> float | None:
        """Two-sided p value of a difference no larger than `null`."""
        return self.difference.p_beyond(self.null)

    @property
    def p_equal(self) -> float | None:
        """Equivalence test's p value, the largest that missing answers allow."""
        each = [self.difference, *(self.extremes or ())]
        p_values = [None if one is None else one.p_within(self.margin) for one in each]
        known = [p for p in p_values if p is not None]
        return max(known) if len(known) == len(p_values) else None

    @property
    def detectable(self) -> float | None:
        """Smallest true difference that the corrected test would have shown with 80 % probability."""
        least = self.difference.detectable(ALPHA / self.num_family)
        return None if least is None else least + self.null

    @property
    def needed(self) -> int | None:
        """Samples that would show a true difference of the margin's size with 80 % probability."""
        return self.difference.needed(self.margin, ALPHA / self.num_family)

    @property
    def worst(self) -> float | None:
        """Mean difference if every missing answer of this run is the worst possible and the other's the best.

        `value` where none is missing, None where a missing value could be anything.
        """
        if self.extremes is None:
            return self.value
        end = self.extremes[0 if self.what.higher_is_better else 1]
        return None if end is None else end.value

    @property
    def num_lost(self) -> int:
        """Samples with a worse value than the other run's."""
        return sum(item.lost for item in self.changes)

    @property
    def num_gained(self) -> int:
        """Samples with a better value than the other run's."""
        return len(self.changes) - self.num_lost

    @property
    def verdict(self) -> str:
        """`worse`, `better`, `equal`, `cannot tell`, `too few answers`, or `no verdict`."""
        if self.pairs.unfit:
            return NO_VERDICT
        if not self.pairs.is_enough:
            return TOO_FEW
        if self.p_holm is not None and self.p_holm < ALPHA and self._stands():
            return self.what.verdicts[(self.value > 0) == self.what.higher_is_better]
        if self.p_equal_holm is not None and self.p_equal_holm < EQUAL_LEVEL:
            return "equal"
        return "cannot tell"

    def _stands(self) -> bool:
        """True where the difference keeps its sign beyond the null for any values of the missing answers."""
        if self.extremes is None:
            return True
        end = self.extremes[0 if self.value > 0 else 1]
        return end is not None and end.value * self.value > 0 and abs(end.value) > self.null


def difference(row: ComparedRun) -> str:
    """The mean difference with its interval, in shown units."""
    return f"{number(row.value, row.what.scale, signed=True)} {span(row.interval, row.what.scale, signed=True)}"


def count(row: ComparedRun) -> str:
    """Samples in the comparison, and of how many, where some are missing."""
    held, total = row.pairs.num_samples, row.pairs.total
    return f"{held}" if held == total else f"{held} of {total}"


def worst(row: ComparedRun) -> str:
    """The difference if the missing answers were as bad as they can be, in shown units."""
    return "unknown" if row.worst is None else number(row.worst, row.what.scale, signed=True)
