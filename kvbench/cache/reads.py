"""Decode steps that read some of the pages: which ones, and how many bytes that is."""

import torch
from torch import Tensor

from kvbench.cache.pages import Pages
from kvbench.kernels.format import PageFormat
from kvbench.kernels.operands import PageChoice, TierPages
from kvbench.policy import DecodeView, ReadSpec


class StepReads:
    """The reads of one decode step under a policy's `ReadSpec`.

    Args:
        spec: What to read.
        fmt: The format of the pages, with bounds.
        view: What the step was planned from.
        held: int64 [S, L, H] slots of every list, the new token's among them.
        first_layer: The model's number of the first of these layers.
        most: Pages of a list at most, where the host is not to ask for the largest count.
    """

    def __init__(
        self, spec: ReadSpec, fmt: PageFormat, view: DecodeView, held: Tensor, first_layer: int, most: int | None
    ) -> None:
        self._fmt, self._held = fmt, held
        count = (view.budget_tokens(spec.budget) // spec.page_tokens).clamp(min=spec.min_pages)
        self.choice = PageChoice(
            count=count,
            width=int(count.max()) if most is None else max(1, most),
            group=spec.group_reduce,
            dense_layers=max(0, spec.dense_layers - first_layer),
        )

    def choose(self, pages: Pages, layer: int, q: Tensor, tier: TierPages) -> TierPages:
        """What a layer reads for the queries [S, Hq, D] of the step."""
        choice = self.choice
        if layer < choice.dense_layers or tier.ids.shape[-1] == 1:
            return tier
        return pages.backend.choose_pages(q, pages.pool.pages, tier, choice.count, choice.width, choice.group)

    def totals(self) -> Tensor:
        """fp64 [S, 2]: per row, the bytes that the step reads (slots, and the bounds of all pages of a list of which
        some are left out) and those that it would read of everything."""
        fmt, held = self._fmt, self._held
        num_pages = (held + fmt.tokens_per_page - 1) // fmt.tokens_per_page
        left_out = (num_pages - self.choice.count[:, None, None]).clamp(
            min=0
        )  # of the others, the last may not be full
        left_out = left_out * (torch.arange(held.shape[1], device=held.device) >= self.choice.dense_layers)[:, None]
        looked_at = num_pages * (left_out > 0)
        slots, saved, looked = (x.sum((1, 2)).double() for x in (held, left_out * fmt.tokens_per_page, looked_at))
        read = (slots - saved) * fmt.slot.slot_bytes + looked * fmt.bounds_bytes
        return torch.stack([read, slots * fmt.slot.slot_bytes], 1)
