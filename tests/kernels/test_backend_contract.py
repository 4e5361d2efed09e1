"""What a backend must have, what it may have, and what it says where it has not."""

import inspect
from contextlib import suppress

import pytest
import torch

from kvbench.kernels.backend import Backend
from kvbench.kernels.cpu.backend import Cpu
from kvbench.kernels.cpu.build import BuildError
from kvbench.kernels.format import PageFormat, SlotFormat
from kvbench.kernels.operands import TierPages
from kvbench.kernels.reference.backend import Reference

try:
    from kvbench.kernels.gpu.backend import Gpu
except ImportError:  # triton is an extra
    Gpu = None

CLASSES = [kind for kind in (Reference, Cpu, Gpu) if kind is not None]
OPTIONAL = {
    "open_step": "fuses_layers",
    "slot_extreme": "searches_slots",
    "tables": "keeps_tables",
    "open_tables": "keeps_tables",
    "demote": "keeps_tables",
}


def operations():
    """Every public method of the contract."""
    return sorted(name for name, value in vars(Backend).items() if inspect.isfunction(value) and name[0] != "_")


def call(backend, name):
    """Calls an operation with nothing: one that the backend lacks raises before it looks at its arguments."""
    parameters = inspect.signature(getattr(backend, name)).parameters.values()
    named = {p.name: None for p in parameters if p.kind is p.KEYWORD_ONLY}
    return getattr(backend, name)(*(None for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD), **named)


def test_a_backend_that_lacks_an_operation_cannot_be_made():
    """Every operation but the optional ones must be there, or the class cannot be instantiated; the error names
    what is missing."""
    required = set(operations()) - set(OPTIONAL)
    assert len(required) == 17 and Backend.__abstractmethods__ == required
    whole = {name: getattr(Reference, name) for name in required}
    assert type("Whole", (Backend,), whole)().is_reference is False
    for missing in required:
        kind = type("Partial", (Backend,), {name: value for name, value in whole.items() if name != missing})
        with pytest.raises(TypeError, match=missing):
            kind()


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
IN_TORCH |= {"prefill_attention_with_lse"}


def test_what_the_reference_does_for_another_backend_is_noted():
    """A backend without a single operation of its own names every one that ran, even if it fails; the reference,
    which stands in for nobody, names none."""

    class Empty(Reference):
        name, is_reference = "empty", False

    for name in sorted(set(operations()) - set(OPTIONAL)):
        for kind in (Empty, Reference):
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
        def column_scores(self, q, k, scale, **how):
            asked.append(how)
            return Reference.column_scores(self, q, k, scale, **how)

    asked: list[dict] = []
    try:
        backend = Counting()
    except BuildError as error:
        pytest.skip(str(error))
    make = torch.Generator().manual_seed(0)
    q, k = torch.randn(4, 9, 8, generator=make), torch.randn(2, 9, 8, generator=make)
    plain = {"pool": "none", "pool_kernel": 1, "pool_stage": "after_group", "pool_region": "all", "group": "sum"}
    scores = backend.prompt_scores(q, k, 0.5, queries=-1, skip_near=0, power=1, **plain)
    torch.testing.assert_close(scores.sum(), torch.tensor(36.0))  # 4 heads of 9 queries give 1 each
    counts = backend.prompt_low_counts(q, k, 0.5, queries=3, skip_near=1, group="max")
    assert counts.shape == (2, 9) and float(counts.max()) <= 0
    assert [how.get("below_uniform", False) for how in asked] == [False, True]


@pytest.mark.parametrize("kind", CLASSES)
def test_pages_with_codes_that_a_backend_lacks_are_the_references_work(kind):
    """The same bytes and numbers, and every operation that the reference did is on record; nothing is fused."""
    try:
        backend = kind()
    except BuildError as error:
        pytest.skip(str(error))
    backend.codes = frozenset()
    fmt = PageFormat(SlotFormat(64, 4, 4, k_code="lloyd"), 1680)
    x, at = torch.randn(9, 64), (torch.zeros(9, dtype=torch.int64), torch.arange(9))
    pages, want = (torch.zeros(2, 1680, dtype=torch.uint8) for _ in range(2))
    held = torch.tensor([[9]])
    tier = TierPages(fmt, torch.zeros(1, 1, 1, dtype=torch.int64), held, held)
    found = []
    for one, space in ((backend, pages), (Reference(), want)):
        one.write_keys(space, fmt, *at, x)
        one.write_values(space, fmt, *at, x)
        one.move_slots(space, fmt, at[0][:1], at[1][:1], at[0][:1] + 1, at[1][:1])
        out, _, _ = one.paged_decode(x[None, :2], space, [tier], None, 0.1)
        found.append([space, out, *one.read_slots(space, fmt, *at)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    expected = {"write_keys", "write_values", "read_slots", "paged_decode"}
    assert backend.is_reference or expected <= backend.fallbacks <= expected | {"move_slots"}
    if backend.fuses_layers:
        lists = TierPages(fmt, tier.ids[:, None], held[:, None], held[:, None])
        assert backend.open_step(pages, [lists], num_q_heads=1, seen=held[0], target=None) is None
