"""Slots of pages in plain torch: written, read and moved; and the note that plain torch stood in for a kernel."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from kvbench.kernels import checks
from kvbench.kernels.codes import SCALE_BYTES, Code
from kvbench.kernels.format import PageFormat
from kvbench.kernels.reference import quant


class Operations:
    """Shared part of a backend's operations; `Backend` describes the attributes."""

    is_reference: bool = True
    takes_lse: bool = False

    def __init__(self) -> None:
        self.fallbacks: set[str] = set()


Of = TypeVar("Of", bound=Operations)
P = ParamSpec("P")
R = TypeVar("R")


def in_plain_torch(operation: Callable[Concatenate[Of, P], R]) -> Callable[Concatenate[Of, P], R]:
    """Marks an operation for which faster backends have kernels: done in their place, it notes itself in `fallbacks`.

    Operations without the mark suit every backend: views, indexing of the tracked fields, torch's own
    attention of a prompt, and the reduction of scores.
    """

    @wraps(operation)
    def noted(backend: Of, *args: P.args, **kwargs: P.kwargs) -> R:
        if not backend.is_reference:
            backend.fallbacks.add(operation.__name__)
        return operation(backend, *args, **kwargs)

    return noted


def region(pages: Tensor, fmt: PageFormat, name: str) -> Tensor:
    """A region of every page as a typed view.

    Args:
        name: A region of `PageFormat.regions`.

    Returns:
        k_codes [P, W, T] uint8 (or elements [P, D, T]), v_codes [P, T, W] (or [P, T, D]), k_scale and k_zero [P,
        groups, T] or [P, T / group, D] fp16, v_scale and v_zero [P, groups, T] fp16, k_apart and v_apart [P, n, T]
        fp16, k_where and v_where [P, n, T] uint8, score [P, T] fp32, pos [P, T] int32, k_low and k_high [P, D]
        elements.
    """
    offset, length = fmt.regions[name]
    raw = pages[:, offset : offset + length]
    slot, tokens = fmt.slot, fmt.tokens_per_page
    if name == "k_codes":
        return (raw.view(slot.dtype) if slot.k_bits >= 16 else raw).unflatten(1, (-1, tokens))
    if name == "v_codes":
        return (raw.view(slot.dtype) if slot.v_bits >= 16 else raw).unflatten(1, (tokens, -1))
    if name in ("k_scale", "k_zero"):
        shape = (-1, slot.head_dim) if slot.channel_keys else (slot.k_groups, tokens)
        return _numbers(raw, slot.keys, name).unflatten(1, shape)
    if name in ("v_scale", "v_zero"):
        return _numbers(raw, slot.values, name).unflatten(1, (slot.v_groups, tokens))
    if name in ("k_low", "k_high"):
        return raw.view(slot.dtype)
    if name.endswith(("apart", "where")):
        return (raw.view(torch.float16) if name.endswith("apart") else raw).unflatten(1, (-1, tokens))
    return raw.view(torch.float32 if name == "score" else torch.int32)


class PageOperations(Operations):
    """The operations on slots; `Backend` has the legend."""

    region = staticmethod(region)

    @in_plain_torch
    def write_keys(self, pages: Tensor, fmt: PageFormat, page: Tensor, slot: Tensor, k: Tensor) -> None:
        """Encodes keys and writes them to their slots.

        Args:
            page: int64 [M] page ids.
            slot: int64 [M] slots within the page. With per-channel keys, runs of `group_tokens` consecutive slots,
                aligned, in order.
            k: [M, D], any float dtype.
        """
        checks.write(pages, fmt, page, slot, k, keys=True)
        checks.within(fmt, len(pages), page, slot)
        form = fmt.slot
        codes = region(pages, fmt, "k_codes")
        if not form.channel_keys:
            side = _encode(k[:, : form.key_channels], form.keys, form.k_groups, form.k_apart, fmt)
            codes[page, :, slot] = side.codes
            _write_metadata(pages, fmt, "k", page, slot, side)
            return
        group = form.k_channel_group
        page, index = page[::group], slot[::group] // group
        # One scale per channel: quantise over the tokens of the group, then pack the channels of each token.
        assert form.keys is not None, "keys with scales are coded"
        tokens = k.unflatten(0, (-1, group)).transpose(1, 2)
        channels, scale, zero = quant.encode(tokens, form.keys, metadata_first=True)
        assert scale is not None, "they have scales"
        packed = quant.pack(channels.transpose(1, 2), form.k_bits)  # [M / group, group, W]
        codes.unflatten(2, (-1, group))[page, :, index] = packed.transpose(1, 2)
        region(pages, fmt, "k_scale")[page, index] = scale[..., 0]
        if zero is not None:
            region(pages, fmt, "k_zero")[page, index] = zero[..., 0]

    @in_plain_torch
    def write_values(self, pages: Tensor, fmt: PageFormat, page: Tensor, slot: Tensor, v: Tensor) -> None:
        """Encodes values [M, D] and writes them to their slots; arguments as in `write_keys`, any slots."""
        checks.write(pages, fmt, page, slot, v, keys=False)
        checks.within(fmt, len(pages), page, slot)
        if fmt.slot.keys_only:
            return
        side = _encode(v, fmt.slot.values, fmt.slot.v_groups, fmt.slot.v_apart, fmt)
        region(pages, fmt, "v_codes")[page, slot] = side.codes
        _write_metadata(pages, fmt, "v", page, slot, side)

    def write_tracked(
        self,
        pages: Tensor,
        fmt: PageFormat,
        page: Tensor,
        slot: Tensor,
        score: Tensor | float | None,
        pos: Tensor | None,
    ) -> None:
        """Writes the tracked fields of slots; those that the format does not track are ignored.

        Args:
            page: int64 [M] page ids.
            slot: int64 [M] slots within the page.
            score: fp32 [M], or one number for all; None only where the format tracks no score.
            pos: int64 [M] positions; None only where the format tracks none.
        """
        checks.write_tracked(pages, fmt, page, slot, score, pos)
        if "score" in fmt.slot.track:
            assert score is not None, "checks.write_tracked wants one"
            self.region(pages, fmt, "score")[page, slot] = score
        if "pos" in fmt.slot.track:
            assert pos is not None, "checks.write_tracked wants them"
            self.region(pages, fmt, "pos")[page, slot] = pos.to(torch.int32)

    @in_plain_torch
    def widen_bounds(
        self, pages: Tensor, fmt: PageFormat, page: Tensor, slot: Tensor, k: Tensor, *, distinct: bool
    ) -> None:
        """Widens the bounds of pages so that they include keys; slot 0 begins a page anew.

        Args:
            fmt: The pages' format, with bounds.
            page: int64 [M] page ids.
            slot: int64 [M] slots within the page.
            k: [M, D], as they are written.
            distinct: No page comes twice, as in a decode step; then nothing is sorted.
        """
        checks.widen_bounds(pages, fmt, page, slot, k)
        k = k.to(fmt.slot.dtype)
        if distinct:
            ids, fresh, low, high = page, slot == 0, k, k
        else:
            ids, inverse = page.unique(return_inverse=True)
            index, shape = inverse[:, None].expand_as(k), (len(ids), k.shape[1])
            fresh = torch.zeros(len(ids), device=k.device).index_add_(0, inverse, (slot == 0).float()) > 0
            low = k.new_full(shape, float("inf")).scatter_reduce_(0, index, k, "amin")
            high = k.new_full(shape, float("-inf")).scatter_reduce_(0, index, k, "amax")
        for name, new, widest in (("k_low", low, torch.minimum), ("k_high", high, torch.maximum)):
            view = region(pages, fmt, name)
            view[ids] = torch.where(fresh[:, None], new, widest(new, view[ids]))

    @in_plain_torch
    def read_slots(self, pages: Tensor, fmt: PageFormat, page: Tensor, slot: Tensor) -> tuple[Tensor, Tensor]:
        """Dequantises single slots: int64 [M] pages and slots to keys and values, fp32 [M, D]."""
        checks.slots(pages, fmt, page, slot)
        checks.within(fmt, len(pages), page, slot)
        if fmt.slot.channel_keys:  # scales belong to groups, so the whole page is the unit of reading
            keys, values = read_pages(pages, fmt, page)
            row = torch.arange(len(page), device=page.device)
            return keys[row, :, slot], values[row, slot]
        k_meta, v_meta = (_metadata(pages, fmt, side, page, slot) for side in "kv")
        keys = _decode_keys(fmt, region(pages, fmt, "k_codes")[page, :, slot][..., None], k_meta)
        if fmt.slot.keys_only:
            return keys[..., 0], keys[..., 0]
        values = _decode_values(fmt, region(pages, fmt, "v_codes")[page, slot][:, None], v_meta)
        return keys[..., 0], values[:, 0]

    def read_tracked(
        self, pages: Tensor, fmt: PageFormat, page: Tensor, slot: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        """Score fp32 [M] and position int64 [M] of single slots; None for a field that is not tracked."""
        checks.slots(pages, fmt, page, slot)
        checks.within(fmt, len(pages), page, slot)
        score = self.region(pages, fmt, "score")[page, slot] if "score" in fmt.slot.track else None
        return score, self.region(pages, fmt, "pos")[page, slot].long() if "pos" in fmt.slot.track else None

    @in_plain_torch
    def move_slots(
        self, pages: Tensor, fmt: PageFormat, src_page: Tensor, src_slot: Tensor, dst_page: Tensor, dst_slot: Tensor
    ) -> None:
        """Copies the bytes of slots as they are (no requantisation); sources and targets must not overlap.

        Args:
            src_page, src_slot: int64 [M] each, where the bytes come from.
            dst_page, dst_slot: int64 [M] each, where they go.

        Raises:
            ValueError: The format's keys share scales over tokens, or its pages carry bounds, so that a slot cannot
                move alone.
        """
        checks.move(pages, fmt, src_page, src_slot, dst_page, dst_slot)
        for page, slot in ((src_page, src_slot), (dst_page, dst_slot)):
            checks.within(fmt, len(pages), page, slot)
        for name, (_, length) in fmt.regions.items():
            if not length:
                continue
            view = region(pages, fmt, name)
            if name in ("v_codes", "score", "pos"):
                view[dst_page, dst_slot] = view[src_page, src_slot]
            else:
                view[dst_page, :, dst_slot] = view[src_page, :, src_slot]


def _numbers(raw: Tensor, code: Code | None, name: str) -> Tensor:
    """Bytes of metadata as what they are: zeros are fp16, scales what the code says."""
    is_byte = code is not None and name.endswith("scale") and SCALE_BYTES[code.scale] == 1
    return raw if is_byte else raw.view(torch.float16)


@dataclass
class _Side:
    """Encoded vectors: bytes or elements [M, W], and scales and zeros [M, groups] if the code has them.

    With outliers, also their indices and their remainders, [M, n].
    """

    codes: Tensor
    scale: Tensor | None = None
    zero: Tensor | None = None
    where: Tensor | None = None
    apart: Tensor | None = None


def _encode(x: Tensor, code: Code | None, groups: int, apart: int, fmt: PageFormat) -> _Side:
    """Encodes vectors [M, D] with one scale per group of channels; without a code, as elements."""
    slot = fmt.slot
    if code is None:
        return _Side(x.to(slot.dtype))
    if apart:
        codes, scale, zero, where, rest = quant.encode_apart(x, code, apart)
        return _Side(quant.pack(codes, code.bits), scale, zero, where, rest)
    codes, *metadata = quant.encode(x.unflatten(-1, (groups, -1)), code, metadata_first=slot.channel_keys)
    return _Side(quant.pack(codes.flatten(-2), code.bits), *(None if m is None else m[..., 0] for m in metadata))


def _write_metadata(pages: Tensor, fmt: PageFormat, kind: str, page: Tensor, slot: Tensor, side: _Side) -> None:
    """Writes the scales, zeros and outliers, where there are any, of keys (kind `k`) or values (`v`)."""
    for name, stored in (("scale", side.scale), ("zero", side.zero), ("where", side.where), ("apart", side.apart)):
        if stored is not None:
            region(pages, fmt, f"{kind}_{name}")[page, :, slot] = stored


_META = ("scale", "zero", "where", "apart")
_Meta = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def _decode_keys(fmt: PageFormat, codes: Tensor, meta: _Meta) -> Tensor:
    """Keys fp32 [X, D, n] from codes [X, W, n] and metadata, None if the code has none.

    Metadata is per token, [X, groups, n], or per channel, [X, n / group, D].
    """
    form, (scale, zero, *apart) = fmt.slot, meta
    if form.keys is None:
        return F.pad(codes.float(), (0, 0, 0, form.head_dim - form.key_channels))
    values = quant.unpack(codes, form.k_bits, dim=1)
    if form.channel_keys:
        shape = values.shape
        values = values.unflatten(2, (-1, form.k_channel_group))
        scale, zero = (None if x is None else x.transpose(1, 2)[..., None] for x in (scale, zero))
        return quant.decode(values, scale, zero, form.keys).reshape(shape)
    values = values.unflatten(1, (form.k_groups, -1))
    scale, zero = (None if x is None else x[:, :, None] for x in (scale, zero))
    return _with_rest(quant.decode(values, scale, zero, form.keys).flatten(1, 2), 1, *apart)


def _decode_values(fmt: PageFormat, codes: Tensor, meta: _Meta) -> Tensor:
    """Values fp32 [X, n, D] from codes [X, n, W] and metadata [X, groups, n], absent as in `_decode_keys`."""
    form = fmt.slot
    if form.values is None:
        return codes.float()
    values = quant.unpack(codes, form.v_bits).unflatten(-1, (form.v_groups, -1))
    scale, zero, where, apart = (None if x is None else x.transpose(1, 2) for x in meta)
    scale, zero = (None if x is None else x[..., None] for x in (scale, zero))
    return _with_rest(quant.decode(values, scale, zero, form.values).flatten(-2), 2, where, apart)


def _with_rest(values: Tensor, dim: int, where: Tensor | None, apart: Tensor | None) -> Tensor:
    """Adds what is kept apart; of slots that were never written, to whatever element."""
    if where is None or apart is None:
        return values
    return values.scatter_add(dim, where.long().clamp(max=values.shape[dim] - 1), apart.float())


def _metadata(pages: Tensor, fmt: PageFormat, side: str, page: Tensor, slot: Tensor | None = None) -> _Meta:
    """Metadata of the codes of pages, or of one slot of each; None where the format has none."""
    views = [region(pages, fmt, f"{side}_{n}") if fmt.regions[f"{side}_{n}"][1] else None for n in _META]
    if slot is None:
        scale, zero, where, apart = (None if view is None else view[page] for view in views)
    else:
        scale, zero, where, apart = (None if view is None else view[page, :, slot][..., None] for view in views)
    return scale, zero, where, apart


def read_pages(pages: Tensor, fmt: PageFormat, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Dequantises whole pages, int64 [X] page ids: keys fp32 [X, D, T] and values fp32 [X, T, D].

    Keys are transposed, as in the page. Slots never written are arbitrary, NaN included.
    """
    keys = _decode_keys(fmt, region(pages, fmt, "k_codes")[ids], _metadata(pages, fmt, "k", ids))
    if fmt.slot.keys_only:
        return keys, keys.transpose(1, 2)
    return keys, _decode_values(fmt, region(pages, fmt, "v_codes")[ids], _metadata(pages, fmt, "v", ids))
