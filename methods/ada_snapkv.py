"""Ada-SnapKV: SnapKV's scores ranked over all heads of a layer, so that heads share one budget."""

from dataclasses import dataclass

from kvbench.policy import Allocation, WindowRanked


@dataclass(kw_only=True)
class AdaSnapKV(WindowRanked):
    """Gives every head of a layer a budget by how many of the layer's best tokens are its own, with a floor.

    Args:
        budget: Mean over heads of what stays of the prompt, window included: ratio, tokens per head, or bytes.
        alpha: Share of a head's budget that does not depend on the ranking, in [0, 1].
        allocation: `ada`; `ada_pyramid` gives layers PyramidKV's budgets instead of equal ones (Ada-PyramidKV).
        beta: Steepness of the pyramid; >= 1.
        window: Observation window; >= 1.
        pool: `max`, `avg` or `none`.
        pool_kernel: Odd width of the pool.
        official_rounding: Round each head's budget half to even as the released code does, which may lose or gain
            tokens; its pyramid has no uniform branch for prompts below twice the budget either.
        decode_every: Evict again before every n-th decode step, down to each list's share of the prompt's budget;
            0 = never, as the papers have it.
        tier: Precision of what is kept.
        granularity: `kv_head`: one kept set per KV head. `q_head`: KV heads are repeated first, as the original does,
            and every query head's copy is stored and billed.

    Source: FFY0/AdaKV at efe4e2e, AdaptiveSnapKVCluster (normalize off, alpha 0.2 for GQA).
    Differs: largest-remainder rounding keeps the layer's total exact unless `official_rounding`; by default
        one kept set per KV head with the group's mean.
    """

    allocation: Allocation = "ada"
    official_rounding: bool = False
