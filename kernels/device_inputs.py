"""Inputs of the device checks: their extent, random pages in every format, and comparisons with their bounds.

`check_device.py` is the command.
"""

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvbench.kernels.backend import REFERENCE
from kvbench.kernels.format import PageFormat, SlotFormat
from kvbench.kernels.operands import TierPages
from kvbench.kernels.reference.pages import region

if TYPE_CHECKING:
    from kvbench.kernels.gpu.backend import Gpu

TRACK = ("score", "pos")
# Sums are fp32 throughout for fp32 queries. For 16-bit ones, weights (and keys with a scale per channel) are rounded to
# 11 or 8 bits before they are multiplied; outputs of unit-variance values stay within a few times that.
BOUNDS = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
SCALED = {"k_code": "e4m3_scaled", "v_code": "e4m3_scaled"}
FOURS = {"k_groups": 4, "v_groups": 4}
FORMATS: dict[str, dict] = {
    "k16v16": {"k_bits": 16, "v_bits": 16},
    "k16v16, 39 key channels": {"k_bits": 16, "v_bits": 16, "k_channels": 39},
    "k16v16 bf16": {"k_bits": 16, "v_bits": 16, "dtype": torch.bfloat16},
    **{f"k{k}v{v}": {"k_bits": k, "v_bits": v} for k, v in ((8, 8), (8, 4), (4, 4), (4, 2), (2, 2), (2, 1), (1, 1))},
    "k4v2 symmetric": {"k_bits": 4, "v_bits": 2, "symmetric": True},
    "k8v4 groups": {"k_bits": 8, "v_bits": 4, "k_groups": 2, "v_groups": 4},
    "e4m3": {"k_bits": 8, "v_bits": 8, "fp8": True},
    "k3v3": {"k_bits": 3, "v_bits": 3},
    "e4m3 scaled": {"k_bits": 8, "v_bits": 8, **SCALED},
    "turboquant 3 bits": {"k_bits": 3, "v_bits": 3, "k_code": "lloyd"},
    "lloyd k4v2": {"k_bits": 4, "v_bits": 2, "k_code": "lloyd", "v_code": "lloyd"},
    "nvfp4": {"k_bits": 4, "v_bits": 4, "k_code": "nvfp4", "v_code": "nvfp4", "k_groups": 4, "v_groups": 4},
    "mxfp4": {"k_bits": 4, "v_bits": 4, "k_code": "mxfp4", "v_code": "mxfp4", "k_groups": 2, "v_groups": 2},
    "llama.cpp 5 bits": {"k_bits": 5, "v_bits": 5, "k_code": "q5_0", "v_code": "q5_1", "k_groups": 2, "v_groups": 2},
    "llama.cpp 4 bits": {"k_bits": 4, "v_bits": 4, "k_code": "iq4_nl", "v_code": "q4_0", "k_groups": 2, "v_groups": 2},
    "q8_0 beside q4_1": {"k_bits": 8, "v_bits": 4, "k_code": "q8_0", "v_code": "q4_1", "k_groups": 2, "v_groups": 2},
    "int4 beside e5m2": {"k_bits": 4, "v_bits": 8, "k_code": "zero_point", "v_code": "e5m2"},
    "e5m2 beside 5 bits": {"k_bits": 8, "v_bits": 5, "k_code": "e5m2", "v_code": "q5_0"},
    "fp4 searched": {"k_bits": 4, "v_bits": 4, "k_code": "nvfp4_4over6", "v_code": "mxfp4_up", **FOURS},
    "kivi 2 bits": {"k_bits": 2, "v_bits": 2, "k_channel_group": 32, "v_groups": 2},
    "kivi 4 bits, group 24": {"k_bits": 4, "v_bits": 4, "k_channel_group": 24, "v_groups": 4},
    "kivi 2 bits, group 8 symmetric": {"k_bits": 2, "v_bits": 2, "k_channel_group": 8, "symmetric": True},
    "kivi 3 bits, group 16": {"k_bits": 3, "v_bits": 3, "k_channel_group": 16, "v_groups": 2},
    "k1v16": {"k_bits": 1, "v_bits": 16},
    "k4 beside e4m3": {"k_bits": 4, "v_bits": 8, "fp8": True},
    "k16v4, 17 key channels": {"k_bits": 16, "v_bits": 4, "k_channels": 17},
    "e4m3 scaled groups": {"k_bits": 8, "v_bits": 8, **SCALED, "k_groups": 2, "v_groups": 4},
}
Kinds = tuple[tuple[int, torch.dtype, tuple[str, ...]], ...]
FEW = ("k16v16", "k8v4", "k4v2", "kivi 2 bits")
# Head dims and query dtypes, and the formats to check with each: every kernel is compiled, a second or two.
QUICK: Kinds = ((64, torch.float32, FEW),)
QUICK_CUDA: Kinds = ((64, torch.bfloat16, FEW),)  # the kernels in CUDA C++ take queries of 16 bits
ALL: Kinds = (
    (64, torch.float32, tuple(FORMATS)),
    (128, torch.float16, tuple(FORMATS)),
    (128, torch.bfloat16, tuple(FORMATS)),
    (256, torch.bfloat16, FEW),
    (80, torch.float32, FEW),
)
SHORT = 60  # slots of the longest list of a quick check


@dataclass(frozen=True)
class Finding:
    """One comparison: the largest difference (or the bytes that differ) and what is allowed."""

    name: str
    difference: float
    bound: float

    @property
    def passed(self) -> bool:
        """True if the difference is within the bound; NaN is not."""
        return self.difference <= self.bound


@dataclass(frozen=True)
class Plan:
    """Device and extent of a check.

    Args:
        device: Device of the backend under test.
        backend: Its operations.
        kinds: Head dims, query dtypes and formats.
        tokens: Slots of the longest list.
        share: Which share of the checks, of how many. Each has kernels of its own, so that processes compile in
            parallel.
    """

    device: torch.device
    backend: "Gpu"
    kinds: Kinds = ALL
    tokens: int = 3000
    share: tuple[int, int] = (0, 1)

    def takes(self, name: str) -> bool:
        """True if a check belongs to this share; every name belongs to one."""
        return zlib.crc32(name.encode()) % self.share[1] == self.share[0]

    def there(self, *tensors: Tensor) -> list[Any]:
        """Copies of tensors where the backend works."""
        return [x.to(self.device, copy=True) for x in tensors]


def hard_vectors(count: int, head_dim: int) -> Tensor:
    """Vectors fp32 [count, D] with constants, zeros, halves between codes, tiny and huge ranges among them."""
    x = 3 * torch.randn(count, head_dim, generator=torch.Generator().manual_seed(5))
    x[0], x[1] = 1.5, 0.0
    x[:, 3], x[:, 4] = torch.arange(count) % 7, torch.arange(count) % 31  # along a channel of 32 tokens too
    x[3] *= 1e-9  # zeros of both signs once in fp16
    x[4] *= 1e3
    x[5, 1:] = 0.0
    # Exactly halfway between codes of 4, 2, 1 and 8 bits: a step of 2, and odd numbers.
    x[2], x[6], x[7] = (torch.arange(head_dim) % n for n in (31, 7, 3))
    x[8], x[8, :2] = torch.arange(head_dim) * 2 + 1, torch.tensor([0.0, 510.0])
    return x


def format_of(name: str, head_dim: int) -> PageFormat:
    """The format of this name in `FORMATS`, on small pages."""
    slot = SlotFormat(head_dim=head_dim, track=TRACK, **FORMATS[name])
    return PageFormat(slot, max(64 * head_dim, -(-slot.quantum_bytes // 16) * 16))


def bounded_format(head_dim: int) -> PageFormat:
    """Pages of 16 slots of 16 bits that carry the bounds of their keys."""
    slot = SlotFormat(head_dim, 16, 16)
    return PageFormat(slot, 16 * int(slot.slot_bytes) + 4 * head_dim, bounds=True)


def differ(a: Tensor, b: Tensor) -> float:
    """The largest difference of two tensors; NaN where only one is NaN."""
    a, b = a.detach().cpu().double(), b.detach().cpu().double()
    same = (a == b) | (a.isnan() & b.isnan())
    return float(torch.where(same, 0.0, (a - b).abs()).max()) if a.numel() else 0.0


def bytes_differ(a: Tensor, b: Tensor) -> float:
    """Number of elements in which two tensors differ."""
    return float((a.cpu() != b.cpu()).sum())


@contextmanager
def no_synchronisation(device: torch.device) -> Iterator[None]:
    """Context in which an operation that synchronises with the GPU raises an error."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def filled(plan: Plan, formats: list[PageFormat], counts: list[Tensor]) -> tuple[Tensor, list[TierPages]]:
    """Random pages, shuffled, and tiers [S, H] on them, in main memory; unused slots have NaN among their scales."""
    make = torch.Generator().manual_seed(7)
    widths = [-(-int(c.max()) // f.tokens_per_page) for f, c in zip(formats, counts, strict=True)]
    total = sum(w * counts[0].numel() for w in widths) + 3
    pages = torch.randint(256, (total, formats[0].page_bytes), dtype=torch.uint8, generator=make)
    order, tiers = torch.randperm(total, generator=make), []
    for fmt, count, width in zip(formats, counts, widths, strict=True):
        used = count.numel() * width
        ids, order = order[:used].view(*count.shape, width), order[used:]
        tiers.append(TierPages(fmt, ids, count, count))
        slot = torch.arange(width * fmt.tokens_per_page)
        page = ids.repeat_interleave(fmt.tokens_per_page, -1).flatten()
        within = (slot % fmt.tokens_per_page).repeat(count.numel())
        k, v = (torch.randn(len(page), fmt.slot.head_dim, generator=make) for _ in range(2))
        REFERENCE.write_keys(pages, fmt, page, within, k)
        REFERENCE.write_values(pages, fmt, page, within, v)
        if fmt.regions["v_scale"][1]:
            dead = (slot >= count[..., None]).flatten()
            scale = region(pages, fmt, "v_scale")
            scale[page[dead], :, within[dead]] = 255 if scale.dtype is torch.uint8 else float("nan")
        region(pages, fmt, "score")[ids.flatten()] = 0.0
    return pages, tiers


def moved_to(tiers: list[TierPages], device: torch.device) -> list[TierPages]:
    """Copies of tiers on a device."""
    moved = [TierPages(t.fmt, t.ids.to(device), t.num_k.to(device), t.num_v.to(device)) for t in tiers]
    for mine, tier in zip(moved, tiers, strict=True):
        mine.rotation = None if (angles := tier.angles) is None else angles.to(device)
    return moved
