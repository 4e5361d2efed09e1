"""Tokens of all lists in one place: in pages, with whatever a method keeps beside them."""

from collections.abc import Callable

import torch
from torch import Tensor

from kvbench.cache.async_counts import Rows
from kvbench.cache.channels import Channels, Orders, reorder
from kvbench.cache.checks import CheckedPlans
from kvbench.cache.counters import Counters
from kvbench.cache.eviction_due import EvictionDue
from kvbench.cache.layout import ModelShape
from kvbench.cache.pages import Pages
from kvbench.cache.rope import Rope
from kvbench.cache.rotation import Rotations
from kvbench.cache.scores import Scores
from kvbench.cache.solve_budget import SolvedBudget
from kvbench.cache.view import PagesView
from kvbench.kernels.operands import Ring, TierPages
from kvbench.policy import Policy


class Holding:
    """Tokens in pages, with what a step and a prompt need to know of them.

    Args:
        rotations: What keys and values took before they come here; statistics see them without.
        first_layer: The model's number of the first layer that is held here; other arguments count from it.
    """

    def __init__(
        self,
        policy: Policy,
        shape: ModelShape,
        pages: Pages,
        counters: Counters,
        rotations: Rotations,
        first_layer: int = 0,
    ) -> None:
        self.policy, self.shape, self.pages, self.counters = policy, shape, pages, counters
        self.rotations, self.first_layer = rotations, first_layer
        self.rope, self.scores = Rope(policy, shape), Scores(policy, shape, pages, rotations, first_layer)
        self.plans = CheckedPlans(policy, pages)
        self.due = EvictionDue(policy, self.plans, pages.counts, pages.on_device)
        self.channels = Channels(pages.shape[0], shape) if policy.score.orders_channels else None
        self.budget: SolvedBudget | None = None  # the store's, which knows what else a row holds

    @property
    def beside_bytes(self) -> int:
        """Bytes of all that is held beside the pages."""
        orders = 0 if self.channels is None else self.channels.allocated_bytes
        return orders + (0 if self.scores.queries is None else self.scores.queries.allocated_bytes)

    @property
    def row_bytes(self) -> tuple[int, int]:
        """Bytes of one row beside its pages, whatever it holds: (counters and orders of channels, rings)."""
        orders = 0 if self.channels is None else self.channels.row_bytes
        return orders, 0 if self.scores.queries is None else self.scores.queries.row_bytes

    # What is held.

    @property
    def copies(self) -> int:
        """Times that each key and value is kept."""
        return self.pages.shape[2] // self.shape.num_kv_heads

    @property
    def most_new_slots(self) -> int:
        """Slots in pages that a list takes in a step at most."""
        return 1

    @property
    def most_new_pages(self) -> int:
        """Pages that a list takes in a step at most."""
        return -(-self.most_new_slots // min(fmt.tokens_per_page for fmt in self.pages.formats))

    @property
    def held_counts(self) -> list[Tensor]:
        """All that says how much lists hold; every number of the ledger follows from them and from the tokens seen."""
        return [self.pages.table.num_slots]

    def sides(self, tier: int, lists: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values that pages hold, int64 in the shape of `lists`."""
        held = self.pages.held(tier, lists)
        return held, held

    def paged_slots(self, kept: int, new: int) -> tuple[int, int]:
        """Slots that a list has in pages once it kept so many tokens of a prompt and took so many more: exactly, and at
        most where that many are the mean of lists."""
        return kept + new, kept + new

    def slots_per_tier(self, lists: Tensor) -> list[Tensor]:
        """Tokens held per list and tier, int64 [M] each; those outside of pages are one more entry."""
        return [self.pages.held(tier, lists) for tier in range(len(self.pages.formats))]

    def ring_bytes(self, lists: Tensor) -> int:
        """Bytes of what the lists of one row have in rings."""
        if self.scores.queries is None:
            return 0
        row = int(lists[0]) // self.pages.lists_per_row
        return self.scores.queries.held_bytes(self.counters.seen[row])

    def layer(self, rows: Tensor, layer: int, width: list[int] | None = None) -> tuple[list[TierPages], Ring | None]:
        """The kernels' description of one layer of rows; `width` is the pages to read per tier, found when absent."""
        lists, tiers = self.pages.layer_lists(rows, layer), self.pages.tier_map
        present = range(len(self.pages.formats)) if tiers is None else [tier for tier, _ in tiers.in_layer(layer)]
        found = [self.pages.tier(tier, lists, width[tier] if width else None) for tier in present]
        if self.pages.codebooks is not None:
            self.pages.codebooks.attach(found, layer)
        return found, None

    def view(self, rows: Rows) -> PagesView:
        """The policy's view of rows."""
        return self._view(rows)

    def measured_view(self, rows: Rows) -> PagesView:
        """The view for a bulk eviction, with the scores that the policy's statistic gives the slots now."""
        return self._view(rows, self.scores.of_slots if self.scores.measures_slots else None, is_still=True)

    def _view(
        self, rows: Rows, measure: Callable[[Tensor, Tensor], Tensor] | None = None, is_still: bool = False
    ) -> PagesView:
        spec, find = self.policy.score, self.plans.find
        return PagesView(self.pages, self.counters, rows, spec, find, self.budget, measure, is_still)

    @property
    def takes_all_as_it_comes(self) -> bool:
        """True if a step's queries, keys and values go to attention as the model gives them, and its output back."""
        idle = self.rotations.keys.idle and self.rotations.values.idle and self.copies == 1
        return idle and self.channels is None and self.scores.queries is None

    def to_pages(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, orders: Orders | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [S, Hq, D], keys and values [S, KV heads, D] of one layer of rows (or of tokens of one row) as
        attention over pages takes them; `orders` are those of the rows' channels."""
        q, k = self.rotations.keys.apply(q), self.rotations.keys.apply(k)
        if orders is not None:
            q, k = reorder(q, orders.queries[:, layer]), reorder(k, orders.keys[:, layer])
        return q, self.copied(k, 1), self.copied(self.rotations.values.apply(v), 1)

    def copied(self, x: Tensor, dim: int) -> Tensor:
        """Keys or values at the cache's granularity: KV heads along `dim`, each as often as it is kept."""
        return x if self.copies == 1 else x.repeat_interleave(self.copies, dim)

    # Rows.

    def lists(self, row: int) -> Tensor:
        """List numbers int64 [M] of one row."""
        return self.pages.lists_of(torch.tensor([row], device=self.shape.device))

    def lists_of_layer(self, row: int, layer: int) -> Tensor:
        """List numbers int64 [H] of one layer of a row."""
        return self.pages.layer_lists(torch.tensor([row], device=self.shape.device), layer).flatten()

    def clear(self, lists: Tensor) -> None:
        """Forgets lists."""
        self.pages.clear(lists)

    def share(self, source: int, target: int) -> None:
        """Lets an empty row hold what another one holds: its pages until one of them writes to one, and copies of
        whatever lies beside the pages."""
        self.pages.table.share(self.lists(source), self.lists(target))
        if self.scores.queries is not None:
            self.scores.queries.copy(source, target)
        if self.channels is not None:
            self.channels.copy(source, target)
