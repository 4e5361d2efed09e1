"""Draws the samples of a benchmark that a run with a limit asks."""

import random
import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Limit:
    """The number of samples of each subset that a run asks, and the choice of them.

    Args:
        count: At most so many, >= 1.
        first: Takes the first ones of the file. Otherwise a random sample: files are often sorted, by length or by
            topic, and their beginning is no sample of the benchmark.
    """

    count: int
    first: bool = False

    @classmethod
    def read(cls, value: object) -> "Limit | None":
        """The setting `limit` as the user writes it.

        Args:
            value: A whole number, `first:` and a whole number, or None for all samples.

        Raises:
            ValueError: It is something else.
        """
        if value is None or isinstance(value, Limit):
            return value
        found = re.fullmatch(r"(first:)?(\d{1,9})", value) if isinstance(value, str) else None
        count = int(found[2]) if found else value
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(
                f"limit={value!r} is no number of samples; write a whole number for a random sample of each subset, "
                "first:20 for the first 20, or null for all samples"
            )
        return cls(count, first=bool(found and found[1]))

    def of(self, total: int, subset: str) -> list[int]:
        """The samples to ask.

        Every run draws the same ones, whatever its seed, and a larger limit keeps those of a smaller one.

        Args:
            total: Samples of the subset.
            subset: Its name.

        Returns:
            Their indices from 0 on, ascending.
        """
        if self.first or self.count >= total:
            return list(range(min(self.count, total)))
        order = list(range(total))
        random.Random(f"limit:{subset}").shuffle(order)
        return sorted(order[: self.count])
