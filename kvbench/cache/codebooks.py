"""Codebooks beside the pages: the tables of each layer's codes, and the scales of its key channels."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvbench.cache.layout import ModelShape
from kvbench.errors import NotForModel
from kvbench.kernels.format import PageFormat
from kvbench.kernels.operands import Channels, TierPages
from kvbench.policy import CodeBooks


class Codebooks:
    """Findings of a calibration of a model, for the layers and heads of one place in the model.

    Keys are levels by the time they come to a page: the scale of their channel is taken off before, and put on again
    where attention reads them. All rows share them.

    Raises:
        NotForModel: The books are of other heads.

    Source: KVQuant (Hooper et al. 2024), section 3.1 (keys per channel before the rotary embedding, by scales found
        offline) and 3.3 (one table per layer).
    """

    def __init__(
        self, found: CodeBooks, formats: Sequence[PageFormat], shape: ModelShape, first_layer: int, first_head: int
    ) -> None:
        layers, heads, dim = slice(first_layer, first_layer + shape.num_layers), shape.num_kv_heads, shape.head_dim
        if len(found.scale[0]) != heads * shape.ranks.size * dim:
            raise NotForModel(
                f"the books have {len(found.scale[0])} key channels per layer, but the model has "
                f"{heads * shape.ranks.size} KV heads of {dim}; measure books of this model"
            )

        def own(rows: Sequence[Sequence[float]]) -> Tensor:
            whole = torch.tensor([list(row) for row in rows[layers]]).unflatten(1, (-1, dim))
            return whole[:, first_head : first_head + heads].half().to(shape.device)

        self._scale, self._zero = own(found.scale), own(found.zero)  # [L, H, D]
        self._tables = torch.tensor(
            [[*keys, *values] for keys, values in zip(found.keys[layers], found.values[layers], strict=True)],
            dtype=torch.uint8,
        )
        self._formats = [
            [_with(fmt, keys, values) for fmt in formats]
            for keys, values in zip(found.keys[layers], found.values[layers], strict=True)
        ]

    @property
    def nbytes(self) -> int:
        return self.table_bytes + self.channel_bytes

    @property
    def table_bytes(self) -> int:
        """Bytes of the tables, one for each level; processes that divide the heads repeat them."""
        return self._tables.nbytes

    @property
    def channel_bytes(self) -> int:
        """Bytes of the scales and zeros of key channels."""
        return self._scale.nbytes + self._zero.nbytes

    def format(self, tier: int, layer: int) -> PageFormat:
        return self._formats[layer][tier]

    def levels(self, tier: int, layer: int, head: Tensor, k: Tensor) -> Tensor:
        """Keys [M, D] of heads int64 [M] as a page of the tier takes them; elements stay as they are."""
        if not _is_coded(self._formats[layer][tier]):
            return k
        scale, zero = (x[layer, head].float() for x in (self._scale, self._zero))
        return torch.where(scale == 0, 0.0, (k.float() - zero) / torch.where(scale == 0, 1.0, scale))

    def attach(self, tiers: Sequence[TierPages], layer: int) -> None:
        """Gives the tiers of a layer its tables, and the scales of its channels."""
        for tier, fmt in zip(tiers, self._formats[layer], strict=True):
            tier.fmt = fmt
            if _is_coded(fmt):
                tier.channels = Channels(self._scale[layer].float(), self._zero[layer].float())


def _is_coded(fmt: PageFormat) -> bool:
    return fmt.slot.k_code == "book_channels"


def _with(fmt: PageFormat, keys: tuple[int, ...], values: tuple[int, ...]) -> PageFormat:
    if not _is_coded(fmt):
        return fmt
    return replace(fmt, slot=replace(fmt.slot, k_table=keys, v_table=values))
