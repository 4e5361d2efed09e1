"""The order of every list's key channels, for methods that keep the first of them only (`Tier.k_kept`)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.cache.layout import ModelShape


@dataclass(frozen=True)
class Orders:
    """Orders of channels, as a step looks them up once.

    Args:
        queries: int64 [S, L, Hq, D], of every query head its list's.
        keys: int64 [S, L, H, D].
    """

    queries: Tensor
    keys: Tensor


class Channels:
    """Lies beside the pages: which channel of the model stands first in a list's keys, which second, ...

    The product of a query and a key does not change when both change the order of their channels. So all tiers of a
    list hold keys in the list's own order, a format of few channels holds the first ones, and queries are put into the
    same order before they come to the pages: attention reads no list of channels.

    Args:
        shape: The shape of the layers and heads that are held here.
    """

    def __init__(self, rows: int, shape: ModelShape) -> None:
        kind = torch.uint8 if shape.head_dim <= 256 else torch.int16
        each = torch.arange(shape.head_dim, dtype=kind, device=shape.device)
        self._order = each.repeat(rows, shape.num_layers, shape.num_kv_heads, 1)
        self._group = shape.num_q_heads // shape.num_kv_heads

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

    def of(self, rows: Tensor) -> Orders:
        """The orders of rows int64 [S], in all layers."""
        keys = self._order[rows].long()
        return Orders(keys if self._group == 1 else keys.repeat_interleave(self._group, 2), keys)


def reorder(x: Tensor, order: Tensor) -> Tensor:
    """Vectors in a list's order of channels.

    Args:
        x: [S, X, D] queries or keys. Of one channel, which stands for vectors that are not there (`kvbench.sizing`),
            there is no order.
        order: int64 [S or 1, X, D].
    """
    return x if x.shape[-1] == 1 else x.gather(-1, order.expand(len(x), -1, -1))
