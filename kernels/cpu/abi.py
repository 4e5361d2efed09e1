"""The compiled library of the CPU backend: which build is loaded, and the structs that its functions take."""

import ctypes
import math
import os
from collections.abc import Sequence
from functools import cache, lru_cache

import torch
from torch import Tensor

from kvbench.kernels.codes import Code, Fit, Rounding, Scale
from kvbench.kernels.cpu.build import SOURCE_DIR, load_library
from kvbench.kernels.format import PageFormat
from kvbench.kernels.operands import InOrder, Reduce, Ring, Softmax, StepRing, TierPages

# Translation units, compiled in parallel, and their headers.
UNITS = tuple(sorted(file.name for file in SOURCE_DIR.glob("*.cpp") if file.name != "isa.cpp"))
SOURCES = (*UNITS, *sorted(header.name for header in SOURCE_DIR.glob("*.h")))
ISA_VARIABLE = "KVBENCH_CPU_ISA"

_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")
_AVX512VNNI = (*_AVX512, "-mavx512vbmi", "-mavx512vnni")
_AVX512BF16 = (*_AVX512VNNI, "-mavx512bf16")
# From the least to the most demanding: a CPU that runs one build runs those before it.
ISA_FLAGS = {
    "portable": ("-DKVBENCH_PORTABLE",),
    "avx2": _AVX2,
    "avx512": _AVX512,
    "avx512vnni": _AVX512VNNI,
    "avx512bf16": _AVX512BF16,
    "amx": (*_AVX512BF16, "-mamx-tile", "-mamx-bf16"),
}

# Objects that a struct points at; they must outlive it.
Kept = list[Tensor | ctypes.Structure | ctypes.Array]

# As csrc/plan.h numbers them.
REDUCE_KINDS: dict[Reduce | None, int] = {None: 0, "sum": 1, "mean": 2, "max": 3}
ELEMENT_KINDS = {torch.float16: 4, torch.bfloat16: 5, torch.float32: 6}
_CODE_KINDS: dict[str | int, int] = {1: 0, 2: 1, 4: 2, 5: 11, 8: 3}
_FLOAT_KINDS: dict[str | int, int] = {"e4m3": 7, "e4m3_scaled": 7, "e5m2": 12}
_BOOK_KINDS: dict[str | int, int] = {2: 8, 3: 9, 4: 10}
_KEYS = 13  # of values that are the keys
_SCALES: dict[Scale, int] = {"none": 0, "fp16": 1, "e4m3": 2, "e8m0": 3}
_FITS: dict[tuple[Fit, Rounding], int] = {
    ("largest", "even"): 1,
    ("norm", "even"): 2,
    ("largest", "up"): 4,
    ("range", "up"): 5,
    ("zero_point", "up"): 6,
    ("extreme", "up"): 7,
    ("squares", "up"): 8,
    ("either", "even"): 9,
}
_LEVELS = 3


# These mirror the structs of the same names in csrc/plan.h, reduce.h and step.h.
class CodeStruct(ctypes.Structure):
    """Code of the numbers of one side."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("kind", "groups", "scale", "fit", "zero", "centre", "apart", "unused")),
        ("unit", ctypes.c_double),
        ("deviation", ctypes.c_double),
        ("levels", ctypes.c_float * 16),
        ("table", ctypes.c_uint8 * 16),
    ]


def _struct(name: str, fields: str) -> type[ctypes.Structure]:
    """C struct from `i a b p c ..`: a type letter, then the names of that type.

    i = int32, l = int64, p = pointer, f = float, c = `CodeStruct`.
    """
    kinds = {"i": ctypes.c_int32, "l": ctypes.c_int64, "p": ctypes.c_void_p, "f": ctypes.c_float, "c": CodeStruct}
    table, kind = [], None
    for word in fields.split():
        if word in kinds:
            kind = kinds[word]
        else:
            table.append((word, kind))
    return type(name, (ctypes.Structure,), {"_fields_": table})


TierStruct = _struct(
    "Tier",
    "i slots_per_page num_columns k_channel_group k_channels c k v "
    "l k_codes v_codes k_scale k_zero v_scale v_zero k_apart k_where v_apart v_where score pos "
    "p ids num_k num_v scores cos sin first_cos first_sin channel_scale channel_zero",
)
RingStruct = _struct(
    "Ring",
    "p k v num_tokens rows l k_row_stride k_head_stride v_row_stride v_head_stride i k_length v_length kind num_rows",
)
_CALL_FIELDS = (
    "p q pages tiers ring out lse seen sinks l page_bytes num_pages seq_stride "
    "i num_seq num_heads group_size head_dim num_tiers power reduce num_threads rotated update skip_near f scale cap"
)
CallStruct = _struct("Call", _CALL_FIELDS)
ColumnsStruct = _struct(
    "Columns", "p logits sums sinks l num_heads num_queries width sum_stride skip_near i power below num_threads f cap"
)
SearchStruct = _struct("Search", "p seen floor before exact l first i by num_threads p value slot pos")


class StepStruct(ctypes.Structure):
    """One decode step; see csrc/step.h."""

    _fields_ = [
        ("call", CallStruct),
        *((name, ctypes.c_void_p) for name in ("page", "slot", "old_k", "old_v", "new_k", "new_v")),
        *((name, ctypes.c_int32) for name in ("num_layers", "tier", "flush_first")),
    ]


@cache
def best_isa() -> str:
    """The most demanding build that this CPU runs; a key of `ISA_FLAGS`. Raises a BuildError as `load` does."""
    library = load_library(ctypes.CDLL, "isa", ("isa.cpp",))
    library.kvb_isa.restype = ctypes.c_char_p
    return library.kvb_isa().decode()


def available_isas() -> list[str]:
    """The builds that this CPU runs, the fastest one last."""
    names = list(ISA_FLAGS)
    return names[: names.index(best_isa()) + 1]


def chosen_isa() -> str:
    """The build that KVBENCH_CPU_ISA names, else the fastest one that this CPU runs.

    Raises:
        ValueError: The variable names no build, or one that this CPU does not run.
    """
    wanted = os.environ.get(ISA_VARIABLE) or "auto"
    if wanted == "auto":
        return best_isa()
    if wanted not in ISA_FLAGS:
        raise ValueError(f"{ISA_VARIABLE}={wanted} does not exist; choose auto or one of {', '.join(ISA_FLAGS)}")
    if wanted not in available_isas():
        raise ValueError(f"{ISA_VARIABLE}={wanted} does not run on this CPU; choose {', '.join(available_isas())}")
    return wanted


class Library(ctypes.CDLL):
    """The compiled kernels, with the types of what their functions take; `max_channels` is the largest head dim."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        p, n, i = ctypes.c_void_p, ctypes.c_long, ctypes.c_int
        pages = (p, n, n, p)
        self.max_channels = self.kvb_max_channels()
        self.kvb_path.restype = ctypes.c_char_p
        self.kvb_set_work_per_thread.argtypes = [ctypes.c_double]
        self.kvb_set_work_per_thread.restype = None
        self.kvb_spoil_scratch.argtypes = [i]
        self.kvb_spoil_scratch.restype = None
        self.kvb_paged_decode.argtypes = [p]
        self.kvb_step.argtypes = [p, i, p, p, p, p, ctypes.c_float]
        self.kvb_add_scores.argtypes = [*pages, n, i]
        self.kvb_write.argtypes = [*pages, i, n, p, p, p, n, i]
        self.kvb_read.argtypes = [*pages, n, p, p, p, p, n, i]
        self.kvb_move.argtypes = [*pages, n, p, p, p, p, n, i]
        self.kvb_search.argtypes = [*pages, p, n]
        self.kvb_column_sums.argtypes = [p]
        self.kvb_products.argtypes = [i, p, n, n, p, n, i]
        self.kvb_gated.argtypes = [i, p, n, n, p, i]
        self.kvb_norm.argtypes = [i, p, p, p, n, n, ctypes.c_float, i]
        self.kvb_norm.restype = None


def load() -> Library:
    """The compiled library, built when no build of the same source and flags is cached.

    Raises:
        BuildError: No compiler, it failed, or what it built cannot be loaded; with the reason and a remedy.
        ValueError: KVBENCH_CPU_ISA names no build that runs here.
    """
    return library_for(os.environ.get(ISA_VARIABLE))


@cache
def library_for(_: str | None) -> Library:
    """The library under a value of KVBENCH_CPU_ISA: one per value, so that the variable may change while we run."""
    isa = chosen_isa()
    return load_library(Library, f"paged-{isa}", SOURCES, flags=ISA_FLAGS[isa])


# Messages of csrc/plan.h's Status, except "done" and "no memory".
_REFUSED = {
    2: "a page table names a page that the pool does not have",
    3: "an address names a slot beyond a page, or keys that share scales are not written in whole groups",
    4: "a list holds fewer than no tokens, or more than its table and its residual buffer have room for",
    5: "a sequence names a row that the residual buffers do not have",
    6: "the step has no such layer",
}


def check(status: int) -> None:
    """Turns the status of a C++ call into an exception."""
    if status == 1:
        raise MemoryError("no memory for the partial results of attention")
    if status:
        raise AssertionError(_REFUSED[status])


def _code_struct(fmt: PageFormat, code: Code | None, groups: int, apart: int) -> CodeStruct:
    if code is None:
        return CodeStruct(kind=ELEMENT_KINDS[fmt.slot.dtype], groups=groups)
    in_table = code.magnitudes or code.levels or code.bits == 3
    named = _FLOAT_KINDS if code.is_float else _BOOK_KINDS if in_table else _CODE_KINDS
    kind = named[code.name if code.is_float else code.bits]
    fit = 0 if code.is_plain else _LEVELS if code.is_book else _FITS[code.fit, code.rounding]
    struct = CodeStruct(
        kind=kind,
        groups=groups,
        scale=_SCALES[code.scale],
        fit=fit,
        zero=int(code.zero),
        centre=code.centre,
        apart=apart,
        unit=code.unit,
        deviation=code.deviation,
    )
    for i, level in enumerate(code.table if in_table else ()):
        struct.levels[i] = struct.table[i] = level
    return struct


@cache
def format_struct(fmt: PageFormat) -> ctypes.Structure:
    """Struct of a format for the C++ side, to be copied: filling one field by field takes longer."""
    slot = fmt.slot
    regions = ("codes", "scale", "zero", "apart", "where")
    offsets = {name: fmt.regions[name][0] for name in (f"{side}_{each}" for side in "kv" for each in regions)}
    tracked = {name: fmt.regions[name][0] if name in slot.track else -1 for name in ("score", "pos")}
    values = _code_struct(fmt, slot.values, slot.v_groups, slot.v_apart)
    if slot.keys_only:
        values = CodeStruct(kind=_KEYS, groups=1)
    return TierStruct(
        slots_per_page=fmt.tokens_per_page,
        k_channel_group=slot.k_channel_group if slot.channel_keys else 0,
        k_channels=slot.k_channels,
        k=_code_struct(fmt, slot.keys, slot.k_groups, slot.k_apart),
        v=values,
        **offsets,
        **tracked,
    )


def plain(x: Tensor) -> Tensor:
    """A tensor as fp32 in one plain array; the same one where it is."""
    return x if x.dtype is torch.float32 and x.is_contiguous() else x.float().contiguous()


def _turns(tier: TierPages) -> tuple[Tensor, ...]:
    """Cosine and sine as a kernel reads them: [S, columns, half, slots], as keys lie in a page."""
    slots, turn = tier.fmt.tokens_per_page, tier.rotation
    if isinstance(turn, InOrder):
        return _turns_in_order(turn, tier.ids.shape[-1], slots)
    assert turn is not None, "the caller asks for no others"
    angle = turn.float().unflatten(1, (-1, slots)).transpose(2, 3).contiguous()
    return angle.cos(), angle.sin()


@lru_cache(maxsize=16)  # the layers of a step, and often many steps, share them
def _turns_in_order(turn: InOrder, columns: int, slots: int) -> tuple[Tensor, ...]:
    """Cosine and sine of one page's slots, [half, slots], and of all pages' first slots, [S, columns, half]."""
    within = torch.arange(slots)[None] * turn.frequencies.float()[:, None]
    first = turn.angles(columns, slots)
    return within.cos(), within.sin(), first.cos(), first.sin()


def fill_tier(entry: ctypes.Structure, tier: TierPages, scores: Tensor | None, keep: Kept) -> None:
    """Fills a struct."""
    held = [x.long().contiguous() for x in (tier.ids, tier.num_k, tier.num_v)]
    keep += held
    ctypes.memmove(ctypes.addressof(entry), ctypes.addressof(format_struct(tier.fmt)), ctypes.sizeof(TierStruct))
    entry.num_columns = tier.ids.shape[-1]
    entry.ids, entry.num_k, entry.num_v = (x.data_ptr() for x in held)
    if scores is not None:
        keep.append(scores)
        entry.scores = scores.data_ptr()
    if tier.rotation is not None:
        tables = _turns(tier)
        keep += tables
        for name, x in zip(("cos", "sin", "first_cos", "first_sin"), tables, strict=False):
            setattr(entry, name, x.data_ptr())
    if tier.channels is not None:
        scales = plain(tier.channels.scale), plain(tier.channels.zero)
        keep += scales
        entry.channel_scale, entry.channel_zero = (x.data_ptr() for x in scales)


def ring_struct(ring: Ring | StepRing, keep: Kept) -> ctypes.Structure:
    """The residual buffers as a struct; only [R, D] of each list must be contiguous."""
    k, v = (x if x.stride(-1) == 1 and x.stride(-2) == x.shape[-1] else x.contiguous() for x in (ring.k, ring.v))
    num_tokens, unit = ring.num_tokens.long().contiguous(), k.element_size()
    struct = RingStruct(
        k=k.data_ptr(),
        v=v.data_ptr(),
        num_tokens=num_tokens.data_ptr(),
        k_row_stride=k.stride(0) * unit,
        k_head_stride=k.stride(-3) * unit,
        v_row_stride=v.stride(0) * unit,
        v_head_stride=v.stride(-3) * unit,
        k_length=k.shape[-2],
        v_length=v.shape[-2],
        kind=ELEMENT_KINDS[k.dtype],
        num_rows=k.shape[0],
    )
    keep += [k, v, num_tokens, struct]
    if isinstance(ring, StepRing):
        rows = ring.rows.long().contiguous()
        struct.rows = rows.data_ptr()
        keep.append(rows)
    return struct


def call_struct(
    pages: Tensor,
    tiers: list[TierPages],
    ring: Ring | StepRing | None,
    keep: Kept,
    *,
    num_q_heads: int,
    power: int,
    group: Reduce | None,
    scores: Sequence[Tensor | None],
    softmax: Softmax,
) -> ctypes.Structure:
    """Attention over tiers as a struct, without its tensors of queries and results."""
    num_seq, *lists = tiers[0].num_k.shape
    table = (TierStruct * len(tiers))()
    for entry, tier, score in zip(table, tiers, scores, strict=True):
        fill_tier(entry, tier, score, keep)
    keep += [pages, table]
    if softmax.sinks is not None:
        keep.append(softmax.sinks)
    return CallStruct(
        pages=pages.data_ptr(),
        tiers=ctypes.addressof(table),
        ring=None if ring is None else ctypes.addressof(ring_struct(ring, keep)),
        page_bytes=pages.shape[1],
        num_pages=pages.shape[0],
        seq_stride=math.prod(lists),
        num_seq=num_seq,
        num_heads=lists[-1],
        group_size=num_q_heads // lists[-1],
        head_dim=tiers[0].fmt.slot.head_dim,
        num_tiers=len(tiers),
        sinks=None if softmax.sinks is None else softmax.sinks.data_ptr(),
        cap=softmax.cap,
        power=power,
        reduce=REDUCE_KINDS[group],
        num_threads=torch.get_num_threads(),
        rotated=2 * max(tier.half for tier in tiers),
    )
