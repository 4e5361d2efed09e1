"""The last queries of every row, kept in 16 bits for statistics that look at them at a bulk eviction."""

import torch
from torch import Tensor

from kvbench.cache.layout import ModelShape


class QueryRing:
    """A ring of queries for every row and layer; the query at position p lies at p modulo the ring's length.

    Queries are multiplied by the factor on attention logits before they are kept, so that nobody has to remember it.

    Args:
        num_queries: Length, >= 1.
        rows: Rows of the cache.
        shape: The model's shape.
        dtype: Element type.
    """

    def __init__(self, num_queries: int, rows: int, shape: ModelShape, dtype: torch.dtype) -> None:
        self.num_queries = num_queries
        layout = (rows, shape.num_layers, shape.num_q_heads, num_queries, shape.head_dim)
        self._ring = torch.zeros(layout, dtype=dtype, device=shape.device)

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the ring."""
        return self._ring.nbytes

    @property
    def row_bytes(self) -> int:
        """One row's part of it."""
        return self._ring[0].nbytes

    def held_bytes(self, tokens_seen: int) -> int:
        """Bytes of the queries that a row of so many tokens has in it."""
        return self.row_bytes // self.num_queries * min(self.num_queries, tokens_seen)

    def last(self, q: Tensor, scale: float) -> Tensor:
        """What is kept of the queries [Hq, N, D] of a prompt: [Hq, up to num_queries, D]."""
        return (q[:, -self.num_queries :].float() * scale).to(self._ring.dtype)

    def hold_prompt(self, row: int, layer: int, last: Tensor, num_tokens: int) -> None:
        """Takes what `last` gave of a prompt of so many tokens."""
        where = torch.arange(num_tokens - last.shape[1], num_tokens, device=last.device) % self.num_queries
        self._ring[row, layer][:, where] = last

    def hold_step(self, rows: Tensor, tokens_seen: Tensor, given: list[tuple[Tensor, float]]) -> None:
        """Takes a decode step's queries [S, Hq, D] and factors on them, of one layer after the other; `tokens_seen`
        int64 [S] is their position."""
        scales = {scale for _, scale in given}
        if len(scales) == 1:
            scaled = torch.stack([q for q, _ in given], 1).float() * scales.pop()
        else:
            scaled = torch.stack([q.float() * scale for q, scale in given], 1)
        self._ring[rows, :, :, tokens_seen % self.num_queries] = scaled.to(self._ring.dtype)

    def of(self, row: int, layer: int, tokens_seen: int) -> Tensor:
        """The queries [Hq, up to num_queries, D] of a row, in order of position."""
        first = max(0, tokens_seen - self.num_queries)
        where = torch.arange(first, tokens_seen, device=self._ring.device) % self.num_queries
        return self._ring[row, layer][:, where]

    def copy(self, source: int, target: int) -> None:
        """Copies a row's queries."""
        self._ring[target] = self._ring[source]
