"""A GPU's memory, by fakes of what is free and taken: how many rows, what the pool leaves to prompts, and what happens
where that is too little."""

import warnings
from types import SimpleNamespace

import pytest
import torch
from engine_helpers import answers, comparable, engine, random_tokens, request

from kvbench.engine.engine import AUTO, AUTO_ROWS, GPU_ROWS, GROUP, grouped
from kvbench.engine.runner import Runner
from kvbench.kernels import memory
from kvbench.methods.full import Full
from kvbench.methods.snapkv import SnapKV

REQUESTS = [request(str(i), random_tokens(20 + 30 * (i == 2), seed=i), max_new_tokens=6) for i in range(4)]
FREE = 4 << 20


@pytest.fixture
def card(monkeypatch):
    """Main memory that looks like a GPU's, of which `free` bytes are free without a pool of pages, and prompts that
    take `peak` bytes; notes how often that was measured."""
    found = SimpleNamespace(free=FREE, peak=FREE // 4, measured=0, fails=0, runner=None)
    reserve = Runner.reserve

    def noted(self, **sizes):
        found.runner = self
        reserve(self, **sizes)

    def free_bytes(device):
        store = found.runner._store if found.runner else None
        return found.free and found.free - (store.pages.pool.allocated_bytes if store else 0)

    monkeypatch.setattr(Runner, "reserve", noted)
    monkeypatch.setattr(memory, "free_bytes", free_bytes)

    def peak_bytes(device, work):
        found.measured += 1
        if found.measured <= found.fails:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        work()
        return found.peak

    monkeypatch.setattr(memory, "peak_bytes", peak_bytes)
    return found


def test_rows_of_a_gpu_come_and_go():
    """`auto` has no groups there; a number of rows, and `auto` on a CPU whose products depend on the rows, has."""
    card, cpu = (SimpleNamespace(rows_are_alone=False, device=torch.device(name)) for name in ("cuda", "cpu"))
    assert grouped(card, "auto", AUTO) == (AUTO, None)
    assert grouped(card, "auto", 7) == (7, 7)
    assert grouped(cpu, "auto", AUTO) == (GROUP, GROUP) and grouped(cpu, "auto", 7) == (7, 7)


@pytest.mark.parametrize("policy", [Full(), SnapKV(budget=0.5, window=4)])
def test_the_pool_leaves_what_the_longest_prompt_took(card, loaded, policy):
    """It is read once before the pool is made; answers are those with any amount of memory."""
    read = []
    real = Runner.read

    def watched(self, prompt, *given, **how):
        read.append(len(prompt))
        return real(self, prompt, *given, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Runner, "read", watched)
        with engine(loaded, policy, batch_size=4, backend="torch") as running:
            got = {}
            running.run(REQUESTS, on_outcome=lambda outcome: got.update({(outcome.sample_id, 0): outcome}))
            assert running.runner.spare_bytes == int(1.1 * card.peak)
            assert running.store.pages.pool.allocated_bytes <= FREE - running.runner.spare_bytes
    assert read == [50, 20, 20, 50, 20] and card.measured == 1
    card.free = None
    want = answers(loaded, policy, REQUESTS, batch_size=4, backend="torch")
    assert {key: comparable(each) for key, each in got.items()} == {key: comparable(each) for key, each in want.items()}


def test_the_share_of_a_setting_still_holds(card, loaded):
    """A prompt that takes little leaves the pool no more than `store.memory_share`, and a budget is what it says."""
    card.free, card.peak = 1 << 20, 1
    with engine(loaded, Full(), batch_size=4, backend="torch", memory_share=0.1) as running:
        running.run(REQUESTS, on_outcome=lambda outcome: None)
        assert running.store.pages.pool.allocated_bytes <= 0.1 * card.free
    card.measured = 0
    with engine(loaded, Full(), batch_size=4, backend="torch", budget_bytes=1 << 20) as running:
        running.run(REQUESTS, on_outcome=lambda outcome: None)
        assert not card.measured and running.runner.spare_bytes == 0


def test_prompts_that_do_not_fit_are_told_before_the_first_answer(card, loaded):
    """How many are longer than what could be read; all are tried."""
    card.fails = 1
    told = []
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with engine(loaded, Full(), batch_size=4, backend="torch") as running:
            running.run(REQUESTS, on_outcome=lambda outcome: told.append((len(seen), outcome.status)))
    (warning,) = [each for each in seen if "prompts" in str(each.message)]
    assert "1 of 4 prompts, up to 50 tokens" in str(warning.message) and "20 tokens could be read" in str(
        warning.message
    )
    assert told == [(len(seen), "ok")] * 4


def crowded(monkeypatch, most_pool_bytes, tokens=50):
    """Lets prompts of so many tokens find no memory beside a pool that is larger."""
    real = Runner.read

    def read(self, prompt, *given, **how):
        pool = self.store.pages.pool
        if len(prompt) == tokens and pool.allocated_bytes > most_pool_bytes:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return real(self, prompt, *given, **how)

    monkeypatch.setattr(Runner, "read", read)


def test_a_prompt_without_memory_shrinks_the_pool(card, loaded, monkeypatch):
    """It waits until it is alone, and is answered with a smaller pool, by the tokens that it has with any; a warning
    says so."""
    want = answers(loaded, Full(), REQUESTS, batch_size=4, backend="torch")
    with engine(loaded, Full(), batch_size=4, backend="torch") as running:
        running.run(REQUESTS[2:3], on_outcome=lambda outcome: None)
        one_row = running.store.pages.pool.allocated_bytes
    crowded(monkeypatch, most_pool_bytes=2 * one_row)
    got = {}
    with engine(loaded, Full(), batch_size=4, backend="torch") as running, pytest.warns(UserWarning, match="made anew"):
        running.run(REQUESTS, on_outcome=lambda outcome: got.update({(outcome.sample_id, 0): outcome}))
        assert running.room.shrinks >= 1 and running.store.pages.pool.num_used == 0
    assert {key: each.token_ids for key, each in got.items()} == {key: each.token_ids for key, each in want.items()}
    assert {each.status for each in got.values()} == {"ok"}


def test_what_no_smaller_pool_helps_is_lost_alone(card, loaded, monkeypatch):
    """After some tries; in main memory, and with a budget, there are none. The other requests are answered."""
    crowded(monkeypatch, most_pool_bytes=0)
    for limit in ({}, {"budget_bytes": 1 << 20}):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            got = answers(loaded, Full(), REQUESTS, batch_size=4, backend="torch", **limit)
        assert [got[str(i), 0].status for i in range(4)] == ["ok", "ok", "oom", "ok"]
        assert "out of memory" in got["2", 0].message


def test_auto_is_what_memory_holds(card, loaded):
    """Up to so many rows on a GPU, each as long as it may become; fewer where a request has several rows."""
    card.free = 1 << 40
    with engine(loaded, Full(), batch_size=AUTO, backend="torch") as running:
        assert running.most_requests == GPU_ROWS
        sizes = {"prompt_tokens": 50, "new_tokens": 6}
        assert running._that_fit(1, sizes) == GPU_ROWS and running._that_fit(4, sizes) == GPU_ROWS // 4
        part = running.store.holding.parts[0].pages
        row_bytes = part.lists_per_row * part.table.max_pages * part.pool.page_bytes
        card.free = 10 * row_bytes
        assert running._that_fit(1, sizes) == 9  # of memory_share=0.9
        running.runner.spare_bytes = 5 * row_bytes
        assert running._that_fit(1, sizes) == 5
        card.free = None
        assert running.most_requests == AUTO_ROWS
