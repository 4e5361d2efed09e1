"""Values in subsets, the weight of each subset, their weighted mean and its standard error.

Everything in this room works on one `Strata`, so that an estimate, its interval and its tests weigh the subsets alike.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

Weighting = Literal["subset", "sample"]
FEWEST_SAMPLES = 8  # fewer prove nothing but yes-or-no answers: spread and skewness cannot be told from them
ROUNDING = 1e-12  # of the largest value; a smaller spread is the rounding of a mean


@dataclass(frozen=True)
class Strata:
    """Values of each subset and the subsets' weights."""

    values: tuple[np.ndarray, ...]
    """[n] or [n, columns] each, n >= 1; a column is one thing measured."""
    weights: tuple[float, ...]
    """Above 0, with the sum 1."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Samples of each subset."""
        return tuple(map(len, self.values))

    @property
    def count(self) -> int:
        """Samples of all subsets."""
        return sum(self.sizes)

    @property
    def flat(self) -> np.ndarray:
        """The values of all subsets, one after the other."""
        return np.concatenate(self.values)

    @property
    def per_sample(self) -> np.ndarray:
        """Weight of each sample in the mean, [count]; the sum is 1."""
        return np.repeat([weight / size for weight, size in zip(self.weights, self.sizes, strict=True)], self.sizes)

    @property
    def weighs_samples_alike(self) -> bool:
        """Every sample has the same weight, so that the subsets are one sample."""
        each = self.per_sample
        return bool(np.ptp(each) <= ROUNDING)

    @property
    def effective_count(self) -> float:
        """The samples of one subset whose mean would be as uncertain: 1 / sum of squared weights."""
        return float(1 / np.sum(self.per_sample**2))

    def mean(self) -> np.ndarray | float:
        """The weighted mean, a number for each column."""
        mean = sum(w * v.mean(axis=0) for w, v in zip(self.weights, self.values, strict=True))
        return mean if self.values[0].ndim > 1 else float(mean)

    def map(self, change: Callable[[np.ndarray], np.ndarray]) -> "Strata":
        """Subsets with each one's values mapped by a function."""
        return Strata(tuple(map(change, self.values)), self.weights)


def weighed(values: Sequence[Sequence[float] | np.ndarray], weighting: Weighting = "subset") -> Strata:
    """Concatenates the values of each subset, empty ones dropped, with weights per subset or per sample."""
    arrays = tuple(np.asarray(item, dtype=float) for item in values if len(item))
    total = sum(map(len, arrays))
    weights = tuple(len(item) / total if weighting == "sample" else 1 / len(arrays) for item in arrays)
    return Strata(arrays, weights)


def unit_of(*arrays: np.ndarray) -> np.ndarray:
    """Power of two below the largest absolute value of each column of values [n, columns] or [n]; 1 where all are 0.

    Squares of values in this unit neither overflow nor vanish, and dividing by it rounds nothing.
    """
    largest = np.max([np.max(np.abs(values), axis=0) for values in arrays], axis=0)
    return np.where(largest > 0, np.ldexp(1.0, np.frexp(largest)[1] - 1), 1.0)


def has_spread(values: np.ndarray) -> bool:
    """True when values differ by more than rounding."""
    return bool(np.ptp(values) > ROUNDING * max(1e-300, float(np.max(np.abs(values)))))


def standard_error(strata: Strata) -> tuple[float, float] | None:
    """Standard error of the weighted mean, and its degrees of freedom; None where a subset has one sample or no spread.

    With one subset this is the paired t test's. With several it is that of a contrast in a model with one mean per
    subset and HC2 errors.

    Source: Satterthwaite 1946, Biometrics Bulletin 2:110; Welch 1947, Biometrika 34:28.
    """
    if not strata.values or min(strata.sizes) < 2 or not any(map(has_spread, strata.values)):
        return None
    units = [float(unit_of(values - values.mean())) for values in strata.values]
    terms = [
        weight**2 * float(np.var(values / unit, ddof=1)) / len(values)
        for values, weight, unit in zip(strata.values, strata.weights, units, strict=True)
    ]
    largest = max(unit for unit, variance in zip(units, terms, strict=True) if variance)
    variances = [one and one * (unit / largest) ** 2 for unit, one in zip(units, terms, strict=True)]
    total = sum(variances)
    freedom = total**2 / sum(one**2 / (size - 1) for one, size in zip(variances, strata.sizes, strict=True))
    return largest * math.sqrt(total), freedom
