"""Examples of papers, carried out on the store's pages and the methods' code.

Lines that `kvbench paper` prints. A test compares each with the paper.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from kvbench.kernels.format import PageFormat, SlotFormat
from kvbench.kernels.pool import PagePool
from kvbench.kernels.table import PageTable
from kvbench.policy import Tier
from kvbench.policy.bounds import Extent
from kvbench.policy.ranking import keep_blocks
from kvbench.runs.choices import read_choice
from kvbench.runs.parts import make_policy

ELEMENT_BITS = 16
FP16_TOKEN = 2 * ELEMENT_BITS  # bits of a channel of a token's key and value
# DiffKV figure 1: tokens in high and in low precision of heads A and B, of five each.
KEPT = {"request 1": ((1, 3), (2, 2)), "request 2": ((1, 4), (2, 1))}


def diffkv_bytes() -> list[str]:
    """DiffKV figure 1: shares of the FP16 cache of two heads in two requests of five tokens."""
    high, low = Tier.parse("k8v4"), Tier.parse("k4v2")
    lines = [
        f"pruning, 1 token of 5 in each head: {_percent(4, 5)} of the FP16 cache",
        f"INT8, every token: {_percent(8, ELEMENT_BITS)}",
    ]
    for request, heads in KEPT.items():
        whole = 0
        for name, (n_high, n_low) in zip("AB", heads, strict=True):
            keys = n_high * high.k_bits + n_low * low.k_bits
            values = n_high * high.v_bits + n_low * low.v_bits
            whole += keys + values
            lines.append(
                f"{request}, head {name}: {n_high} high, {n_low} low, {5 - n_high - n_low} pruned; keys "
                f"{_percent(keys, 5 * ELEMENT_BITS)}, values {_percent(values, 5 * ELEMENT_BITS)}"
            )
        lines.append(f"{request}, both heads: {_percent(whole, 10 * FP16_TOKEN)}")
    return lines


def diffkv_pages() -> list[str]:
    """DiffKV figure 6: a request of eight tokens and two heads on pages of two high or four low tokens.

    The figure reserves for eight high tokens, plans, and gives back; a store here plans first and reserves exactly.
    Both are carried out, on a pool of pages 0 to 12 of which 0 to 4 are taken.
    """
    kept = ((2, 4), (3, 4))  # tokens in high and low precision; how full pages are is not in the text
    lines = []
    table, lists = _page_table(13)
    table.reserve(lists, 0, torch.tensor([8, 8]))
    lines.append(f"reserved for 8 high tokens a head: {_pages(table, lists, 0)}; the pool has {_free(table.pool)}")
    table.truncate(lists, 0, torch.tensor([high for high, _ in kept]))
    lines.append(f"planned, {_counts(kept)}: high {_pages(table, lists, 0)}; returned, in the list's order: "
                 f"{_free(table.pool)}")  # fmt: skip
    table.reserve(lists, 1, torch.tensor([low for _, low in kept]))
    lines.append(f"low from the right: {_pages(table, lists, 1)}; rows {_rows(table, lists)}; free {_free(table.pool)}")
    exact, lists = _page_table(13)
    for tier in (0, 1):
        exact.reserve(lists, tier, torch.tensor([head[tier] for head in kept]))
    lines.append(
        f"as a store does it, planned first: high {_pages(exact, lists, 0)}; low {_pages(exact, lists, 1)}; as many "
        f"pages in use: {exact.pool.num_used - 5} and {table.pool.num_used - 5}"
    )
    return lines


def kv_compress_blocks() -> list[str]:
    """KV-Compress figure 5: a sequence of two heads with five and two KVs on blocks of two frees two blocks.

    The metrics are made up so that, as the text says, both come from the first head and a third from the second.
    """
    metrics = torch.tensor([[0.3, 0.1, 0.6, 0.2, 0.7], [0.5, 0.4, torch.inf, torch.inf, torch.inf]])
    held = torch.tensor([5, 2])
    table, lists = _page_table(4, (2,), taken=0)
    table.reserve(lists, 0, held)
    lines = [f"blocks of head 1 and 2: {_pages(table, lists, 0)}; metrics {_metrics(metrics, held)}"]
    keep = keep_blocks(metrics, held, 2, 2)
    gone = [row[:count].logical_not().nonzero()[:, 0].tolist() for row, count in zip(keep, held, strict=True)]
    lines.append(f"two blocks: KVs {gone[0]} of head 1 and {gone[1]} of head 2 go")
    owner, source, target, _ = table.plan_compaction(lists, 0, keep)
    moves = [f"head {h + 1}: {a} to {b}" for h, a, b in zip(*map(Tensor.tolist, (owner, source, target)), strict=True)]
    flat = metrics.new_zeros(table.pool.num_pages, 2)
    all_lists = lists.repeat_interleave(held)
    slots = torch.cat([torch.arange(int(count)) for count in held])
    flat[table.lookup(all_lists, 0, slots)] = metrics[metrics < torch.inf]

    def move(page: Tensor, slot: Tensor, to_page: Tensor, to_slot: Tensor) -> None:
        flat[to_page, to_slot] = flat[page, slot]

    table.compact(lists, 0, keep, _FORMAT, move)
    left = [flat[table.lookup(one.expand(int(n)), 0, torch.arange(int(n)))].tolist()
            for one, n in zip(lists, table.num_slots[0], strict=True)]  # fmt: skip
    lines.append(f"moves: {', '.join(moves)}; blocks then {_pages(table, lists, 0)}, freed {_free(table.pool)}; "
                 f"metrics {[[round(value, 2) for value in row] for row in left]}")  # fmt: skip
    third = keep_blocks(metrics, held, 2, 3) != keep
    lines.append(f"a third block would be of head {int(third.any(-1).nonzero()[0]) + 1}")
    return lines


def kv_compress_layouts() -> list[str]:
    """KV-Compress figure 3: block tables that all heads of all layers share, and one for each head of each layer."""
    layers, heads, block, tokens = 2, 2, 2, 6
    pool = PagePool(_FORMAT.page_bytes, 2 * layers * heads * tokens // block)
    table = PageTable(pool, (block,), 1, layers, heads, tokens // block)
    lists = torch.arange(layers * heads)
    table.reserve(lists, 0, torch.full((layers * heads,), tokens))
    lines = [
        f"shared: a sequence of {tokens} tokens has {tokens // block} entries of a table, each a block of {block} "
        f"tokens over all {layers} layers x {heads} heads",
        f"here, as in KV-Compress: table {list(table.entries.shape)} (layers x heads, blocks), {pool.num_used} blocks "
        f"of one head each: {table.entries.tolist()}",
    ]
    table.truncate(lists, 0, torch.tensor([6, 2, 4, 0]))
    lines.append(f"after eviction heads hold {table.num_slots[0].tolist()} tokens in {pool.num_used} blocks; a shared "
                 f"table would hold {tokens // block * layers * heads} as long as one head needs them")  # fmt: skip
    return lines


# MiniKV table 2: its approaches, and the method here; None where there is none.
APPROACHES = {
    "AttentionSink": "streaming_llm",
    "FastGen": "fastgen",
    "ScissorHands": "scissorhands",
    "H2O": "h2o",
    "FlexGen": None,
    "LLM-QAT": None,
    "Q-Hitters": "q_hitter",
    "KVQuant": "kvquant",
    "KIVI": "kivi",
    "MiniKV": "minikv",
}
# A prompt of 1,000 tokens and 100 after it, of which a method that evicts says that it keeps fewer.
EXTENT = Extent(prompt_tokens=1000, tokens_seen=1100, lists=4, prompt_slots=1000, page_tokens=16, slot_bytes=64.0)


def minikv_approaches() -> list[str]:
    """MiniKV table 2: which approaches evict and which quantise, as their methods here do with their defaults."""
    lines = []
    for name, method in APPROACHES.items():
        if method is None:
            lines.append(f"{name}: no method here")
            continue
        policy = make_policy(read_choice("method", method))
        bounds = policy.bounds(EXTENT)
        stated = () if bounds is None else (bounds.prompt, bounds.prompt_mean, bounds.end_mean)
        most = min((each[1] for each in stated), default=EXTENT.tokens_seen)
        bits = min(min(tier.k_bits, tier.v_bits) for tier in policy.tiers)
        evicts = "evicts" if most < EXTENT.prompt_tokens else "evicts nothing"
        lines.append(f"{name}: method={method}, {evicts}, {bits} bits, no training")
    return lines


_FORMAT = PageFormat(SlotFormat(head_dim=8, k_bits=16, v_bits=16), 512)
EXAMPLES: dict[str, Callable[[], list[str]]] = {
    one.__name__: one
    for one in (diffkv_bytes, diffkv_pages, kv_compress_blocks, kv_compress_layouts, minikv_approaches)
}


def _page_table(pages: int, per_page: tuple[int, ...] = (2, 4), taken: int = 5) -> tuple[PageTable, Tensor]:
    """A table of two heads with four entries each, on a pool of which the first pages are taken; and its lists."""
    pool = PagePool(_FORMAT.page_bytes, pages, growable=False)
    pool.allocate(torch.tensor([taken]))
    return PageTable(pool, per_page, 1, 1, 2, 4), torch.arange(2)


def _pages(table: PageTable, lists: Tensor, tier: int) -> str:
    """The pages of heads A and B, in slot order."""
    counts = table.num_pages(tier)[lists].tolist()
    ids = table.page_ids(lists, tier, max(counts)).tolist()
    return " and ".join(f"{row[:count]}" for row, count in zip(ids, counts, strict=True))


def _rows(table: PageTable, lists: Tensor) -> str:
    """The table's rows; `-` for an entry that no page has."""
    high, low = (table.num_pages(tier)[lists].tolist() for tier in (0, 1))
    rows = table.entries[lists].tolist()
    width = table.max_pages
    return " and ".join(
        f"[{', '.join(f'{page}' if index < left or index >= width - right else '-' for index, page in enumerate(row))}]"
        for row, left, right in zip(rows, high, low, strict=True)
    )


def _free(pool: PagePool) -> str:
    """The free pages in the order in which they are taken."""
    places = [(pool.start + step) % len(pool.free_list) for step in range(pool.num_free)]
    return f"{pool.free_list[places].tolist()}" if places else "none free"


def _counts(kept: tuple[tuple[int, int], ...]) -> str:
    return ", ".join(f"{name} {high} high and {low} low" for name, (high, low) in zip("AB", kept, strict=True))


def _metrics(metrics: Tensor, held: Tensor) -> str:
    rows = zip(metrics.tolist(), held.tolist(), strict=True)
    return " and ".join(f"{[round(value, 2) for value in row[:count]]}" for row, count in rows)


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.4g} %"
