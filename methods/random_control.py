"""The control: keeps tokens at random."""

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from kvbench.policy import CompactPlan, DecodeView, PrefillView, Scored, ScoreSpec, SettingsConflict, Whole, uniform


@dataclass(kw_only=True)
class RandomControl(Scored):
    """Keeps sinks, a recent window, and a seeded random choice of the other prompt tokens per layer and head.

    A method that chooses by attention has to beat this at the same bytes. With `protect=prompt` only the answer goes at
    random (`random_trace`).

    Args:
        sinks: First tokens that always stay.
        window: Last tokens that always stay, as in the methods it is compared with.
        seed: Seed of the choice; the prompt's length is mixed in.

    Source: none (control). `random_trace`: Random Attention (arXiv 2609.03430), which keeps the prompt and evicts the
        trace of a thinking model at random, as others describe it; its text was not at hand.
    Differs: `random_trace` draws anew at every eviction, among what earlier ones left, and keeps the last `window`
        tokens.
    """

    ranks_anew = True
    sinks: Annotated[int, Whole(0, unit="tokens")] = 4
    window: Annotated[int, Whole(0, unit="tokens")] = 32
    seed: Annotated[int, Whole(0, 2**63 - 1)] = 0

    def declare(self) -> None:
        super().declare()
        if self.value_aware:
            raise SettingsConflict(
                "value_aware=true weighs a score, and random has none; leave it false", setting="method.value_aware"
            )
        self.rank_by(ScoreSpec(track=("pos",) if self.evicts_later else ()))

    def always(self, budget: int) -> tuple[int, int]:
        return self.sinks, self.window

    def ranking(self, view: PrefillView) -> Tensor:
        draws = []
        for layer in view.layers.tolist():  # of the whole prompt: read in chunks, every token keeps its number
            generator = torch.Generator().manual_seed(hash((self.seed, layer, view.prompt_tokens)))
            draws.append(torch.rand(view.num_kv_heads, view.prompt_tokens, generator=generator)[:, : view.num_tokens])
        return torch.stack(draws).to(view.layers.device)

    def plan_compact(self, view: DecodeView) -> CompactPlan:
        pos = view.slots(0).pos
        _, layers, heads = (torch.arange(size, device=pos.device) for size in view.shape)
        draw = uniform(self.seed, view.tokens_seen[:, None, None, None], layers[:, None, None], heads[:, None], pos)
        score = draw.masked_fill(pos < self.sinks, 3.0)
        return self.shrink(view, score)
