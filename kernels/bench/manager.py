"""Times page management of many lists at once next to the same work done list by list.

Runs with torch alone: `python -m kvbench.kernels.bench.manager lists=[32768]`. The sequential manager is what serving
systems keep on the host: a queue of free pages and a Python list of pages per sequence, layer and head.
"""

import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvbench.kernels.backend import Backend
from kvbench.kernels.bench import machine, report
from kvbench.kernels.bench.rounds import Variant, choose_timer, measure_cell
from kvbench.kernels.bench.settings import Common, check_list, check_whole
from kvbench.kernels.dispatch import get_backend
from kvbench.kernels.pool import PagePool
from kvbench.kernels.table import PageTable

if TYPE_CHECKING:
    from kvbench.kernels.gpu.manager import DevicePages

PAGE_BYTES = 16  # contents do not matter: no operation here touches them
KEEP = 0.75  # share of slots that compaction keeps
QUICK = {"lists": [1024, 8192], "rounds": 3, "threads": [1]}


@dataclass(kw_only=True)
class Settings(Common):
    """What to measure.

    Args:
        lists: Head lists: rows x layers x KV heads.
        tokens_per_page: Slots per page.
        start_tokens: Tokens per list before; lists differ by up to as many again.
    """

    lists: list[int] = field(default_factory=lambda: [90, 1024, 8192, 32768])
    tokens_per_page: int = 64
    start_tokens: int = 96

    def check(self) -> None:
        """Raises ValueError for a value out of range, with the rule."""
        super().check()
        check_list("lists", self.lists, 1)
        check_whole("tokens_per_page", self.tokens_per_page, 1)
        check_whole("start_tokens", self.start_tokens, 1)


class OneByOne:
    """A page manager on the host that goes through its lists one after the other.

    Args:
        num_pages: Pages.
        tokens_per_page: Slots per page.
        lists: Lists.
    """

    def __init__(self, num_pages: int, tokens_per_page: int, lists: int) -> None:
        self.free = deque(range(num_pages))
        self.size = tokens_per_page
        self.pages: list[list[int]] = [[] for _ in range(lists)]
        self.slots = [0] * lists

    def reserve(self, count: list[int]) -> None:
        """Appends `count[i]` slots to list i."""
        for index, more in enumerate(count):
            self.slots[index] += more
            own = self.pages[index]
            while len(own) * self.size < self.slots[index]:
                own.append(self.free.popleft())

    def truncate(self, count: list[int]) -> None:
        """Keeps the first `count[i]` slots of list i."""
        for index, left in enumerate(count):
            own, self.slots[index] = self.pages[index], left
            keep = -(-left // self.size)
            self.free.extend(own[keep:])
            del own[keep:]

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


def run(settings: Settings, progress: report.Progress = report.quiet) -> dict:
    """Measures every number of lists.

    Args:
        settings: What to measure.
        progress: Told what is done.

    Returns:
        The document that `report.document` describes.
    """
    device = machine.pick_device(settings.device)
    backend = get_backend(settings.kernels, device)
    threads = [n or machine.num_cpus() for n in settings.threads] if device == "cpu" else [0]
    cells = [
        {"operation": operation, "lists": lists, "threads": count}
        for count in dict.fromkeys(threads)
        for operation in _OPERATIONS
        for lists in settings.lists
    ]
    bench = report.begin("manager", settings, device, backend, cells)
    for cell in bench.todo(progress):
        timer = choose_timer(settings.clock, device, cell["threads"])
        variants = _OPERATIONS[cell["operation"]](_State(cell["lists"], settings, device, backend))
        bench.add(
            measure_cell(
                cell,
                variants,
                baselines=["one by one"],
                rounds=settings.rounds,
                seed=settings.seed,
                timer=timer,
                on_round=bench.on_round,
            )
        )
    return bench.document()


class _State:
    """The managers under test, holding the same lists; the GPU backend brings one that works on the device."""

    def __init__(self, lists: int, settings: Settings, device: str, backend: Backend) -> None:
        generator = torch.Generator().manual_seed(settings.seed)
        size, start = settings.tokens_per_page, settings.start_tokens
        self.start = torch.randint(start, 2 * start + 1, (lists,), generator=generator).to(device)
        self.width = 2 * start
        self.keep = (torch.rand(lists, self.width, generator=generator) < KEEP).to(device)
        most = -(-2 * start // size) + 3
        # Twice the pages that are used at most, so that the circular list wraps around every few operations.
        self.pool = PagePool(PAGE_BYTES, lists * most, device, growable=False)
        self.table = PageTable(self.pool, (size,), lists, 1, 1, most)
        self.lists = torch.arange(lists, device=device)
        self.table.reserve(self.lists, 0, self.start)
        self.host = OneByOne(lists * most, size, lists)
        self.host_start = self.start.tolist()
        self.host.reserve(self.host_start)
        self.kernels: DevicePages | None = None
        if backend.name == "triton":
            from kvbench.kernels.gpu import manager

            self.kernels = manager.DevicePages(PAGE_BYTES, lists * most, (size,), lists, most, device)
            self.kernels.reserve(self.lists, 0, self.start)

    def pages_agree(self) -> float:
        """0 when both managers hold the same pages in every list, else the share of lists that differ."""
        counts = self.table.num_pages(0)
        ids = self.table.page_ids(self.lists, 0, self.table.max_pages).tolist()
        own = [row[:count] for row, count in zip(ids, counts.tolist(), strict=True)]
        return sum(a != b for a, b in zip(own, self.host.pages, strict=True)) / len(own)

    def kernels_agree(self, kernels: "DevicePages") -> float:
        """0 when the manager on the device holds as many slots in every list, and every page once, else 1."""
        kernels.check()
        counts = self.table.num_pages(0)
        held = torch.arange(self.table.max_pages, device=counts.device) < counts[:, None]
        ids = kernels.page_ids(self.lists, 0, self.table.max_pages)[held]
        every = torch.cat([ids, kernels.free_ids()]).sort().values
        same = torch.equal(kernels.num_slots, self.table.num_slots)
        return float(not (same and torch.equal(every, torch.arange(self.pool.num_pages, device=every.device))))


def _variants(
    state: _State,
    batched: Callable[[int], None],
    sequential: Callable[[int], None],
    on_device: Callable[["DevicePages"], None],
    plans_differ: Callable[[], float] = lambda: 0.0,
) -> list[Variant]:
    """The variants of one operation; each is checked by running it once and comparing every page of every list.

    Args:
        state: The managers.
        batched: The work, all lists at once.
        sequential: The work, list by list.
        on_device: The work on the device, where the backend has a manager there.
        plans_differ: A further check of the batched way: share of its moves that are not the sequential one's.
    """

    def check() -> float:
        batched(0)
        sequential(0)
        return max(state.pages_agree(), plans_differ())

    made = [
        Variant(name="all at once", call=batched, check=check, extra={"lists": len(state.lists)}),
        Variant(name="one by one", call=sequential, extra={"lists": len(state.lists)}),
    ]
    if (kernels := state.kernels) is not None:

        def check_kernels() -> float:
            on_device(kernels)
            return state.kernels_agree(kernels)

        made.append(
            Variant(
                name="on the device",
                call=lambda _: on_device(kernels),
                check=check_kernels,
                extra={"lists": len(state.lists)},
            )
        )
    return made


def _grow_and_shrink(state: _State, more: Tensor) -> list[Variant]:
    host_more = more.tolist()

    def batched(_: int) -> None:
        state.table.reserve(state.lists, 0, more)
        state.table.truncate(state.lists, 0, state.start)

    def sequential(_: int) -> None:
        state.host.reserve(host_more)
        state.host.truncate(state.host_start)

    def on_device(kernels: "DevicePages") -> None:
        kernels.reserve(state.lists, 0, more)
        kernels.truncate(state.lists, 0, state.start)

    return _variants(state, batched, sequential, on_device)


def _token(state: _State) -> list[Variant]:
    """One more token for every list, as in a decode step, and back."""
    return _grow_and_shrink(state, torch.ones_like(state.start))


def _page(state: _State) -> list[Variant]:
    """One more page for every list and back: the most that a step can ask for."""
    return _grow_and_shrink(state, torch.full_like(state.start, state.table.tokens_per_page[0]))


def _compact(state: _State) -> list[Variant]:
    """Plans which slots move when a quarter is evicted, frees the emptied pages, and grows back."""
    host_keep = state.keep.tolist()

    def batched(index: int) -> None:
        *_, count = state.table.plan_compaction(state.lists, 0, state.keep)
        state.table.truncate(state.lists, 0, count)
        state.table.reserve(state.lists, 0, state.start - count)

    def sequential(index: int) -> None:
        _, count = state.host.plan_compaction(host_keep)
        state.host.truncate(count)
        state.host.reserve([a - b for a, b in zip(state.host_start, count, strict=True)])

    def on_device(kernels: "DevicePages") -> None:
        _, _, count = kernels.plan_compaction(state.lists, 0, state.keep)
        kernels.truncate(state.lists, 0, count)
        kernels.reserve(state.lists, 0, state.start - count)

    return _variants(state, batched, sequential, on_device, lambda: _moves_differ(state, host_keep))


def _moves_differ(state: _State, host_keep: list[list[bool]]) -> float:
    """Share of moves that the two plans do not have in common."""
    owner, source, target, _ = state.table.plan_compaction(state.lists, 0, state.keep)
    own = set(zip(owner.tolist(), source.tolist(), target.tolist(), strict=True))
    other = set(state.host.plan_compaction(host_keep)[0])
    return len(own ^ other) / max(1, len(own | other))


_OPERATIONS = {"append a token and free": _token, "take a page and free": _page, "compact, free, take": _compact}


if __name__ == "__main__":
    sys.exit(report.main("manager", Settings, QUICK, run, sys.argv[1:]))
