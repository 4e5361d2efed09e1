"""What a backend must have, what it may have, and what it says where it has not."""

import inspect
from contextlib import suppress

import pytest
import torch

from kvbench.kernels.backend import REFERENCE, Backend
from kvbench.kernels.cpu.backend import Cpu
from kvbench.kernels.cpu.build import BuildError
from kvbench.kernels.format import PageFormat, SlotFormat
from kvbench.kernels.operands import PLAIN, ColumnSums, HeadScores, TierPages

try:
    from kvbench.kernels.gpu.backend import Gpu
except ImportError:  # triton is an extra
    Gpu = None

CLASSES = [kind for kind in (Backend, Cpu, Gpu) if kind is not None]
OPTIONAL = {
    "open_step": "fuses_layers",
    "slot_extreme": "searches_slots",
    "tables": "keeps_tables",
    "open_tables": "keeps_tables",
    "demote": "keeps_tables",
}


def operations():
    """Every public method of the contract."""
    return sorted(name for name, value in inspect.getmembers(Backend, inspect.isfunction) if name[0] != "_")


def call(backend, name):
    """Calls an operation with nothing: one that the backend lacks raises before it looks at its arguments."""
    parameters = inspect.signature(getattr(backend, name)).parameters.values()
    named = {p.name: None for p in parameters if p.kind is p.KEYWORD_ONLY}
    return getattr(backend, name)(*(None for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD), **named)


@pytest.mark.parametrize("kind", CLASSES)
def test_backends_take_what_the_contract_says(kind):
    """Every operation has the contract's parameters in the contract's order; what a backend adds is optional."""
    for name in operations():
        wanted = inspect.signature(getattr(Backend, name)).parameters
        found = inspect.signature(getattr(kind, name)).parameters
        assert list(found)[: len(wanted)] == list(wanted), name
        for parameter, value in wanted.items():
            assert (found[parameter].kind, found[parameter].default) == (value.kind, value.default), (name, parameter)
        assert all(found[extra].default is not inspect.Parameter.empty for extra in set(found) - set(wanted)), name


@pytest.mark.parametrize("kind", CLASSES)
def test_optional_operations_are_announced(kind):
    """A backend's flags say which of the optional operations it overrides; the others raise with its name."""
    for name, flag in OPTIONAL.items():
        own = getattr(kind, name) is not getattr(Backend, name)
        assert getattr(kind, flag) is own
        if not own:
            with pytest.raises(NotImplementedError, match=f"backend={kind.name} "):
                call(kind(), name)


# What plain torch does for every backend as fast as anything would: no kernel is missing there.
IN_TORCH = {"region", "write_tracked", "read_tracked", "prefill_attention", "prompt_scores", "prompt_low_counts"}
IN_TORCH |= {"prefill_attention_with_lse", "window_attention", "multiplier"}


def test_what_the_reference_does_for_another_backend_is_noted():
    """A backend without a single operation of its own names every one that ran, even if it fails; the reference,
    which stands in for nobody, names none."""

    class Empty(Backend):
        name, is_reference = "empty", False

    assert len(operations()) == 20 + len(OPTIONAL)
    for name in sorted(set(operations()) - set(OPTIONAL)):
        for kind in (Empty, Backend):
            backend = kind()
            with suppress(Exception):  # it is called with nothing
                call(backend, name)
            wanted = {name} if kind is Empty and name not in IN_TORCH else set()
            assert backend.fallbacks - {"column_scores"} == wanted - {"column_scores"}, name
            assert name != "column_scores" or backend.fallbacks == wanted


def test_only_the_reference_calls_itself_one():
    """Names are what `get_backend` takes; the reference is the only one whose speed says nothing."""
    found = {kind.name: kind.is_reference for kind in CLASSES}
    assert found.items() <= {"torch": True, "cpu": False, "triton": False}.items()


@pytest.mark.parametrize("kind", CLASSES)
def test_column_sums_are_what_a_backend_replaces(kind):
    """Prompt scores and low counts are made of the backend's own column sums, whichever backend it is."""

    class Counting(kind):
        def column_scores(self, q, k, scale, columns, lse=None, softmax=PLAIN):
            asked.append(columns)
            return Backend.column_scores(self, q, k, scale, columns, lse, softmax)

    asked: list[ColumnSums] = []
    try:
        backend = Counting()
    except BuildError as error:
        pytest.skip(str(error))
    make = torch.Generator().manual_seed(0)
    q, k = torch.randn(4, 9, 8, generator=make), torch.randn(2, 9, 8, generator=make)
    scores = backend.prompt_scores(q, k, 0.5, ColumnSums(queries=-1), HeadScores(group="sum"))
    torch.testing.assert_close(scores.sum(), torch.tensor(36.0))  # 4 heads of 9 queries give 1 each
    counts = backend.prompt_low_counts(q, k, 0.5, queries=3, skip_near=1, group="max")
    assert counts.shape == (2, 9) and float(counts.max()) <= 0
    assert [columns.below_uniform for columns in asked] == [False, True]


# Pages that a backend has no kernels for: codes of a calibrated table, and heads that are wider than its buffers.
UNCOVERED = {
    "triton": PageFormat(SlotFormat(64, 4, 4, k_code="book", v_code="book", track=("score",)), 1680),
    "cpu": PageFormat(SlotFormat(1024, 8, 4, track=("score",)), 26240),
}


@pytest.mark.parametrize("kind", CLASSES[1:])
def test_pages_that_a_backend_has_no_kernels_for_are_plain_torch_s_work(kind):
    """Every operation on them gives the bytes and numbers of plain torch, whatever did it; each that plain torch did is
    on record, and no other. Nothing is fused."""

    def run(backend, space):
        at = torch.zeros(9, dtype=torch.int64), torch.arange(9)
        backend.write_keys(space, fmt, *at, x)
        backend.write_values(space, fmt, *at, x)
        backend.write_tracked(space, fmt, *at, 0.5, None)
        backend.move_slots(space, fmt, at[0][:1], at[1][:1], at[0][:1] + 1, at[1][:1])
        out, lse, (scores,) = backend.paged_decode(x[None, :2], space, [tier], None, 0.1, group="sum")
        backend.add_scores(space, tier, scores)
        dense = backend.gather_dense(space, [tier], None)
        history = tuple(part[0] for part in dense)
        chunk = backend.chunk_attention(x[None, :2], x[None, :2], x[None, :2], history, 0.1)
        columns = backend.column_scores(x[None], x[None], 0.1, ColumnSums(queries=-1))
        means = backend.column_scores(x[None], x[None], 0.1, ColumnSums(queries=-1, reduce="mean"))
        found = [out, lse, scores, chunk, columns, means, *dense[:2], *backend.read_slots(space, fmt, *at)]
        return space, [one.float() for one in found]

    try:
        backend = kind()
    except BuildError as error:
        pytest.skip(str(error))
    fmt = UNCOVERED[kind.name]
    make, held = torch.Generator().manual_seed(0), torch.tensor([[9]])
    x = torch.randn(9, fmt.slot.head_dim, generator=make)
    tier = TierPages(fmt, torch.zeros(1, 1, 1, dtype=torch.int64), held, held)
    (got, numbers), (want, known) = (
        run(b, torch.zeros(2, fmt.page_bytes, dtype=torch.uint8)) for b in (backend, REFERENCE)
    )
    for a, b in zip(numbers, known, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    score, known_score = (REFERENCE.region(space, fmt, "score") for space in (got, want))
    torch.testing.assert_close(score, known_score, rtol=0, atol=1e-5)
    score.zero_(), known_score.zero_()
    assert torch.equal(got, want)
    extra = {"cpu": {"move_slots", "gather_dense", "chunk_attention"}, "triton": {"gather_dense"}}[kind.name]
    assert backend.fallbacks == {"write_keys", "write_values", "read_slots", "paged_decode", "column_scores"} | extra
    if backend.fuses_layers:
        lists = TierPages(fmt, tier.ids[:, None], held[:, None], held[:, None])
        target = 0, torch.zeros(1, 1, 1, dtype=torch.int64), torch.full((1, 1, 1), 9)
        assert backend.open_step(got, [lists], num_q_heads=1, seen=held[0], target=target) is None
