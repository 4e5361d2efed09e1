"""GPU backend, decode attention in CUDA C++ (`csrc/`): calls that it covers, and the compile-time constants of one."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from kvbench.kernels.codes import Code
from kvbench.kernels.format import PageFormat, SlotFormat

HEAD_DIMS = (64, 128, 256)
MOST_QUERIES = 8  # of a KV head: columns of a product on tensor cores
# As csrc/call.h has them: tokens of a turn and warps that take turns; parts of a list in a tier at most, and slots of
# each at least.
TURN, WARPS, MOST_PARTS, LEAST_SLOTS = 32, 4, 24, 256
BLOCK = 256  # threads of the kernels that plan and make scores: a list or a slot each
_BITS = (2, 4, 8)
_GRAIN = 32  # tokens of a turn, and channels that lie in one group of values
STAGE_BYTES = 36 << 10  # of pages under way in a block, of which four lie on a multiprocessor
Element = Literal["fp32", "fp16", "bf16"]
_NUMBERS: dict[Element, int] = {"fp32": 0, "fp16": 1, "bf16": 2}
ELEMENTS: dict[torch.dtype, Element] = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


@dataclass(frozen=True, kw_only=True)
class Form:
    """Template parameters of a build of the kernels.

    Args:
        tiers: The page formats, one or two.
        queries: Query heads per KV head.
        query: Type of the queries.
        out: Type of the output.
        ring: Type of the residual buffers; empty = there are none.
        scores: Exponentials are kept.
        stage_bytes: Bytes of pages in flight in a block.
    """

    tiers: tuple[PageFormat, ...]
    queries: int
    query: Element
    out: Element = "fp32"
    ring: Element | Literal[""] = ""
    scores: bool = False
    stage_bytes: int = STAGE_BYTES

    def __post_init__(self) -> None:
        if reason := refusal(self):
            raise ValueError(f"the kernels in CUDA C++ take no {reason}")

    @property
    def head_dim(self) -> int:
        return self.tiers[0].slot.head_dim

    def registers(self, target: str) -> int:
        """Most registers of a thread of the decode kernel.

        A multiprocessor holds three blocks with 128 or fewer; the benchmarked forms need 104 on sm_90.
        """
        if self.head_dim > 128:
            return 255
        plain = len(self.tiers) == 1 and not (self.scores or self.ring or target != "sm_90")
        slot = self.tiers[0].slot
        return 104 if plain and not (slot.channel_keys and slot.k_bits > 2) else 128

    def header(self, target: str) -> str:
        """`form.h`, which csrc/decode.cu includes, for a target such as sm_90."""
        names = ("A", "B")
        sides = [_layout(name, tier) for name, tier in zip(names, self.tiers, strict=False)]
        if len(self.tiers) == 1:
            sides.append("using B = A;")
        form = {
            "D": self.head_dim, "G": self.queries, "QUERY": _NUMBERS[self.query], "OUT": _NUMBERS[self.out],
            "RING": _NUMBERS[self.ring] if self.ring else 0, "STAGE_BYTES": self.stage_bytes,
            "REGISTERS": self.registers(target),
        }  # fmt: skip
        flags = {"SCORES": self.scores, "TWO": len(self.tiers) == 2}
        switches = {name: int(value) for name, value in flags.items()}
        lines = [_struct("F", {"int": form, "bool": switches}), *sides]
        return "\n".join(["#pragma once", *lines, ""])


def _struct(name: str, fields: dict[str, dict[str, int]]) -> str:
    lines = [f"struct {name} {{"]
    for kind, values in fields.items():
        lines += [f"  static constexpr {kind} {field} = {value};" for field, value in values.items()]
    return "\n".join([*lines, "};"])


def _layout(name: str, fmt: PageFormat) -> str:
    """A page's layout as a struct; offsets of what it has not are -1."""
    slot, regions = fmt.slot, fmt.regions
    offsets = {key.upper(): offset if length else -1 for key, (offset, length) in regions.items()}
    wanted = ("K_CODES", "V_CODES", "K_SCALE", "K_ZERO", "V_SCALE", "V_ZERO", "SCORE", "POS")
    assert slot.keys is not None and slot.values is not None
    fields = {
        "K_BITS": slot.k_bits, "V_BITS": slot.v_bits, "SLOTS": fmt.tokens_per_page, "PAGE": fmt.page_bytes,
        "READ": regions["k_apart"][0], "K_GROUP": slot.k_channel_group if slot.channel_keys else 0,
        "V_GROUPS": slot.v_groups, "K_CENTRE": slot.keys.centre, "V_CENTRE": slot.values.centre,
    } | {key: offsets[key] for key in wanted}  # fmt: skip
    return _struct(name, {"int": fields})


def refusal(form: Form) -> str:
    """Reason why the kernels do not support a form; empty if they do."""
    slots = [tier.slot for tier in form.tiers]
    if not 1 <= len(slots) <= 2:
        return f"{len(slots)} tiers"
    if form.head_dim not in HEAD_DIMS:
        return f"head dim {form.head_dim}"
    if form.queries > MOST_QUERIES:
        return f"{form.queries} query heads per KV head"
    if form.query == "fp32" or form.ring == "fp32":
        return "queries or residual buffers of 32 bits"
    if form.ring and len(slots) > 1:
        return "residual buffers before two tiers"
    return next((reason for tier in form.tiers if (reason := _refused_page(tier))), "")


def _refused_page(fmt: PageFormat) -> str:
    slot = fmt.slot
    for side, code, bits in (("keys", slot.keys, slot.k_bits), ("values", slot.values, slot.v_bits)):
        if bits not in _BITS or not _is_plain(code):
            return f"{side} of {bits} bits in {'elements' if code is None else code.name}"
    if slot.k_apart or slot.v_apart or slot.key_channels != slot.head_dim:
        return "elements apart or keys of fewer channels"
    return _refused_scales(slot, fmt.tokens_per_page)


def _is_plain(code: Code | None) -> bool:
    """Levels are whole numbers next to one another, with a scale in fp16."""
    return code is not None and code.is_uniform and code.scale == "fp16"


def _refused_scales(slot: SlotFormat, tokens: int) -> str:
    assert slot.keys is not None
    if slot.channel_keys:
        if slot.k_channel_group % _GRAIN or tokens % _GRAIN or not slot.keys.zero:
            return f"keys with a scale per {slot.k_channel_group} tokens, or without zeros"
    elif slot.k_groups > 1:
        return f"{slot.k_groups} scales per key"
    if slot.head_dim // slot.v_groups % _GRAIN:
        return f"{slot.v_groups} scales per value of {slot.head_dim} channels"
    return ""


def form_of(
    tiers: Sequence[PageFormat], queries: int, query: torch.dtype, out: torch.dtype, ring: torch.dtype | None,
    scores: bool,
) -> Form:  # fmt: skip
    """The form of a call.

    Raises:
        ValueError: The kernels do not take it.
    """
    return Form(
        tiers=tuple(tiers), queries=queries, query=ELEMENTS[query], out=ELEMENTS[out],
        ring="" if ring is None else ELEMENTS[ring], scores=scores,
    )  # fmt: skip
