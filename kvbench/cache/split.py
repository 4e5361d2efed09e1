"""Parts of a cache, made of a policy and a model's shape: one, or several behind a `Split`.

The layers of a model may lie on several devices of one process (`ModelShape.device_spans`), and the heads of every
layer in several processes (`ModelShape.ranks`). Each part has pages, tables and counters of its own, and attention
never leaves it. The policy's view is gathered on the first device, and in every process, before a plan is made; each
part then carries out its share of the plan. So a plan equals that of a single cache, also of methods whose tokens
compete across heads or layers.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvbench.cache.async_counts import AsyncCounts, Rows
from kvbench.cache.buffered import Buffered
from kvbench.cache.checks import CheckedPlans
from kvbench.cache.codebooks import Codebooks, KeyBiases, Scales
from kvbench.cache.counters import Counters
from kvbench.cache.holding import EvictionDue
from kvbench.cache.layout import ModelShape, compile_formats
from kvbench.cache.offsets import check_key_offset, key_offsets
from kvbench.cache.options import StoreOptions
from kvbench.cache.paged import Paged, Parts
from kvbench.cache.pages import Pages, TierMap
from kvbench.cache.ranks import Ranks
from kvbench.cache.rotation import rotations_of
from kvbench.cache.steps import PagedStep
from kvbench.cache.view import By, PagesView, SlotsView
from kvbench.errors import SettingsConflict
from kvbench.kernels.backend import Backend
from kvbench.kernels.pool import PagePool
from kvbench.policy import Budget, DecodePlan, Extreme, Policy, ScoreSpec, SlotArrays


def make_holding(
    policy: Policy,
    shape: ModelShape,
    *,
    rows: int,
    max_slots: int,
    options: StoreOptions,
    backend: Backend,
    pool: type[PagePool],
    counts: dict[torch.device, AsyncCounts],
) -> "Paged | Split":
    """Makes the empty parts of a cache.

    `max_slots` is the limit of one list, and `counts` gets an `AsyncCounts` per device, where there is none yet. Raises
    ValueError where the policy does not fit the model or the options.
    """
    rows += backend.keeps_tables  # the spare one, which pads captured steps
    copies = shape.num_q_heads // shape.num_kv_heads if policy.granularity == "q_head" else 1
    table: list[list[int]] | None = None  # the tier of every list of the model, where these differ
    lists_by_tier = {0: shape.num_layers * shape.num_kv_heads * copies}
    if policy.by_layer is not None:
        planned = policy.by_layer.of_model(shape.num_layers, shape.num_kv_heads)
        table = [[tier for tier in row for _ in range(copies)] for row in planned]
        lists_by_tier = dict(sorted(Counter(tier for row in table for tier in row).items()))

    def make_part(first_layer: int, local: ModelShape) -> Paged:
        heads, first_head, budget = local.num_kv_heads * copies, shape.ranks.index * local.num_kv_heads, None
        if options.budget_bytes is not None:  # each place has its layers' share, and each process its heads'
            budget = options.budget_bytes * local.num_layers // (shape.num_layers * shape.ranks.size)
        formats = compile_formats(policy, shape, replace(options, budget_bytes=budget))
        tier_map = None
        codebooks: Codebooks | None = None
        if table is not None:
            here = slice(first_head * copies, first_head * copies + heads)
            layers = table[first_layer : first_layer + local.num_layers]
            tier_map = TierMap(tuple(tuple(row[here]) for row in layers), local.device)
        if policy.head_scales is not None:
            tiers = [[0] * local.num_kv_heads] * local.num_layers if tier_map is None else tier_map.table
            codebooks = Scales(policy.head_scales, formats, local, first_layer, first_head, tiers)
        elif policy.codebooks is not None:
            codebooks = Codebooks(policy.codebooks, formats, local, first_layer, first_head)
        elif options.key_offset == "bias":
            check_key_offset(options.key_offset, policy)
            codebooks = KeyBiases(formats, local, first_layer)
        pages = Pages(
            formats,
            (rows, local.num_layers, heads),
            max_slots=max_slots,
            backend=backend,
            device=local.device,
            lists_by_tier=lists_by_tier,
            budget_bytes=budget,
            memory_share=options.memory_share,
            pool=pool,
            tier_map=tier_map,
            codebooks=codebooks,
            counts=counts,
        )
        counted = pages.table.num_lists if policy.compaction or policy.needs_prompt_slots else 0
        counters = Counters.make(rows, counted, local.device, policy.needs_instruction)
        rotations = rotations_of(options.rotation, policy, local.head_dim, local.device, backend)
        offsets = key_offsets(options.key_offset, policy, shape, local, first_layer, rows, formats[0].slot.dtype)
        if policy.residual is None:
            return Paged(policy, local, pages, counters, rotations, first_layer, offsets)
        return Buffered(policy, local, pages, counters, rotations, policy.residual, first_layer, offsets)

    parts = [make_part(*each) for each in shape.parts()]
    return parts[0] if shape.is_whole else Split(policy, shape, parts)


class Split(Parts):
    """Layers of a model in several parts, and heads in several processes.

    Refuses a policy whose statistic cannot be computed from some of the heads.
    """

    def __init__(self, policy: Policy, shape: ModelShape, parts: Sequence[Paged]) -> None:
        self.policy, self.parts, self._ranks = policy, parts, shape.ranks
        first = parts[0].pages
        self.plans = CheckedPlans(policy, first)
        self.due = EvictionDue(policy, self.plans, first.counts, first.on_device)
        self._first = [part.first_layer for part in parts]
        if shape.ranks.size > 1 and "attention_call" in policy.score.statistic.needs:
            raise SettingsConflict(
                f"{type(policy).__name__} with {type(policy.score.statistic).__name__} looks at a layer's whole "
                f"attention, and model.tensor_parallel={shape.ranks.size} leaves each process some of its heads; "
                "spread the layers instead (model.device=[cuda:0,cuda:1])",
                setting="model.tensor_parallel",
            )

    def part_of(self, layer: int) -> tuple[int, Paged]:
        index = bisect_right(self._first, layer) - 1
        return index, self.parts[index]

    def view(self, rows: Rows) -> "SplitView":
        return self._merged([part.view(rows.on(part.shape.device)) for part in self.parts])

    def _merged(self, views: Sequence[PagesView]) -> "SplitView":
        return SplitView(views, self._ranks, self.policy.score)

    def open(self, rows: Rows) -> list[PagedStep]:
        """See `Paged.open`; one plan over everything precedes any change.

        If one part has no page, others may already have reserved theirs, so that the rows can only be closed.
        """
        if whose := self.due.whose(rows.numbers, lambda: self.view(rows)):
            self.compact(Rows.of(whose, self.parts[0].shape.device))
        asks = self.policy.residual is None and self.policy.decides_steps
        plan = self.plans.decode(self.view(rows)) if asks else DecodePlan()
        steps: list[PagedStep] = []
        for part in self.parts:
            local = DecodePlan(
                slot=self._share(part, plan.slot),
                demote_to=self._share(part, plan.demote_to),
                demote_slot=self._share(part, plan.demote_slot),
                tier=plan.tier,
            )
            steps.append(part.step(rows.on(part.shape.device), local))
        return steps

    def compact(self, rows: Rows) -> None:
        due = [rows.on(part.shape.device) for part in self.parts]
        for part, part_rows in zip(self.parts, due, strict=True):
            part.pages.table.unshare_all(part.pages.lists_of(part_rows.tensor))
        views = [part.view(part_rows, measured=True) for part, part_rows in zip(self.parts, due, strict=True)]
        plan = self.plans.compact(self._merged(views))
        for part, part_rows in zip(self.parts, due, strict=True):
            part.evict(part_rows, replace(plan, keep=[self._share(part, each) for each in plan.keep]))

    def _share(self, part: Paged, x: Tensor | None) -> Tensor | None:
        """A part's share of a tensor [S, L, H, ...] of the whole model, on its device; None of None."""
        if x is None:
            return None
        layers = slice(part.first_layer, part.first_layer + part.shape.num_layers)
        return self._ranks.local(x[:, layers], 2).to(part.shape.device)


class SplitView(SlotsView):
    """View of rows whose layers or heads lie in several parts: the parts' views, joined."""

    def __init__(self, views: Sequence[PagesView], ranks: Ranks, spec: ScoreSpec) -> None:
        super().__init__(spec)
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
            self.prompt_slots = self._gathered(lambda view: view.prompt_slots)

    def _copied(self) -> dict[str, Any]:
        return vars(SplitView([view.shown() for view in self._views], self._ranks, self._spec))

    def num_columns(self, tier: int) -> int:
        return self._ranks.most(max(view.num_columns(tier) for view in self._views))

    def _gathered(self, of: Callable[[PagesView], Tensor], lead: int = 0) -> Tensor:
        """Concatenates tensors [.., S, L, H] or [.., S, L, H, n] of all parts, with `lead` leading dimensions.

        Shorter ones are padded to the longest n.
        """
        tensors = [of(view).to(self.tokens_seen.device) for view in self._views]
        if tensors[0].ndim == lead + 4:
            widest = self._ranks.most(max(x.shape[-1] for x in tensors))
            tensors = [torch.nn.functional.pad(x, (0, widest - x.shape[-1])) for x in tensors]
        return self._ranks.gather(torch.cat(tensors, lead + 1), lead + 2)

    def budget_tokens(self, budget: Budget, tier: int = 0) -> Tensor:
        return self._views[0].budget_tokens(budget, tier)

    def num_slots(self, tier: int) -> Tensor:
        if tier not in self._counts:
            self._counts[tier] = self._gathered(lambda view: view.num_slots(tier))
        return self._counts[tier]

    def slots(self, tier: int) -> SlotArrays:
        if tier not in self._arrays:

            def extra(name: str) -> Tensor:
                return self._gathered(lambda view: view.slots(tier).extra[name])

            self._arrays[tier] = SlotArrays(
                score=self._gathered(lambda view: view.slots(tier).score),
                extra={name: extra(name) for name in self._views[0].slots(tier).extra},
                pos=self._gathered(lambda view: view.slots(tier).pos),
                valid=self._gathered(lambda view: view.slots(tier).valid),
            )
        return self._arrays[tier]

    def _search(self, tier: int, by: By, **conditions: Any) -> Extreme:
        if conditions.get("over_layer") and self._ranks.size > 1:  # the mean is over heads of all processes
            return super()._search(tier, by, **conditions)

        def search_part(view: PagesView) -> Tensor:
            to = view.tokens_seen.device
            local: dict[str, Any] = {name: x.to(to) if isinstance(x, Tensor) else x for name, x in conditions.items()}
            extreme = view._search(tier, by, **local)
            # One message, in which whole numbers are exact, too.
            return torch.stack([extreme.value.double(), extreme.slot.double(), extreme.pos.double()])

        value, slot, pos = self._gathered(search_part, lead=1)
        return Extreme(value=value.float(), slot=slot.long(), pos=pos.long())
