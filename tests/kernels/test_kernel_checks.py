"""What every backend refuses before it touches memory, one mistake at a time."""

from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvbench.kernels import checks
from kvbench.kernels.backend import Backend
from kvbench.kernels.cpu.backend import Cpu
from kvbench.kernels.cpu.build import BuildError
from kvbench.kernels.format import PageFormat, SlotFormat
from kvbench.kernels.operands import Channels, InOrder, Ring, SlotSearch, StepRing, StepScores, TierPages

BACKENDS: list[Backend] = [Backend()]
with suppress(BuildError):
    BACKENDS.append(Cpu())
try:
    from kvbench.kernels.gpu.backend import Gpu

    BACKENDS.append(Gpu())
except ImportError:  # triton is an extra
    pass
COMPILED = next((backend for backend in BACKENDS if backend.name == "cpu"), None)
needs_compiler = pytest.mark.skipif(COMPILED is None, reason="no C++ compiler")
each_backend = pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)

FMT = PageFormat(SlotFormat(64, 8, 4, track=("score", "pos")), 4608)
BARE = PageFormat(SlotFormat(64, 8, 4), 4608)
BOUNDED = PageFormat(SlotFormat(64, 16, 16), 4608, bounds=True)
T = FMT.tokens_per_page


def pool(num_pages: int = 6) -> Tensor:
    """Pages of zeros."""
    return torch.zeros(num_pages, FMT.page_bytes, dtype=torch.uint8)


def index(*shape: int, value: int = 0) -> Tensor:
    """int64 of one value."""
    return torch.full(shape, value)


def tier(*lead: int, count: int = 5, columns: int = 1, fmt: PageFormat = FMT) -> TierPages:
    """Lists of a few slots each."""
    return TierPages(fmt, index(*lead, columns), index(*lead, value=count), index(*lead, value=count))


def decode(backend: Backend, q: Tensor, pages: Tensor, *tiers: TierPages, ring: Ring | None = None, **how) -> None:
    """One call without scores."""
    backend.paged_decode(q, pages, list(tiers), ring, 0.125, **how)


ONE = index(3)
X = torch.randn(3, 64)
Q = torch.randn(2, 6, 64)
WRONG = {
    "slots fewer than pages": (lambda b, p: b.write_keys(p, FMT, ONE, ONE[:2], X), r"slot is int64 \[2\].*\[3\]"),
    "rows fewer than pages": (lambda b, p: b.write_values(p, FMT, ONE, ONE, X[:2]), r"v is float32 \[2, 64\]"),
    "vectors too wide": (lambda b, p: b.write_keys(p, FMT, ONE, ONE, torch.randn(3, 600)), r"k is float32 \[3, 600\]"),
    "vectors of integers": (lambda b, p: b.write_keys(p, FMT, ONE, ONE, X.long()), "it must be floating-point"),
    "half a page index": (lambda b, p: b.write_keys(p, FMT, ONE + 0.5, ONE, X), r"page is float32.*must be int64"),
    "a narrow pool": (lambda b, p: b.write_keys(p[:, :-16].contiguous(), FMT, ONE, ONE, X), "the pool is uint8"),
    "a pool of int64": (lambda b, p: b.read_slots(p.long(), FMT, ONE, ONE), "the pool is int64"),
    "reading without slots": (lambda b, p: b.read_slots(p, FMT, ONE, ONE[:1]), r"slot is int64 \[1\]"),
    "moving without targets": (lambda b, p: b.move_slots(p, FMT, ONE, ONE, ONE[:1], ONE[:1]), "there are 3 sources"),
    "moving with few slots": (lambda b, p: b.move_slots(p, FMT, ONE, ONE[:1], ONE, ONE), r"slot is int64 \[1\]"),
    "a tracked slot short": (lambda b, p: b.write_tracked(p, FMT, ONE, ONE[:1], 0.0, ONE), r"slot is int64 \[1\]"),
    "a score missing": (lambda b, p: b.write_tracked(p, FMT, ONE, ONE, None, ONE), "the format tracks scores"),
    "bounds that are not there": (
        lambda b, p: b.widen_bounds(p, FMT, ONE, ONE, X, distinct=False),
        "carry no bounds that could be widened",
    ),
    "more queries than tables": (
        lambda b, p: decode(b, torch.randn(3, 6, 64), p, tier(2, 2)),
        r"ids is int64 \[2, 2, 1\]",
    ),
    "another head dim": (lambda b, p: decode(b, torch.randn(2, 6, 128), p, tier(2, 2)), "head dim of the pages is 64"),
    "heads in no group": (lambda b, p: decode(b, torch.randn(2, 3, 64), p, tier(2, 2)), "a multiple of the 2 KV heads"),
    "counts of another shape": (
        lambda b, p: decode(b, Q, p, TierPages(FMT, index(2, 2, 1), index(1, 1), index(1, 1))),
        r"num_k is int64 \[1, 1\].*must be int64 \[2, 2\]",
    ),
    "a short rotation": (
        lambda b, p: decode(b, Q, p, TierPages(FMT, index(2, 2, 1), index(2, 2), index(2, 2), torch.zeros(2, 3, 32))),
        r"rotation is float32 \[2, 3, 32\]",
    ),
    "a wide rotation": (
        lambda b, p: decode(b, Q, p, TierPages(FMT, index(2, 2, 1), index(2, 2), index(2, 2), torch.zeros(2, T, 33))),
        "rotation is 33 angles per slot",
    ),
    "scales of channels beside those of the page": (
        lambda b, p: decode(
            b, Q, p, TierPages(FMT, index(2, 2, 1), index(2, 2), index(2, 2), None, Channels(*torch.ones(2, 2, 64)))
        ),
        "the channels' scale is beside scales in the page, but keys have the one or the other",
    ),
    "first positions of another batch": (
        lambda b, p: decode(
            b, Q, p, TierPages(FMT, index(2, 2, 1), index(2, 2), index(2, 2), InOrder(index(3), torch.ones(32)))
        ),
        r"the first positions is int64 \[3\].*must be int64 \[2\]",
    ),
    "too many frequencies": (
        lambda b, p: decode(
            b, Q, p, TierPages(FMT, index(2, 2, 1), index(2, 2), index(2, 2), InOrder(index(2), torch.ones(33)))
        ),
        "rotation is 33 angles per slot",
    ),
    "a third power": (lambda b, p: decode(b, Q, p, tier(2, 2), power=3), "power is 3"),
    "an unknown reduction": (lambda b, p: decode(b, Q, p, tier(2, 2), group="min"), "group is 'min'"),
    "a ring behind two tiers": (
        lambda b, p: decode(
            b, Q, p, tier(2, 2), tier(2, 2), ring=Ring(torch.zeros(2, 2, 8, 64), torch.zeros(2, 2, 8, 64), index(2, 2))
        ),
        "there is one behind residual buffers",
    ),
    "short scores": (lambda b, p: b.add_scores(p, tier(2, 2), torch.zeros(2, 2, T - 1)), "scores is float32"),
    "scores without a place": (
        lambda b, p: b.add_scores(p, tier(2, 2, fmt=BARE), torch.zeros(2, 2, BARE.tokens_per_page)),
        r"the format's track is \(\), but the call needs score",
    ),
    "prompts of two lengths": (
        lambda b, p: b.prefill_attention(torch.randn(4, 9, 8), torch.randn(2, 8, 8), torch.randn(2, 8, 8), 1.0),
        r"k is float32 \[2, 8, 8\]",
    ),
    "a negative distance": (
        lambda b, p: b.prompt_low_counts(
            torch.randn(4, 9, 8), torch.randn(2, 9, 8), 1.0, queries=-1, skip_near=-1, group="sum"
        ),
        "skip_near is -1",
    ),
}


@each_backend
@pytest.mark.parametrize("mistake", WRONG)
def test_every_backend_refuses_the_same_mistakes(mistake: str, backend: Backend):
    """One sentence with what was found and what the operation takes, the same whoever does it; no byte changes."""
    call, said = WRONG[mistake]
    pages = pool()
    with pytest.raises(AssertionError, match=said):
        call(backend, pages)
    assert not pages.any()


@each_backend
def test_slots_of_pages_with_bounds_do_not_move(backend: Backend):
    """The bounds would no longer hold, so that no backend does it."""
    with pytest.raises(ValueError, match="the bounds would no longer hold"):
        backend.move_slots(pool(), BOUNDED, ONE, ONE, ONE + 1, ONE)


@pytest.mark.parametrize("backend", [b for b in BACKENDS if b.name != "triton"], ids=lambda backend: backend.name)
@pytest.mark.parametrize("page", [-1, 6, 2**50])
def test_indices_beyond_the_pool_are_refused_in_main_memory(page: int, backend: Backend):
    """Torch alone would take -1 for the last page, and write there."""
    pages, at, none = pool(), index(1, value=page), index(1)
    for call in (
        lambda: backend.write_keys(pages, FMT, at, none, X[:1]),
        lambda: backend.write_keys(pages, FMT, none, at * T, X[:1]),
        lambda: backend.read_slots(pages, FMT, at, none),
        lambda: backend.move_slots(pages, FMT, none, none, at, none),
        lambda: backend.write_tracked(pages, FMT, at, none, 1.0, none),
        lambda: backend.read_tracked(pages, FMT, at, none),
    ):
        with pytest.raises(AssertionError, match="a page that the pool|a slot beyond|counted from 0"):
            call()
    assert not pages.any()


@needs_compiler
@pytest.mark.parametrize("count", [-1, T + 1, 2**40, 2**62, -(2**62)])
def test_a_count_beyond_its_table_sizes_nothing(count: int):
    """2**40 slots on one page are refused at once; they once made a plan of as many."""
    for name in ("num_k", "num_v"):
        wrong = tier(1, 1)
        setattr(wrong, name, index(1, 1, value=count))
        with pytest.raises(AssertionError, match="more than its table and its residual buffer have room for"):
            decode(COMPILED, torch.randn(1, 2, 64), pool(), wrong)
    wrong = tier(1, 1, count=count)
    with pytest.raises(AssertionError, match="more than its table"):
        COMPILED.add_scores(pool(), wrong, torch.zeros(1, 1, T))


def open_step(pages: Tensor, *, page: int = 0, slot: int = 4, at: int = 0, **other):
    """A step of two sequences, one layer and two heads."""
    places = index(2, 1, 2, value=page), index(2, 1, 2, value=slot)
    how = {"num_q_heads": 4, "seen": index(2), "target": (at, *places)} | other
    return COMPILED.open_step(pages, [tier(2, 1, 2)], **how)


def attend(step, layer: int = 0, heads: int = 2) -> Tensor:
    """One layer of it."""
    return step.attend(layer, torch.randn(2, 4, 64), torch.randn(2, heads, 64), torch.randn(2, 2, 64), 0.125)


@needs_compiler
@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"slot": T}, "a slot beyond a page"),
        ({"slot": -1}, "a slot beyond a page"),
        ({"slot": 10**6}, "a slot beyond a page"),
        ({"page": 6}, "a page that the pool does not have"),
        ({"page": -1}, "a page that the pool does not have"),
        ({"at": 2}, "the target's tier is 2"),
        ({"at": -1}, "the target's tier is -1"),
        ({"target": None}, "give one target"),
        ({"num_q_heads": 3}, "a multiple of the 2 KV heads"),
        ({"seen": index(3)}, r"seen is int64 \[3\]"),
        ({"scores": StepScores(update="add")}, "group is None"),
    ],
    ids=str,
)
def test_a_fused_step_refuses_what_lies_outside(wrong: dict, said: str):
    """Where the new token goes is checked before a byte of the pool changes."""
    pages = pool()
    with pytest.raises(AssertionError, match=said):
        attend(open_step(pages, **wrong))
    assert not pages.any()


@needs_compiler
def test_a_fused_step_refuses_other_layers_and_heads():
    """The step knows its layers and the shapes of its tokens."""
    pages = pool()
    for layer in (1, 7, -1):
        with pytest.raises(AssertionError, match="the step has no such layer"):
            attend(open_step(pages), layer)
    with pytest.raises(AssertionError, match=r"k is float32 \[2, 1, 64\]"):
        attend(open_step(pages), heads=1)
    assert not pages.any()
    assert attend(open_step(pages)).shape == (2, 4, 64) and pages.any()


@needs_compiler
@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"rows": 9}, "a row that the residual buffers do not have"),
        ({"rows": -1}, "a row that the residual buffers do not have"),
        ({"num_tokens": 0}, "fewer than no tokens, or more"),
        ({"num_tokens": -5}, "fewer than no tokens, or more"),
        ({"num_tokens": 2**40}, "fewer than no tokens, or more"),
        ({"after": 2**40}, "fewer than no tokens, or more"),
        ({"before": -3}, "fewer than no tokens, or more"),
    ],
    ids=str,
)
def test_a_step_behind_buffers_refuses_rows_and_counts_outside(wrong: dict[str, int], said: str):
    """Neither the pool nor the buffers change."""
    pages, buffers = pool(), [torch.zeros(3, 1, 2, 8, 64).half() for _ in "kv"]
    number = {"rows": 1, "num_tokens": 4, "before": 0, "after": 0} | wrong
    count = {name: index(2, 1, 2, value=value) for name, value in number.items()}
    ring = StepRing(
        k=buffers[0],
        v=buffers[1],
        rows=index(2, value=number["rows"]),
        num_tokens=count["num_tokens"],
        before=(count["before"], count["before"]),
        after=(count["after"], count["after"]),
        flush_first=False,
    )
    step = COMPILED.open_step(pages, [tier(2, 1, 2, count=0)], num_q_heads=4, seen=index(2), target=None, ring=ring)
    with pytest.raises(AssertionError, match=said):
        attend(step)
    assert not pages.any() and not any(buffer.any() for buffer in buffers)


@needs_compiler
def test_a_search_refuses_what_it_cannot_see():
    """Fields that the format does not track, and a pool with gaps between its pages."""
    ids, held = index(2, 1), index(2, value=5)
    how = SlotSearch(by="score", seen=held)
    for fmt, pages, changed, said in (
        (BARE, pool(), {}, "the call needs score"),
        (BARE, pool(), {"by": "pos"}, "the call needs pos"),
        (FMT, torch.zeros(6, 2 * FMT.page_bytes, dtype=torch.uint8)[:, : FMT.page_bytes], {}, "one plain array"),
        (FMT, pool(), {"seen": held[:1]}, r"seen is int64 \[1\]"),
        (FMT, pool(), {"by": "size"}, "by is 'size'"),
    ):
        with pytest.raises(AssertionError, match=said):
            COMPILED.slot_extreme(pages, fmt, ids, held, replace(how, **changed))
    with pytest.raises(AssertionError, match=r"ids is int64 \[1, 1\]"):
        COMPILED.slot_extreme(pool(), FMT, ids[:1], held, how)


def test_a_pool_that_begins_anywhere_is_refused():
    """Numbers are read in place, so that pages must begin where numbers can."""
    room = torch.zeros(FMT.page_bytes + 16, dtype=torch.uint8)
    with pytest.raises(AssertionError, match="a multiple of 16 bytes"):
        checks.pool(room[3 : 3 + FMT.page_bytes][None], FMT)
