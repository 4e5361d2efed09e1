"""The checks of a device: every operation there and by the plain torch reference, on the same random pages."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvbench.kernels.backend import Backend
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
    hard_vectors,
    moved_to,
    no_synchronisation,
)
from kvbench.kernels.format import PageFormat
from kvbench.kernels.graphs import capturing
from kvbench.kernels.operands import ColumnSums, HeadScores, Ring, TierPages
from kvbench.kernels.pool import PagePool
from kvbench.kernels.reference.pages import region
from kvbench.kernels.table import PageTable

if TYPE_CHECKING:
    from kvbench.kernels.gpu.table import DeviceTable


def _write(backend: Backend, pages: Tensor, fmt: PageFormat, page: Tensor, slot: Tensor, k: Tensor, v: Tensor) -> None:
    backend.write_keys(pages, fmt, page, slot, k)
    backend.write_values(pages, fmt, page, slot, v)


def check_pages(plan: Plan) -> Iterator[Finding]:
    """Checks written bytes, read values, and slots that are demoted or moved; page -1 must be skipped."""
    make = torch.Generator().manual_seed(1)
    for head_dim, _, names in plan.kinds:
        for name in names:
            if not plan.takes(f"pages {head_dim} {name}"):
                continue
            fmt = format_of(name, head_dim)
            run = max(8, fmt.slot.group_tokens)
            size = fmt.tokens_per_page // run * run
            page = torch.tensor([4, 1, 3]).repeat_interleave(size)
            slot, kept = torch.arange(size).repeat(3), page != 1
            k, v = hard_vectors(len(page), head_dim), hard_vectors(len(page), head_dim).flip(0)
            want = torch.randint(256, (6, fmt.page_bytes), dtype=torch.uint8, generator=make)
            got, *operands = plan.there(want, page.where(kept, -1), slot, k, v)
            _write(REFERENCE, want, fmt, page[kept], slot[kept], k[kept], v[kept])
            with no_synchronisation(plan.device):
                _write(plan.backend, got, fmt, *operands)
            yield Finding(f"write {name}, dim {head_dim}: bytes", bytes_differ(got, want), 0)
            read = plan.backend.read_slots(got, fmt, operands[0], operands[1])
            known = REFERENCE.read_slots(want, fmt, page, slot)
            worst = max(differ(a, b.masked_fill(~kept[:, None], 0.0)) for a, b in zip(read, known, strict=True))
            yield Finding(f"read {name}, dim {head_dim}", worst, 0)
            if not fmt.slot.channel_keys:
                moves = [torch.tensor(x) for x in ([4, 1, 4], [0, size - 1, 1], [0, 5, -1], [3, 0, 1])]
                REFERENCE.move_slots(want, fmt, *(x[:2] for x in moves))
                plan.backend.move_slots(got, fmt, *plan.there(*moves))
                yield Finding(f"move {name}, dim {head_dim}: bytes", bytes_differ(got, want), 0)
        for names in DEMOTED:
            if plan.takes(f"demote {head_dim} {names}"):
                yield _demotion(plan, names, head_dim)


def _demotion(plan: Plan, names: tuple[str, str], head_dim: int) -> Finding:
    upper, lower = (format_of(name, head_dim) for name in names)
    want = torch.randint(256, (5, upper.page_bytes), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    page, slot = torch.zeros(9, dtype=torch.int64), torch.arange(9) % 8
    page[8] = 1
    _write(REFERENCE, want, upper, page, slot, hard_vectors(9, head_dim), hard_vectors(9, head_dim).flip(0))
    REFERENCE.write_tracked(want, upper, page, slot, torch.rand(9), slot)
    onto, at = torch.where(slot % 3 == 1, -1, 3 + slot % 2), 7 - slot
    onto[8] = 2  # no two may go to one slot: on a GPU either can be the last
    got, *operands = plan.there(want, page, slot, onto, at)
    page, slot, onto, at = (x[onto >= 0] for x in (page, slot, onto, at))
    _write(REFERENCE, want, lower, onto, at, *REFERENCE.read_slots(want, upper, page, slot))
    REFERENCE.write_tracked(want, lower, onto, at, *REFERENCE.read_tracked(want, upper, page, slot))
    plan.backend.demote(got, upper, lower, *operands)
    return Finding(f"demote {names[0]} to {names[1]}, dim {head_dim}: bytes", bytes_differ(got, want), 0)


DEMOTED = (
    ("k8v4 groups", "k4v2"),
    ("k16v16", "k2v1"),
    ("k16v16", "k16v4, 17 key channels"),
    ("k16v16, 39 key channels", "k4v4"),
)


def _attend(
    plan: Plan, name: str, formats: list[PageFormat], dtype: torch.dtype, index: int, ring: Ring | None = None
) -> Iterator[Finding]:
    """Checks a call that returns scores, one that adds them to the pages, and adding alone.

    `index` selects query heads per KV head, the score's form and, below 0, rotation of half of the channels.
    """
    make, long = torch.Generator().manual_seed(3), plan.tokens
    counts = [torch.tensor([[1, long], [formats[0].tokens_per_page, long // 2 + 3]])]
    counts += [torch.tensor([[0, 5], [long // 3, 0]]), torch.tensor([[3, 0], [1, 17]])][: len(formats) - 1]
    if ring is not None:
        group = formats[0].slot.group_tokens
        counts[0] = (counts[0] + group - 1) // group * group
        ring.num_tokens = counts[0] + 5
    pages, tiers = filled(plan, formats, counts)
    for tier in tiers if index < 0 else []:
        width = tier.ids.shape[-1] * tier.fmt.tokens_per_page
        angles = torch.rand(tier.fmt.slot.head_dim // 4, generator=make) * torch.arange(width)[:, None]
        tier.rotation = angles.expand(2, -1, -1)  # as far as positions go: a rotation is only as good as its cosines
    q = torch.randn(2, 2 * (4, 1, 3, 7, 17)[index % 5], formats[0].slot.head_dim, generator=make).to(dtype)
    scale, rules = q.shape[-1] ** -0.5, ("max", "sum", "mean")
    how: dict[str, Any] = {"power": 1 + index % 2, "group": rules[index % 3]}
    want = REFERENCE.paged_decode(q, pages, tiers, ring, scale, **how)
    moved, alone, queries = plan.there(pages, pages, q)
    there = moved_to(tiers, plan.device)
    on = None if ring is None else Ring(*plan.there(ring.k, ring.v, ring.num_tokens))
    with no_synchronisation(plan.device):
        got = plan.backend.paged_decode(queries, moved, there, on, scale, **how)
    bound = BOUNDS[dtype]
    for what, a, b in (("output", got[0], want[0]), ("lse", got[1], want[1])):
        yield Finding(f"{name}: {what}", differ(a, b), bound)
    worst = max(differ(a, b) for a, b in zip(got[2], want[2], strict=True))
    yield Finding(f"{name}: scores", worst, bound)
    for tier, other, score in zip(tiers, there, want[2], strict=True):
        REFERENCE.add_scores(pages, tier, score)
        plan.backend.add_scores(alone, other, *plan.there(score))
    yield Finding(f"{name}: scores added alone", bytes_differ(alone, pages), 0)
    with no_synchronisation(plan.device):
        plan.backend.paged_decode(queries, moved, there, on, scale, **how, accumulate=True)
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
                yield from _attend(plan, f"attend {name}, {kind}", [format_of(name, head_dim)], dtype, index)
        for index, name in enumerate(names[:4]):
            if plan.takes(f"rotate {kind} {name}") and format_of(name, head_dim).slot.key_channels == head_dim:
                formats = [format_of(name, head_dim)]
                yield from _attend(plan, f"attend rotated {name}, {kind}", formats, dtype, index - 4)
        if not plan.takes(f"attend {kind}"):
            continue
        three = [format_of(name, head_dim) for name in ("k8v4", "k4v2", "k16v16")]
        size = max(fmt.page_bytes for fmt in three)
        tiers = [PageFormat(fmt.slot, size) for fmt in three]
        yield from _attend(plan, f"attend three tiers, {kind}", tiers, dtype, 0)
        make = torch.Generator().manual_seed(5)
        k, v = (torch.randn(2, 2, n, head_dim, generator=make).to(dtype) for n in (40, 42))
        ring, fmt = Ring(k, v, torch.zeros(2, 2, dtype=torch.int64)), format_of("kivi 2 bits", head_dim)
        yield from _attend(plan, f"attend kivi 2 bits behind a ring, {kind}", [fmt], dtype, 0, ring)


def check_prompts(plan: Plan) -> Iterator[Finding]:
    """Checks the column scores of a prompt."""
    make = torch.Generator().manual_seed(2)
    for head_dim, dtype, _ in plan.kinds:
        if not plan.takes(f"prompts {head_dim} {dtype}"):
            continue
        length = min(plan.tokens, 700)
        q, k = (torch.randn(h, length, head_dim, generator=make).to(dtype) for h in (6, 2))
        kind, scale = f"dim {head_dim}, {str(dtype).split('.')[1]}", head_dim**-0.5
        mine, keys = plan.there(q, k)
        for queries, skip_near, power in ((-1, 0, 1), (-1, length // 4, 2), (32, 7, 1)):
            columns = ColumnSums(queries=queries, skip_near=skip_near, power=power)
            with no_synchronisation(plan.device):
                got = plan.backend.prompt_scores(mine, keys, scale, columns, HeadScores(group="max"))
            known = REFERENCE.column_scores(q, k, scale, columns)
            known = known.unflatten(0, (2, 3)).amax(1)
            name = f"column scores {queries}/{skip_near}/{power}, {kind}"
            yield Finding(name, differ(got / known.max(), known / known.max()), 1e-5)
        counted = ColumnSums(queries=-1, below_uniform=True)
        with no_synchronisation(plan.device):
            got = plan.backend.column_scores(mine, keys, scale, counted)
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
        for name, held, mask in (("chunk", torch.float32, live), ("replay", dtype, None)):
            past = past_k.to(held), past_v.to(held)
            want = REFERENCE.chunk_attention(q, k, v, (*past, mask), scale)
            mine, there, seen = plan.there(q, k, v), plan.there(*past), mask if mask is None else mask.to(plan.device)
            with no_synchronisation(plan.device):
                got = plan.backend.chunk_attention(mine[0], mine[1], mine[2], (there[0], there[1], seen), scale)
            yield Finding(f"attention of a {name}, {kind}", differ(got.float(), want), BOUNDS[dtype])
        for index, name in enumerate(names[:4]):
            fmt = format_of(name, head_dim)
            pages, tiers = filled(plan, [fmt], [torch.tensor([[1, length], [fmt.tokens_per_page, 0]])])
            turns = index % 2 == 1 and fmt.slot.key_channels == head_dim
            if turns:
                slots = tiers[0].ids.shape[-1] * fmt.tokens_per_page
                tiers[0].rotation = torch.rand(2, slots, head_dim // 2, generator=make)
            known = REFERENCE.gather_dense(pages, tiers, None)
            read = plan.backend.gather_dense(pages.to(plan.device), moved_to(tiers, plan.device), None)
            worst = max(differ(a.float(), b.float()) for a, b in zip(read, known, strict=True))
            bound = BOUNDS[torch.float32] * turns  # a device has cosines of its own
            yield Finding(f"read back {name}, {kind}", worst, bound)


def check_bounds(plan: Plan) -> Iterator[Finding]:
    """Checks the bounds of pages that keys widen, by many keys of a page and by one; page -1 is passed over."""
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
            got, *inputs = plan.there(want, page, slot, k)
            inputs[0][-1] = -1
            REFERENCE.widen_bounds(want, fmt, page[:-1], slot[:-1], k[:-1], distinct=distinct)
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
            with capturing(graph):
                step()
            step = graph.replay
        for _ in range(3 if captured else 4):
            step()
        torch.cuda.synchronize()
        held.pool.check()
        results.append((result.clone(), held.num_slots.clone(), held.pool.pages.clone()))
    (out, slots, pages), (replayed, replayed_slots, replayed_pages) = results
    yield Finding("captured step: output", differ(replayed, out), 0)
    yield Finding(
        "captured step: slots and bytes", bytes_differ(replayed_slots, slots) + bytes_differ(replayed_pages, pages), 0
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
