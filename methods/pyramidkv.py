"""PyramidKV: SnapKV's selection with a budget that shrinks from the first layer to the last."""

from dataclasses import dataclass

from kvbench.policy import Allocation, WindowRanked


@dataclass(kw_only=True)
class PyramidKV(WindowRanked):
    """Keeps the observation window and the tokens its queries attend to most; lower layers keep more, and the mean over
    layers is the budget.

    Args:
        budget: Mean over layers of what stays of the prompt, window included: ratio, tokens per head, or bytes.
        window: Observation window; >= 1.
        allocation: `pyramid`; `ada_pyramid` is Ada-PyramidKV.
        beta: Steepness: the last layer keeps base / beta prefix tokens; >= 1.
        pool: `max`, `avg` or `none`.
        pool_kernel: Odd width of the pool.
        official_rounding: Round the step between layers down as the released code does, which spends more than the
            budget.
        decode_every: Evict again before every n-th decode step, down to each list's share of the prompt's budget;
            0 = never, as the papers have it.
        tier: Precision of what is kept.
        granularity: `kv_head`: one kept set per KV head. `q_head`: KV heads are repeated first, as the original does,
            and every query head's copy is stored and billed.

    Source: Zefan-Cai/KVCache-Factory at c97f9d7, PyramidKVCluster.
    Differs: the budget is met exactly (largest remainder) unless `official_rounding`; budgets are computed for every
        prompt; one layer works. The default window is 32, as in SnapKV and AdaKV, so that the three compare; the class
        there has 64 and run_longbench.py 8.
    """

    allocation: Allocation = "pyramid"
    official_rounding: bool = False
