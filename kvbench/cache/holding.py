"""Tokens of all lists on one device: in pages, and in whatever a method keeps outside of them."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from kvbench.cache.async_counts import AsyncCounts, Rows, one_row
from kvbench.cache.checks import CheckedPlans
from kvbench.cache.counters import Counters
from kvbench.cache.layout import ModelShape
from kvbench.cache.offsets import KeyOffsets, less
from kvbench.cache.pages import Pages
from kvbench.cache.rope import Rope
from kvbench.cache.rotation import Rotations
from kvbench.cache.scores import Scores
from kvbench.cache.solve_budget import SolvedBudget
from kvbench.cache.view import PagesView
from kvbench.kernels.operands import Ring, Softmax, TierPages
from kvbench.policy import DecodeView, Policy

Orders = tuple[Tensor, Tensor]  # of channels: int64 [S, L, Hq, D] of each query head's list, [S, L, H, D] of each list


class Channels:
    """The order of every list's key channels, for methods that keep the first of them only (`Tier.k_kept`).

    The product of a query and a key does not change when both change the order of their channels. So all tiers of a
    list hold keys in the list's own order, a format of few channels holds the first ones, and queries are put into the
    same order before they come to the pages: attention reads no list of channels.
    """

    def __init__(self, rows: int, shape: ModelShape) -> None:
        kind = torch.uint8 if shape.head_dim <= 256 else torch.int16
        each = torch.arange(shape.head_dim, dtype=kind, device=shape.device)
        self._order = each.repeat(rows, shape.num_layers, shape.num_kv_heads, 1)
        self._group = shape.num_q_heads // shape.num_kv_heads
        self.allocated_bytes, self.row_bytes = self._order.nbytes, self._order.nbytes // rows

    def hold(self, row: int, layer: int, order: Tensor) -> None:
        self._order[row, layer] = order.to(self._order.dtype)

    def copy(self, source: int, row: int) -> None:
        self._order[row] = self._order[source]

    def of(self, rows: Tensor) -> Orders:
        """The orders of rows int64 [S], in all layers, as a step looks them up once."""
        keys = self._order[rows].long()
        return keys if self._group == 1 else keys.repeat_interleave(self._group, 2), keys


def reorder(x: Tensor, order: Tensor) -> Tensor:
    """Permutes queries or keys [S, X, D] by an order of channels, int64 [S or 1, X, D].

    Vectors of one channel, which stand for absent ones (`kvbench.sizing`), have no order.
    """
    return x if x.shape[-1] == 1 else x.gather(-1, order.expand(len(x), -1, -1))


class EvictionDue:
    """Host-side state of the bulk evictions that are due for rows, over all layers and heads, wherever they lie.

    Args:
        posts: The device posts to `counts` whether an eviction is due, so that no step reads it back.
    """

    def __init__(self, policy: Policy, plans: CheckedPlans, counts: AsyncCounts, posts: bool) -> None:
        is_periodic = policy.compaction is not None and not policy.compaction.when_full
        self._happens = is_periodic and policy.residual is None  # no eviction with rings
        self._plans, self._counts, self._posts = plans, counts, posts
        self._due: dict[int, int] = {}

    def forget(self, numbers: Sequence[int]) -> None:
        """Notes that what the host was told of rows holds no longer."""
        for number in numbers:
            self._due.pop(number, None)

    def tell(self, numbers: Sequence[int], view: Callable[[], DecodeView]) -> None:
        """Tells the host, later, of which rows an eviction is due before the next step; `view` shows them."""
        if self._happens and self._posts:
            self._counts.post(self._plans.due(view()), lambda: partial(self.learn, tuple(numbers)))

    def learn(self, numbers: Sequence[int], due: Sequence[int]) -> None:
        """Takes in whether the bulk evictions of rows are due, and perhaps of what pads them."""
        self._due |= zip(numbers, due, strict=False)

    def may_be(self, numbers: Sequence[int]) -> bool:
        """True if an eviction of rows is due before the next step, or the host was not told that it is not."""
        return self._happens and any(self._due.get(number) != 0 for number in numbers)

    def whose(self, numbers: Sequence[int], view: Callable[[], DecodeView]) -> list[int]:
        """The rows whose eviction is due now, of those that a step begins with; `view` shows these."""
        if not self._happens:
            return []
        due = [self._due.get(number) for number in numbers]
        self.forget(numbers)
        if None in due:
            due = self._plans.due(view()).tolist()
        return [number for number, is_due in zip(numbers, due, strict=False) if is_due]


class Holding:
    """Tokens in pages, with the state of steps and prompts.

    `first_layer` is the model's index of the first layer here; other arguments count from it.
    """

    def __init__(
        self,
        policy: Policy,
        shape: ModelShape,
        pages: Pages,
        counters: Counters,
        rotations: Rotations,
        first_layer: int,
        offsets: KeyOffsets | None = None,
    ) -> None:
        self.policy, self.shape, self.pages, self.counters = policy, shape, pages, counters
        self.rotations, self.first_layer, self.offsets = rotations, first_layer, offsets
        self.rope = Rope(policy, shape, pages.on_device)
        self.scores = Scores(policy, shape, pages, rotations, first_layer, offsets)
        self.plans = CheckedPlans(policy, pages)
        self.due = EvictionDue(policy, self.plans, pages.counts, pages.on_device)
        self.channels = Channels(pages.shape[0], shape) if policy.score.orders_channels else None
        self.budget: SolvedBudget | None = None  # of the store, which counts everything that a row holds

    @property
    def off_page_bytes(self) -> int:
        orders = 0 if self.channels is None else self.channels.allocated_bytes
        orders += 0 if self.offsets is None else self.offsets.allocated_bytes
        return orders + (0 if self.scores.queries is None else self.scores.queries.allocated_bytes)

    @property
    def row_bytes(self) -> tuple[int, int]:
        """Bytes of one row outside its pages, whatever it holds.

        (Counters, orders of channels and offsets of keys, rings).
        """
        orders = 0 if self.channels is None else self.channels.row_bytes
        orders += 0 if self.offsets is None else self.offsets.row_bytes
        return orders, 0 if self.scores.queries is None else self.scores.queries.row_bytes

    # Contents.

    @property
    def copies(self) -> int:
        """The number of times that each key and value is kept."""
        return self.pages.shape[2] // self.shape.num_kv_heads

    def softmax_of(self, layer: int) -> Softmax:
        """Caps and sinks of a layer."""
        return self.shape.softmax.of_layer(layer)

    @property
    def most_new_slots(self) -> int:
        return 1

    @property
    def most_new_pages(self) -> int:
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
        """Slots in pages of a list after it kept `kept` tokens of a prompt and took `new` more: exact, and at most.

        The second is for lists that hold these numbers on average.
        """
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
        lists = self.pages.layer_lists(rows, layer)
        tiers = [self.pages.tier(tier, lists, width[tier] if width else None) for tier in self.pages.tiers_in(layer)]
        if self.pages.codebooks is not None:
            self.pages.codebooks.attach(tiers, layer)
        return tiers, None

    def view(self, rows: Rows, measured: bool = False) -> PagesView:
        """The policy's view of rows; of a bulk eviction, with the scores that its statistic gives the slots now."""
        measure = self.scores.of_slots if measured and self.scores.measures_slots else None
        spec, find = self.policy.score, self.plans.find
        return PagesView(self.pages, self.counters, rows.looked_at, spec, find, self.budget, measure, is_still=measured)

    @property
    def takes_all_as_it_comes(self) -> bool:
        """True if a step's queries, keys and values go to attention as the model gives them, and its output back."""
        idle = self.rotations.keys.idle and self.rotations.values.idle and self.copies == 1
        return idle and self.channels is None and self.offsets is None and self.scores.queries is None

    def to_pages(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, orders: Orders | None, offsets: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [S, Hq, D], keys and values [S, KV heads, D] of one layer in the form of attention over pages.

        S counts rows, or tokens of one row. `orders` are the orders of the rows' channels, `offsets` fp32 [S or 1, L,
        KV heads, D] what is subtracted from stored keys.
        """
        if offsets is not None:
            k = less(k, offsets[:, layer])
        q, k = self.rotations.keys.apply(q), self.rotations.keys.apply(k)
        if orders is not None:
            q, k = (reorder(x, order[:, layer]) for x, order in zip((q, k), orders, strict=True))
        return q, self.copied(k, 1), self.copied(self.rotations.values.apply(v), 1)

    def copied(self, x: Tensor, dim: int) -> Tensor:
        """Keys or values at the cache's granularity: KV heads along `dim`, each as often as it is kept."""
        return x if self.copies == 1 else x.repeat_interleave(self.copies, dim)

    # Rows.

    def lists(self, row: int) -> Tensor:
        """List numbers int64 [M] of one row."""
        return self.pages.lists_of(one_row(row, self.shape.device))

    def lists_of_layer(self, row: int, layer: int) -> Tensor:
        heads = self.pages.shape[2]
        first = row * self.pages.lists_per_row + layer * heads
        return torch.arange(first, first + heads, device=self.shape.device)

    def clear(self, lists: Tensor) -> None:
        self.pages.clear(lists)

    def share(self, source: int, target: int) -> None:
        """Makes an empty row share another row's contents.

        Pages are shared until one of the rows writes to one; everything outside the pages is copied.
        """
        self.pages.table.share(self.lists(source), self.lists(target))
        if self.scores.queries is not None:
            self.scores.queries.copy(source, target)
        if self.channels is not None:
            self.channels.copy(source, target)
        if self.offsets is not None:
            self.offsets.copy(source, target)
