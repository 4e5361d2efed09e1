"""The checks of a device: every operation there and by the plain torch reference, on the same random pages."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvbench.kernels.device_inputs import (
    BOUNDS,
    REFERENCE,
    Finding,
    Plan,
    bounded_format,
    bytes_differ,
    differ,
    filled,
    format_of,
    moved_to,
    no_synchronisation,
)
from kvbench.kernels.format import PageFormat
from kvbench.kernels.operands import ColumnSums, HeadScores, Ring, TierPages
from kvbench.kernels.pool import PagePool
from kvbench.kernels.reference.pages import region
from kvbench.kernels.table import PageTable

if TYPE_CHECKING:
    from kvbench.kernels.gpu.table import DeviceTable


def check_pages(plan: Plan) -> Iterator[Finding]:
    """Checks the bytes that are written, the values that are read, and slots that are demoted or moved."""
    make = torch.Generator().manual_seed(1)
    for head_dim, _, names in plan.kinds:
        for name in names:
            if not plan.takes(f"pages {head_dim} {name}"):
                continue
            fmt = format_of(name, head_dim)
            run = max(8, fmt.slot.group_tokens)
            size = fmt.tokens_per_page // run * run
            page = torch.tensor([4, 1, 3]).repeat_interleave(size)
            slot = torch.arange(size).repeat(3)
            k, v = (3 * torch.randn(len(page), head_dim, generator=make) for _ in range(2))
            v[0] = k[1] = 1.25
            want = torch.randint(256, (6, fmt.page_bytes), dtype=torch.uint8, generator=make)
            got = want.to(plan.device, copy=True)
            where = (page.to(plan.device), slot.to(plan.device))
            inputs = k.to(plan.device), v.to(plan.device)
            REFERENCE.write_keys(want, fmt, page, slot, k)
            REFERENCE.write_values(want, fmt, page, slot, v)
            with no_synchronisation(plan.device):
                plan.backend.write_keys(got, fmt, *where, inputs[0])
                plan.backend.write_values(got, fmt, *where, inputs[1])
            yield Finding(f"write {name}, dim {head_dim}: bytes", bytes_differ(got, want), 0)
            read = plan.backend.read_slots(got, fmt, *where)
            known = REFERENCE.read_slots(want, fmt, page, slot)
            worst = max(differ(a, b) for a, b in zip(read, known, strict=True))
            yield Finding(f"read {name}, dim {head_dim}", worst, 0)
            if not fmt.slot.channel_keys:
                moves = [torch.tensor(x) for x in ([4, 1], [0, size - 1], [0, 5], [3, 0])]
                REFERENCE.move_slots(want, fmt, *moves)
                plan.backend.move_slots(got, fmt, *(x.to(plan.device) for x in moves))
                yield Finding(f"move {name}, dim {head_dim}: bytes", bytes_differ(got, want), 0)
        if not plan.takes(f"demote {head_dim}"):
            continue
        upper, lower = format_of("k8v4", head_dim), format_of("k4v2", head_dim)
        want = torch.randint(256, (4, upper.page_bytes), dtype=torch.uint8, generator=make)
        page, slot = torch.zeros(8, dtype=torch.int64), torch.arange(8)
        REFERENCE.write_keys(want, upper, page, slot, torch.randn(8, head_dim, generator=make))
        REFERENCE.write_values(want, upper, page, slot, torch.randn(8, head_dim, generator=make))
        got = want.to(plan.device, copy=True)
        keys, values = REFERENCE.read_slots(want, upper, page, slot)
        REFERENCE.write_keys(want, lower, page + 2, slot, keys)
        REFERENCE.write_values(want, lower, page + 2, slot, values)
        REFERENCE.write_tracked(want, lower, page + 2, slot, *REFERENCE.read_tracked(want, upper, page, slot))
        plan.backend.demote(got, upper, lower, *(x.to(plan.device) for x in (page, slot, page + 2, slot)))
        yield Finding(f"demote k8v4 to k4v2, dim {head_dim}: bytes", bytes_differ(got, want), 0)


def _attend(
    plan: Plan,
    name: str,
    formats: list[PageFormat],
    ring: Ring | None,
    dtype: torch.dtype,
    group_size: int,
    rotated: bool = False,
) -> Iterator[Finding]:
    """Checks one call that returns scores and one that adds them to the pages; `rotated` turns half of the channels."""
    make, long = torch.Generator().manual_seed(3), plan.tokens
    counts = [torch.tensor([[1, long], [formats[0].tokens_per_page, long // 2 + 3]])]
    counts += [torch.tensor([[0, 5], [long // 3, 0]]), torch.tensor([[3, 0], [1, 17]])][: len(formats) - 1]
    if ring is not None:
        group = formats[0].slot.group_tokens
        counts[0] = (counts[0] + group - 1) // group * group
        ring.num_tokens = counts[0] + 5
    pages, tiers = filled(plan, formats, counts)
    for tier in tiers if rotated else []:
        width = tier.ids.shape[-1] * tier.fmt.tokens_per_page
        angles = torch.rand(tier.fmt.slot.head_dim // 4, generator=make) * torch.arange(width)[:, None]
        tier.rotation = angles.expand(2, -1, -1)  # as far as positions go: a rotation is only as good as its cosines
    q = torch.randn(2, 2 * group_size, formats[0].slot.head_dim, generator=make).to(dtype)
    scale = q.shape[-1] ** -0.5
    want = REFERENCE.paged_decode(q, pages, tiers, ring, scale, power=1, group="max")
    moved, there, queries = pages.to(plan.device), moved_to(tiers, plan.device), q.to(plan.device)
    on = None if ring is None else Ring(*(x.to(plan.device) for x in (ring.k, ring.v, ring.num_tokens)))
    with no_synchronisation(plan.device):
        got = plan.backend.paged_decode(queries, moved, there, on, scale, power=1, group="max")
    bound = BOUNDS[dtype]
    for what, a, b in (("output", got[0], want[0]), ("lse", got[1], want[1])):
        yield Finding(f"{name}: {what}", differ(a, b), bound)
    worst = max(differ(a, b) for a, b in zip(got[2], want[2], strict=True))
    yield Finding(f"{name}: scores", worst, bound)
    for tier, score in zip(tiers, want[2], strict=True):
        REFERENCE.add_scores(pages, tier, score)
    with no_synchronisation(plan.device):
        plan.backend.paged_decode(queries, moved, there, on, scale, power=1, group="max", accumulate=True)
    worst = 0.0
    for tier in tiers:
        pair = [region(x, tier.fmt, "score")[tier.ids.flatten()] for x in (moved.cpu(), pages)]
        worst = max(worst, differ(*pair))
        for x in (moved, pages):
            region(x, tier.fmt, "score")[tier.ids.flatten().to(x.device)] = 0.0
    yield Finding(f"{name}: scores added", worst, bound)
    yield Finding(f"{name}: other bytes", bytes_differ(moved, pages), 0)


def check_attention(plan: Plan) -> Iterator[Finding]:
    """Checks attention: every format and query dtype, three tiers, residual buffers."""
    for head_dim, dtype, names in plan.kinds:
        kind = f"dim {head_dim}, {str(dtype).split('.')[1]} queries"
        for index, name in enumerate(names):
            if plan.takes(f"attend {kind} {name}"):
                yield from _attend(
                    plan, f"attend {name}, {kind}", [format_of(name, head_dim)], None, dtype, (4, 1, 3, 7)[index % 4]
                )
        for name in names[:4]:
            if plan.takes(f"rotate {kind} {name}"):
                formats = [format_of(name, head_dim)]
                yield from _attend(plan, f"attend rotated {name}, {kind}", formats, None, dtype, 4, rotated=True)
        if not plan.takes(f"attend {kind}"):
            continue
        three = [format_of(name, head_dim) for name in ("k8v4", "k4v2", "k16v16")]
        size = max(fmt.page_bytes for fmt in three)
        tiers = [PageFormat(fmt.slot, size) for fmt in three]
        yield from _attend(plan, f"attend three tiers, {kind}", tiers, None, dtype, 4)
        make = torch.Generator().manual_seed(5)
        k, v = (torch.randn(2, 2, n, head_dim, generator=make).to(dtype) for n in (40, 42))
        ring, fmt = Ring(k, v, torch.zeros(2, 2, dtype=torch.int64)), format_of("kivi 2 bits", head_dim)
        yield from _attend(plan, f"attend kivi 2 bits behind a ring, {kind}", [fmt], ring, dtype, 4)


def check_prompts(plan: Plan) -> Iterator[Finding]:
    """Checks the column scores of a prompt."""
    make = torch.Generator().manual_seed(2)
    for head_dim, dtype, _ in plan.kinds:
        if not plan.takes(f"prompts {head_dim} {dtype}"):
            continue
        length = min(plan.tokens, 700)
        q, k = (torch.randn(h, length, head_dim, generator=make).to(dtype) for h in (6, 2))
        kind, scale = f"dim {head_dim}, {str(dtype).split('.')[1]}", head_dim**-0.5
        there = q.to(plan.device), k.to(plan.device)
        for queries, skip_near, power in ((-1, 0, 1), (-1, length // 4, 2), (32, 7, 1)):
            columns = ColumnSums(queries=queries, skip_near=skip_near, power=power)
            with no_synchronisation(plan.device):
                got = plan.backend.prompt_scores(*there, scale, columns, HeadScores(group="max"))
            known = REFERENCE.column_scores(q, k, scale, columns)
            known = known.unflatten(0, (2, 3)).amax(1)
            name = f"column scores {queries}/{skip_near}/{power}, {kind}"
            yield Finding(name, differ(got / known.max(), known / known.max()), 1e-5)
        counted = ColumnSums(queries=-1, below_uniform=True)
        with no_synchronisation(plan.device):
            got = plan.backend.column_scores(*there, scale, counted)
        known = REFERENCE.column_scores(q, k, scale, counted)
        # A probability that is just one over the keys may fall on either side.
        yield Finding(f"queries below the uniform share, {kind}", differ(got, known), 2)


def check_chunks(plan: Plan) -> Iterator[Finding]:
    """Checks attention of a chunk over entries that are live and others, and what a layer holds read back."""
    make = torch.Generator().manual_seed(9)
    for head_dim, dtype, names in plan.kinds:
        if not plan.takes(f"chunks {head_dim} {dtype}"):
            continue
        length, kind = min(plan.tokens, 300), f"dim {head_dim}, {str(dtype).split('.')[1]}"
        q, k, v = (torch.randn(h, 70, head_dim, generator=make).to(dtype) for h in (6, 2, 2))
        past_k, past_v = (torch.randn(2, length, head_dim, generator=make) for _ in range(2))
        live, scale = torch.rand(2, length, generator=make) < 0.7, head_dim**-0.5
        want = REFERENCE.chunk_attention(q, k, v, (past_k, past_v, live), scale)
        q, k, v, past_k, past_v, live = (x.to(plan.device) for x in (q, k, v, past_k, past_v, live))
        with no_synchronisation(plan.device):
            got = plan.backend.chunk_attention(q, k, v, (past_k, past_v, live), scale)
        yield Finding(f"attention of a chunk, {kind}", differ(got, want), BOUNDS[torch.float32])
        fmt = format_of(names[0], head_dim)
        pages, tiers = filled(plan, [fmt], [torch.tensor([[1, length], [fmt.tokens_per_page, 0]])])
        known = REFERENCE.gather_dense(pages, tiers, None)
        read = plan.backend.gather_dense(pages.to(plan.device), moved_to(tiers, plan.device), None)
        worst = max(differ(a.float(), b.float()) for a, b in zip(read, known, strict=True))
        yield Finding(f"read back {names[0]}, {kind}", worst, 0)


def check_bounds(plan: Plan) -> Iterator[Finding]:
    """Checks the bounds of pages that keys widen, by many keys of a page and by one."""
    make = torch.Generator().manual_seed(10)
    for head_dim, _, _ in plan.kinds:
        if not plan.takes(f"bounds {head_dim}"):
            continue
        fmt = bounded_format(head_dim)
        want = torch.zeros(9, fmt.page_bytes, dtype=torch.uint8)
        for page, slot, distinct in (
            (torch.arange(8).repeat_interleave(16), torch.arange(16).repeat(8), False),
            (torch.arange(8), torch.arange(8), True),
        ):
            mixed = torch.randperm(len(page), generator=make)
            page, slot, k = page[mixed], slot[mixed], torch.randn(len(page), head_dim, generator=make)
            got = want.to(plan.device, copy=True)
            REFERENCE.widen_bounds(want, fmt, page, slot, k, distinct=distinct)
            inputs = [x.to(plan.device) for x in (page, slot, k)]
            with no_synchronisation(plan.device):
                plan.backend.widen_bounds(got, fmt, *inputs, distinct=distinct)
            name = f"bounds of pages, {'one key' if distinct else 'keys'} for each, dim {head_dim}: bytes"
            yield Finding(name, bytes_differ(got, want), 0)


def check_manager(plan: Plan) -> Iterator[Finding]:
    """Checks the page manager: random takes and returns of many lists, its state compared after each; compaction."""
    if not plan.takes("manager"):
        return
    make = torch.Generator().manual_seed(4)
    fmt = format_of("k4v2", 64)
    size, num = fmt.tokens_per_page, 32_768 if plan.device.type == "cuda" else 300
    tokens, spare = (size, size), 3 * num
    pool = PagePool(16, spare, growable=False)
    table = PageTable(pool, tokens, num, 1, 1, 6)
    there_pool, held = plan.backend.tables(pool.page_bytes, spare, tokens, (num, 1, 1), 6, plan.device)
    lists = torch.randperm(num, generator=make)
    on = lists.to(plan.device)
    for step in range(6):
        tier = step % 2
        count = torch.randint(0, size + 1, (num,), generator=make) // (1 + step)
        if step in (2, 3):
            count = torch.minimum(count, table.num_slots[tier, lists].long())
            table.truncate(lists, tier, count)
            there = count.to(plan.device)
            with no_synchronisation(plan.device):
                held.truncate(on, tier, there)
            same = True
        else:
            want, there = table.reserve(lists, tier, count), count.to(plan.device)
            with no_synchronisation(plan.device):
                got = held.reserve(on, tier, there, at_most=0)
            same = torch.equal(got.cpu(), want)
        there_pool.check()
        same = same and torch.equal(there_pool.free_ids().cpu(), pool.free_ids())
        same = same and torch.equal(held.num_slots.cpu(), table.num_slots)
        name = f"manager, {num} lists, {'truncate' if step in (2, 3) else 'reserve'} tier {tier}: state differs"
        yield Finding(name, float(not same), 0)
    yield _compaction(plan, fmt)


def _compaction(plan: Plan, fmt: PageFormat) -> Finding:
    make, num, size = torch.Generator().manual_seed(6), 60, fmt.tokens_per_page
    pool = PagePool(fmt.page_bytes, 4 * num, growable=False)
    pool.pages.copy_(torch.randint(256, pool.pages.shape, dtype=torch.uint8, generator=make))
    table = PageTable(pool, (size,), num, 1, 1, 4)
    there, held = plan.backend.tables(fmt.page_bytes, 4 * num, (size,), (num, 1, 1), 4, plan.device)
    there.pages.copy_(pool.pages)
    lists = torch.arange(num)
    count = torch.randint(0, 3 * size, (num,), generator=make)
    table.reserve(lists, 0, count)
    held.reserve(lists.to(plan.device), 0, count.to(plan.device))
    keep = torch.rand(num, 3 * size, generator=make) < 0.5
    owner, source, target, left = table.plan_compaction(lists, 0, keep)
    moves = [y for x in (source, target) for y in table.lookup(lists[owner], 0, x)]
    REFERENCE.move_slots(pool.pages, fmt, *moves)
    table.truncate(lists, 0, left)
    held.compact(lists.to(plan.device), 0, keep.to(plan.device), fmt)
    there.check()
    differ = bytes_differ(there.pages, pool.pages) + float(not torch.equal(there.free_ids().cpu(), pool.free_ids()))
    return Finding("manager, compaction: bytes", differ, 0)


def check_graph(plan: Plan) -> Iterator[Finding]:
    """Checks that a decode step captured in a CUDA graph and replayed equals plain calls."""
    if plan.device.type != "cuda" or not plan.takes("graph"):
        return
    results = []
    for captured in (False, True):
        step, held, result = decode_step(plan)
        if captured:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                step()  # compiles, and makes the tables that only a first call makes
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
            step = graph.replay
        for _ in range(3 if captured else 4):
            step()
        torch.cuda.synchronize()
        held.pool.check()
        results.append((result.clone(), held.num_slots.clone(), held.pool.pages.clone()))
    (out, slots, pages), (again, slots_again, pages_again) = results
    yield Finding("captured step: output", differ(again, out), 0)
    yield Finding(
        "captured step: slots and bytes", bytes_differ(slots_again, slots) + bytes_differ(pages_again, pages), 0
    )


def decode_step(plan: Plan) -> tuple[Callable[[], None], "DeviceTable", Tensor]:
    """A step over four sequences of two KV heads, its page tables and where it leaves its output."""
    fmt, head_dim, num = format_of("k8v4", 64), 64, 8
    size = fmt.tokens_per_page
    make = torch.Generator(plan.device).manual_seed(8)
    pool, held = plan.backend.tables(fmt.page_bytes, 64, (size,), (num, 1, 1), 4, plan.device)
    pool.pages.zero_()
    lists = torch.arange(num, device=plan.device)
    one, out = torch.ones_like(lists), torch.zeros(4, 8, head_dim, device=plan.device)
    q = torch.randn(4, 8, head_dim, generator=make, device=plan.device, dtype=torch.float16)
    k, v = (torch.randn(num, head_dim, generator=make, device=plan.device, dtype=torch.float16) for _ in range(2))

    def step() -> None:
        page, slot = held.lookup(lists, 0, held.reserve(lists, 0, one, at_most=0))
        plan.backend.write_keys(pool.pages, fmt, page, slot, k)
        plan.backend.write_values(pool.pages, fmt, page, slot, v)
        plan.backend.write_tracked(pool.pages, fmt, page, slot, 0.0, slot)
        count = held.num_slots[0].view(4, 2)
        tier = TierPages(fmt, held.page_ids(lists, 0, 4).view(4, 2, -1), count, count)
        out.copy_(plan.backend.paged_decode(q, pool.pages, [tier], None, 0.1, group="max", accumulate=True)[0])
        for x in (k, v):  # another token in the next step: attention over equal ones would not show which were read
            x.copy_(x.roll(1, -1))

    return step, held, out


CHECKS: dict[str, Callable[[Plan], Iterator[Finding]]] = {
    "pages": check_pages,
    "attention": check_attention,
    "prompts": check_prompts,
    "chunks": check_chunks,
    "bounds": check_bounds,
    "manager": check_manager,
    "graph": check_graph,
}
