"""SnapKV: the last prompt queries choose what stays."""

from dataclasses import dataclass

from kvbench.policy import WindowRanked


@dataclass(kw_only=True)
class SnapKV(WindowRanked):
    """Keeps, per KV head, the observation window and the prompt tokens that its queries attend to most, pooled along
    the prompt.

    Args:
        budget: What stays of the prompt, window included: ratio, tokens per head, or bytes.
        window: Observation window, the last prompt queries; >= 1.
        pool: `max`, `avg` or `none`, over the prompt before the window.
        pool_kernel: Odd width of the pool.
        decode_every: Evict again before every n-th decode step, down to each list's share of the prompt's budget;
            0 = never, as the papers have it.
        tier: Precision of what is kept.
        granularity: `kv_head`: one kept set per KV head. `q_head`: KV heads are repeated first, as the original does,
            and every query head's copy is stored and billed.

    Source: FasterDecoding/SnapKV snapkv_utils.py; defaults of its LongBench configs (w32, k7, max).
    Differs: by default one kept set per KV head with the group's mean score before pooling; kept tokens are stored in
        position order; scores are summed in fp32; a prompt of exactly the budget is left alone.
    """
