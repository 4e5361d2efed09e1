"""The order of every list's key channels, for methods that keep the first of them only (`Tier.k_kept`)."""

import torch
from torch import Tensor

from kvbench.cache.layout import ModelShape


class Channels:
    """Lies beside the pages: which channel of the model stands first in a list's keys, which second, ...

    The product of a query and a key does not change when both change the order of their channels. So all tiers of a
    list hold keys in the list's own order, a format of few channels holds the first ones, and queries are put into the
    same order before they come to the pages: attention reads no list of channels.

    Args:
        rows: Sequences held at once.
        shape: The shape of the layers and heads that are held here.
    """

    def __init__(self, rows: int, shape: ModelShape) -> None:
        kind = torch.uint8 if shape.head_dim <= 256 else torch.int16
        each = torch.arange(shape.head_dim, dtype=kind, device=shape.device)
        self._order = each.repeat(rows, shape.num_layers, shape.num_kv_heads, 1)

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all orders."""
        return self._order.nbytes

    @property
    def row_bytes(self) -> int:
        """Bytes of one row's."""
        return self._order.nbytes // len(self._order)

    def hold(self, row: int, layer: int, order: Tensor) -> None:
        """Notes the order of one layer of a row, whole numbers [H, D]."""
        self._order[row, layer] = order.to(self._order.dtype)

    def copy(self, source: int, row: int) -> None:
        """Gives a row the orders of another one."""
        self._order[row] = self._order[source]

    def of(self, rows: Tensor, layer: int) -> Tensor:
        """int64 [S, H, D] of rows int64 [S]."""
        return self._order[rows, layer].long()


def reorder(x: Tensor, order: Tensor) -> Tensor:
    """Vectors in a list's order of channels.

    Args:
        x: [S, X, D] queries or keys; X is a multiple of H, and the heads of a list follow one another. Of one channel,
            which stands for vectors that are not there (`kvbench.sizing`), there is no order.
        order: int64 [S or 1, H, D].
    """
    if x.shape[-1] == 1:
        return x
    group = x.shape[1] // order.shape[1]
    index = order if group == 1 else order.repeat_interleave(group, 1)
    return x.gather(-1, index.expand(len(x), -1, -1))
