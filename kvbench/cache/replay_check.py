"""Replay check: repeats a call on a fresh copy of the policy, to catch hidden state and unseeded randomness.

An answer that depends on earlier calls or on chance differs then. Such a method's numbers would depend on the order of
the samples, and on the part of them that a resumed run computes.
"""

import copy
from collections import Counter
from itertools import zip_longest
from typing import Generic, TypeVar

import torch
from torch import Tensor

Subject = TypeVar("Subject")
# Of every kind of call the first two are repeated, and then one of so many.
EVERY = {"plan_prefill": 8, "of_prompt": 8, "plan_decode": 64, "compaction": 64, "plan_compact": 16}
RULE = (
    "asked again about the same, a copy that knows of no earlier call answered otherwise, so numbers would hang on "
    "the order of the samples; let an answer follow from what is shown and from the settings alone: keep nothing from "
    "one call to the next, and draw from a generator that they seed"
)
NOISE = 1e-3  # share of an answer that may differ on a device, whose sums have no fixed order


class ReplayCheck(Generic[Subject]):
    """Fresh copies of a policy or of a statistic."""

    def __init__(self, subject: Subject) -> None:
        self._first = _copied(subject)
        self._now: Subject | None = None
        self._counts: Counter[str] = Counter()
        self._repeats: Counter[str] = Counter()

    def of(self, call: str, begins: bool = True) -> Subject | None:
        """Copy to call now, or None.

        Calls that do not `begin` a prompt, such as those for later layers, go to the copy of the previous call, if any.
        """
        if begins:
            number = self._counts[call]
            self._counts[call] += 1
            repeats = number < 2 or number % EVERY[call] == 0
            self._repeats[call] += repeats
            self._now = _copied(self._first) if repeats else None
        return self._now

    def number(self, call: str) -> int:
        """Number of repeated calls before this one."""
        return self._repeats[call] - 1


def _copied(subject: Subject) -> Subject:
    """A copy; itself where it holds what cannot be copied, such as a generator, which then shows chance alone."""
    try:
        return copy.deepcopy(subject)
    except Exception:  # whatever the parts of a class of anybody's raise
        return subject


def differ(one: object, other: object, most: float = 0.0) -> Tensor | bool:
    """True where two answers differ, in more than a share `most` of a tensor's elements.

    A bool [] tensor on their device, or a Python bool where no element has to be compared.
    """
    pairs = list(zip_longest(_leaves(one), _leaves(other)))
    tensors = [(a, b) for a, b in pairs if isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape]
    if any(not isinstance(a, Tensor) and a != b for a, b in pairs) or len(tensors) < sum(
        isinstance(x, Tensor) for x, _ in pairs
    ):
        return True
    flags = [((a != b) & ~(a.isnan() & b.isnan())).float().mean() > most for a, b in tensors]
    return torch.stack(flags).any() if flags else False


def _leaves(answer: object) -> list[object]:
    """The tensors and plain values of an answer."""
    if isinstance(answer, Tensor) or not (isinstance(answer, list | tuple) or hasattr(answer, "__dict__")):
        return [answer]
    return [
        leaf
        for part in (answer if isinstance(answer, list | tuple) else vars(answer).values())
        for leaf in _leaves(part)
    ]
