"""Keyformer: heavy hitters by attention that noise and a temperature keep from settling too early."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from kvbench.policy import ALL_QUERIES, BudgetText, LayerTensors, Number, ScoreSpec, Statistic, Stepwise, Whole, uniform

ROWS = 256  # queries whose attention lies in memory at once


@dataclass(frozen=True)
class GumbelAttention(Statistic):
    """Softmax of a query's logits with Gumbel noise, divided by a temperature that rises while decoding."""

    tau_init: float
    tau_delta: float
    noise: float
    seed: int
    words: ClassVar[str] = "with Gumbel noise, at a temperature"

    def of_prompt(self, seen: LayerTensors) -> Tensor:
        total = torch.zeros(seen.pos.shape, device=seen.k.device)
        for begin in range(0, seen.tokens_seen, ROWS):
            logits, rows = seen.logits(slice(begin, begin + ROWS)), seen.q_pos[begin : begin + ROWS]
            noisy = logits + self.noise * gumbel(self.seed, rows[:, None], seen.pos[0])
            total += seen.grouped((noisy / self.tau_init).softmax(-1).sum(1)).mean(1)
        return total

    def of_step(self, probability: Tensor, num_keys: Tensor, step: Tensor) -> Tensor:
        slot = torch.arange(probability.shape[-1], device=probability.device)
        noisy = probability.log() + self.noise * gumbel(self.seed + 1, step, slot)  # a logit, up to a constant
        tau = self.tau_init + (step + 1) * self.tau_delta
        return (noisy / tau).softmax(-1)


@dataclass(kw_only=True)
class Keyformer(Stepwise):
    """Keeps, per KV head, a recent window and the tokens with the largest sums of noisy attention over all queries.

    In every decode step the new token takes the slot of the token with the lowest sum outside the window.

    Args:
        tau_init: Temperature in the prompt; > 0.
        tau_delta: Increment of tau per decode step; >= 0.
        noise: Factor on the Gumbel noise; >= 0. 0 = none.
        seed: Seed of the noise.

    Source: d-matrix-ai/keyformer-llm models/gptj-keyformer-lib/modeling_gptj.py (Adnan et al. 2024, arXiv 2403.09054):
        60 % of the prompt, 30 % of it recent, temperatures from 1 in steps of 0.01.
    Differs: one kept set per KV head by the mean of its query heads, to which the noise of a step comes once; noise is
        the same in all heads and in repeated runs. Slots are freed, where the original masks tokens and frees none. Its
        mask is one token short, so that what leaves the recent window always goes, and no step changes the key tokens
        of the prompt; here it competes with them. A full list holds one more token, as `h2o`'s.
    """

    budget: BudgetText | None = 0.6
    recent_share: Annotated[float, Number(0, 1)] = 0.3
    tau_init: Annotated[float, Number(0, 1000, above=True)] = 1.0
    tau_delta: Annotated[float, Number(0, 1000)] = 0.01
    noise: Annotated[float, Number(0, 1000)] = 1.0
    seed: Annotated[int, Whole(0, 2**31)] = 0

    def declare(self) -> None:
        super().declare()
        self.rank_by(
            ScoreSpec(
                statistic=GumbelAttention(self.tau_init, self.tau_delta, self.noise, self.seed),
                prefill_queries=ALL_QUERIES,
                decode_update=True,
                track=("score", "pos"),
            )
        )


def gumbel(seed: int, *indices: Tensor) -> Tensor:
    """Gumbel noise that depends on whole numbers alone, fp32 in their common shape (`uniform`)."""
    return -(-uniform(seed, *indices).log()).log()
