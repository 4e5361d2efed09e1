"""What holds the tokens of a cache, made of a policy and a model's shape: one place, or several behind a `Split`."""

from collections import Counter
from dataclasses import replace

from kvbench.cache.books import Books
from kvbench.cache.buffered import Buffered
from kvbench.cache.counters import Counters
from kvbench.cache.homes import Homes
from kvbench.cache.layout import ModelShape, StoreOptions, compile_formats
from kvbench.cache.paged import Paged
from kvbench.cache.pages import Pages
from kvbench.cache.rotation import turns_of
from kvbench.cache.split import Split
from kvbench.kernels.backend import Backend
from kvbench.kernels.pool import PagePool
from kvbench.policy import Policy


def make_holding(
    policy: Policy,
    shape: ModelShape,
    *,
    rows: int,
    max_slots: int,
    options: StoreOptions,
    backend: Backend,
    pool: type[PagePool],
) -> Paged | Split:
    """Makes what holds the tokens, empty.

    Args:
        policy: Decides.
        shape: The model's shape.
        rows: Sequences held at once.
        max_slots: Most slots of one list.
        options: Page size, byte budget, extra tracked fields.
        backend: The kernels.
        pool: Class of the page pools.

    Raises:
        ValueError: The policy does not fit the model or the options.
    """
    copies = shape.num_q_heads // shape.num_kv_heads if policy.granularity == "q_head" else 1
    table: list[list[int]] | None = None  # the tier of every list of the model, where these differ
    if policy.by_layer is not None:
        planned = policy.by_layer.of_model(shape.num_layers, shape.num_kv_heads)
        table = [[tier for tier in row for _ in range(copies)] for row in planned]

    def homes_of(first_layer: int, own: ModelShape) -> Homes | None:
        """The part of the table that is about the layers of a place and the heads of this process."""
        if table is None:
            return None
        heads = own.num_kv_heads * copies
        begin = shape.ranks.index * heads
        here = table[first_layer : first_layer + own.num_layers]
        return Homes(tuple(tuple(row[begin : begin + heads]) for row in here), own.device)

    def part(first_layer: int, own: ModelShape) -> Paged:
        """What holds the layers of one place."""
        turns = turns_of(options.rotation, policy, own.head_dim, own.device)
        budget = options.budget_bytes
        if budget is not None:  # each place has its layers' share, and each process its heads'
            budget = budget * own.num_layers // (shape.num_layers * shape.ranks.size)
        pages = Pages(
            compile_formats(policy, shape, replace(options, budget_bytes=budget)),
            (rows, own.num_layers, own.num_kv_heads * copies),
            max_slots=max_slots,
            backend=backend,
            device=own.device,
            budget_bytes=budget,
            pool=pool,
            memory_share=options.memory_share,
            homes=homes_of(first_layer, own),
        )
        if policy.codebooks is not None:
            first_head = shape.ranks.index * own.num_kv_heads
            pages.books = Books(policy.codebooks, pages.formats, own, first_layer, first_head)
        lists = shape.num_layers * shape.num_kv_heads * copies
        at_home = {0: lists} if table is None else Counter(tier for row in table for tier in row)
        pages.at_home = sorted(at_home.items())
        # Only bulk eviction asks how much the prompt's plan gave each list.
        counted = pages.table.num_lists if policy.compaction else 0
        counters = Counters.make(rows, counted, own.device, policy.needs_instruction)
        if policy.residual is None:
            return Paged(policy, own, pages, counters, turns, first_layer)
        return Buffered(policy, own, pages, counters, turns, policy.residual, first_layer)

    parts = [part(*each) for each in shape.parts()]
    return parts[0] if shape.is_whole else Split(policy, shape, parts)
