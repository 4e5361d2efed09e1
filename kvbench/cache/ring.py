"""Rings: the residual buffers of 16-bit tokens in front of tier 0, and the last queries of every row."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvbench.cache.layout import ModelShape
from kvbench.policy import Residual


class ResidualBuffer:
    """Rings of keys and values for all lists, with the counts that say which tokens are still in them.

    Token i of a list is in the key ring while `i >= num_k`, in the value ring while `i >= num_v`; it lies at i modulo
    the ring's length.

    Args:
        lists_shape: (rows, layers, heads).
        head_dim: Channels.
        dtype: Element type of the rings.
        group_tokens: Slots that tier 0 takes together on the key side.
    """

    def __init__(
        self,
        spec: Residual,
        lists_shape: tuple[int, int, int],
        head_dim: int,
        dtype: torch.dtype,
        group_tokens: int,
        device: torch.device,
    ) -> None:
        self.spec = spec
        self.group_tokens = group_tokens
        # The oldest value leaves when R + 1 are held, and the newest is written before it does: one entry more.
        v_length = spec.num_tokens + (spec.v_flush == "oldest")
        self.k = torch.zeros(*lists_shape, spec.num_tokens, head_dim, dtype=dtype, device=device)
        self.v = torch.zeros(*lists_shape, v_length, head_dim, dtype=dtype, device=device)
        num_lists = lists_shape[0] * lists_shape[1] * lists_shape[2]
        self.num_k = torch.zeros(num_lists, dtype=torch.int32, device=device)
        self.num_v = torch.zeros(num_lists, dtype=torch.int32, device=device)
        self.num_tokens = torch.zeros(num_lists, dtype=torch.int32, device=device)

    @property
    def allocated_bytes(self) -> int:
        """Bytes of rings and counters, as the tensors hold them."""
        return sum(t.nbytes for t in (self.k, self.v, self.num_k, self.num_v, self.num_tokens))

    @property
    def list_bytes(self) -> int:
        """Bytes of one list's rings, without counters."""
        return (self.k[0, 0, 0].numel() + self.v[0, 0, 0].numel()) * self.k.element_size()

    @property
    def most_leaving(self) -> tuple[int, int]:
        """Most keys and values of a list that leave the rings in one step."""
        size = self.spec.num_tokens
        return size, 1 if self.spec.v_flush == "oldest" else size

    def of_layer(self, rows: Tensor, layer: int, numbers: Sequence[int] | None = None) -> tuple[Tensor, Tensor]:
        """The key and value rings [S, H, R, D] of one layer; views, not copies, when `rows`, which the host knows as
        `numbers`, follow one another."""
        numbers = rows.tolist() if numbers is None else list(numbers)
        if numbers and numbers == list(range(numbers[0], numbers[0] + len(numbers))):
            chosen = slice(numbers[0], numbers[0] + len(numbers))
            return self.k[chosen, layer], self.v[chosen, layer]
        return self.k[rows, layer], self.v[rows, layer]

    def split_prompt(self, count: Tensor) -> tuple[Tensor, Tensor]:
        """The number of a prompt's `count` kept tokens (int64 [..]) go to the pages at once: keys, values."""
        size = self.spec.num_tokens
        if self.spec.hold_prompt:
            whole = count - count % size
            return whole, whole if self.spec.v_flush == "all" else (count - size).clamp(min=0)
        whole = count - count % self.group_tokens
        return whole, whole

    def paged_after(self, count: int, new: int) -> tuple[int, int]:
        """Slots in pages of a list that kept `count` tokens of a prompt and took `new` more: exactly, and the most that
        a list which kept fewer can have for each token that it kept."""

        period = self.spec.num_tokens if self.spec.hold_prompt else self.group_tokens
        given = torch.cat([torch.tensor([count]), torch.arange(period)])
        keys, values = self.split_prompt(given)
        total, size = given + new, self.spec.num_tokens
        keys = keys + (total - keys) // size * size
        if self.spec.v_flush == "oldest":
            keys = torch.maximum(keys, torch.maximum(values, total - size))
        return int(keys[0]), count + int((keys - given)[1:].max())

    def after_append(self, lists: Tensor) -> tuple[Tensor, Tensor]:
        """The counts (keys, values in pages) once each of these lists has taken one more token; int64 [M]."""
        total = self.num_tokens[lists].long() + 1
        held_k, held_v = self.num_k[lists].long(), self.num_v[lists].long()
        size = self.spec.num_tokens
        full = total - held_k >= size
        new_k = torch.where(full, total, held_k)
        if self.spec.v_flush == "all":
            return new_k, torch.where(full, total, held_v)
        return new_k, torch.where(total - held_v > size, total - size, held_v)

    def hold(self, lists: Tensor, num_k: Tensor, num_v: Tensor, num_tokens: Tensor) -> None:
        """Sets the counts of lists, int64 [M] each."""
        for counter, count in ((self.num_k, num_k), (self.num_v, num_v), (self.num_tokens, num_tokens)):
            counter[lists] = count.to(torch.int32)

    def clear(self, lists: Tensor) -> None:
        """Forgets lists (int64 [M])."""
        nothing = torch.zeros_like(lists)
        self.hold(lists, nothing, nothing, nothing)

    def copy(self, source: int, target: int, old: Tensor, new: Tensor) -> None:
        """Copies a row's rings; `old` and `new` int64 [M] are the lists of the two rows."""
        for counter in (self.num_k, self.num_v, self.num_tokens):
            counter[new] = counter[old]
        self.k[target], self.v[target] = self.k[source], self.v[source]


class QueryRing:
    """The last queries of every row and layer, for statistics that look at them at a bulk eviction; the query at
    position p lies at p modulo the ring's length.

    Queries are multiplied by the factor on attention logits before they are kept, so that nobody has to remember it.

    Args:
        num_queries: Length, >= 1.
        dtype: Element type, of 16 bits.
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
        """The part of the queries [Hq, N, D] of a prompt that is kept: [Hq, up to num_queries, D]."""
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
