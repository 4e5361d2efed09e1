"""KV-Compress while decoding, as its released code decides it: Python lists, one block at a time.

Source: vllm-kvcompress at 5e2a6394: kvcompress/scheduler.py (_schedule_seq_evictions, last_token_positions),
kvcompress/metrics.py (schedule_evictions, aggregate_decode), kvcompress/block.py (get_hanging_token_counts),
engine/llm_engine.py (schedule_kvcompress comes before every forward pass), kvcompress_attention_kernels.cu line 124.
"""

import math

import numpy as np


def surplus_blocks(counts: list[int], max_cache_tokens: int, block: int) -> int:
    """Blocks that a sequence with so many tokens per list has beyond its limit; the limit is rounded up to blocks."""
    max_cache_tokens = -(-max_cache_tokens // block) * block
    max_cache_blocks = -(-max_cache_tokens * len(counts) // block)
    return max(0, sum(-(-count // block) for count in counts) - max_cache_blocks)


def evictions(lists: list[list[tuple[int, float]]], seq_len: int, *, limit: int, block: int, protected: int) -> list:
    """The positions that go before a forward pass, a set per list.

    Args:
        lists: Per list, (position, metric) of the cached tokens in slot order, which decides between equal metrics.
        seq_len: Tokens of the sequence, the sampled one included, which is not cached yet.
        limit: Most tokens per list on average.
        block: Tokens per block.
        protected: Last tokens that stay.
    """
    last_token_position = seq_len - 1
    prices, orders = [], []
    for index, held in enumerate(lists):
        metric = [m if pos <= last_token_position - protected else math.inf for pos, m in held]
        order = sorted(range(len(held)), key=lambda slot: metric[slot])
        orders.append(order)
        hanging = len(held) % block or block
        for end in range(hanging, len(held) + 1, block):  # so many tokens gone frees one block more
            prices.append((metric[order[end - 1]], index, end))
    gone = [0] * len(lists)
    for price, index, end in sorted(prices)[: surplus_blocks([len(held) for held in lists], limit, block)]:
        if price < math.inf:
            gone[index] = end
    return [{held[slot][0] for slot in order[:n]} for held, order, n in zip(lists, orders, gone, strict=True)]


def step_metrics(queries, keys, positions: list[int], scale: float, *, last: int, buffer: int, power: int) -> list:
    """What one step adds to the metrics of one list's tokens, float64, the incoming one included.

    Args:
        queries: [G, D] of the KV head's query heads.
        keys: [n, D].
        positions: Of the keys.
        last: Position of the incoming token.
        buffer: Keys nearer than this get nothing.
        power: Of the probabilities.
    """
    logits = np.asarray(queries, np.float64) @ np.asarray(keys, np.float64).T * scale
    weight = np.exp(logits - logits.max(1, keepdims=True))
    total = ((weight / weight.sum(1, keepdims=True)) ** power).sum(0)
    return [float(x) if pos <= last - buffer else 0.0 for x, pos in zip(total, positions, strict=True)]
