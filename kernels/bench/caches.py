"""Paged caches to time: filled by the backend's own quantise-and-write, copied about in memory, and checked."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvbench.kernels import memory
from kvbench.kernels.backend import REFERENCE, Backend
from kvbench.kernels.format import PageFormat, SlotFormat, choose_page_bytes
from kvbench.kernels.operands import Channels, InOrder, Reduce, Ring, TierPages
from kvbench.kernels.reference.attention import reduce_group

ROPE_BASE = 10000.0  # of the rotary frequencies, where keys are turned
KIVI_GROUP = 32  # tokens per key scale and channels per value scale, as KIVI's authors set them
_PLAIN = re.compile(r"K(1|2|3|4|8|16)V(1|2|3|4|8|16)")
# Formats of serving engines, as policy/tiers.py has them: bits and codes of both sides, channels per scale (0: all).
_NAMED: dict[str, tuple[tuple[int, int], str, str, int]] = {
    "FP8TH": ((8, 8), "e4m3_scaled", "e4m3_scaled", 0),
    "INT8TH": ((8, 8), "symmetric", "symmetric", 0),
    "TQ4": ((4, 4), "lloyd", "min_max", 0),
    "TQ3": ((3, 3), "lloyd", "min_max", 0),
    "LLOYD4": ((4, 4), "lloyd", "lloyd", 0),
    "LLOYD3": ((3, 3), "lloyd", "lloyd", 0),
    "NVFP4": ((4, 4), "nvfp4", "nvfp4", 16),
    "NVFP4_4OVER6": ((4, 4), "nvfp4_4over6", "nvfp4_4over6", 16),
    "MXFP4": ((4, 4), "mxfp4", "mxfp4", 32),
    "INT4TH": ((4, 4), "zero_point", "zero_point", 0),
    "E5M2": ((8, 8), "e5m2", "e5m2", 0),
    **{
        name.upper(): ((bits, bits), name, name, 32)
        for name, bits in (("q8_0", 8), ("q5_1", 5), ("q5_0", 5), ("q4_1", 4), ("q4_0", 4), ("iq4_nl", 4))
    },
}


def slot_format(name: str, head_dim: int) -> SlotFormat:
    """Slot format of a name; raises ValueError for an unknown one.

    Names are `K4V2` (scales per token), `KIVI2` (keys per channel), `FP8`, `KVQ4` (KVQuant's: keys per channel and
    before the rotary embedding, with one outlier per vector), and the keys of `_NAMED`.
    """
    more: dict[str, Any]
    if match := _PLAIN.fullmatch(name):
        bits, more = (int(match[1]), int(match[2])), {}
    elif match := re.fullmatch("KIVI([24])", name):
        bits = (int(match[1]),) * 2
        more = {"k_channel_group": KIVI_GROUP, "v_groups": head_dim // KIVI_GROUP}
    elif match := re.fullmatch("KVQ([234])", name):
        bits = (int(match[1]),) * 2
        more = {"k_code": "book_channels", "v_code": "book", "k_apart": 1, "v_apart": 1}
    elif name == "FP8":
        bits, more = (8, 8), {"fp8": True}
    elif name in _NAMED:
        bits, keys, values, size = _NAMED[name]
        groups = head_dim // size if size else 1
        more = {"k_code": keys, "v_code": values, "k_groups": groups, "v_groups": groups}
    else:
        raise ValueError(
            f"formats={name} does not exist; choose KaVb with a and b among 1, 2, 3, 4, 8, 16 (like K4V2), KIVI2, "
            f"KIVI4, KVQ2, KVQ3, KVQ4, FP8, {', '.join(_NAMED)}, or two of them joined by + (half of the tokens each)"
        )
    return SlotFormat(head_dim=head_dim, k_bits=bits[0], v_bits=bits[1], **more)


@dataclass
class PagedCaches:
    """Equal caches in several buffers of one pool, so that no call finds its pages in a CPU or GPU cache.

    Pages are uint8 [P, page_bytes]; then the tiers of each buffer, its residual buffers (or None), and the bytes that
    attention reads: of all lists, and per token and KV head.
    """

    pages: Tensor
    buffers: list[list[TierPages]]
    rings: list[Ring | None]
    read_bytes: int
    token_bytes: float


@dataclass(frozen=True)
class Layout:
    """Layout of a cache's tokens: for each format of a name the tokens of a list that it holds, and its pages."""

    formats: list[PageFormat]
    counts: list[int]
    widths: list[int]

    @property
    def list_pages(self) -> int:
        return sum(self.widths)

    @property
    def page_bytes(self) -> int:
        return self.formats[0].page_bytes

    @property
    def token_bytes(self) -> float:
        """Bytes that attention reads per token and KV head."""
        read = sum(slot_read_bytes(f.slot) * n for f, n in zip(self.formats, self.counts, strict=True))
        return read / sum(self.counts)


def lay_out(
    name: str, length: int, head_dim: int, device: str, kind: torch.dtype = torch.float16, page_slots: int = 0
) -> Layout:
    """Layout of lists of `length` tokens in a format of `slot_format`, with the pages that a run on this device has.

    Elements of 16 bits have the type `kind`; of `A+B` the first half of the tokens is in A; `page_slots`, unless 0, is
    the slots per page of the largest format. Raises ValueError for an unknown format, or a length that does not fill
    whole key groups.
    """
    slots = [slot_format(part, head_dim) for part in name.split("+")]
    slots = [replace(slot, dtype=kind) if 16 in (slot.k_bits, slot.v_bits) else slot for slot in slots]
    size = choose_page_bytes(slots, tiled=device == "cuda")
    if page_slots:
        size = -(-round(max(slot.slot_bytes for slot in slots) * page_slots) // 16) * 16
    formats = [PageFormat(slot, size) for slot in slots]
    bounds = [length * i // len(slots) for i in range(len(slots) + 1)]
    counts = [b - a for a, b in zip(bounds, bounds[1:], strict=False)]
    for fmt, count in zip(formats, counts, strict=True):
        if count % fmt.slot.group_tokens:
            raise ValueError(f"{name}: {count} tokens are no multiple of its key group {fmt.slot.group_tokens}")
    widths = [-(-count // fmt.tokens_per_page) for fmt, count in zip(formats, counts, strict=True)]
    return Layout(formats, counts, widths)


def slot_read_bytes(slot: SlotFormat) -> float:
    """Bytes that attention reads of one slot: codes and their metadata, no tracked fields."""
    return slot.slot_bytes - slot.track_bytes


def build_caches(
    name: str,
    k: Tensor,
    v: Tensor,
    backend: Backend,
    *,
    num_buffers: int,
    seed: int,
    kind: torch.dtype = torch.float16,
    ring_tokens: int = 0,
    held: Tensor | None = None,
    page_slots: int = 0,
) -> PagedCaches:
    """Quantises keys and values fp32 [S, H, n, D] into pages once, and copies those pages to all buffers.

    Page ids are shuffled by `seed`.

    Args:
        name: As `lay_out` takes it, with `kind` and `page_slots`; raises what that does.
        ring_tokens: Newest tokens of each list that lie in a residual buffer of `kind`, which is full; of one tier.
        held: int64 [S, H] tokens of each list, in whole groups of each tier; None = all.

    Raises:
        ValueError: A residual buffer before two tiers.
    """
    if ring_tokens and "+" in name:
        raise ValueError(f"{name}: a residual buffer is in front of one tier; leave rings out, or name one format")
    sequences, heads, length, dim = k.shape
    ring, lists = None, sequences * heads
    if ring_tokens:
        length -= ring_tokens
        ring = [_in_ring(x[:, :, length:].to(kind), length, num_buffers) for x in (k, v)]
    layout = lay_out(name, length, dim, k.device.type, kind, page_slots)
    formats, counts, widths, size = layout.formats, layout.counts, layout.widths, layout.page_bytes
    per_buffer = sequences * heads * layout.list_pages
    pages = memory.empty(num_buffers * per_buffer, size, dtype=torch.uint8, device=k.device).zero_()
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randperm(len(pages), generator=generator).to(k.device).view(num_buffers, sequences, heads, -1)
    split = list(ids.split(widths, -1))
    key_parts = []
    begin = 0
    for fmt, mine, count in zip(formats, split, counts, strict=True):
        end = begin + count
        keys, channels, rotation = _as_stored(fmt, k[:, :, begin:end], begin)
        key_parts.append((rotation, channels))
        for index in range(sequences):
            _write(backend, pages, fmt, mine[0, index], keys[index], v[index, :, begin:end])
        begin = end
    for index in range(1, num_buffers):
        pages[ids[index].flatten()] = pages[ids[0].flatten()]
    in_tier = [torch.full((sequences, heads), count, dtype=torch.int64, device=k.device) for count in counts]
    if held is not None:
        in_tier = [held.to(k.device) * count // length for count in counts]
    tiers = list(zip(formats, split, in_tier, key_parts, strict=True))
    buffers = [
        [TierPages(f, ids[i].contiguous(), n, n, *more) for f, ids, n, more in tiers] for i in range(num_buffers)
    ]
    read = sum(slot_read_bytes(f.slot) * int(n.sum()) for f, n in zip(formats, in_tier, strict=True))
    tokens = sum(int(n.sum()) for n in in_tier) + lists * ring_tokens
    rings: list[Ring | None] = [None] * num_buffers
    if ring is not None:
        read += lists * ring_tokens * 2 * dim * kind.itemsize
        total = in_tier[0] + ring_tokens
        rings = [Ring(keys, values, total) for keys, values in zip(*ring, strict=True)]
    return PagedCaches(pages, buffers, rings, round(read), read / tokens)


def _in_ring(newest: Tensor, first: int, num_buffers: int) -> list[Tensor]:
    """Copies of a full residual buffer [S, H, R, D] whose oldest token is number `first` of its list."""
    count = newest.shape[2]
    buffer = newest.roll(first % count, 2)
    return [buffer.clone() for _ in range(num_buffers)]


def _as_stored(fmt: PageFormat, k: Tensor, begin: int) -> tuple[Tensor, Channels | None, InOrder | None]:
    """Keys [S, H, n, D] as pages store them, the data of their channels, and their rotation on reading.

    Keys whose scales lie outside the pages are levels of tokens from `begin` on, without a rotary position.
    """
    if fmt.slot.k_code != "book_channels":
        return k, None, None
    zero, most = k.amin((0, 2)), k.amax((0, 2))
    scale = (most - zero) / 255
    frequencies = ROPE_BASE ** (-torch.arange(0, k.shape[-1], 2, device=k.device) / k.shape[-1])
    first = torch.full((len(k),), begin, device=k.device)
    return (k - zero[:, None]) / scale[:, None], Channels(scale, zero), InOrder(first, frequencies)


def _write(backend: Backend, pages: Tensor, fmt: PageFormat, ids: Tensor, k: Tensor, v: Tensor) -> None:
    """One sequence and tier: ids int64 [H, m], k and v [H, n, D]."""
    heads, count, _ = k.shape
    token = torch.arange(count, device=k.device).repeat(heads)
    head = torch.arange(heads, device=k.device).repeat_interleave(count)
    page, slot = ids[head, token // fmt.tokens_per_page], token % fmt.tokens_per_page
    backend.write_keys(pages, fmt, page, slot, k.flatten(0, 1))
    backend.write_values(pages, fmt, page, slot, v.flatten(0, 1))


def exact_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, live: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Decode attention of one sequence in fp64: q [Hq, D] over the keys and values [H, n, D] marked in `live`.

    `live` is bool [H, n]. Returns out [Hq, D] and probabilities [H, G, n].
    """
    grouped = q.double().view(len(k), -1, q.shape[-1])
    logits = torch.matmul(grouped, k.double().transpose(1, 2)) * scale
    if live is not None:
        logits.masked_fill_(~live[:, None], -torch.inf)
    prob = torch.softmax(logits, -1)
    return torch.matmul(prob, v.double()).flatten(0, 1), prob


def dense_error(outputs: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float) -> float:
    """Largest error of attention [S, Hq, D] over keys and values [S, H, n, D] that are exact."""
    rows = zip(outputs, q, k, v, strict=True)
    return worst([relative_error(row, exact_attention(a, b, c, scale)[0]) for row, a, b, c in rows])


Call = Callable[[int], tuple[Tensor, Tensor, list[Tensor]]]  # of a buffer: as `Backend.paged_decode` returns it


def paged_error(
    backend: Backend,
    caches: PagedCaches,
    q: Tensor,
    scale: float,
    group: Reduce | None,
    buffer: int,
    call: Call | None = None,
) -> float:
    """Largest error of a backend's paged attention (and scores) relative to the largest exact element.

    The exact attention is over the reference's dequantisation of the pages.

    Args:
        call: The compared operation; None = the backend's `paged_decode`.
    """
    tiers, ring = caches.buffers[buffer], caches.rings[buffer]
    if call is None:
        out, _, scores = backend.paged_decode(q, caches.pages, tiers, ring, scale, group=group)
    else:
        out, _, scores = call(buffer)
    errors = []
    for index in range(len(q)):
        sequence_tiers, one = [_of_sequence(tier, index) for tier in tiers], slice(index, index + 1)
        newest = None if ring is None else Ring(ring.k[one], ring.v[one], ring.num_tokens[one])
        k, v, live = (x[0] for x in REFERENCE.gather_dense(caches.pages, sequence_tiers, newest))
        exact, prob = exact_attention(q[index], k, v, scale, live)
        errors.append(relative_error(out[index], exact))
        if group:
            got, wanted = torch.cat([s[index] for s in scores], -1), reduce_group(prob, group, 1)
            width = min(got.shape[-1], wanted.shape[-1])  # a page's slots after the last token, or the ring's tokens
            paged = live[:, :width]
            if ring is not None:
                paged = torch.arange(width, device=k.device) < tiers[0].num_k[index, :, None]
            got, wanted = (x[:, :width].where(paged, 0.0) for x in (got, wanted))
            errors.append(relative_error(got, wanted))
    return worst(errors)


def _of_sequence(tier: TierPages, index: int) -> TierPages:
    """A tier of one sequence."""
    one, turn = slice(index, index + 1), tier.rotation
    rotation = InOrder(turn.first[one], turn.frequencies) if isinstance(turn, InOrder) else None
    return TierPages(tier.fmt, tier.ids[one], tier.num_k[one], tier.num_v[one], rotation, tier.channels)


def relative_error(got: Tensor, exact: Tensor) -> float:
    """Largest difference, as a share of the largest exact element; NaN when anything is NaN."""
    return float((got.double() - exact).abs().max() / exact.abs().max())


def worst(errors: list[float]) -> float:
    """The largest error; NaN when one is NaN, which Python's max may lose."""
    return float(torch.tensor(errors, dtype=torch.float64).max())


def num_buffers(buffer_bytes: float, working_set_mb: int, most: int) -> int:
    """Buffers that make up the working set, at least one."""
    return max(1, min(most, int(-(-working_set_mb * 1e6 // max(1, buffer_bytes)))))
