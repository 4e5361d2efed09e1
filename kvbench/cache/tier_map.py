"""The tier of each list, where the format of tokens differs from layer to layer or head to head."""

import torch
from torch import Tensor

from kvbench.kernels.backend import FusedStep


class TierMap:
    """The tier that a plan's tier 0 stands for in every list of a row.

    The host knows them all, so that what is done tier by tier has sizes that no device is asked for.

    Args:
        table: The tier of every head of every layer.
    """

    def __init__(self, table: tuple[tuple[int, ...], ...], device: torch.device) -> None:
        self.table, self._device = table, device
        self.tiers = sorted({tier for row in table for tier in row})
        """Those that some list has."""
        self.by_head = any(len(set(row)) > 1 for row in table)
        """The heads of a layer differ."""
        flat = [tier for row in table for tier in row]
        self._flat = torch.tensor(flat, device=device)
        self._within = {tier: _places_of(tier, flat, device) for tier in self.tiers}
        self._heads = [
            [(tier, None if len(set(row)) == 1 else _places_of(tier, row, device)) for tier in sorted(set(row))]
            for row in table
        ]

    def of(self, lists: Tensor) -> Tensor:
        """int64, in the shape of `lists`: the tier of each list."""
        return self._flat[lists % len(self._flat)]

    def where(self, tier: int, num_rows: int) -> Tensor:
        """int64 [M]: which of the lists of so many rows, row-major, have a tier."""
        within = self._within.get(tier, self._flat[:0])
        rows = torch.arange(num_rows, device=self._device)[:, None] * len(self._flat)
        return (rows + within).flatten()

    def in_layer(self, layer: int) -> list[tuple[int, Tensor | None]]:
        """The tiers of a layer with the heads int64 [h] of each; None = all heads."""
        return self._heads[layer]

    def of_layer(self, layer: int) -> int:
        """The tier of a layer whose heads do not differ."""
        return self.table[layer][0]


def _places_of(tier: int, tiers: list[int] | tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor([place for place, own in enumerate(tiers) if own == tier], dtype=torch.int64, device=device)


class MappedStep(FusedStep):
    """Steps of several formats, each for the layers that have it."""

    def __init__(self, tier_map: TierMap, steps: dict[int, FusedStep]) -> None:
        self._tier_map, self._steps = tier_map, steps

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        return self._steps[self._tier_map.of_layer(layer)].attend(layer, q, k, v, scale)
