"""Calibration tables kept outside the pages: code levels and key channel scales per layer, or scales per head."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvbench.cache.layout import ModelShape
from kvbench.errors import NotForModel
from kvbench.kernels.format import PageFormat
from kvbench.kernels.operands import Channels, TierPages
from kvbench.policy import CodeBooks, HeadScales


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
        self, books: CodeBooks, formats: Sequence[PageFormat], shape: ModelShape, first_layer: int, first_head: int
    ) -> None:
        layers, heads, dim = slice(first_layer, first_layer + shape.num_layers), shape.num_kv_heads, shape.head_dim
        if len(books.scale[0]) != heads * shape.ranks.size * dim:
            raise NotForModel(
                f"the books have {len(books.scale[0])} key channels per layer, but the model has "
                f"{heads * shape.ranks.size} KV heads of {dim}; measure books of this model",
                setting="method.books",
            )

        def local(rows: Sequence[Sequence[float]]) -> Tensor:
            whole = torch.tensor([list(row) for row in rows[layers]]).unflatten(1, (-1, dim))
            return whole[:, first_head : first_head + heads].half().to(shape.device)

        self._scale, self._zero = local(books.scale), local(books.zero)  # [L, H, D]
        self._tables = torch.tensor(
            [[*keys, *values] for keys, values in zip(books.keys[layers], books.values[layers], strict=True)],
            dtype=torch.uint8,
        )
        self._formats = [
            [_with(fmt, keys, values) for fmt in formats]
            for keys, values in zip(books.keys[layers], books.values[layers], strict=True)
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

    def values(self, layer: int, head: Tensor, v: Tensor) -> Tensor:
        """Values [M, D] of heads int64 [M] as a page takes them."""
        return v

    def queries(self, layer: int, q: Tensor) -> Tensor:
        """Queries [S, Hq, D] as keys in pages are multiplied with."""
        return q

    def outputs(self, layer: int, out: Tensor) -> Tensor:
        """The output [S, Hq, D] of attention over what pages hold, of the values that this stands for."""
        return out

    def read(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values [S, H, n, D] that those of pages stand for."""
        return k, v

    def attach(self, tiers: Sequence[TierPages], layer: int) -> None:
        """Gives the tiers of a layer its tables, and the scales of its channels."""
        for tier, fmt in zip(tiers, self._formats[layer], strict=True):
            tier.fmt = fmt
            if _is_coded(fmt):
                tier.channels = Channels(self._scale[layer].float(), self._zero[layer].float())


class Scales(Codebooks):
    """Scales of a layer's keys and values, one for all of its heads or one for each, that never change.

    A page holds floats of 8 bits of keys and values that are divided by them. Queries are multiplied by the keys' scale
    and attention's output by the values', so that kernels take neither. Other formats have scales of 1.

    Source: vLLM's `k_scale` and `v_scale` (layers/quantization/kv_cache.py), per tensor or, since PR 30141, per head.
    """

    def __init__(
        self,
        scales: HeadScales,
        formats: Sequence[PageFormat],
        shape: ModelShape,
        first_layer: int,
        first_head: int,
        tiers: Sequence[Sequence[int]],
    ) -> None:
        """`tiers`: of each list here, by layer; the other arguments as for `Codebooks`."""
        layers, heads = slice(first_layer, first_layer + shape.num_layers), shape.num_kv_heads
        self._of_heads = len(scales.keys[0]) > 1

        def local(rows: Sequence[Sequence[float]]) -> Tensor:
            values = torch.tensor([list(row) for row in rows[layers]])
            return values[:, first_head : first_head + heads] if self._of_heads else values.expand(-1, heads)

        coded = torch.tensor([[formats[tier].slot.fp8 for tier in row] for row in tiers])
        self._keys, self._values = (
            torch.where(coded, local(rows), 1.0).to(shape.device) for rows in (scales.keys, scales.values)
        )  # fp32 [L, H]
        self._formats = [list(formats)] * shape.num_layers

    @property
    def table_bytes(self) -> int:
        return 0 if self._of_heads else 2 * 4 * len(self._keys)

    @property
    def channel_bytes(self) -> int:
        return self._keys.nbytes + self._values.nbytes if self._of_heads else 0

    def levels(self, tier: int, layer: int, head: Tensor, k: Tensor) -> Tensor:
        return k.float() / self._keys[layer, head, None]

    def values(self, layer: int, head: Tensor, v: Tensor) -> Tensor:
        return v.float() / self._values[layer, head, None]

    def queries(self, layer: int, q: Tensor) -> Tensor:
        return _times(self._keys[layer], q)

    def outputs(self, layer: int, out: Tensor) -> Tensor:
        return _times(self._values[layer], out)

    def read(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return k * self._keys[layer, :, None, None], v * self._values[layer, :, None, None]

    def attach(self, tiers: Sequence[TierPages], layer: int) -> None:
        """Attaches nothing to the tiers: kernels take no such scales."""


class KeyBiases(Codebooks):
    """The biases of a model's key projections, which keys without their positions are stored less.

    They are added back, exactly, where attention reads keys, before these are rotated. In plain torch alone: no kernel
    takes them yet.
    """

    def __init__(self, formats: Sequence[PageFormat], shape: ModelShape, first_layer: int) -> None:
        """`shape` is of one place, with the heads of this process; the other arguments as for `Codebooks`.

        Raises:
            NotForModel: There are no such biases.
        """
        if shape.key_biases is None:
            raise NotForModel(
                "store.key_offset=bias: the key projections of this model have no bias, or keys are normalised behind "
                "it; set store.key_offset=none or prompt",
                setting="store.key_offset",
            )
        if shape.keys_only:
            raise NotForModel(
                "store.key_offset=bias: of a model with latent attention keys and values are the same vectors, held "
                "once; set store.key_offset=none",
                setting="store.key_offset",
            )
        biases = torch.stack([*shape.key_biases[first_layer : first_layer + shape.num_layers]])
        self._biases = biases.unflatten(1, (shape.num_kv_heads, -1)).to(shape.device, formats[0].slot.dtype)
        self._formats = [list(formats)] * shape.num_layers

    @property
    def table_bytes(self) -> int:
        return 0

    @property
    def channel_bytes(self) -> int:
        return self._biases.nbytes

    def levels(self, tier: int, layer: int, head: Tensor, k: Tensor) -> Tensor:
        return k.float() - self._biases[layer, head].float()

    def attach(self, tiers: Sequence[TierPages], layer: int) -> None:
        """Gives the tiers of a layer its biases."""
        for tier in tiers:
            tier.offset = self._biases[layer].float()


def _times(scale: Tensor, x: Tensor) -> Tensor:
    """Product of `x` [S, Hq, D] and the scales [H] of the query heads' groups, in the dtype of `x`."""
    return (x.float() * scale.repeat_interleave(x.shape[1] // len(scale))[:, None]).to(x.dtype)


def _is_coded(fmt: PageFormat) -> bool:
    return fmt.slot.k_code == "book_channels"


def _with(fmt: PageFormat, keys: tuple[int, ...], values: tuple[int, ...]) -> PageFormat:
    if not _is_coded(fmt):
        return fmt
    return replace(fmt, slot=replace(fmt.slot, k_table=keys, v_table=values))
