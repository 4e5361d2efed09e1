"""GPU backend, decode attention in CUDA C++: one query token per sequence over pages, prepared for layers alike.

It does what `decode.Attention` does with Triton. How lists are cut into parts is decided on the device, from how much
each one holds; the host only has an upper bound on the number of parts. A layer is one launch, and two where it makes
scores.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvbench.kernels.gpu.cuda_call import Call, Kernels, address
from kvbench.kernels.gpu.cuda_form import BLOCK, LEAST_SLOTS, MOST_PARTS, TURN, Form, form_of
from kvbench.kernels.gpu.decode import Attention, Lists, ListTier
from kvbench.kernels.gpu.parts import LOG2_E
from kvbench.kernels.operands import NO_SCORES, PLAIN, Reduce, Ring, Softmax, StepScores

_RULES: dict[Reduce, int] = {"sum": 0, "mean": 1, "max": 2}


def _parts_at_most(tier: ListTier, slots: int) -> int:
    """Parts of a list of at most so many slots."""
    tokens = tier.fmt.tokens_per_page
    pages = -(-slots // tokens)
    return max(1, min(MOST_PARTS, -(-pages // -(-LEAST_SLOTS // tokens))))


class CudaAttention:
    """Attention of one query token per sequence over lists of pages; arguments as of `decode.Attention`.

    Args:
        build: Makes the kernels of a form for a device.
        layers: Layers that the lists are of.

    Raises:
        ValueError: The kernels do not take such pages, queries or buffers.

    Source: kvbench's own; FlashDecoding's split with an exact merge, dequantisation to fragments as in Marlin.
    """

    def __init__(
        self, build: "Build", q: Tensor, pages: Tensor, tiers: list[ListTier], lists: Lists,
        ring: Ring | None, how: StepScores = NO_SCORES, *, seen: Tensor | None = None,
        out: torch.dtype = torch.float32, softmax: Softmax = PLAIN, layers: int = 1,
    ) -> None:  # fmt: skip
        if softmax.cap or any(tier.half for tier in tiers):
            raise ValueError("the kernels in CUDA C++ take no cap and no keys that are rotated when they are read")
        count, group = lists.num_seq * lists.heads, q.shape[1] // lists.heads
        form = form_of(
            [tier.fmt for tier in tiers], group, q.dtype, out, None if ring is None else ring.k.dtype, bool(how.group)
        )
        self._kernels, self._out, self._tiers, self._how = build(form, q.device), out, tiers, how
        self._lists, self._layers = lists, layers
        longest = 0 if ring is None else max(ring.k.shape[-2], ring.v.shape[-2])
        parts = count * sum(_parts_at_most(t, t.columns * t.fmt.tokens_per_page + longest) for t in tiers)
        made: dict[str, Any] = {"device": q.device, "dtype": torch.float32}
        self._lse = [torch.empty(count, group, **made) for _ in range(2)]
        self._partial = [torch.empty(parts, group, *more, **made) for more in ((), (), (form.head_dim,))]
        self._arrived = torch.zeros(count, dtype=torch.int32, device=q.device)
        self._starts = torch.empty(layers, count + 1, dtype=torch.int32, device=q.device)
        self._kept: list[tuple[Tensor, Tensor]] = []
        self._returned: list[tuple[int, int, int]] = []
        for tier in tiers if how.group else []:
            width, turns = tier.columns * tier.fmt.tokens_per_page, -(-tier.fmt.tokens_per_page // TURN)
            weights = torch.empty(count, width, group, device=q.device, dtype=torch.float16)
            self._kept.append((weights, torch.empty(count, tier.columns * turns, group, **made)))
            if how.update is None:
                self._returned.append((lists.num_seq, lists.heads, width))
        self._softmax, self._rows, self._seen, self._pages = softmax, lists.rows, seen, pages
        self._is_planned = False

    def _call(self, q: Tensor, out: Tensor, scores: list[Tensor], ring: Ring | None, scale: float, offset: int) -> Call:
        """The arguments; tensors that they point to are the caller's or this object's."""
        call, lists, how = Call(), self._lists, self._how
        named = {
            "q": q, "out": out, "pages": self._pages, "rows": self._rows, "seen": self._seen,
            "sinks": self._softmax.sinks, "lse": self._lse[0], "lse2": self._lse[1], "part_top": self._partial[0],
            "part_sum": self._partial[1], "part_out": self._partial[2], "arrived": self._arrived,
            "starts": self._starts,
        }  # fmt: skip
        if ring is not None:
            named |= {"ring_k": ring.k, "ring_v": ring.v, "ring_tokens": ring.num_tokens}
            call.rk_row, call.rk_head, call.rv_row, call.rv_head = (*ring.k.stride()[:2], *ring.v.stride()[:2])
            call.rk, call.rv = ring.k.shape[-2], ring.v.shape[-2]
            call.wide_rings = ring.num_tokens.dtype == torch.int64
        for name, x in named.items():
            setattr(call, name, address(x))
        for index, tier in enumerate(self._tiers):
            to = call.tiers[index]
            to.table, to.num_k, to.num_v = (address(x) for x in (tier.table, tier.num_k, tier.num_v))
            to.columns, to.entries, to.reversed = tier.columns, tier.entries, tier.is_reversed
            to.wide_table, to.wide_counts = (x.dtype == torch.int64 for x in (tier.table, tier.num_k))
            if self._kept:
                to.weights, to.tops = (address(x) for x in self._kept[index])
            if scores:
                to.scores = address(scores[index])
        call.scale2, call.lists, call.heads = scale * LOG2_E, lists.num_seq * lists.heads, lists.heads
        call.per_row, call.offset = lists.per_row, offset
        call.in_table, call.counts_in_table = lists.in_table, lists.counts_in_table
        if how.group:
            call.power, call.rule, call.replace = how.power, _RULES[how.group], how.update == "replace"
            call.near = how.skip_near
        return call

    def __call__(
        self, q: Tensor, ring: Ring | None, scale: float, offset: int | None = None
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Attends one layer, whose lists are `offset` lists into each sequence; see `Backend.paged_decode`.

        The next call overwrites the log-sum-exp.
        """
        q, offset = q.contiguous(), self._lists.offset if offset is None else offset
        if ring is not None:
            k, v = (x if x.stride(3) == 1 and x.stride(2) == x.shape[3] else x.contiguous() for x in (ring.k, ring.v))
            ring = Ring(k, v, ring.num_tokens.contiguous())
        out = torch.empty(q.shape, dtype=self._out, device=q.device)
        scores = [torch.empty(shape, device=q.device) for shape in self._returned]
        call = self._call(q, out, scores, ring, scale, offset)
        if not self._is_planned:
            first = self._call(q, out, scores, ring, scale, 0)
            self._kernels.plan(first, self._layers)
            self._is_planned = True
        self._kernels.decode(call)
        if self._how.group:
            widths = [tier.columns * tier.fmt.tokens_per_page for tier in self._tiers]
            self._kernels.scores(call, call.lists * sum(-(-width // BLOCK) for width in widths))
        return out, self._lse[0].view(q.shape[:2]), scores


Build = Callable[[Form, torch.device], Kernels]


class Decoder:
    """Makes the attention of a step: in CUDA C++ where its kernels take the step and can be had, else in Triton.

    Args:
        build: Makes the kernels of a form for a device, or raises ValueError where it cannot; None = Triton alone.

    Attributes:
        ran: Kernels that have run so far: `cuda`, or `triton`, followed by the reason if `cuda` was requested.
    """

    def __init__(self, build: Build | None = None) -> None:
        self._build, self.ran = build, set[str]()
        self._made: dict[tuple[Form, torch.device], Kernels | str] = {}

    def _kernels(self, form: Form, device: torch.device) -> Kernels:
        assert self._build is not None
        if (form, device) not in self._made:
            try:
                self._made[form, device] = self._build(form, device)
            except ValueError as error:  # kept, since each step would try again
                self._made[form, device] = str(error)
        made = self._made[form, device]
        if isinstance(made, str):
            raise ValueError(made)
        return made

    def __call__(
        self, q: Tensor, pages: Tensor, tiers: list[ListTier], lists: Lists, ring: Ring | None,
        how: StepScores = NO_SCORES, *, layers: int = 1, **more: Any,
    ) -> "CudaAttention | Attention":  # fmt: skip
        """Arguments as of `CudaAttention`."""
        if self._build is None:
            self.ran.add("triton")
            return Attention(q, pages, tiers, lists, ring, how, **more)
        try:
            made = CudaAttention(self._kernels, q, pages, tiers, lists, ring, how, layers=layers, **more)
        except ValueError as error:
            if (line := f"triton: {error}") not in self.ran:
                self.ran.add(line)
                warnings.warn(f"backend.decode=cuda: decode attention by {line}", stacklevel=3)
            return Attention(q, pages, tiers, lists, ring, how, **more)
        self.ran.add("cuda")
        return made
