"""How the lists of a cache share one budget: by layer, by how many of the best tokens are theirs, or by a table."""

import json
import re
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from kvbench.policy.ranking import rank_descending, share_with_cap

Allocation = Literal["uniform", "pyramid", "ada", "ada_pyramid", "global", "preference", "table"]
"""Who competes for a budget: nobody, layers by their depth, the heads of a layer, all heads, or a table decides, or
what the method finds its layers to be worth."""
Table = tuple[tuple[float, ...], ...]


def shares_by_score(score: Tensor, base: Tensor, alpha: float, *, official_rounding: bool = False) -> Tensor:
    """Budgets by how many of the best tokens of a group of lists are a list's own, with a floor; int64 [G, M].

    Args:
        score: fp32 [G, M, n] the tokens of M lists, which compete within each of G groups.
        base: int64 [G] mean budget of a group's lists, at most n; a group's budgets sum to base * M.
        alpha: Share of a list's budget that does not depend on the scores, in [0, 1]: Ada-KV's safeguard.
        official_rounding: Round each budget half to even, as AdaKV's code does, which may lose or gain tokens.

    Source: FFY0/AdaKV at efe4e2e, AdaptiveSnapKVCluster.
    Differs: largest remainder, unless `official_rounding`.
    """
    lists = score.shape[1]
    total = base * lists
    # Ties go to the lower list, then to the lower position.
    best = rank_descending(score.flatten(1)).view_as(score) < total[:, None, None]
    count = best.sum(-1)
    if official_rounding:
        return (count.double() * (1 - alpha) + (base.double() * alpha).floor()[:, None]).round().long()
    share = Fraction(str(alpha))  # 0.2 is not exact in binary, and ties have to be ties
    parts = count * (share.denominator - share.numerator) + base[:, None] * share.numerator
    return round_to_total(parts, share.denominator, total)


def round_to_total(parts: Tensor, denominator: int, total: Tensor) -> Tensor:
    """Rounds parts / denominator to whole numbers with a given sum: floors, then +1 by remainder descending, index
    ascending; int64 [G, M].

    Args:
        parts: int64 [G, M], >= 0.
        denominator: Of all parts, >= 1.
        total: int64 [G], from the sum of the floors to one more per part.
    """
    floors = parts // denominator
    by_remainder = rank_descending(parts - floors * denominator)
    return floors + (by_remainder < (total - floors.sum(-1))[:, None])


def shares_by_table(weight: Tensor, base: int, room: int, alpha: float) -> Tensor:
    """Budgets in proportion to weights, with a floor; int64 [L, H]; their mean is `base`, and none is above `room`.

    Args:
        weight: fp64 [L, H], >= 0.
        base: Mean budget, >= 0.
        room: Tokens that a list has; what this cuts off goes to the others.
        alpha: Share of a list's budget that does not depend on the table, in [0, 1].
    """
    mixed = alpha * weight.mean() + (1 - alpha) * weight
    shares = share_with_cap(mixed.flatten(), base * weight.numel(), room, at_least=0)
    return torch.tensor(shares, device=weight.device).view_as(weight)


def read_table(table: str | Sequence[Sequence[float]], setting: str = "table") -> Table:
    """Numbers per layer and KV head, from a file or from nested sequences.

    Args:
        table: Path of a file with one line per layer and one number per KV head, parted by tabs, commas or blanks, or
            of a .json file with a list of lists; or the list of lists itself.
        setting: Its name, for messages.

    Raises:
        ValueError: There is no such file, or it is not a table of numbers with equally many in every line.
    """
    rows: Sequence[Sequence[float | str]]
    if isinstance(table, str):
        path = Path(table).expanduser()
        if not path.is_file():
            raise ValueError(f"method.{setting}={table} is no file; give a table of numbers, one line per layer")
        text = path.read_text()
        lines = [re.split(r"[\s,]+", line.strip()) for line in text.splitlines() if line.strip()]
        try:
            rows = json.loads(text) if path.suffix == ".json" else lines
        except ValueError as error:
            raise ValueError(
                f"method.{setting}={table} is no JSON ({error}); write a list of lists of numbers"
            ) from None
    else:
        rows = table
    try:
        found = tuple(tuple(float(value) for value in row) for row in rows)
    except (TypeError, ValueError):
        found = ()
    if not found or not found[0] or len({len(row) for row in found}) > 1:
        name = table if isinstance(table, str) else "the list"
        raise ValueError(f"method.{setting}: {name} is not one line per layer with one number per KV head in each")
    return found
