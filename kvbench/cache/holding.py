"""What is held of all lists in one place: tokens in pages, and whatever a method keeps beside them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvbench.cache.channels import Channels, Orders, reorder
from kvbench.cache.checks import CheckedPlans
from kvbench.cache.counters import Counters
from kvbench.cache.due import Due
from kvbench.cache.fit import Fit
from kvbench.cache.layout import ModelShape
from kvbench.cache.pages import Pages
from kvbench.cache.rope import Rope
from kvbench.cache.rotation import Turns
from kvbench.cache.scores import Scores
from kvbench.cache.view import PagesView
from kvbench.kernels.operands import Ring, TierPages
from kvbench.policy import Policy


class Holding:
    """Tokens in pages, with what a step and a prompt need to know of them.

    Args:
        policy: Decides.
        shape: The model's shape.
        pages: The pages.
        counters: What the rows have seen.
        turns: What keys and values took before they come here; statistics see them without.
        first_layer: The model's number of the first layer that is held here; other arguments count from it.
    """

    def __init__(
        self, policy: Policy, shape: ModelShape, pages: Pages, counters: Counters, turns: Turns, first_layer: int = 0
    ) -> None:
        self.policy, self.shape, self.pages, self.counters = policy, shape, pages, counters
        self.turns, self.first_layer = turns, first_layer
        self.rope, self.scores = Rope(policy, shape), Scores(policy, shape, pages, turns, first_layer)
        self.plans = CheckedPlans(policy, pages)
        self.due = Due(policy, self.plans, pages.late, pages.on_device)
        self.channels = Channels(pages.shape[0], shape) if policy.score.orders_channels else None
        self.fit: Fit | None = None  # what a budget in bytes buys; the store's, which knows what else a row holds

    @property
    def allocated_bytes(self) -> int:
        """What is held beside the pages."""
        orders = 0 if self.channels is None else self.channels.allocated_bytes
        return orders + (0 if self.scores.queries is None else self.scores.queries.allocated_bytes)

    @property
    def row_bytes(self) -> tuple[int, int]:
        """Bytes of one row beside its pages, whatever it holds: (counters and orders of channels, rings)."""
        orders = 0 if self.channels is None else self.channels.row_bytes
        return orders, 0 if self.scores.queries is None else self.scores.queries.row_bytes

    # What is held.

    @property
    def most_new_pages(self) -> int:
        """Pages that a list takes in a step at most."""
        return 1

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
        lists, homes = self.pages.layer_lists(rows, layer), self.pages.homes
        present = range(len(self.pages.formats)) if homes is None else [tier for tier, _ in homes.in_layer(layer)]
        tiers = [self.pages.tier(tier, lists, width[tier] if width else None) for tier in present]
        if self.pages.books is not None:
            self.pages.books.attach(tiers, layer)
        return tiers, None

    def view(self, rows: Tensor, numbers: Sequence[int] = ()) -> PagesView:
        """What the policy may see of rows, which the host knows as `numbers`."""
        return PagesView(
            self.pages, self.counters, rows, self.policy.score, self.plans.find, fit=self.fit, numbers=numbers
        )

    def measured_view(self, rows: Tensor, numbers: Sequence[int]) -> PagesView:
        """The same for a bulk eviction, with the scores that the policy's statistic gives the slots now."""
        measure = self.scores.of_slots if self.scores.measures_slots else None
        return PagesView(
            self.pages,
            self.counters,
            rows,
            self.policy.score,
            self.plans.find,
            measure,
            self.fit,
            numbers,
            is_still=True,
        )

    @property
    def takes_all_as_it_comes(self) -> bool:
        """Whether a step's queries, keys and values go to attention as the model gives them, and its output back."""
        idle = self.turns.keys.idle and self.turns.values.idle
        return idle and self.channels is None and self.scores.queries is None

    def turned(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, orders: Orders | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [S, Hq, D], keys and values [S, H, D] of one layer of rows (or of tokens of one row) as attention
        over pages takes them; `orders` are those of the rows' channels."""
        q, k = self.turns.keys.turn(q), self.turns.keys.turn(k)
        if orders is not None:
            q, k = reorder(q, orders.queries[:, layer]), reorder(k, orders.keys[:, layer])
        return q, k, self.turns.values.turn(v)

    # Rows.

    def lists(self, row: int) -> Tensor:
        """List numbers int64 [M] of one row."""
        return self.pages.lists_of(torch.tensor([row], device=self.shape.device))

    def forget(self, number: int) -> None:
        """Notes that what the host was told of a row holds no longer."""
        self.pages.forget(number)
        self.due.forget(number)

    def clear(self, lists: Tensor) -> None:
        """Forgets lists."""
        self.pages.clear(lists)

    def share(self, source: int, target: int) -> None:
        """Lets an empty row hold what another one holds: its pages until one of them writes to one, and copies of
        whatever lies beside the pages."""
        rows = torch.tensor([source, target], device=self.shape.device)
        self.pages.table.share(*(self.pages.lists_of(row[None]) for row in rows))
        if self.scores.queries is not None:
            self.scores.queries.copy(source, target)
        if self.channels is not None:
            self.channels.copy(source, target)
