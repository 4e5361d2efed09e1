"""Homes: the format in which each list's tokens are kept, where it differs from layer to layer or head to head."""

import torch
from torch import Tensor

from kvbench.kernels.backend import FusedStep


class Homes:
    """Which tier a plan's tier 0 stands for in every list of a row.

    The host knows them all, so that what is done home by home has sizes that no device is asked for.

    Args:
        table: The tier of every head of every layer.
        device: Where the lists lie.
    """

    def __init__(self, table: tuple[tuple[int, ...], ...], device: torch.device) -> None:
        self.table, self._device = table, device
        self.tiers = sorted({tier for row in table for tier in row})
        """Those that are somewhere at home."""
        self.by_head = any(len(set(row)) > 1 for row in table)
        """The heads of a layer differ."""
        self.counts = [sum(row.count(tier) for row in table) for tier in self.tiers]
        """Lists of a row that are at home in each."""
        flat = [tier for row in table for tier in row]
        self._flat = torch.tensor(flat, device=device)
        self._within = [
            torch.tensor([n for n, home in enumerate(flat) if home == tier], dtype=torch.int64, device=device)
            for tier in range(max(flat) + 1)
        ]
        self._parts = [_parts(row, device) for row in table]

    def of(self, lists: Tensor) -> Tensor:
        """int64, in the shape of `lists`: the tier of each list."""
        return self._flat[lists % len(self._flat)]

    def where(self, tier: int, num_rows: int) -> Tensor:
        """int64 [M]: which of the lists of so many rows, row-major, are at home in a tier."""
        within = self._within[tier] if tier < len(self._within) else self._within[0][:0]
        rows = torch.arange(num_rows, device=self._device)[:, None] * len(self._flat)
        return (rows + within).flatten()

    def in_layer(self, layer: int) -> list[tuple[int, Tensor | None]]:
        """The tiers of a layer with the heads int64 [h] that are at home in each; None = all heads."""
        return self._parts[layer]

    def of_layer(self, layer: int) -> int:
        """The tier of a layer whose heads do not differ."""
        return self.table[layer][0]


def _parts(row: tuple[int, ...], device: torch.device) -> list[tuple[int, Tensor | None]]:
    """The tiers of a layer and their heads; None for all."""
    if len(set(row)) == 1:
        return [(row[0], None)]
    return [
        (tier, torch.tensor([head for head, home in enumerate(row) if home == tier], device=device))
        for tier in sorted(set(row))
    ]


class HomedStep(FusedStep):
    """Steps of several formats, each for the layers that are at home in it.

    Args:
        homes: Which layer is where.
        steps: A step per tier.
    """

    def __init__(self, homes: Homes, steps: dict[int, FusedStep]) -> None:
        self._homes, self._steps = homes, steps

    @staticmethod
    def of(homes: Homes, steps: dict[int, FusedStep | None]) -> "HomedStep | None":
        """The step of all layers; None where the backend has none for some."""
        found = {tier: step for tier, step in steps.items() if step is not None}
        return HomedStep(homes, found) if len(found) == len(steps) else None

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        return self._steps[self._homes.of_layer(layer)].attend(layer, q, k, v, scale)
