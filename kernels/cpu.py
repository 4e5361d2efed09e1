"""CPU backend: the C++ of csrc/, compiled on first use by the system's compiler and called through ctypes.

No torch headers, no Python headers, no build system: plain C functions that take pointers. Operations that are not
here are the torch reference's.
"""

import ctypes
import warnings
from functools import cache
from types import SimpleNamespace

import torch
from torch import Tensor

from kvbench.kernels import torch_attention
from kvbench.kernels.build import build_library
from kvbench.kernels.format import PageFormat
from kvbench.kernels.torch_attention import Reduce, Ring, TierPages

SOURCES = ("paged.cpp", "plan.h", "sides.h", "simd.h")

_REDUCE = {None: 0, "sum": 1, "mean": 2, "max": 3}
_CODE_KINDS = {1: 0, 2: 1, 4: 2, 8: 3}
_ELEMENT_KINDS = {torch.float16: 4, torch.bfloat16: 5, torch.float32: 6}
_FP8_KIND = 7


def _struct(name: str, fields: str) -> type[ctypes.Structure]:
    """A C struct from `i a b p c ..`: i = int32, l = int64, p = pointer, f = float, each for the names after it."""
    kinds = {"i": ctypes.c_int32, "l": ctypes.c_int64, "p": ctypes.c_void_p, "f": ctypes.c_float}
    table, kind = [], None
    for word in fields.split():
        if word in kinds:
            kind = kinds[word]
        else:
            table.append((word, kind))
    return type(name, (ctypes.Structure,), {"_fields_": table})


# These three mirror the structs of the same names in csrc/plan.h.
_Tier = _struct(
    "Tier",
    "i slots_per_page num_columns k_kind v_kind k_channel_group k_groups v_groups symmetric "
    "l k_codes v_codes k_scale k_zero v_scale v_zero p ids num_k num_v scores",
)
_Ring = _struct(
    "Ring", "p k v num_tokens l k_row_stride k_head_stride v_row_stride v_head_stride i k_length v_length kind"
)
_Call = _struct(
    "Call",
    "p q pages tiers ring out lse l page_bytes num_pages "
    "i num_seq num_heads group_size head_dim num_tiers power reduce num_threads f scale",
)


@cache
def load() -> ctypes.CDLL:
    """The compiled library, built when no build of the same source, flags, compiler and CPU is cached.

    Raises:
        BuildError: No compiler, or it failed; with the reason and a remedy.
    """
    library = ctypes.CDLL(str(build_library("paged", SOURCES)))
    library.kvb_paged_decode.argtypes = [ctypes.c_void_p]
    library.kvb_add_scores.argtypes = [
        ctypes.c_void_p, ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_long, ctypes.c_long,
    ]  # fmt: skip
    library.kvb_path.restype = ctypes.c_char_p
    return library


@cache
def _kind(fmt: PageFormat, side: str) -> int:
    slot = fmt.slot
    bits, is_coded = (slot.k_bits, slot.k_coded) if side == "k" else (slot.v_bits, slot.v_coded)
    return _CODE_KINDS[bits] if is_coded else _FP8_KIND if bits == 8 else _ELEMENT_KINDS[slot.dtype]


@cache
def _format_fields(fmt: PageFormat) -> ctypes.Structure:
    """A struct with what the C++ side must know of a format, to be copied: filling one field by field takes longer."""
    slot = fmt.slot
    offsets = {name: fmt.regions[name][0] for name in ("k_codes", "v_codes", "k_scale", "k_zero", "v_scale", "v_zero")}
    return _Tier(
        slots_per_page=fmt.tokens_per_page,
        k_kind=_kind(fmt, "k"),
        v_kind=_kind(fmt, "v"),
        k_channel_group=slot.k_channel_group if slot.channel_keys else 0,
        k_groups=slot.k_groups,
        v_groups=slot.v_groups,
        symmetric=int(slot.symmetric),
        **offsets,
    )


def _takes(q: Tensor, tiers: list[TierPages], ring: Ring | None) -> bool:
    """Whether the C++ code covers a call; the reference takes the others."""
    if q.device.type != "cpu" or q.shape[-1] > load().kvb_max_channels():
        return False
    if any(tier.rotation is not None for tier in tiers) or (ring is not None and len(tiers) > 1):
        return False
    return ring is None or ring.k.dtype in _ELEMENT_KINDS


def paged_decode(
    q: Tensor, pages: Tensor, tiers: list[TierPages], ring: Ring | None, scale: float, *, power: int = 1,
    group: Reduce | None = None,
) -> tuple[Tensor, Tensor, list[Tensor]]:  # fmt: skip
    """Attention of one query token per sequence over all tiers and the residual buffer, dequantising as it goes.

    Arguments and results are those of `torch_attention.paged_decode`, which it calls for keys that must be rotated.
    Results do not depend on the number of threads (torch.get_num_threads() are used) nor on the other sequences of
    the call.

    Raises:
        MemoryError: No room for the partial results.

    Source: kvbench's own; folding the scales into the products as in KIVI's and DiffKV's kernels.
    """
    if not _takes(q, tiers, ring):
        return torch_attention.paged_decode(q, pages, tiers, ring, scale, power=power, group=group)
    num_seq, num_q_heads, head_dim = q.shape
    heads = tiers[0].ids.shape[1]
    q = q.float().contiguous()
    pages = pages.contiguous()
    out = torch.empty_like(q)
    lse = torch.empty(num_seq, num_q_heads)
    keep, scores = [], []
    table = (_Tier * len(tiers))()
    for entry, tier in zip(table, tiers, strict=True):
        if group:
            scores.append(torch.empty(num_seq, heads, tier.ids.shape[-1] * tier.fmt.tokens_per_page))
        _fill_tier(entry, tier, scores[-1] if group else None, keep)
    call = _Call(
        q=q.data_ptr(), pages=pages.data_ptr(), tiers=ctypes.addressof(table), out=out.data_ptr(), lse=lse.data_ptr(),
        page_bytes=pages.shape[1], num_pages=pages.shape[0], num_seq=num_seq, num_heads=heads,
        group_size=num_q_heads // heads, head_dim=head_dim, num_tiers=len(tiers), power=power, reduce=_REDUCE[group],
        num_threads=torch.get_num_threads(), scale=scale,
    )  # fmt: skip
    if ring is not None:
        entry = _ring_entry(ring, keep)
        call.ring = ctypes.addressof(entry)
    status = load().kvb_paged_decode(ctypes.addressof(call))
    _check(status)
    return out, lse, scores


def add_scores(pages: Tensor, tier: TierPages, scores: Tensor) -> None:
    """Adds fp32 [S, H, m * T] to the tracked scores of a tier's live slots, in place."""
    if not pages.is_contiguous():  # a copy would take the sums and be thrown away
        torch_attention.add_scores(pages, tier, scores)
        return
    keep: list[Tensor] = []
    entry = _Tier()
    _fill_tier(entry, tier, scores.float().contiguous(), keep)
    address, offset = ctypes.addressof(entry), tier.fmt.regions["score"][0]
    lists = tier.num_k.numel()
    _check(load().kvb_add_scores(pages.data_ptr(), pages.shape[1], pages.shape[0], address, offset, lists))


def _check(status: int) -> None:
    """Turns the status of a C++ call into an exception."""
    if status == 1:
        raise MemoryError("no memory for the partial results of attention")
    if status:
        raise AssertionError("a page table names a page that the pool does not have")


def _fill_tier(entry: ctypes.Structure, tier: TierPages, scores: Tensor | None, keep: list[Tensor]) -> None:
    """Fills a struct; `keep` takes the tensors whose addresses it carries, and must outlive it."""
    held = [x.long().contiguous() for x in (tier.ids, tier.num_k, tier.num_v)]
    keep += held
    ctypes.memmove(ctypes.addressof(entry), ctypes.addressof(_format_fields(tier.fmt)), ctypes.sizeof(_Tier))
    entry.num_columns = tier.ids.shape[-1]
    entry.ids, entry.num_k, entry.num_v = (x.data_ptr() for x in held)
    if scores is not None:
        keep.append(scores)
        entry.scores = scores.data_ptr()


def _ring_entry(ring: Ring, keep: list[Tensor]) -> ctypes.Structure:
    """The residual buffers as a struct; only [R, D] of each list must be contiguous."""
    k, v = (x if x.stride(3) == 1 and x.stride(2) == x.shape[3] else x.contiguous() for x in (ring.k, ring.v))
    num_tokens = ring.num_tokens.long().contiguous()
    keep += [k, v, num_tokens]
    unit = k.element_size()
    return _Ring(
        k=k.data_ptr(), v=v.data_ptr(), num_tokens=num_tokens.data_ptr(), k_row_stride=k.stride(0) * unit,
        k_head_stride=k.stride(1) * unit, v_row_stride=v.stride(0) * unit, v_head_stride=v.stride(1) * unit,
        k_length=k.shape[2], v_length=v.shape[2], kind=_ELEMENT_KINDS[k.dtype],
    )  # fmt: skip


def backend(reference: SimpleNamespace) -> SimpleNamespace:
    """The backend's operations; those without C++ are the reference's.

    Raises:
        BuildError: See `load`.
    """
    load()
    own = {"name": "cpu", "is_reference": False, "paged_decode": paged_decode, "add_scores": add_scores}
    return SimpleNamespace(**{**vars(reference), **own})


@cache
def warn_absent(reason: str) -> None:
    """Says once per reason that the reference stands in."""
    warnings.warn(
        f"no compiled CPU kernels: {reason}; going on with backend=torch, the plain reference, which is much slower",
        stacklevel=3,
    )
