"""Vectors that keys are stored less, so that a quantiser spends no codes on what all keys of a head have in common."""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from kvbench.cache.layout import ModelShape
from kvbench.cache.options import OFFSETS
from kvbench.errors import NotForModel, SettingsConflict, SettingValue
from kvbench.policy import Policy

Table = Sequence[Sequence[float]]  # per layer, the channels of all KV heads


class KeyOffsets:
    """One vector per layer and KV head, in the model's own channels, that all keys of a list are stored less.

    A query's logits over a list then all miss its product with the vector. The softmax of logits that are shifted alike
    is the same, so attention over stored keys adds nothing back, and kernels are unchanged. Any other reader of keys
    gets them with the vector added back.

    Args:
        rows: Sequences, each with vectors of its own unless there is a table.
        shape: The layers and heads of one part.
        dtype: Dtype of the vectors.
        table: [L, H, D] vectors of all rows; None = the mean of the keys of each row's prompt.

    Source: SageAttention (Zhang et al. 2024, arXiv 2410.02367), the smoothing of K.
    Differs: there the mean is of all keys of a call and only the product is quantised; here it is of a prompt, and the
        answer's keys are stored less the same vector.
    """

    def __init__(self, rows: int, shape: ModelShape, dtype: torch.dtype, table: Tensor | None = None) -> None:
        self._is_shared = table is not None
        if table is None:
            table = torch.zeros(rows, shape.num_layers, shape.num_kv_heads, shape.head_dim)
        else:
            table = table[None]
        self._vectors = table.to(shape.device, dtype)  # [rows or 1, L, H, D]

    @property
    def allocated_bytes(self) -> int:
        return self._vectors.nbytes

    @property
    def row_bytes(self) -> int:
        """Bytes of one row's vectors; 0 where all rows share them."""
        return 0 if self._is_shared else self._vectors[0].nbytes

    @property
    def table_bytes(self) -> int:
        """Bytes of the vectors that all rows share."""
        return self._vectors.nbytes if self._is_shared else 0

    # Rows.

    def clear(self, row: int) -> None:
        if not self._is_shared:
            self._vectors[row] = 0

    def copy(self, source: int, target: int) -> None:
        if not self._is_shared:
            self._vectors[target] = self._vectors[source]

    def hold_prompt(self, row: int, layer: int, k: Tensor) -> None:
        """Takes the mean of a prompt's keys [KV heads, N, D] as a row's vectors of a layer."""
        if not self._is_shared and k.shape[1] and k.shape[-1] == self._vectors.shape[-1]:
            self._vectors[row, layer] = k.mean(1, dtype=torch.float64).to(self._vectors.dtype)

    # Keys.

    def of(self, rows: Tensor) -> Tensor:
        """The vectors of rows int64 [S], fp32 [S or 1, L, KV heads, D]."""
        return (self._vectors if self._is_shared else self._vectors[rows]).float()

    def of_layer(self, row: int, layer: int, heads: int) -> Tensor:
        """The vectors of one layer of a row, fp32 [heads, 1, D], each as often as its KV head's keys are kept."""
        vectors = self._vectors[0 if self._is_shared else row, layer].float()
        return vectors.repeat_interleave(heads // len(vectors), 0)[:, None]


def less(k: Tensor, vectors: Tensor) -> Tensor:
    """Keys [..., D] minus vectors that broadcast against them, in their dtype.

    Keys of one channel, which stand for absent ones (`kvbench.sizing`), stay unchanged.
    """
    return (k.float() - vectors).to(k.dtype) if k.shape[-1] == vectors.shape[-1] else k


def back(k: Tensor, vectors: Tensor) -> Tensor:
    """Keys [..., D] that were stored less vectors, in their own dtype."""
    return (k.float() + vectors).to(k.dtype) if k.shape[-1] == vectors.shape[-1] else k


def key_offsets(
    offset: str | Table,
    policy: Policy,
    whole: ModelShape,
    shape: ModelShape,
    first_layer: int,
    rows: int,
    dtype: torch.dtype,
) -> KeyOffsets | None:
    """Offset vectors of a part's keys; None where keys are stored unchanged, or without their biases (`KeyBiases`).

    `shape` is the part's share of the `whole` model, from layer `first_layer` on.

    Raises:
        NotForModel: The model's softmax is not blind to a constant, its keys are its values, or the table is of another
            model.
        ValueError: `check_key_offset` refuses it.
    """
    check_key_offset(offset, policy)
    if offset in ("none", "bias"):
        return None
    setting = f"store.key_offset={offset if isinstance(offset, str) else 'a table'}"
    if not shape.softmax.is_plain:
        what = "caps its logits" if shape.softmax.cap else "has attention sinks, whose logits belong to no key"
        raise NotForModel(
            f"{setting} shifts all logits of a query alike, but this model {what}, so that its attention would change; "
            "set store.key_offset=none",
            setting="store.key_offset",
        )
    if shape.keys_only:
        raise NotForModel(
            f"{setting}: of a model with latent attention keys and values are the same vectors, held once, and values "
            "cannot be shifted; set store.key_offset=none",
            setting="store.key_offset",
        )
    if offset == "prompt":
        return KeyOffsets(rows, shape, dtype)
    return KeyOffsets(rows, shape, dtype, _part_table(cast(Table, offset), whole, shape, first_layer))


def _part_table(table: Table, whole: ModelShape, shape: ModelShape, first_layer: int) -> Tensor:
    """The share of a table that a place has, fp32 [L, H, D]."""
    layers, heads, dim = whole.num_layers, whole.num_kv_heads, whole.head_dim
    if (len(table), len(table[0])) != (layers, heads * dim):
        raise NotForModel(
            f"store.key_offset has {len(table)} layers x {len(table[0])} numbers, but the method acts on {layers} "
            f"layers of {heads} KV heads x {dim} channels; measure a table of this model",
            setting="store.key_offset",
        )
    rows = table[first_layer : first_layer + shape.num_layers]
    vectors, first_head = torch.tensor([list(row) for row in rows]), whole.ranks.index * shape.num_kv_heads
    return vectors.unflatten(1, (heads, dim))[:, first_head : first_head + shape.num_kv_heads]


def check_key_offset(offset: str | Table, policy: Policy, chunk: int | None = None) -> None:
    """Refuses key offsets that a method's formats do not support, or that are unknown at a prompt's first key.

    The prompt is read `chunk` tokens at a time (None = at once). By the settings alone, with a ValueError.
    """
    if offset == "none":
        return
    name = type(policy).__name__
    setting = f"store.key_offset={offset if isinstance(offset, str) else 'a table'}"
    if isinstance(offset, str) and offset not in OFFSETS:
        raise SettingValue(
            f"{setting} is a path, and a store takes numbers; give a table of numbers, or one of {OFFSETS}",
            setting="store.key_offset",
        )
    if offset == "bias":
        _check_bias(policy, setting)
        return
    if policy.position_mode != "absolute":
        raise SettingsConflict(
            f"{setting} needs keys that are stored with their positions, but {name} stores them without "
            f"(position_mode={policy.position_mode}), and rotated on reading one vector is another one at every "
            "position; set store.key_offset=none, or method.position_mode=absolute or method.pre_rope=false where the "
            "method has that option",
            setting="store.key_offset",
        )
    if policy.codebooks is not None or policy.head_scales is not None:
        raise SettingsConflict(
            f"{setting}: the tables of {name} were measured of keys as they are; set store.key_offset=none",
            setting="store.key_offset",
        )
    if policy.reading is not None and policy.reading.group_reduce == "max":
        raise SettingsConflict(
            f"{setting}: {name} chooses pages by the largest bound of a group of query heads, and each head's bounds "
            "would be shifted by another number; set store.key_offset=none, or method.group=mean",
            setting="store.key_offset",
        )
    if offset == "prompt" and chunk is not None:
        raise SettingsConflict(
            f"{setting} is the mean of a whole prompt's keys, which is not known when its first {chunk} tokens are "
            "stored; set prefill.chunk=null, or give a table as store.key_offset=PATH",
            setting="store.key_offset",
        )


def _check_bias(policy: Policy, setting: str) -> None:
    name, remedy = type(policy).__name__, "set store.key_offset=none or prompt"
    if policy.position_mode != "pre_rope":
        raise SettingsConflict(
            f"{setting} needs keys that are stored without their positions and in their order, since with its position "
            f"a bias turns; {name} stores them otherwise (position_mode={policy.position_mode}); set "
            "method.pre_rope=true where the method has that option, or store.key_offset=none or prompt",
            setting="store.key_offset",
        )
    if policy.codebooks is not None or policy.residual is not None:
        raise SettingsConflict(
            f"{setting}: the formats of {name} have a zero for each channel of keys already; {remedy}",
            setting="store.key_offset",
        )
    if len(policy.tiers) > 1 and policy.by_layer is None:
        raise SettingsConflict(
            f"{setting}: {name} has several precisions, and tokens that change theirs; {remedy}",
            setting="store.key_offset",
        )
