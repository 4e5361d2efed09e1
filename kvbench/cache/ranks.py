"""The processes among which the heads of a cache are divided, each with its own KV heads of every layer."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class Ranks:
    """Single process that holds all heads: gathers nothing, and its sums are complete.

    `index` is its rank among `size`, in the order of its heads.
    """

    size: int = 1
    index: int = 0

    def gather(self, x: Tensor, dim: int) -> Tensor:
        """The tensors of all processes, which have one shape, one after another along `dim`; the same everywhere."""
        return x

    def total(self, x: Tensor) -> Tensor:
        """The sum of the processes' tensors."""
        return x

    def totals(self, numbers: Sequence[int]) -> list[int]:
        """The sums of the processes' numbers."""
        return list(numbers)

    def most(self, number: int) -> int:
        """The largest of the processes' numbers."""
        return number

    def local(self, x: Tensor, dim: int) -> Tensor:
        """Local share of a tensor of all heads along `dim`."""
        return x.unflatten(dim, (self.size, -1)).select(dim, self.index) if self.size > 1 else x


ALONE = Ranks()


class ProcessRanks(Ranks):
    """Processes of torch.distributed's default group, with the same calls in the same order.

    See `engine/tensor_parallel.py`.
    """

    def __init__(self, device: torch.device) -> None:
        from torch import distributed

        self._distributed: Any = distributed
        self.size, self.index, self._device = distributed.get_world_size(), distributed.get_rank(), device

    def gather(self, x: Tensor, dim: int) -> Tensor:
        return torch.cat(list(self._all(x)), dim)

    def _all(self, x: Tensor) -> Tensor:
        """[size, ...] the tensors of all processes, which have one shape."""
        local = x.to(torch.uint8) if x.dtype == torch.bool else x.contiguous()
        gathered = torch.empty(self.size, *local.shape, dtype=local.dtype, device=local.device)
        self._distributed.all_gather(list(gathered.unbind(0)), local)
        return gathered.to(x.dtype)

    def total(self, x: Tensor) -> Tensor:
        summed = x.clone()
        self._distributed.all_reduce(summed)
        return summed

    def totals(self, numbers: Sequence[int]) -> list[int]:
        return self.total(torch.tensor(numbers, dtype=torch.int64, device=self._device)).tolist()

    def most(self, number: int) -> int:
        return int(self._all(torch.tensor([number], device=self._device)).amax())
