"""Plans and writes prompts, layer by layer or, where a policy ranks over the whole model, once all layers are there."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvbench.cache.async_counts import Rows
from kvbench.cache.holding import reorder
from kvbench.cache.layout import ModelShape
from kvbench.cache.ledger import Ledger
from kvbench.cache.offsets import less
from kvbench.cache.paged import Paged
from kvbench.cache.split import Split
from kvbench.policy import Policy, PrefillPlan, PrefillView


@dataclass(frozen=True)
class ScoredLayer:
    """One uncompressed layer of a prompt with its measurements.

    k, v [KV heads, N, D] post-RoPE keys and values, [H, N, D] once they are at the cache's granularity; the score of
    the policy's `ScoreSpec`, None without one, or if it depends on keys and values alone; the part of the last queries
    that the cache keeps (`QueryRing.last`); and fp32 [H, D] weights of key channels, if the policy orders them.
    """

    k: Tensor
    v: Tensor
    score: Tensor | None = None
    last: Tensor | None = None
    channels: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        return self.k.shape[1]

    @property
    def staged_bytes(self) -> int:
        return self.k.nbytes + self.v.nbytes


class Prompts:
    """The prompts on their way into a cache."""

    def __init__(self, policy: Policy, shape: ModelShape, holding: Paged | Split, ledger: Ledger) -> None:
        self._policy, self._shape, self._holding, self._ledger = policy, shape, holding, ledger
        self._ranks = shape.ranks
        self.new_tokens: dict[int, int] = {}  # row -> most tokens that come after its prompt
        self._pending: dict[int, list[ScoredLayer]] = {}  # row -> layers that wait for the last one

    def write(self, row: int, layer: int, scored: ScoredLayer) -> None:
        """Plans and writes one layer of a prompt, whose keys and values are as the model gives them."""
        _, part = self._holding.part_of(layer)
        keys, values = (part.copied(x, 0) for x in (scored.k, scored.v))
        if part.offsets is not None:
            part.offsets.hold_prompt(row, layer - part.first_layer, scored.k)
            keys = less(keys, part.offsets.of_layer(row, layer - part.first_layer, len(keys)))
        scored = replace(scored, k=part.rotations.keys.apply(keys), v=part.rotations.values.apply(values))
        last = layer + 1 == self._shape.num_layers
        if not layer:
            self._ledger.begin_prompt(row, scored.num_tokens, self.new_tokens[row])
        if self._policy.scope == "model" or self._policy.score.probe is not None:  # a probe's prompt is there anyhow
            self._pending.setdefault(row, []).append(scored)
            if not last:
                return
            self._write_all(row, self._pending.pop(row))
        else:
            self._write(row, layer, [scored])
        if last:
            self.finish(row, scored.num_tokens)

    def _write_all(self, row: int, layers: list[ScoredLayer]) -> None:
        """Plans and writes all layers, in one plan or one by one, as the policy's scope is."""
        if self._policy.scope == "model":
            self._write(row, 0, layers)
            return
        for layer in range(len(layers)):
            layer_tensors = layers.pop(0)
            self._write(row, layer, [layer_tensors], later_bytes=sum(each.staged_bytes for each in layers))

    def forget(self, row: int) -> None:
        self._pending.pop(row, None)

    def _write(self, row: int, first: int, layers: list[ScoredLayer], later_bytes: int = 0) -> None:
        """Plans layers together, from layer `first` on, and writes each; others hold so many bytes meanwhile."""
        scores = [each.score.to(self._shape.device) for each in layers if each.score is not None]
        worth = [each.channels.to(self._shape.device) for each in layers if each.channels is not None]
        # A copy: what a prompt cache replays never leaves its hands. And heads may compete.
        score = self._ranks.gather(torch.stack(scores), -2) if scores else None
        channels = self._ranks.gather(torch.stack(worth), -2) if worth else None
        heads, num_tokens = layers[0].k.shape[:2]
        numbers = range(first, first + len(layers))
        plan, begins_with = self.plan(row, numbers, heads * self._ranks.size, num_tokens, score, channels=channels)
        for layer, tensors in enumerate(layers, first):
            _, part = self._holding.part_of(layer)
            index, part_layer, k = layer - first, layer - part.first_layer, tensors.k
            if part.channels is not None and plan.channels is not None:
                order = self._ranks.local(plan.channels[index], 0).to(k.device).long()
                part.channels.hold(row, part_layer, order)
                k = reorder(k.transpose(0, 1), order[None]).transpose(0, 1)
            tier_of = self._ranks.local(plan.tier_of[index], 0).to(k.device)
            stored = None if begins_with is None else self._ranks.local(begins_with[index], 0).to(k.device)
            part.write_prompt(row, part_layer, k, tensors.v, tier_of, stored)
        # Pages only grow: of layers that come one by one, the last has the most.
        if later_bytes or first + len(layers) == self._shape.num_layers:
            self._ledger.hold(row, staging_bytes=later_bytes + sum(each.staged_bytes for each in layers))

    def plan(
        self, row: int, layers: Sequence[int], heads: int, num_tokens: int, score: Tensor | None, **more: Any
    ) -> tuple[PrefillPlan, Tensor | None]:
        """Calls the policy for layers of a prompt that are planned together.

        `heads` are the cache's heads per layer, `num_tokens` the tokens so far, `score` fp32 [V, H, N] or [V, 1 +
        len(also), H, N], or None; further fields go to the view. Returns the plan and the initial scores of the slots,
        fp32 [V, H, N] or None.
        """
        extra: dict[str, Tensor] = {}
        if score is not None and (also := self._policy.score.statistic.also):
            score, *others = score.unbind(1)
            extra = dict(zip(also, others, strict=True))
        first = self._holding.parts[0]
        view = PrefillView(
            num_tokens=num_tokens,
            num_layers=self._shape.num_layers,
            num_kv_heads=heads,
            layers=torch.arange(layers[0], layers[0] + len(layers), device=self._shape.device),
            score=score,
            token_bytes=first.pages.planned_bytes,
            extra=extra,
            instruction_tokens=min(num_tokens, first.counters.instruction_of(row)),
            byte_tokens=self._ledger.budget.of_row(row),
            **more,
        )
        plan = self._holding.plans.prefill(view, score, begins=not layers[0])
        return plan, score if plan.score is None else plan.score

    def finish(self, row: int, num_tokens: int) -> None:
        """Counts a prompt whose last layer was written."""
        counted = []
        self._holding.hold(row, num_tokens)
        for part in self._holding.parts:
            part.counters.prompt_tokens[row] = num_tokens
            lists = part.lists(row)
            counts = torch.stack(part.slots_per_tier(lists)).sum(0)
            if part.counters.prompt_slots.numel():
                part.counters.prompt_slots[lists] = counts.to(torch.int32)
            counted.append(counts.to(self._shape.device))
        self._holding.tell(Rows.of([row], self._shape.device))
        self._holding.send()
        self._holding.collect()  # a plan that broke a rule is learnt of before anything follows the prompt
        self._ledger.note_prompt(row, self._ranks.gather(torch.cat(counted), 0), num_tokens)
