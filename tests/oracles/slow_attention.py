"""Slow oracles of attention and of attention statistics: full matrices in float64, one query head at a time."""

import torch
from torch import Tensor


def attend_one(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, float, Tensor]:
    """Attention of one query [D] over k, v [n, D]: output [D], log-sum-exp, probabilities [n]; float64."""
    logits = k.double() @ q.double() * scale
    probabilities = logits.softmax(0)
    return probabilities @ v.double(), float(logits.logsumexp(0)), probabilities


def reduce(x: Tensor, how: str) -> Tensor:
    """Reduces the query heads of a group, the first axis."""
    return {"sum": x.sum(0), "mean": x.sum(0) / len(x), "max": x.max(0).values}[how]


def causal_probabilities(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """The full causal matrix [N, N] of one query head, float64."""
    logits = q.double() @ k.double().T * scale
    return logits.masked_fill(torch.ones_like(logits, dtype=torch.bool).triu(1), float("-inf")).softmax(-1)


def columns(p: Tensor, queries: int, skip_near: int, power: int) -> Tensor:
    """Column sums of one head's matrix, entry by entry."""
    length = len(p)
    out = torch.zeros(length, dtype=torch.float64)
    for i in range(length):
        if queries >= 0 and i < length - queries:
            continue
        for j in range(i + 1):
            if i - j >= skip_near:
                out[j] += p[i, j] ** power
    return out


def pool(x: Tensor, kind: str, kernel: int) -> Tensor:
    """Centred pooling of a vector: `avg` counts what lies outside as zeros, `max` ignores it."""
    reach = kernel // 2
    out = []
    for j in range(len(x)):
        window = x[max(0, j - reach) : j + reach + 1]
        out.append(window.sum() / kernel if kind == "avg" else window.max())
    return torch.stack(out) if out else x


def prompt_scores(
    q: Tensor,
    k: Tensor,
    scale: float,
    *,
    queries: int,
    skip_near: int,
    power: int,
    kind: str,
    kernel: int,
    stage: str,
    where: str,
    group: str,
) -> Tensor:
    """Scores [H, N] of a prompt: q [Hq, N, D], k [H, N, D]."""
    size, length = q.shape[0] // k.shape[0], k.shape[1]
    cut = length if where == "all" or queries < 0 else max(0, length - queries)

    def pooled(x: Tensor) -> Tensor:
        return x if kind == "none" else torch.cat([pool(x[:cut], kind, kernel), x[cut:]])

    out = []
    for h in range(k.shape[0]):
        heads = [
            columns(causal_probabilities(q[h * size + g], k[h], scale), queries, skip_near, power) for g in range(size)
        ]
        if stage == "per_query_head":
            out.append(reduce(torch.stack([pooled(x) for x in heads]), group))
        else:
            out.append(pooled(reduce(torch.stack(heads), group)))
    return torch.stack(out)
