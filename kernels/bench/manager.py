"""Times page management of many lists at once next to the same work done list by list.

Runs with torch alone: `python -m kvbench.kernels.bench.manager lists=[32768]`. The sequential manager is what serving
systems keep on the host: a queue of free pages and a Python list of pages per sequence, layer and head.
"""

import sys
from collections import deque
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from kvbench.kernels.backend import Backend
from kvbench.kernels.bench.bench import Bench, Common, main, setting
from kvbench.kernels.bench.rounds import Variant
from kvbench.kernels.pool import PagePool
from kvbench.kernels.table import PageTable

PAGE_BYTES = 16  # contents do not matter: no operation here touches them
KEEP = 0.75  # share of slots that compaction keeps


@dataclass(kw_only=True)
class Settings(Common):
    """Allocating, freeing and compacting pages of many lists at once, compared with one list after the other."""

    what = "manager"
    quick = {"lists": [1024, 8192], "rounds": 3, "threads": [1]}

    lists: list[int] = setting([90, 1024, 8192, 32768], "Head lists: rows x layers x KV heads.", 1)
    tokens_per_page: int = setting(64, "Slots per page.", 1)
    start_tokens: int = setting(96, "Tokens per list before; lists differ by up to as many again.", 1)

    def cells(self, threads: list[int]) -> list[dict]:
        every = product(threads, _OPERATIONS, self.lists)
        return [{"operation": operation, "lists": lists, "threads": count} for count, operation, lists in every]

    def timing(self, bench: Bench, cell: dict) -> dict[str, Any]:
        return {"baselines": ["one by one"]}

    def variants(self, bench: Bench, cell: dict) -> list[Variant]:
        return _State(cell["lists"], self, bench.device, bench.backend).variants(cell["operation"])


class OneByOne:
    """A page manager on the host that goes through its lists one after the other."""

    def __init__(self, num_pages: int, tokens_per_page: int, lists: int) -> None:
        self.free = deque(range(num_pages))
        self.size = tokens_per_page
        self.pages: list[list[int]] = [[] for _ in range(lists)]
        self.slots = [0] * lists

    def reserve(self, count: list[int]) -> None:
        """Appends `count[i]` slots to list i."""
        for index, more in enumerate(count):
            self.slots[index] += more
            pages = self.pages[index]
            while len(pages) * self.size < self.slots[index]:
                pages.append(self.free.popleft())

    def truncate(self, count: list[int]) -> None:
        """Keeps the first `count[i]` slots of list i."""
        for index, left in enumerate(count):
            pages, self.slots[index] = self.pages[index], left
            keep = -(-left // self.size)
            self.free.extend(pages[keep:])
            del pages[keep:]

    def plan_compaction(self, keep: list[list[bool]]) -> tuple[list[tuple[int, int, int]], list[int]]:
        """The moves (list, from, to) that bring the kept slots to the front, and the counts left."""
        moves: list[tuple[int, int, int]] = []
        counts = []
        for index, wanted in enumerate(keep):
            held = wanted[: self.slots[index]]
            left, low, high = sum(held), 0, len(held) - 1
            while True:
                while low < left and held[low]:
                    low += 1
                if low >= left:
                    break
                while not held[high]:
                    high -= 1
                moves.append((index, high, low))
                low, high = low + 1, high - 1
            counts.append(left)
        return moves, counts


class AllAtOnce:
    """A page table, or the GPU's manager, over all of its lists; with the interface of `OneByOne`, in tensors."""

    def __init__(self, table: Any, lists: Tensor) -> None:
        self.table, self.lists = table, lists

    def reserve(self, count: Tensor) -> None:
        self.table.reserve(self.lists, 0, count, at_most=0)  # enough are free: nothing is waited for

    def truncate(self, count: Tensor) -> None:
        self.table.truncate(self.lists, 0, count)

    def plan_compaction(self, keep: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        *moves, count = self.table.plan_compaction(self.lists, 0, keep)
        return tuple(moves), count


class _State:
    """The managers under test, holding the same lists; the GPU backend brings one that works on the device."""

    def __init__(self, lists: int, settings: Settings, device: str, backend: Backend) -> None:
        generator = torch.Generator().manual_seed(settings.seed)
        size, start = settings.tokens_per_page, settings.start_tokens
        self.start = torch.randint(start, 2 * start + 1, (lists,), generator=generator).to(device)
        self.keep = (torch.rand(lists, 2 * start, generator=generator) < KEEP).to(device)
        most = -(-2 * start // size) + 3
        # Twice the pages that are used at most, so that the circular list wraps around every few operations.
        self.pool = PagePool(PAGE_BYTES, lists * most, device, growable=False)
        self.table = PageTable(self.pool, (size,), lists, 1, 1, most)
        self.lists = torch.arange(lists, device=device)
        self.host = OneByOne(lists * most, size, lists)
        self.managers: dict[str, Any] = {"all at once": AllAtOnce(self.table, self.lists), "one by one": self.host}
        self.kernels: Any = None
        if backend.name == "triton":
            _, self.kernels = backend.tables(PAGE_BYTES, lists * most, (size,), (lists, 1, 1), most, device)
            self.managers["on the device"] = AllAtOnce(self.kernels, self.lists)
        for manager in self.managers.values():
            manager.reserve(self.start.tolist() if manager is self.host else self.start)

    def variants(self, operation: str) -> list[Variant]:
        """The variants of one operation; each is checked by running it once and comparing every page of every list."""
        slots = _OPERATIONS[operation]
        targets = self.keep if slots is None else torch.full_like(self.start, slots or self.table.tokens_per_page[0])
        work: Any = _compact if slots is None else _grow_and_shrink
        both = self.start, targets
        calls = {
            name: partial(work, manager, *([x.tolist() for x in both] if manager is self.host else both))
            for name, manager in self.managers.items()
        }

        def check() -> float:
            calls["all at once"](0)
            calls["one by one"](0)
            return max(self.pages_agree(), self.moves_differ() if slots is None else 0.0)

        def check_kernels() -> float:
            calls["on the device"](0)
            return self.kernels_agree()

        checks = {"all at once": check, "on the device": check_kernels}
        count = len(self.lists)
        return [Variant(name=name, call=c, check=checks.get(name), extra={"lists": count}) for name, c in calls.items()]

    def pages_agree(self) -> float:
        """0 when both managers hold the same pages in every list, else the share of lists that differ."""
        counts = self.table.num_pages(0)
        ids = self.table.page_ids(self.lists, 0, self.table.max_pages).tolist()
        table_pages = [row[:count] for row, count in zip(ids, counts.tolist(), strict=True)]
        return sum(a != b for a, b in zip(table_pages, self.host.pages, strict=True)) / len(table_pages)

    def moves_differ(self) -> float:
        """Share of moves that the two plans do not have in common."""
        owner, source, target, _ = self.table.plan_compaction(self.lists, 0, self.keep)
        moves = set(zip(owner.tolist(), source.tolist(), target.tolist(), strict=True))
        other = set(self.host.plan_compaction(self.keep.tolist())[0])
        return len(moves ^ other) / max(1, len(moves | other))

    def kernels_agree(self) -> float:
        """0 when the manager on the device holds as many slots in every list, and every page once, else 1."""
        self.kernels.pool.check()
        counts = self.table.num_pages(0)
        held = torch.arange(self.table.max_pages, device=counts.device) < counts[:, None]
        ids = self.kernels.page_ids(self.lists, 0, self.table.max_pages)[held]
        every = torch.cat([ids, self.kernels.pool.free_ids()]).sort().values
        same = torch.equal(self.kernels.num_slots, self.table.num_slots)
        return float(not (same and torch.equal(every, torch.arange(self.pool.num_pages, device=every.device))))


def _grow_and_shrink(manager: Any, start: Any, more: Any, _: int) -> None:
    """Grow every list, and shrink it again."""
    manager.reserve(more)
    manager.truncate(start)


def _compact(manager: Any, start: Any, keep: Any, _: int) -> None:
    """Plans which slots move when a quarter is evicted, frees the emptied pages, and grows back."""
    _, count = manager.plan_compaction(keep)
    manager.truncate(count)
    manager.reserve([a - b for a, b in zip(start, count, strict=True)] if isinstance(start, list) else start - count)


# Slots that every list gets: one, as in a decode step; 0 = a page, the most that a step can take; None = compaction.
_OPERATIONS = {"append a token and free": 1, "take a page and free": 0, "compact, free, take": None}


if __name__ == "__main__":
    sys.exit(main(Settings, sys.argv[1:]))
