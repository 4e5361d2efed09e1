"""Plans and writes prompts, layer by layer or, where a policy ranks over the whole model, once all layers are there."""

import torch
from torch import Tensor

from kvbench.cache.channels import reorder
from kvbench.cache.layout import ModelShape
from kvbench.cache.ledger import Ledger
from kvbench.cache.paged import Paged
from kvbench.cache.split import Split
from kvbench.policy import Policy, PrefillPlan, PrefillView

Layer = tuple[Tensor, Tensor, Tensor | None, Tensor | None]  # keys, values, scores, what channels are worth


class Prompts:
    """The prompts on their way into a cache.

    Args:
        policy: Decides.
        shape: The model's shape.
        holding: What holds the tokens.
        ledger: Counts bytes.
    """

    def __init__(self, policy: Policy, shape: ModelShape, holding: Paged | Split, ledger: Ledger) -> None:
        self._policy, self._shape, self._holding, self._ledger = policy, shape, holding, ledger
        self._ranks = shape.ranks
        # Row -> layers that wait for the last one, for policies of scope `model`.
        self.new_tokens: dict[int, int] = {}  # row -> most tokens that come behind its prompt
        self._waiting: dict[int, list[Layer]] = {}

    def place(
        self, row: int, layer: int, k: Tensor, v: Tensor, score: Tensor | None, channels: Tensor | None = None
    ) -> None:
        """Plans and writes one layer of a prompt whose scores are known.

        Args:
            k, v: [H, N, D] post-RoPE keys and values, uncompressed, at the cache's granularity.
            score: fp32 [H, N] or [1 + len(also), H, N] as the policy's `ScoreSpec` says, or None when it asks for none.
            channels: fp32 [H, D] what the key channels are worth, likewise.
        """
        last = layer + 1 == self._shape.num_layers
        if not layer and self._ledger.fit.budget is not None:
            self._ledger.fit.open(row, k.shape[1], self.new_tokens[row])
        if self._policy.scope == "model" or self._policy.score.probe is not None:  # a probe's prompt is there anyhow
            waiting = self._waiting.setdefault(row, [])
            waiting.append((k, v, score, channels))
            if not last:
                return
            self._place_all(row, self._waiting.pop(row))
        else:
            self._place(row, layer, [(k, v, score, channels)])
        if last:
            self.finish(row, k.shape[1])

    def _place_all(self, row: int, layers: list[Layer]) -> None:
        """Plans and writes all layers, in one plan or one by one, as the policy's scope is."""
        if self._policy.scope == "model":
            self._place(row, 0, layers)
            return
        for layer in range(len(layers)):
            own = layers.pop(0)
            self._place(row, layer, [own], beside_bytes=sum(k.nbytes + v.nbytes for k, v, *_ in layers))

    def forget(self, row: int) -> None:
        """Drops what a row was still waiting with."""
        self._waiting.pop(row, None)

    def _place(self, row: int, first: int, layers: list[Layer], beside_bytes: int = 0) -> None:
        """Plans layers together, from layer `first` on, and writes each; others hold so many bytes meanwhile."""
        given = [score.to(self._shape.device) for _, _, score, _ in layers if score is not None]
        worth = [channels.to(self._shape.device) for *_, channels in layers if channels is not None]
        score = torch.stack(given) if given else None  # a copy: what a prompt cache replays never leaves its hands
        score = score if score is None else self._ranks.gather(score, -2)  # heads may compete
        extra: dict[str, Tensor] = {}
        if score is not None and (also := self._policy.score.statistic.also):
            score, *others = score.unbind(1)
            extra = dict(zip(also, others, strict=True))
        channels = self._ranks.gather(torch.stack(worth), -2) if worth else None
        plan = self._plan(row, first, len(layers), score, extra, layers[0][0], channels)
        begins_with = plan.score if plan.score is not None else score
        for index, (k, v, *_) in enumerate(layers):
            _, part = self._holding.part_of(first + index)
            if part.channels is not None and plan.channels is not None:
                order = self._ranks.own(plan.channels[index], 0).to(k.device).long()
                part.channels.hold(row, first + index - part.first_layer, order)
                k = reorder(k.transpose(0, 1), order[None]).transpose(0, 1)
            tier_of = self._ranks.own(plan.tier_of[index], 0).to(k.device)
            stored = None if begins_with is None else self._ranks.own(begins_with[index], 0).to(k.device)
            part.write_prompt(row, first + index - part.first_layer, k, v, tier_of, stored)
        self._ledger.hold(row, staging_bytes=beside_bytes + sum(k.nbytes + v.nbytes for k, v, *_ in layers))

    def _plan(
        self,
        row: int,
        first: int,
        num_layers: int,
        score: Tensor | None,
        extra: dict[str, Tensor],
        k: Tensor,
        channels: Tensor | None,
    ) -> PrefillPlan:
        heads, num_tokens = k.shape[:2]
        fit, counters = self._ledger.fit, self._holding.parts[0].counters
        view = PrefillView(
            num_tokens=num_tokens,
            num_layers=self._shape.num_layers,
            num_kv_heads=heads * self._ranks.size,
            layers=torch.arange(first, first + num_layers, device=self._shape.device),
            score=score,
            token_bytes=self._holding.parts[0].pages.planned_bytes,
            extra=extra,
            instruction_tokens=int(counters.instruction_tokens[row]) if self._policy.needs_instruction else 0,
            byte_tokens=int(fit.tokens[row]) if fit.budget is not None else None,
            channels=channels,
        )
        return self._holding.plans.prefill(view, score)

    def finish(self, row: int, num_tokens: int) -> None:
        """Counts a prompt whose last layer was written."""
        counted = []
        for part in self._holding.parts:
            part.counters.hold(row, num_tokens)
            part.counters.prompt_tokens[row] = num_tokens
            lists = part.lists(row)
            counts = torch.stack(part.slots_per_tier(lists)).sum(0)
            if part.counters.prompt_slots.numel():
                part.counters.prompt_slots[lists] = counts.to(torch.int32)
            counted.append(counts.to(self._shape.device))
        self._holding.tell(torch.tensor([row], device=self._shape.device), [row])
        for part in self._holding.parts:
            part.pages.late.send()
            part.pages.late.collect()  # a plan that broke a rule is learnt of before anything follows the prompt
        self._ledger.note_prompt(row, self._ranks.gather(torch.cat(counted), 0), num_tokens)
