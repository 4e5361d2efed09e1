"""Memory that runs out anywhere: the other samples answer as ever, and every page and row comes back."""

import gc
import resource
import subprocess
import sys
import weakref

import pytest
import torch
from engine_helpers import answers, comparable, engine, random_tokens, request
from refusals import refused
from selection import FULL, few
from torch.utils._python_dispatch import TorchDispatchMode

from kvbench.cache.prompts import ScoredLayer
from kvbench.engine.prompt_cache import Recording
from kvbench.errors import ExitRequested, raised_by, what_happened
from kvbench.kernels.memory import is_out_of_memory
from kvbench.kernels.pool import PagePool, PoolExhausted
from kvbench.kernels.table import PageTable
from kvbench.methods.diffkv import DiffKV
from kvbench.methods.full import Full
from kvbench.methods.h2o import H2O
from kvbench.methods.kivi import Kivi
from kvbench.methods.snapkv import SnapKV

METHODS = {
    "full": Full(tier="native"),
    "snapkv": SnapKV(budget=0.5, window=4, tier="native", decode_every=2),
    "kivi": Kivi(group=8, residual_tokens=8, native=True),
    "diffkv": DiffKV(alpha_h=2.0, alpha_l=0.5, window=4, high="native", low="native"),
    "h2o": H2O(budget=12, tier="native"),
}
WORDS = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "4000 bytes. Error code 12 (Cannot allocate memory)"
)
POINTS = 16 if FULL else 8  # per method, spread over all of a run's operations


class Scarce(TorchDispatchMode):
    """Counts torch's operations, each of which may allocate, and makes one of them fail as its CPU allocator does."""

    def __init__(self, failing: int = -1) -> None:
        super().__init__()
        self.failing, self.count = failing, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        if self.count == self.failing:
            raise RuntimeError(WORDS)
        return func(*args, **(kwargs or {}))


def asked() -> list:
    """Two prompts: forks for a second answer and for gold tokens, and steps in which everything moves."""
    fields = {"max_new_tokens": 5, "gold": random_tokens(3)}
    return [request("0", random_tokens(30), num_samples=2, **fields), request("1", random_tokens(17, seed=1), **fields)]


def run(loaded, policy, failing: int = -1) -> tuple[dict, int]:
    """Outcomes by sample and repeat, after a check that nothing leaked, and how many operations there were."""
    requests, got = asked(), {}

    def keep(outcome):
        assert (outcome.sample_id, outcome.repeat) not in got
        got[outcome.sample_id, outcome.repeat] = outcome

    with engine(loaded, policy, batch_size=2, backend="torch") as running:
        with Scarce(failing) as scarce:
            running.run(requests, on_outcome=keep)
        pages, store = running.store.pages, running.store
    assert pages.pool.num_used == 0 and len(pages.table.used_page_ids()) == 0
    assert sorted(pages.pool.free_ids().tolist()) == list(range(pages.pool.num_pages))
    assert sorted(store._free_rows) == list(range(pages.table.shape[0])) and not store.prompts._pending
    assert set(got) == {(r.sample_id, i) for r in requests for i in range(r.num_samples)}
    return got, scarce.count


@pytest.mark.parametrize("name", few(METHODS, "h2o"))
def test_an_allocation_that_fails_anywhere_loses_nothing(loaded, name):
    """One failing allocation costs at most the sample that ran alone then: all other tokens and bytes are as ever."""
    policy = METHODS[name]
    want, total = run(loaded, policy)
    assert total > 1000 and {outcome.status for outcome in want.values()} == {"ok"}
    wanted = {key: (outcome.token_ids, outcome.ledger["resident_bytes"]) for key, outcome in want.items()}
    unharmed = 0
    for failing in range(1, total, total // POINTS):
        got, _ = run(loaded, policy, failing)
        lost = {key[0] for key, outcome in got.items() if outcome.status == "oom"}
        assert len(lost) <= 1, failing
        unharmed += not lost
        for key, outcome in got.items():
            if key[0] not in lost:
                assert (outcome.token_ids, outcome.ledger["resident_bytes"]) == wanted[key], failing
    assert unharmed > POINTS // 2
    again, _ = run(loaded, policy)
    assert {key: comparable(outcome) for key, outcome in again.items()} == {k: comparable(v) for k, v in want.items()}


@pytest.mark.parametrize("policy", METHODS.values(), ids=METHODS)
def test_a_sample_that_never_fits_is_named_and_the_run_goes_on(loaded, policy, monkeypatch):
    """Torch's own words for a full CPU make an `oom` of one line, and the sample beside it is answered."""
    requests = asked()
    want = answers(loaded, policy, requests[1:], sizing=requests)
    place = torch.nn.functional.embedding
    length = requests[0].num_prompt_tokens

    def scarce(ids, *rest, **more):
        if ids.shape[-1] >= length:
            raise RuntimeError(WORDS + "\nException raised from alloc_cpu\nframe #0 ...")
        return place(ids, *rest, **more)

    monkeypatch.setattr(torch.nn.functional, "embedding", scarce)
    got = answers(loaded, policy, requests)
    assert [got["0", repeat].status for repeat in range(2)] == ["oom"] * 2
    assert got["0", 0].message == WORDS
    assert comparable(got["1", 0])["token_ids"] == want["1", 0].token_ids
    assert got["1", 0].ledger == want["1", 0].ledger


@pytest.mark.parametrize("error", [RuntimeError("a fault"), ValueError("a plan"), KeyboardInterrupt()])
def test_whatever_is_raised_no_row_stays_open(loaded, error, monkeypatch):
    """An error that is not about memory goes through, and the rows of its batch are closed."""
    with engine(loaded, Full()) as running:
        step = running.runner.try_step

        def third(rows, tokens):
            if running.store.counters.tokens_seen.max() > 31:
                raise error
            return step(rows, tokens)

        monkeypatch.setattr(running.runner, "try_step", third)
        with pytest.raises(type(error)):
            running.run(asked(), on_outcome=lambda outcome: None)
        assert running.runner.open_rows == [] and running.store.pages.pool.num_used == 0


@pytest.mark.parametrize("error", [SystemExit(0), GeneratorExit("x"), KeyError("x"), ValueError("own words")], ids=repr)
def test_what_a_method_raises_has_its_name(loaded, error):
    """Also a request to leave comes out as an error, and either names class, call and place; no row stays open."""

    class Rude(Full):
        """Raises when it is asked."""

        def plan_prefill(self, view):
            return self.fail()

        def fail(self):
            """Raise one level below the call."""
            raise error

    with engine(loaded, Rude()) as running:
        kind = type(error) if isinstance(error, Exception) else ExitRequested
        with pytest.raises(kind) as found:
            running.run(asked(), on_outcome=lambda outcome: None)
        assert running.runner.open_rows == []
    line = Rude.fail.__code__.co_firstlineno + 2
    what = f"{type(error).__name__}: {error}"
    assert what_happened(found.value) == f"Rude.plan_prefill raised {what} (test_engine_faults.py:{line})"


def test_a_slip_in_a_file_has_the_files_name():
    """A module that Python cannot read has run no line; it was called a fault of kvbench."""
    with pytest.raises(SyntaxError) as found:
        compile("x = (", "/somewhere/own_toy.py", "exec")
    assert raised_by(found.value) == ("own_toy", "own_toy.py:1")


def test_the_harness_raises_in_nobodys_name(loaded):
    """An error in a library that the harness calls is not laid at a method's door."""
    with engine(loaded, Full()) as running, pytest.raises(IndexError) as found:
        running.run([request("0", (10**6, 1))], on_outcome=lambda outcome: None)  # no token of the vocabulary
    assert raised_by(found.value) is None and what_happened(found.value).startswith("IndexError: ")


def test_a_caller_without_memory_is_not_taken_for_a_full_cache(loaded):
    """A sample that could not be written down must not pass for one that is done."""

    def full(outcome):
        raise MemoryError("the journal")

    with engine(loaded, Full()) as running, pytest.raises(MemoryError, match="the journal"):
        running.run(asked(), on_outcome=full)


def test_the_pass_that_failed_is_forgotten_before_the_halves_run(loaded, monkeypatch):
    """What the failed pass had allocated is free when its requests run again; an error keeps it as long as it lives."""
    gc.disable()  # only what reference counts give back counts
    try:
        with engine(loaded, Full()) as running:
            step, seen = running.runner.try_step, []

            def once(rows, tokens):
                large = torch.zeros(1000)
                if not seen:
                    seen.append(weakref.ref(large))
                    raise MemoryError("once")
                assert seen[0]() is None
                return step(rows, tokens)

            monkeypatch.setattr(running.runner, "try_step", once)
            running.run(asked(), on_outcome=lambda outcome: None)
            assert len(seen) == 1
    finally:
        gc.enable()


def test_a_cache_that_does_not_fit_is_made_for_fewer(loaded, monkeypatch):
    """Without memory for the tables of the batch its half is tried; when one alone does not fit, all are named."""
    for limit, status in ((5, "ok"), (1, "oom")):
        rows = []
        with engine(loaded, Full(), batch_size=4) as running:
            reserve = running.runner.reserve

            def scarce(*, rows: int, limit=limit, tried=rows, reserve=reserve, **sizes):
                tried.append(rows)
                if rows > limit:
                    raise RuntimeError(WORDS)
                reserve(rows=rows, **sizes)

            monkeypatch.setattr(running.runner, "reserve", scarce)
            got = []
            running.run(asked(), on_outcome=got.append)
        assert rows == [6, 3]  # two requests of three rows each
        assert {outcome.status for outcome in got} == {status} and len(got) == 3


# The pieces -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (PoolExhausted("3 pages"), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError(WORDS), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("std::bad_alloc"), True),
        (OSError(12, "Cannot allocate memory"), True),
        (OSError(28, "No space left on device"), False),
        (RuntimeError("shape mismatch"), False),
        (ValueError("out of memory"), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_errors_about_memory_are_known_by_type_or_words(error: BaseException, expected: bool):
    """torch has a class of its own on a GPU only; here, what its allocator really raises is known, too."""
    assert is_out_of_memory(error) is expected
    with pytest.raises(RuntimeError) as found:
        torch.empty(10**15)
    assert is_out_of_memory(found.value)


def pool_state(table: PageTable) -> tuple:
    """What two failures may not change."""
    pool = table.pool
    return sorted(pool.free_ids().tolist()), pool.num_used, table.num_slots.tolist(), table.used_page_ids().tolist()


@pytest.mark.parametrize("action", ["reserve", "grow", "truncate"])
def test_a_table_that_fails_half_way_keeps_its_pages_and_its_counts(action: str):
    """Whichever operation fails, pages are either free or named by a table, and the call goes through afterwards."""
    lists = torch.arange(4)

    def fresh() -> PageTable:
        table = PageTable(PagePool(16, 12, "cpu"), (2,), 1, 2, 2, max_pages=200)
        table.reserve(lists, 0, torch.tensor([3, 0, 4, 1]))
        return table

    def act(table: PageTable) -> None:
        if action == "truncate":
            table.truncate(lists, 0, torch.tensor([1, 0, 1, 0]))
        else:
            table.reserve(lists, 0, torch.tensor([2, 1, 0, 5]) * (1 if action == "reserve" else 20))

    with Scarce() as scarce:
        act(done := fresh())
    want, failures = pool_state(done)[1:3], 0
    for failing in range(1, scarce.count + 1):
        table = fresh()
        before = pool_state(table)
        try:
            with Scarce(failing):
                act(table)
        except RuntimeError:
            failures += 1
            after = pool_state(table)
            assert after[1:] == before[1:]
            assert sorted(after[0] + after[3]) == list(range(table.pool.num_pages))
            act(table)
        assert pool_state(table)[1:3] == want
    assert failures > 5


def test_a_prompt_cache_without_memory_lets_the_prompt_through(monkeypatch):
    """What cannot be remembered is not remembered, and what was is given back."""
    recording = Recording(10**6)
    recording.add(ScoredLayer(torch.ones(1, 2, 3), torch.ones(1, 2, 3)), torch.ones(3, 2, 3), 1.0)
    assert len(recording.layers) == 1

    def scarce(self, *rest, **more):
        raise RuntimeError(WORDS)

    monkeypatch.setattr(torch.Tensor, "clone", scarce)
    recording.add(ScoredLayer(torch.ones(1, 2, 3), torch.ones(1, 2, 3)), torch.ones(3, 2, 3), 1.0)
    assert recording.overflow and recording.layers == []


@pytest.mark.exhaustive
def test_a_process_without_address_space_names_the_sample():
    """The operating system really refuses: the long prompt is `oom` and the short one answered."""
    script = """
import resource, sys
import torch
from kvbench.cache.options import StoreOptions
from kvbench.engine.engine import Engine
from kvbench.engine.requests import Request
from kvbench.methods.full import Full
from kvbench.models.load import load_model
torch.set_num_threads(1)
model = load_model({"kind": "random", "preset": "tiny", "num_layers": 1, "seed": 0, "dtype": "float32",
                    "device": "cpu", "overrides": {"max_position_embeddings": 200000}})
def ask(name, length):
    return Request(sample_id=name, subset="test", segments=(tuple([5] * length),), max_new_tokens=2)
engine = Engine(model, Full(), store=StoreOptions(), batch_size=2, seed=0, backend="torch")
asked = [ask("short", 40), ask("long", 150000)]
engine.run(asked[:1], sizing=asked, on_outcome=lambda o: None)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (192 << 20), -1))
engine.run(asked, on_outcome=lambda o: print(o.sample_id, o.status))
assert engine.store.pages.pool.num_used == 0
"""
    if sys.platform != "linux" or not hasattr(resource, "RLIMIT_AS"):
        pytest.skip("needs Linux's limit on address space")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split("\n")[:-1] == ["short ok", "long oom"]


def test_a_mode_that_a_grader_changes_reaches_no_other_answer(tiny_model):
    """A metric or a statistic of the user's own that switches a mode of torch is named before the next answer is kept,
    and the mode is put back."""
    kept = []

    def grade(outcome) -> None:
        kept.append(outcome.sample_id)
        torch.set_default_dtype(torch.float64)

    loaded = tiny_model("llama", "gqa3", 64, "float32")
    with (
        engine(loaded, METHODS["snapkv"], batch_size=1) as running,
        refused("mode-changed", None, "torch.get_default_dtype", "torch.float32", "torch.float64"),
    ):
        running.run(asked(), on_outcome=grade)
    assert torch.get_default_dtype() == torch.float32 and len(kept) == 1
