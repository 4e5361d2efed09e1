"""What a method's `ScoreSpec` asks for, computed for a prompt and kept up in decode steps."""

import torch
from torch import Tensor

from kvbench.cache.pages import Pages
from kvbench.kernels.backend import TierPages
from kvbench.policy import ScoreSpec


class Scores:
    """The attention statistics of one method over pages.

    Args:
        spec: What the method asks for.
        pages: Where the tracked fields lie.
    """

    def __init__(self, spec: ScoreSpec, pages: Pages) -> None:
        self.spec, self._pages = spec, pages

    def of_prompt(self, q: Tensor, k: Tensor, scale: float) -> Tensor | None:
        """Scores of one layer of a prompt.

        Args:
            q: [Hq, N, D]; k: [H, N, D], at the cache's granularity.
            scale: Factor on the attention logits.

        Returns:
            fp32 [H, N], or None when the method asks for none.
        """
        spec, backend = self.spec, self._pages.backend
        if not spec.prefill_queries:
            return None
        if spec.statistic == "below_uniform":
            return backend.prompt_low_counts(
                q, k, scale, queries=spec.prefill_queries, skip_near=spec.skip_near, group=spec.group_reduce
            )
        return backend.prompt_scores(
            q,
            k,
            scale,
            queries=spec.prefill_queries,
            skip_near=spec.skip_near,
            power=spec.power,
            pool=spec.pool,
            pool_kernel=spec.pool_kernel,
            pool_stage=spec.pool_stage,
            pool_region=spec.pool_region,
            group=spec.group_reduce,
        )

    def of_keys(self, k: Tensor) -> Tensor:
        """Minus the Euclidean norms of keys [..., D], before or after their rotation; fp32 [...]."""
        return -torch.linalg.vector_norm(k.float(), dim=-1)

    def add_step(self, tokens_seen: Tensor, tiers: list[TierPages], reduced: list[Tensor]) -> None:
        """Brings the stored scores of one layer up to date after a step.

        Args:
            tokens_seen: int64 [S], which is the position of the step's queries.
            tiers: What was attended to.
            reduced: Per tier, fp32 [S, H, n] probabilities, the group reduced; empty when a step updates nothing.
        """
        spec, pages = self.spec, self._pages
        if spec.statistic == "below_uniform" and reduced:
            num_keys = torch.stack([tier.num_k for tier in tiers]).sum(0)[..., None]
            # The largest probability of a group is below the threshold where all of them are: no kernel has to count.
            reduced = [-(score < 1.0 / num_keys).float() for score in reduced]
        for index, (tier, score) in enumerate(zip(tiers, reduced, strict=False)):
            if spec.skip_near:  # as in the prompt, a query does not count for the keys just before it
                pos = pages.field(index, "pos")[tier.ids].flatten(-2)
                distance = tokens_seen[:, None, None] - pos
                score = score.masked_fill(distance < spec.skip_near, 0.0)
            if spec.decode_replace:
                pages.clear_scores(tier)
            pages.backend.add_scores(pages.pool.pages, tier, score)

    def restart(self, lists: Tensor) -> None:
        """Sets all scores of lists (int64 [M]) to 0."""
        for tier in range(len(self._pages.formats)):
            self._pages.clear_scores(self._pages.tier(tier, lists))
