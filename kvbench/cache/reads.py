"""Decode steps that read some of the pages: which ones, and how many bytes that is."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.cache.pages import Pages
from kvbench.kernels.operands import TierPages
from kvbench.policy import DecodeView, ReadSpec


@dataclass
class StepReads:
    """The reads of one decode step under a policy's `ReadSpec`.

    Args:
        spec: What to read.
        count: int64 [S] pages per list that a layer reads.
        width: As large as the largest of them, or larger.
        read_bytes: fp64 [S] read so far in this step: slots, and the bounds of all pages where pages were chosen.
        held_bytes: fp64 [S] of all slots in the layers so far.
    """

    spec: ReadSpec
    count: Tensor
    width: int
    read_bytes: Tensor
    held_bytes: Tensor

    @staticmethod
    def begin(spec: ReadSpec, view: DecodeView, most: int | None = None) -> "StepReads":
        """How much the rows of a step may read, of lists of `most` pages where the host is not to ask for the largest
        count."""
        count = (view.budget_tokens(spec.budget) // spec.page_tokens).clamp(min=spec.min_pages)
        nothing = torch.zeros(len(count), dtype=torch.float64, device=count.device)
        return StepReads(spec, count, int(count.max()) if most is None else max(1, most), nothing, nothing.clone())

    def choose(self, pages: Pages, layer: int, q: Tensor, tier: TierPages) -> TierPages:
        """What a layer reads for the queries [S, Hq, D] of the step."""
        spec, fmt = self.spec, tier.fmt
        chosen = tier
        if layer >= spec.dense_layers and tier.ids.shape[-1] > 1:
            chosen = pages.backend.choose_pages(q, pages.pool.pages, tier, self.count, self.width, spec.group_reduce)
            num_pages = -(-tier.num_k // fmt.tokens_per_page)
            looked_at = num_pages * (num_pages > self.count[:, None])  # bounds decide only where a page is left out
            self.read_bytes += looked_at.sum(1) * fmt.bounds_bytes
        self.read_bytes += chosen.num_k.sum(1) * fmt.slot.slot_bytes
        self.held_bytes += tier.num_k.sum(1) * fmt.slot.slot_bytes
        return chosen

    def totals(self) -> Tensor:
        """fp64 [S, 2]: per row, the bytes that the step read and those that it would have read of everything."""
        return torch.stack([self.read_bytes, self.held_bytes], 1)
