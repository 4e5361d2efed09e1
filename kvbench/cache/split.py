"""A cache whose layers or heads lie in several places: every place holds its own, and plans are made over all of them.

The layers of a model may lie on several devices of one process (`ModelShape.places`), and the heads of every layer in
several processes (`ModelShape.ranks`). Each place has pages, tables and counters of its own, and attention never leaves
it. What a policy looks at is brought together on the first device, and in every process, before it is asked; each place
then carries out its share of the plan. So a plan is the one that a single cache would get, and methods whose tokens
compete across heads or layers need not know.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from kvbench.cache.checks import CheckedPlans
from kvbench.cache.due import Due
from kvbench.cache.late import to_device
from kvbench.cache.layout import ModelShape
from kvbench.cache.paged import Paged
from kvbench.cache.ranks import Ranks
from kvbench.cache.steps import PagedStep
from kvbench.cache.view import PagesView, SlotsView
from kvbench.policy import Budget, DecodePlan, Extreme, Policy, SlotArrays


class Split:
    """Holds the layers of a model in several places, and the heads in several processes.

    Args:
        policy: Decides.
        shape: The model's shape.
        parts: What holds each place's layers, in their order.

    Raises:
        ValueError: The policy's statistic cannot be computed from some of the heads.
    """

    def __init__(self, policy: Policy, shape: ModelShape, parts: Sequence[Paged]) -> None:
        self.policy, self.parts, self._ranks = policy, parts, shape.ranks
        first = parts[0].pages
        self.plans = CheckedPlans(policy, first)
        self.due = Due(policy, self.plans, first.late, first.on_device)
        self._first = [part.first_layer for part in parts]
        if shape.ranks.size > 1 and "attention_call" in policy.score.statistic.needs:
            raise ValueError(
                f"{type(policy).__name__} with {type(policy.score.statistic).__name__} looks at a layer's whole "
                f"attention, and model.tensor_parallel={shape.ranks.size} leaves each process some of its heads; "
                "spread the layers instead (model.device=[cuda:0,cuda:1])"
            )

    def part_of(self, layer: int) -> tuple[int, Paged]:
        """Which of `parts` holds a layer of the model, by number and itself."""
        index = bisect_right(self._first, layer) - 1
        return index, self.parts[index]

    @property
    def takes_chunks(self) -> bool:
        """As of each part."""
        return self.parts[0].takes_chunks

    def view(self, rows: Tensor, numbers: Sequence[int] = ()) -> "SplitView":
        """What the policy may see of rows (int64 [S] on the first device), which the host knows as `numbers`."""
        return self._joined([part.view(rows.to(part.shape.device), numbers) for part in self.parts])

    def _joined(self, views: Sequence[PagesView]) -> "SplitView":
        return SplitView(views, self._ranks, self.policy.score.prefill_queries)

    def forget(self, number: int) -> None:
        """Notes that what the host was told of a row holds no longer."""
        for part in self.parts:
            part.forget(number)
        self.due.forget(number)

    def tell(self, rows: Tensor, numbers: Sequence[int]) -> None:
        """As `Paged.tell`."""
        for part in self.parts:
            part.pages.tell(rows.to(part.shape.device), numbers)
        self.due.tell(numbers, lambda: self.view(rows, numbers))

    def open(self, rows: Tensor, numbers: Sequence[int]) -> list[PagedStep]:
        """As `Paged.open`; a plan is made over everything before any place changes.

        Raises:
            PoolExhausted: One of the places has no page for a new slot. Others may have reserved theirs by then, so
                that the rows can only be closed.
            ValueError: The plan breaks a rule; nothing was changed, except that a bulk eviction that was due has taken
                place.
        """
        if self.policy.residual is None:
            self._compact(rows, numbers)
        asks = self.policy.residual is None and type(self.policy).plan_decode is not Policy.plan_decode
        plan = self.plans.decode(self.view(rows, numbers)) if asks else DecodePlan()
        steps: list[PagedStep] = []
        for part in self.parts:
            own = DecodePlan(
                slot=self._share(part, plan.slot),
                demote_to=self._share(part, plan.demote_to),
                demote_slot=self._share(part, plan.demote_slot),
                tier=plan.tier,
            )
            steps.append(part.step(rows.to(part.shape.device), numbers, own))
        return steps

    def _compact(self, rows: Tensor, numbers: Sequence[int]) -> None:
        """Bulk eviction for the rows whose turn it is."""
        whose = self.due.whose(numbers, lambda: self.view(rows))
        if not whose:
            return
        due = [to_device(whose, part.shape.device) for part in self.parts]
        for part, own in zip(self.parts, due, strict=True):
            part.pages.table.own_all(part.pages.lists_of(own))
        views = [part.measured_view(own, whose) for part, own in zip(self.parts, due, strict=True)]
        plan = self.plans.compact(self._joined(views))
        for part, own, view in zip(self.parts, due, views, strict=True):
            keep = [self._share(part, each) for each in plan.keep]
            for tier, each in enumerate(keep):
                if each is not None:  # a place's own lists may be shorter than the longest of all
                    keep[tier] = each[..., : view.slots(tier).valid.shape[-1]]
            part.evict(part.pages.lists_of(own), whose, replace(plan, keep=keep))

    def _share(self, part: Paged, x: Tensor | None) -> Tensor | None:
        """A part's share of a tensor [S, L, H, ...] of the whole model, on its device; None of None."""
        if x is None:
            return None
        layers = slice(part.first_layer, part.first_layer + part.shape.num_layers)
        return self._ranks.own(x[:, layers], 2).to(part.shape.device)


class SplitView(SlotsView):
    """What a policy sees of rows whose layers or heads lie in several places: the places' views, put together.

    Args:
        views: Of the places in this process, in the order of their layers.
        ranks: The processes.
        window: As for `SlotsView`.
    """

    def __init__(self, views: Sequence[PagesView], ranks: Ranks, window: int) -> None:
        super().__init__(window)
        first = views[0]
        self._views, self._ranks = views, ranks
        self._counts: dict[int, Tensor] = {}
        self._arrays: dict[int, SlotArrays] = {}
        self.tokens_seen, self.prompt_tokens = first.tokens_seen, first.prompt_tokens
        rows, _, heads = first.shape
        self.shape = (rows, sum(view.shape[1] for view in views), heads * ranks.size)
        if hasattr(first, "instruction_tokens"):
            self.instruction_tokens = first.instruction_tokens
        if hasattr(first, "prompt_slots"):
            self.prompt_slots = self._joined(lambda view: view.prompt_slots)

    def _joined(self, of: Callable[[PagesView], Tensor], lead: int = 0) -> Tensor:
        """The places' tensors [.., S, L, H] or [.., S, L, H, n], with `lead` dimensions before, as one; what is
        shorter than the longest n is filled up."""
        found = [of(view).to(self.tokens_seen.device) for view in self._views]
        if found[0].ndim == lead + 4:
            widest = self._ranks.most(max(x.shape[-1] for x in found))
            found = [torch.nn.functional.pad(x, (0, widest - x.shape[-1])) for x in found]
        return self._ranks.gather(torch.cat(found, lead + 1), lead + 2)

    def budget_tokens(self, budget: Budget, tier: int = 0) -> Tensor:
        return self._views[0].budget_tokens(budget, tier)

    def num_slots(self, tier: int) -> Tensor:
        if tier not in self._counts:
            self._counts[tier] = self._joined(lambda view: view.num_slots(tier))
        return self._counts[tier]

    def slots(self, tier: int) -> SlotArrays:
        if tier not in self._arrays:

            def extra(name: str) -> Tensor:
                return self._joined(lambda view: view.slots(tier).extra[name])

            self._arrays[tier] = SlotArrays(
                score=self._joined(lambda view: view.slots(tier).score),
                extra={name: extra(name) for name in self._views[0].slots(tier).extra},
                pos=self._joined(lambda view: view.slots(tier).pos),
                valid=self._joined(lambda view: view.slots(tier).valid),
            )
        return self._arrays[tier]

    def argmin(
        self,
        tier: int,
        *,
        by: Literal["mean", "score", "pos"],
        before: Tensor | None = None,
        first: int | Tensor = 0,
        over_layer: bool = False,
    ) -> Extreme:
        if over_layer and self._ranks.size > 1:  # the mean is over heads of all processes
            return self._smallest(tier, by, before, first, over_layer)

        def found(view: PagesView) -> Extreme:
            to = view.tokens_seen.device
            own_before, own_first = (x.to(to) if isinstance(x, Tensor) else x for x in (before, first))
            return view.argmin(tier, by=by, before=own_before, first=own_first, over_layer=over_layer)  # type: ignore[arg-type]

        return self._extreme(found)

    def find(self, tier: int, position: Tensor) -> Extreme:
        return self._extreme(lambda view: view.find(tier, position.to(view.tokens_seen.device)))

    def _extreme(self, of: Callable[[PagesView], Extreme]) -> Extreme:
        def packed(view: PagesView) -> Tensor:
            found = of(view)
            # One message, in which whole numbers are exact, too.
            return torch.stack([found.value.double(), found.slot.double(), found.pos.double()])

        value, slot, pos = self._joined(packed, lead=1)
        return Extreme(value=value.float(), slot=slot.long(), pos=pos.long())
