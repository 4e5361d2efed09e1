"""Prompts that are read in chunks, beside slow code that keeps its tokens in lists."""

from dataclasses import dataclass

import pytest
import torch
from refusals import refused
from store_helpers import held_positions, held_scores, make_store

from kvbench.cache.store import CompressedStore
from kvbench.cache.tensors import ChunkTensors, Measurer, PromptTensors
from kvbench.kernels.dispatch import get_backend
from kvbench.methods.diffkv import DiffKV
from kvbench.methods.h2o import H2O
from kvbench.methods.kivi import Kivi
from kvbench.methods.knorm import KeyNorm
from kvbench.methods.kvquant_style import KVQuantStyle
from kvbench.methods.random_control import RandomControl
from kvbench.methods.snapkv import SnapKV
from kvbench.methods.streaming_llm import StreamingLLM
from kvbench.policy import ALL_QUERIES, Policy, Scored, ScoreSpec, Statistic, check_chunk

HEADS, GROUP, DIM, SCALE = 2, 2, 8, 0.5
SIZES = (5, 16, 16, 16)
LENGTH = sum(SIZES)


def prompt(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries of four heads, keys and values of two, which 16 bits hold exactly."""
    make = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randn(heads, LENGTH, DIM, generator=make).half().float() for heads in (HEADS * GROUP, HEADS, HEADS)
    )


def store_of(policy: Policy, **more) -> CompressedStore:
    """A store of one layer with two KV heads and four query heads."""
    settings = {"num_q_heads": HEADS * GROUP, "num_kv_heads": HEADS, "max_tokens": LENGTH} | more
    return make_store(policy, **settings)


def read(store: CompressedStore, q, k, v, sizes=SIZES, after=None) -> tuple[int, torch.Tensor]:
    """A row with the prompt, read in chunks, and what attention gave; `after` is called after each chunk."""
    row, begin, outs = store.open_row(), 0, []
    store.open_chunks(row, LENGTH)
    for size in sizes:
        own = slice(begin, begin + size)
        outs.append(store.read_chunk(row, 0, q[:, own], k[:, own], v[:, own], SCALE))
        begin += size
        if after:
            after(row)
    return row, torch.cat(outs, 1)


def oracle(q, k, v, budget: int, window: int, last_queries: int, sums: bool):
    """The same with lists: per KV head the positions held at the end and their scores, and attention, [Hq, N, D].

    A chunk's tokens attend to what is held and to the chunk up to themselves. A score is what the chunk's last queries
    give, or with `sums` what all queries so far gave. The last `window` tokens stay, and the heaviest others.
    """
    q, k, v = q.double(), k.double(), v.double()
    out = torch.zeros_like(q)
    held = [[] for _ in range(HEADS)]
    scores = [{} for _ in range(HEADS)]
    begin = 0
    for size in SIZES:
        end = begin + size
        for head in range(HEADS):
            score = {j: scores[head].get(j, 0.0) if sums else 0.0 for j in [*held[head], *range(begin, end)]}
            for member in range(GROUP):
                for i in range(begin, end):
                    keys = [*held[head], *range(begin, i + 1)]
                    share = torch.softmax(k[head, keys] @ q[head * GROUP + member, i] * SCALE, -1)
                    out[head * GROUP + member, i] = share @ v[head, keys]
                    if sums or i >= end - last_queries:
                        for j, part in zip(keys, share.tolist(), strict=True):
                            score[j] += part / (1 if sums else GROUP)
            if end > budget:
                free = sorted((j for j in score if j < end - window), key=lambda j: (-score[j], j))
                kept = sorted([*free[: budget - window], *range(end - window, end)])
            else:
                kept = sorted(score)
            held[head], scores[head] = kept, {j: score[j] for j in kept}
        begin = end
    return held, scores, out.float()


def test_heavy_hitters_add_up_over_chunks():
    """H2O's sums go on from chunk to chunk; what was dropped is neither attended to nor counted again."""
    q, k, v = prompt()
    held, scores, out = oracle(q, k, v, budget=20, window=10, last_queries=0, sums=True)
    store = store_of(H2O(budget=20, tier="native"))
    row, found = read(store, q, k, v)
    torch.testing.assert_close(found, out, atol=1e-5, rtol=1e-5)
    assert held_positions(store, row) == held
    for own, want in zip(held_scores(store, row), scores, strict=True):
        assert own == pytest.approx(want, rel=1e-4)


def test_an_observation_window_is_that_of_the_newest_chunk():
    """SnapKV measures all that is held anew by the last queries of each chunk."""
    q, k, v = prompt(1)
    held, _, out = oracle(q, k, v, budget=24, window=8, last_queries=8, sums=False)
    store = store_of(SnapKV(budget=24, window=8, pool="none", tier="native"), track=("pos",))
    row, found = read(store, q, k, v)
    torch.testing.assert_close(found, out, atol=1e-5, rtol=1e-5)
    assert held_positions(store, row) == held
    (keys,), (values,), _ = store.pages.backend.gather_dense(
        store.pages.pool.pages, store.holding.layer(torch.tensor([row]), 0)[0], None
    )
    for head, positions in enumerate(held):  # bytes moved with their tokens
        assert torch.equal(keys[head, : len(positions)], k[head, positions])
        assert torch.equal(values[head, : len(positions)], v[head, positions])


@pytest.mark.parametrize("power", [1, 2])
@pytest.mark.parametrize("skip_near", [0, 3])
@pytest.mark.parametrize(("queries", "reduce"), [(ALL_QUERIES, "sum"), (40, "sum"), (40, "mean"), (40, "max")])
def test_a_chunk_that_is_the_whole_prompt_is_measured_as_one(queries, reduce, skip_near, power):
    """More queries than are looked at together; each key gets what reading the prompt at once gives it."""
    q, k, v = prompt(3)
    spec = ScoreSpec(prefill_queries=queries, query_reduce=reduce, skip_near=skip_near, power=power)
    shape = store_of(SnapKV(budget=20, window=8)).shape
    measurer = Measurer(spec, shape, get_backend("torch", torch.device("cpu")), first_layer=0)
    whole = PromptTensors(measurer, 0, q=q, k=k, v=v, scale=SCALE)
    pos = torch.arange(LENGTH).expand(HEADS, -1)
    chunk = ChunkTensors(measurer, 0, q=q, before=None, k=k, v=v, pos=pos, tokens_seen=LENGTH, scale=SCALE)
    torch.testing.assert_close(chunk.attention(), whole.attention(), atol=1e-6, rtol=1e-5)
    if power == 1 and reduce == "sum":
        torch.testing.assert_close(chunk.low_counts(), whole.low_counts(), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("budget", [0.25, 17])
@pytest.mark.parametrize("kind", [KeyNorm, RandomControl])
def test_numbers_that_do_not_change_choose_the_same_tokens(kind, budget):
    """A budget is of the whole prompt, so that nothing goes before it has to: what ranks every token once and for all
    keeps in chunks what it keeps at once."""
    q, k, v = prompt(2)
    policy = kind(budget=budget, tier="native", **({"window": 4} if kind is RandomControl else {}))
    chunked, whole = (store_of(policy, track=("pos",)) for _ in range(2))
    most = []
    row, _ = read(chunked, q, k, v, after=lambda row: most.append(max(map(len, held_positions(chunked, row)))))
    other = whole.open_row()
    whole.prefill_layer(other, 0, q, k, v, SCALE)
    assert held_positions(chunked, row) == held_positions(whole, other)
    allowed = int(0.25 * LENGTH) if budget == 0.25 else budget
    assert most == [min(allowed, seen) for seen in (5, 21, 37, 53)]


def test_what_is_measured_beside_the_score_is_shown_by_its_name():
    """Under `also`, in their order and apart from the score, in every chunk but the first one's plan alike."""

    @dataclass(frozen=True)
    class WithFurther(Statistic):
        """The position as the score, and two numbers that follow from it."""

        also = ("tenfold", "negative")
        in_chunks = True

        def of_prompt(self, seen):
            pos = seen.pos.expand(len(seen.k), -1).float()
            return torch.stack([pos, 10 * pos, -pos])

    class Watching(Scored):
        """Notes what it is shown."""

        def __post_init__(self):
            super().__post_init__()
            self.score_by(WithFurther())

        def plan_prefill(self, view):
            shown.append(view)
            return super().plan_prefill(view)

    shown = []
    read(store_of(Watching(budget=20, tier="native")), *prompt())
    assert len(shown) == len(SIZES)
    for view in shown:
        held = view.score > torch.finfo(torch.float32).min / 2
        assert list(view.extra) == ["tenfold", "negative"] and held.any()
        assert torch.equal(view.extra["tenfold"][held], 10 * view.score[held])
        assert torch.equal(view.extra["negative"][held], -view.score[held])


def test_gaps_are_closed_in_one_go_where_a_chunk_has_room(monkeypatch):
    """The slots that a chunk will take are free to go through: two moves per chunk, of however many tokens."""
    store = store_of(H2O(budget=20, tier="native"))
    moved, move = [], store.pages.backend.move_slots
    monkeypatch.setattr(store.pages.backend, "move_slots", lambda *args: moved.append(len(args[2])) or move(*args))
    read(store, *prompt())
    assert len(moved) <= 2 * (len(SIZES) - 1) and max(moved) > 2 * HEADS


@pytest.mark.parametrize(
    "policy",
    [Kivi(group=8, residual_tokens=16), Kivi(group=8, residual_tokens=8), KVQuantStyle(group=8, pre_rope=False)],
    ids=["kivi", "kivi-short", "kvquant"],
)
def test_groups_of_tokens_are_those_of_a_prompt_read_at_once(policy):
    """Behind a residual buffer the codes, the rings and the bytes are the same after chunks."""
    q, k, v = prompt(3)
    chunked, whole = store_of(policy), store_of(policy)
    row, _ = read(chunked, q, k, v)
    other = whole.open_row()
    whole.prefill_layer(other, 0, q, k, v, SCALE)
    dense = []
    for store, own in ((chunked, row), (whole, other)):
        tiers, ring = store.holding.layer(torch.tensor([own]), 0)
        store.holding.rope.attach(tiers, None)
        dense.append(store.pages.backend.gather_dense(store.pages.pool.pages, tiers, ring))
    for found, want in zip(*dense, strict=True):
        assert torch.equal(found, want)
    assert chunked.ledger.itemise(row) == whole.ledger.itemise(other)


def test_a_token_never_comes_back_to_a_better_tier():
    """DiffKV demotes and prunes between chunks; what went down stays there, and every token lies in one tier."""
    q, k, v = prompt(4)
    store = store_of(DiffKV(alpha_h=1.2, alpha_l=0.6, window=4))
    seen = []
    read(store, 3 * q, k, v, after=lambda row: seen.append([held_positions(store, row, tier) for tier in (0, 1)]))
    moved = 0
    for before, after in zip(seen, seen[1:], strict=False):
        for head in range(HEADS):
            old = set(before[0][head]) | set(before[1][head])
            new = set(after[0][head]) | set(after[1][head])
            fresh = set(range(max(old) + 1, LENGTH))
            assert new <= old | fresh and not set(after[0][head]) & set(after[1][head])
            assert not set(after[0][head]) & set(before[1][head])
            moved += len(set(after[1][head]) & set(before[0][head])) + len(old - new)
    assert moved > 4, "the settings demote and prune nothing, so that this shows nothing"


def test_streaming_puts_a_chunk_behind_the_cache():
    """With positions in the cache, a chunk's queries stand right behind what is held, however much was dropped."""
    inv_freq = torch.tensor([1.0, 0.3, 0.1, 0.03])
    q, k, v = prompt(5)
    at = torch.arange(LENGTH).double()[:, None] * inv_freq.double()

    def rotated(x, angle):
        first, second = x[..., :4].double(), x[..., 4:].double()
        return torch.cat(
            [first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], -1
        ).float()

    store = store_of(StreamingLLM(sinks=2, budget=12, tier="native"), inv_freq=inv_freq)
    _, out = read(store, rotated(q, at), rotated(k, at), v)
    begin = LENGTH - SIZES[-1]
    kept = [0, 1, *range(begin - 10, begin)]
    for i in (begin, LENGTH - 1):
        keys = [*kept, *range(begin, i + 1)]
        places = torch.arange(len(keys)).double()[:, None] * inv_freq.double()
        own = rotated(k[:, keys], places).repeat_interleave(GROUP, 0)
        query = rotated(q[:, i], places[-1])
        share = torch.softmax(torch.einsum("hd,hnd->hn", query, own) * SCALE, -1)
        want = torch.einsum("hn,hnd->hd", share, v[:, keys].repeat_interleave(GROUP, 0))
        torch.testing.assert_close(out[:, i], want, atol=1e-4, rtol=1e-4)


def test_a_prompt_that_stops_halfway_gives_everything_back():
    """A row that is closed between two chunks leaves nothing behind, and can be used again."""
    q, k, v = prompt(6)
    store = store_of(H2O(budget=20))
    row, _ = read(store, q, k, v, sizes=SIZES[:2])
    store.close_row(row)
    assert store.pages.pool.num_used == 0
    again, _ = read(store, q, k, v)
    fresh = store_of(H2O(budget=20))
    other, _ = read(fresh, q, k, v)
    assert again == row and held_positions(store, again) == held_positions(fresh, other)


def test_a_chunk_is_at_least_the_observation_window():
    """One sentence: the number, the method, the rule, the remedy."""
    check_chunk(SnapKV(window=32), 32)
    check_chunk(SnapKV(window=32), None)
    with refused("settings-conflict", "prefill.chunk", "prefill.chunk=16", "SnapKV", "prefill.chunk=32"):
        check_chunk(SnapKV(window=32), 16)
    with refused("setting-value", "prefill.chunk", "prefill.chunk=0"):
        check_chunk(SnapKV(window=32), 0)
