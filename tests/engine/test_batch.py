"""Rows that come and go: whoever joins when and gives way to whom, answers and bytes are those of single runs."""

import random
from collections import Counter
from functools import cache
from typing import ClassVar

import pytest
import torch
from engine_helpers import answers, comparable, engine, random_tokens, request
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from selection import method_of, per_path

from kvbench.config.files import options
from kvbench.engine.request_queue import Clock, RequestQueue
from kvbench.methods.full import Full
from kvbench.methods.snapkv import SnapKV
from kvbench.models.load import load_model
from kvbench.runs.answers import finish

PAGE_BYTES, SMALL = 4096, 2048
METHODS = sorted(options("method"))


@pytest.fixture(scope="module")
def by_row():
    """A model of two layers whose products give a row the same bits whatever is beside it."""
    given = {"kind": "random", "preset": "tiny", "num_layers": 2, "seed": 0, "linear": "streamed"}
    model = load_model(given | {"dtype": "float32", "device": "cpu"})
    assert model.rows_are_alone, model.remark
    yield model
    model.model.set_attn_implementation("sdpa")


def mixed(count: int, seed: int = 0, longest: int = 24, extra_tokens: int = 0) -> list:
    """Requests of unequal lengths, the usual and the odd: two answers that are drawn, texts that are forced, choices,
    and questions about one context; prompts have at least so many tokens as lie beside pages."""
    dice, asked, context = random.Random(seed), [], random_tokens(30, seed=99)
    for index in range(count):
        fields = {"max_new_tokens": dice.randint(longest // 3, longest)}
        prompt = [random_tokens(extra_tokens + dice.randint(8, 60), seed=index)]
        kind = index % 6
        if kind == 1:
            fields |= {"num_samples": 2, "temperature": 1.0}
        elif kind == 2:
            fields |= {"gold": random_tokens(dice.randint(1, 9), seed=index)}
        elif kind == 3:
            fields |= {"choices": (random_tokens(3), random_tokens(5))}
        elif kind > 3:
            prompt.insert(0, context)
        asked.append(request(str(index), *prompt, **fields))
    return asked


def alone(loaded, policy, requests, **given) -> tuple[dict, int]:
    """What single runs say, and the most bytes of pages that one of them held after a step; within a step, rows that
    share pages may need half as much again for their copies."""
    most = [0]

    def watch(running, step):
        most[0] = max(most[0], running.store.used_bytes)

    found = answers(loaded, policy, requests, batch_size=1, on_step=watch, **(given or layout(policy)))
    return {key: comparable(one) for key, one in found.items()}, most[0]


def together(loaded, policy, requests, budget_bytes: float, **given) -> tuple[dict, int]:
    """What they say in a batch whose pool has so many bytes, and how often one gave way."""
    outcomes = {}

    def keep(outcome):
        outcomes[outcome.sample_id, outcome.repeat] = comparable(outcome)

    with engine(loaded, policy, budget_bytes=int(budget_bytes), **layout(policy), **given) as running:
        batch = running.open_batch(RequestQueue(requests), on_outcome=keep)
        finish(batch.answer())
        check_empty(running)
    return outcomes, batch.preemptions


def check_empty(running) -> None:
    """Every page came back, and no row is open."""
    pool = running.store.pages.pool
    assert pool.num_used == 0 and sorted(pool.free_ids().tolist()) == list(range(pool.num_pages))
    assert running.runner.open_rows == [] and sorted(running.store._free_rows) == list(
        range(running.store.pages.table.shape[0])
    )


def layout(policy) -> dict:
    """Small pages, where the method does not say how large they are."""
    if policy.reading is not None:
        return {}
    return {"page_bytes": PAGE_BYTES if policy.residual is None else 2 * PAGE_BYTES}


@pytest.mark.every(6)
@pytest.mark.parametrize("name", per_path(METHODS, part=0))
def test_a_pool_that_is_too_small_costs_nothing_but_time(by_row, name):
    """Tokens, bytes, what was kept and what was forced are those of single runs, bit by bit, with room for two or three
    of the largest requests."""
    policy = method_of(name)
    requests = mixed(5, longest=9, extra_tokens=policy.residual.num_tokens if policy.residual else 0)
    want, most = alone(by_row, policy, requests)
    got, _ = together(by_row, policy, requests, 1.6 * most, batch_size=4)
    assert got == want and {one["status"] for one in got.values()} == {"ok"}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", METHODS)
def test_200_requests_in_a_pool_that_is_too_small(by_row, name):
    """The same of many."""
    policy = method_of(name)
    requests = mixed(200, seed=1, extra_tokens=policy.residual.num_tokens if policy.residual else 0)
    want, most = alone(by_row, policy, requests)
    assert together(by_row, policy, requests, 1.6 * most, batch_size=4)[0] == want


def test_who_came_last_gives_way_and_comes_back(by_row):
    """Answers that outgrow the pool: the last in order gives way, and the first one is never interrupted."""
    requests = [request(str(index), random_tokens(8, seed=index), max_new_tokens=60) for index in range(6)]
    want, most = alone(by_row, Full(), requests)
    got, preemptions = together(by_row, Full(), requests, 2.2 * most, batch_size=6)
    assert preemptions > 2 and next(iter(got)) == ("0", 0)
    assert got == want


def test_rows_join_as_soon_as_others_end(by_row):
    """Of requests of unequal lengths every step but the last ones has as many rows as may be."""
    lengths = (20, 3, 3, 3, 3, 3)
    requests = [
        request(str(index), random_tokens(9, seed=index), max_new_tokens=length) for index, length in enumerate(lengths)
    ]
    live: list[int] = []
    answers(by_row, Full(), requests, batch_size=2, on_step=lambda _, step: live.append(step["live_rows"]))
    assert live == [2] * 10 + [1] * 9
    live.clear()
    answers(by_row, Full(), requests, batch_size=2, group=2, on_step=lambda _, step: live.append(step["live_rows"]))
    assert live == [2] * 2 + [1] * 17 + [2] * 4, "groups: nobody joins before all have ended"


def test_prompts_in_chunks_are_read_between_steps(by_row):
    """While a long prompt is read, the row beside it makes a step per chunk; the answers are those of single runs."""
    policy = SnapKV(budget=0.5, window=8, tier="native")
    requests = [
        request("short", random_tokens(8), max_new_tokens=12),
        request("long", random_tokens(80, seed=1), max_new_tokens=4),
    ]
    want = answers(by_row, policy, requests, batch_size=1, prefill_chunk=16)
    live: list[int] = []
    got = answers(by_row, policy, requests, prefill_chunk=16, on_step=lambda _, step: live.append(step["live_rows"]))
    assert live == [1] * 4 + [2] * 3 + [1] * 4
    assert {key: comparable(one) for key, one in got.items()} == {key: comparable(one) for key, one in want.items()}


def test_who_is_cancelled_leaves_at_once(by_row):
    """Also in the middle of its prompt; the others answer as ever, and no page stays."""
    requests = [request(str(index), random_tokens(40, seed=index), max_new_tokens=8) for index in range(3)]
    want, got = answers(by_row, Full(), requests, batch_size=1, prefill_chunk=16), {}
    waiting = RequestQueue(requests)
    with engine(by_row, Full(), prefill_chunk=16) as running:
        batch = running.open_batch(waiting, on_outcome=lambda one: got.update({(one.sample_id, 0): one}))
        finish(batch.advance())
        finish(batch.advance())
        assert "0" in batch._samples and batch._reading[0].request.sample_id == "1"
        waiting.cancelled |= {"0", "1"}
        finish(batch.advance())
        assert [row for sample in batch._samples.values() for row in sample.open_rows] == running.runner.open_rows
        finish(batch.answer())
        check_empty(running)
    assert {key: comparable(one) for key, one in got.items()} == {("2", 0): comparable(want["2", 0])}


def test_auto_takes_what_memory_takes(by_row, monkeypatch):
    """As many rows as make a step cheaper; fewer where a row as long as it may become would not fit in half of what is
    free; with a budget, pages decide."""
    requests = mixed(40)
    most = []
    for free, budget in ((1 << 40, None), (1 << 22, None), (1, None), (1, 1 << 30)):
        monkeypatch.setattr("kvbench.kernels.bench.machine.available_bytes", lambda _, free=free: free)
        with engine(by_row, Full(), batch_size="auto", budget_bytes=budget) as running:
            most.append(running.open_batch(RequestQueue(requests), on_outcome=print).most)
    largest = max(one.num_samples + bool(one.gold) + len(one.choices) for one in requests)
    assert most[0] == most[3] == 32 // largest and 1 < most[1] < most[0] and most[2] == 1


def test_order_arrivals_and_groups():
    """First come those that gave up their place; nobody before it is there, and no group before the last has ended."""
    asked = mixed(5)
    waiting = RequestQueue(asked, group=2)
    assert [waiting.first(1).sample_id, waiting.take().sample_id, waiting.take().sample_id] == ["0", "0", "1"]
    assert waiting.first(1) is None and waiting.first(0).sample_id == "2"
    waiting.put_back(asked[:1])
    assert waiting.first(1) is None, "a group that has begun again comes alone, too"
    assert waiting.first(0).sample_id == "0" and len(waiting) == 4
    waiting.cancelled |= {"0", "2"}
    assert waiting.first(0).sample_id == "3" and len(waiting) == 2
    worked = [7.0]
    later = RequestQueue(asked, arrivals_s=[0.0, 0.3, 0.3, 0.5, 1e9], clock=Clock(lambda: worked[0]))
    assert later.first(0).sample_id == "0" and later.take() and later.first(0) is None
    worked[0] += 0.25
    assert later.first(0) is None and later.clock.now_s() == 0.25
    later.wait()  # nobody sleeps: the time until then is passed over
    assert [later.first(0) and later.take().sample_id for _ in range(3)] == ["1", "2", None]
    assert later.clock.busy_s() == 0.25 and later.clock.now_s() == pytest.approx(0.3)


class BatchMachine(RuleBasedStateMachine):
    """Requests arrive, are cancelled, and lose their pages to somebody else; the oracle has the answers of single
    runs."""

    counts: ClassVar[Counter] = Counter()
    loaded: ClassVar = None

    @initialize(
        name=st.sampled_from(["full", "snapkv"]), room=st.sampled_from([1.2, 2.0]), there=st.sampled_from([3, 8])
    )
    def start(self, name: str, room: float, there: int) -> None:
        """A batch of up to four whose pool has room for one or two of the largest; some are there."""
        self.requests, self.want, most = _single(name)
        self.there, self.is_starved = there, False
        self.waiting = RequestQueue(self.requests, arrivals_s=range(len(self.requests)))
        self.waiting.clock.now_s = lambda: self.there - 0.5
        self.got = {}
        given = {"batch_size": 4, "budget_bytes": int(most * room), "page_bytes": SMALL}
        self.manager = engine(self.loaded, _policy(name), **given)
        self.engine = self.manager.__enter__()
        self.batch = self.engine.open_batch(self.waiting, on_outcome=self.keep)
        self.taken = torch.zeros(0, dtype=torch.int64)

    def keep(self, outcome) -> None:
        assert (outcome.sample_id, outcome.repeat) not in self.got
        assert outcome.status == "ok" or self.is_starved, "nobody is refused for whom there is room"
        self.got[outcome.sample_id, outcome.repeat] = outcome

    @rule(action=st.sampled_from(["advance"] * 5 + ["arrive", "starve", "cancel", "cancel"]), size=st.integers(0, 20))
    def act(self, action: str, size: int) -> None:
        getattr(self, action)(size)

    def arrive(self, count: int) -> None:
        """Some requests are there from now on."""
        self.there = min(self.there + count, len(self.requests))

    def advance(self, steps: int) -> None:
        """Steps, whether somebody is there or not."""
        for _ in range(1 + steps):
            finish(self.batch.advance())

    def cancel(self, which: int) -> None:
        """Nobody waits any longer for a request, which may be waiting, in the batch, or done."""
        names = sorted(self.batch._samples) if which % 4 else []
        names = names or [one.sample_id for one in self.requests]
        name = names[which % len(names)]
        self.counts["cancelled alive"] += name in self.batch._samples
        self.waiting.cancelled.add(name)

    def starve(self, spare: int) -> None:
        """Somebody else takes all pages but a few, for a few steps."""
        pool = self.engine.store.pages.pool
        held = pool.allocate(torch.tensor([max(0, pool.num_free - spare)]))[0]
        before, self.is_starved = self.batch.preemptions, True
        self.advance(3)
        self.is_starved = False
        self.counts["starved"] += self.batch.preemptions > before
        pool.release(held)

    @invariant()
    def pages_are_those_of_the_rows(self) -> None:
        """Every page in use is a row's, and every row a sample's or a context's."""
        if not hasattr(self, "batch"):
            return
        store, runner = self.engine.store, self.engine.runner
        assert len(store.pages.table.used_page_ids()) >= store.pages.pool.num_used
        rows = [row for sample in self.batch._samples.values() for row in sample.open_rows]
        assert len(rows) == len(set(rows)) and set(rows) <= set(runner.open_rows)
        assert len(runner.open_rows) - len(rows) == self.batch._reader.contexts.is_open
        assert len(self.batch._samples) <= 4

    def teardown(self) -> None:
        """In the end everyone who was not cancelled has the answer of a single run, and every page came back."""
        if not hasattr(self, "batch"):
            return
        self.there = len(self.requests)
        finish(self.batch.answer())
        self.counts["preemptions"] += self.batch.preemptions
        check_empty(self.engine)
        self.manager.__exit__(None, None, None)
        for key, outcome in self.got.items():
            assert outcome.status == "oom" or comparable(outcome) == self.want[key]
        missing = {name for name, _ in self.want} - {name for name, _ in self.got}
        assert missing <= self.waiting.cancelled


def _policy(name: str):
    return method_of(name) if name != "snapkv" else SnapKV(budget=0.5, window=8)


@cache
def _single(name: str) -> tuple:
    """Requests, and what `alone` gives of them."""
    requests = mixed(8, seed=2, longest=36)
    return requests, *alone(BatchMachine.loaded, _policy(name), requests, page_bytes=SMALL)


@pytest.mark.parametrize("examples", [5, pytest.param(150, marks=pytest.mark.exhaustive)])
def test_random_histories_end_as_single_runs(by_row, examples):
    """Arrivals, cancellations, and pages that others take, in any order."""
    BatchMachine.counts.clear()
    BatchMachine.loaded = by_row
    given = {"max_examples": examples, "stateful_step_count": 20, "deadline": None, "derandomize": True}
    run_state_machine_as_test(BatchMachine, settings=settings(**given, database=None, phases=[Phase.generate]))
    counts = BatchMachine.counts
    assert counts["preemptions"] and (examples < 10 or (counts["cancelled alive"] and counts["starved"])), counts
