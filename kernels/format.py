"""Page formats: how the slots of one precision tier lie in a page of bytes.

A page is a run of `page_bytes` bytes that holds the slots of one (sequence, layer, KV head) and one tier. Its regions,
in order (T slots of D channels):

- K codes [D * k_bits / 8, T]: transposed, planar: byte w of a slot holds channels w, w + W, w + 2W, ... (W bytes); of 3
  bits the lower two come first, and after them the third; of 5 bits the lower four, and the fifth; of keys with fewer
  channels than values, the first ones
- V codes [T, D * v_bits / 8]: slot after slot, planar too
- K scale, K zero: fp16 [groups, T] on axis token, [T / group, D] on axis channel; a scale is a byte where `codes` says
- V scale, V zero: fp16 [groups, T], with the same exception
- K apart, V apart: fp16 [n, T], what n elements of each vector have beyond what their codes stand for; K where, V
  where: bytes [n, T], which elements these are
- score: fp32 [T], when tracked
- pos: int32 [T], when tracked
- K low, K high: elements [D], the smallest and largest value per key channel of the page, where steps choose pages by
  them

16-bit sides hold the elements themselves (two bytes, fp16 or bf16), `native` fp32 models four. T is a multiple of 8, so
every region starts on a multiple of 16 bytes without padding (of 8, after an odd number of elements kept apart).
Scores and positions lie inside the page, after everything that attention reads. Side arrays sized for the tier with
the most slots per page would leave part of them unused in the others: 48 of 112 slots in a high page of DiffKV at D=64
(7,168 B; K8V4 holds 64 slots, K4V2 112).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import lcm

import torch

from kvbench.kernels.codes import BITS, SCALE_BYTES, Code, code_of

APART_BYTES = 3  # of an element whose rest is kept apart: 16 bits, and which one it is
TILE_SLOTS = 64  # that a GPU's kernels read at a time, at most
TOKEN_QUANTUM = 8  # slots per page are a multiple of this: 8 slots x 2 bytes = one 16-byte lane of metadata


@dataclass(frozen=True)
class SlotFormat:
    """The bytes of one slot, independent of the page size.

    Args:
        head_dim: Channels D of a key and of a value.
        k_bits: 1, 2, 3, 4, 5, 8 (codes) or 16, 32 (elements of `dtype`).
        v_bits: As `k_bits`, for values.
        k_channel_group: Tokens that share a per-channel key scale; 0 = scales per token.
        k_groups: Scales per key vector when per token.
        v_groups: Scales per value vector.
        symmetric: Where no code is named: no zero points are stored.
        fp8: Where no code is named: 8-bit sides are e4m3 floats without metadata.
        k_code: Code of keys, a name of `codes`; empty = `min_max`, unless `symmetric` or `fp8` says otherwise.
        v_code: Code of values; see `k_code`.
        k_table: Level of each code of `book` keys; empty = equally far apart.
        v_table: As `k_table`, for values.
        k_apart: Of keys of a calibrated table in one group: elements of each vector whose rest is kept apart, in 16
            bits.
        v_apart: As `k_apart`, for values.
        dtype: Element type of 16- and 32-bit sides.
        track: Tracked fields, a subset of ("score", "pos").
        k_channels: Channels that are stored of a key, the first ones; the others read as 0. Of elements only; 0 = all.
        keys_only: The keys are the values, too, and nothing else is stored (latent attention).
    """

    head_dim: int
    k_bits: int
    v_bits: int
    k_channel_group: int = 0
    k_groups: int = 1
    v_groups: int = 1
    symmetric: bool = False
    fp8: bool = False
    k_code: str = ""
    v_code: str = ""
    k_table: tuple[int, ...] = ()
    v_table: tuple[int, ...] = ()
    k_apart: int = 0
    v_apart: int = 0
    dtype: torch.dtype = torch.float16
    track: tuple[str, ...] = ()
    k_channels: int = 0
    keys_only: bool = False

    def __post_init__(self) -> None:
        for side, bits in (("k_bits", self.k_bits), ("v_bits", self.v_bits)):
            if bits not in (allowed := (*BITS, 16, 32)):
                raise ValueError(f"{side}={bits} is not one of {', '.join(map(str, allowed))}")
            if bits >= 16 and bits != self.dtype.itemsize * 8:
                raise ValueError(
                    f"{side}={bits} does not match dtype={self.dtype}, which has {self.dtype.itemsize * 8} bits"
                )
            if self.head_dim * bits % 8:
                raise ValueError(f"head_dim={self.head_dim} x {side}={bits} is not a whole number of bytes")
        if not 0 <= self.k_channels <= self.head_dim:
            raise ValueError(f"k_channels={self.k_channels} must be 0 (all) to head_dim={self.head_dim}")
        if self.k_channels and (self.k_bits < 16 or self.keys_only):
            but = "keys that are values, too" if self.keys_only else f"k_bits={self.k_bits}"
            raise ValueError(f"k_channels={self.k_channels} goes with keys of 16 bits, not with {but}")
        for name, groups in (("k_groups", self.k_groups), ("v_groups", self.v_groups)):
            if groups < 1 or self.head_dim % groups:
                raise ValueError(
                    f"{name}={groups} does not divide head_dim={self.head_dim}; choose a group size that divides the "
                    "head dim"
                )
        if self.k_channel_group % TOKEN_QUANTUM:
            raise ValueError(f"k_channel_group={self.k_channel_group} must be a multiple of {TOKEN_QUANTUM} tokens")
        for side, apart, code, groups in (
            ("k", self.k_apart, self.keys, self.k_groups),
            ("v", self.v_apart, self.values, self.v_groups),
        ):
            levels = code is not None and code.is_book and groups == 1
            if apart and not (levels and 0 < apart < self.head_dim <= 256):
                raise ValueError(
                    f"{side}_apart={apart} goes with codes of calibrated tables in one group, and fewer elements than "
                    f"the at most 256 of a vector, of which there are {self.head_dim}; set it to 0"
                )
        keys, _ = self.keys, self.values  # a code that does not exist is refused here
        if self.k_channel_group and keys is not None and keys.scale != "none" and not keys.is_plain:
            raise ValueError(
                f"k_channel_group={self.k_channel_group} goes with min_max and symmetric keys only, not with "
                f"{keys.name}; set it to 0"
            )

    def _code(self, name: str, bits: int, table: tuple[int, ...]) -> Code | None:
        if bits >= 16:
            return None
        plain = "e4m3" if self.fp8 and bits == 8 else "symmetric" if self.symmetric else "min_max"
        return code_of(name or plain, bits, table)

    @cached_property
    def keys(self) -> Code | None:
        """Code of keys; None = elements of `dtype`."""
        return self._code(self.k_code, self.k_bits, self.k_table)

    @cached_property
    def values(self) -> Code | None:
        """Code of values; None = elements of `dtype`, or none are stored."""
        return None if self.keys_only else self._code(self.v_code, self.v_bits, self.v_table)

    @property
    def key_channels(self) -> int:
        """Channels that are stored of a key."""
        return self.k_channels or self.head_dim

    @property
    def k_coded(self) -> bool:
        """Keys have scales."""
        return self.keys is not None and self.keys.scale != "none"

    @property
    def v_coded(self) -> bool:
        """Values have scales."""
        return self.values is not None and self.values.scale != "none"

    @property
    def channel_keys(self) -> bool:
        """Keys share scales over groups of tokens; slots are immutable."""
        return self.k_coded and self.k_channel_group > 0

    @property
    def group_tokens(self) -> int:
        """Slots that must be written together on the key side."""
        return self.k_channel_group if self.channel_keys else 1

    @property
    def k_code_bytes(self) -> int:
        """Key bytes of one slot without metadata."""
        return self.key_channels * self.k_bits // 8

    @property
    def v_code_bytes(self) -> int:
        """Value bytes of one slot without metadata."""
        return 0 if self.keys_only else self.head_dim * self.v_bits // 8

    @property
    def k_meta_bytes(self) -> float:
        """Key scale, zero and outlier bytes per slot (a fraction when channel groups are longer than the head dim)."""
        scales = self.head_dim / self.k_channel_group if self.channel_keys else self.k_groups
        return 0.0 if self.keys is None else float(self.keys.scale_bytes * scales + APART_BYTES * self.k_apart)

    @property
    def v_meta_bytes(self) -> float:
        """Value scale, zero and outlier bytes per slot."""
        return (
            0.0 if self.values is None else float(self.values.scale_bytes * self.v_groups + APART_BYTES * self.v_apart)
        )

    @property
    def track_bytes(self) -> int:
        """Score and position bytes per slot."""
        return 4 * len(self.track)

    @property
    def slot_bytes(self) -> float:
        """All bytes of one slot."""
        return self.k_code_bytes + self.v_code_bytes + self.k_meta_bytes + self.v_meta_bytes + self.track_bytes

    @property
    def token_quantum(self) -> int:
        """Slots per page are a multiple of this."""
        return lcm(TOKEN_QUANTUM, self.k_channel_group) if self.channel_keys else TOKEN_QUANTUM

    @property
    def quantum_bytes(self) -> int:
        """Bytes of one quantum of slots; whole, although a slot's share of a channel scale may not be."""
        return round(self.slot_bytes * self.token_quantum)


@dataclass(frozen=True)
class PageFormat:
    """A slot format laid out in pages of a given size.

    Args:
        slot: The slot format.
        page_bytes: Page size, a multiple of 16 that holds at least one quantum of slots.
        bounds: Every page carries the bounds of its keys per channel.

    Raises:
        ValueError: The page is too small or not a multiple of 16.
    """

    slot: SlotFormat
    page_bytes: int
    bounds: bool = False

    def __post_init__(self) -> None:
        if self.page_bytes % 16:
            raise ValueError(f"page_bytes={self.page_bytes} must be a multiple of 16")
        if self.tokens_per_page < 1:
            need = self.slot.quantum_bytes + self.bounds_bytes
            raise ValueError(
                f"page_bytes={self.page_bytes} is below one group of {self.slot.token_quantum} slots ({need} B); "
                f"set store.page_bytes={-(-need // 16) * 16} or more, or auto"
            )

    @property
    def bounds_bytes(self) -> int:
        """Bytes of the bounds of one page."""
        return 2 * self.slot.head_dim * self.slot.dtype.itemsize * self.bounds

    @cached_property
    def tokens_per_page(self) -> int:
        """Slots T per page."""
        return (self.page_bytes - self.bounds_bytes) // self.slot.quantum_bytes * self.slot.token_quantum

    @cached_property
    def regions(self) -> dict[str, tuple[int, int]]:
        """Region name -> (offset, length) in bytes; absent regions have length 0."""
        slot, tokens = self.slot, self.tokens_per_page
        k_scales = tokens // slot.k_channel_group * slot.head_dim if slot.channel_keys else slot.k_groups * tokens
        lengths = {"k_codes": slot.k_code_bytes * tokens, "v_codes": slot.v_code_bytes * tokens}
        for side, code, scales in (("k", slot.keys, k_scales), ("v", slot.values, slot.v_groups * tokens)):
            lengths[f"{side}_scale"] = 0 if code is None else SCALE_BYTES[code.scale] * scales
            lengths[f"{side}_zero"] = 2 * scales * (code is not None and code.zero)
        for side, apart in (("k", slot.k_apart), ("v", slot.v_apart)):
            lengths |= {f"{side}_apart": 2 * apart * tokens, f"{side}_where": apart * tokens}
        lengths |= {"score": 4 * tokens * ("score" in slot.track), "pos": 4 * tokens * ("pos" in slot.track)}
        if self.bounds:
            lengths |= dict.fromkeys(("k_low", "k_high"), self.bounds_bytes // 2)
        table, offset = {}, 0
        for name, length in lengths.items():
            table[name] = (offset, length)
            offset += length
        return table

    @property
    def used_bytes(self) -> int:
        """Bytes of a full page that hold something."""
        return sum(length for _, length in self.regions.values())

    @property
    def fill(self) -> float:
        """Share of a full page that holds something, in (0, 1]."""
        return self.used_bytes / self.page_bytes


def choose_page_bytes(slots: Sequence[SlotFormat], *, tiled: bool = False) -> int:
    """The page size that wastes least in the worst of the given formats; the smallest such size.

    Pages between 64 and 132 bytes per channel are searched (4,096-8,448 B at D=64, 8,192-16,896 B at D=128): small
    enough that half a page of slack per list stays cheap, large enough for long runs of contiguous bytes. DiffKV sizes
    its pages by the same search.

    Args:
        slots: The formats of all tiers, one head dim.
        tiled: Take only sizes at which every format has whole tiles of 64 slots (whole key groups, where keys share
            scales over tokens), if there are such: the rest of a page after its last tile takes another code path.

    Returns:
        Page size in bytes, a multiple of 16.

    Source: DiffKV artefact, config.py (search of 800-8000 B over its two formats); bounds from kvbench's own
        measurements.
    """
    return _choose_page_bytes(tuple(slots), tiled)


def _is_tiled(fmt: PageFormat) -> bool:
    """Return True if the slots of a page fill whole tiles."""
    return fmt.tokens_per_page % (fmt.slot.group_tokens if fmt.slot.channel_keys else TILE_SLOTS) == 0


@lru_cache(maxsize=256)  # counting bytes makes many stores of the same formats
def _choose_page_bytes(slots: tuple[SlotFormat, ...], tiled: bool) -> int:
    head_dim = slots[0].head_dim
    low, high = 64 * head_dim, 132 * head_dim
    low = max([low, *(-(-s.quantum_bytes // 16) * 16 for s in slots)])
    high = max(high, low)
    sizes: Sequence[int] = range(-(-low // 16) * 16, high + 1, 16)
    if tiled:
        sizes = [size for size in sizes if all(_is_tiled(PageFormat(s, size)) for s in slots)] or sizes
    return max(sizes, key=lambda size: (round(min(PageFormat(s, size).fill for s in slots), 9), -size))
