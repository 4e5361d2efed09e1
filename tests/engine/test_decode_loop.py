"""Runs of decode steps that the host learns of one step late: whole engine runs are those of one step at a time."""

from collections.abc import Iterator, Sequence

import pytest
from torch.utils._python_dispatch import _disable_current_modes

pytest.importorskip("triton", reason="triton is not installed (pip install -e '.[test]')")

from engine_helpers import answers, comparable, engine, random_tokens, request
from ropes import settings_of
from selection import few

from kvbench.cache.pages import Pages
from kvbench.engine import hf, sessions
from kvbench.engine.decode_loop import DecodeLoop
from kvbench.engine.request_queue import Clock, RequestQueue
from kvbench.engine.runner import Runner
from kvbench.kernels.gpu import parts
from kvbench.kernels.gpu.emulator import record
from kvbench.models.load import load_model
from kvbench.runs import choices

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy warns of what empty slots hold
    pytest.mark.usefixtures("without_overflow_checks"),
]
METHODS = (
    "full",
    "snapkv budget=12 window=4 pool_kernel=3",
    "h2o budget=12",
    "kivi residual_tokens=8 group=8",
    "diffkv window=8",
    "kv_compress budget=16 block=8 obs_window=4",
    "kv_compress budget=16 block=8 obs_window=4 continual=true",
    "streaming_llm sinks=2 budget=12",
)


def both(smallest, method: str, asked: list, **settings) -> tuple[dict, dict, dict]:
    """Outcomes of one step at a time in plain torch and of runs, whatever two runs must agree on; and how the latter's
    were made. Single steps on the kernels are what follows a capture that fails."""
    found, counts = [], {}
    for capture, backend in ((None, "torch"), (record, "triton")):
        policy = choices.make_method(method)
        counts.clear()
        got = answers(smallest, policy, asked, backend=backend, capture=capture, counts=counts, **settings)
        found.append({key: comparable(outcome) | {"drift": outcome.drift} for key, outcome in got.items()})
        if capture is None:
            assert counts["replayed"] == counts["eager_in_runs"] == 0 < counts["one_at_a_time"]
    return *found, counts


def numbers(found: object) -> Iterator[float]:
    """What was measured, in order: a row is in steps with more rows, padded to 4, and attended to by a kernel, whose
    fp32 sums round in other places; a perplexity moves with its own size."""
    if isinstance(found, dict | list | tuple):
        for part in found.values() if isinstance(found, dict) else found:
            yield from numbers(part)
    elif found is not None:
        yield float(found)


def agree(got: dict, want: dict) -> None:
    """Holds that outcomes are the same, and what was measured in them but for its last bits."""
    assert got.keys() == want.keys()
    for key, outcome in got.items():
        mine, theirs = ({name: of.get(name) for name in ("fidelity", "drift")} for of in (outcome, want[key]))
        assert outcome | theirs == want[key] | theirs
        assert list(numbers(mine)) == pytest.approx(list(numbers(theirs)), rel=1e-5, abs=1e-5, nan_ok=True)


def test_logits_that_are_not_finite_end_a_run(smallest, monkeypatch: pytest.MonkeyPatch):
    """Nothing of the run counts: its request is answered again step by step, which says what is wrong."""
    plain, steps, counts = hf.forward, [], {}

    def spoilt(model, session, *arguments):
        logits = plain(model, session, *arguments)
        if not isinstance(session, sessions.Decode):
            return logits
        steps.append(session)
        return logits * float("nan") if len(steps) > 1 else logits

    monkeypatch.setattr(hf, "forward", spoilt)
    asked = [request("spoilt", random_tokens(5), max_new_tokens=8, min_new_tokens=1)]
    settings = {"backend": "triton", "capture": record, "counts": counts, "fidelity_max_tokens": 0}
    (found,) = answers(smallest, choices.make_method("full"), asked, **settings).values()
    assert found.status == "nan" and "not finite" in found.message
    assert len(steps) > counts["one_at_a_time"] > 0


DRAWN = {"temperature": 0.9, "top_p": 0.9}
FAILING = ["full", "kivi residual_tokens=8 group=8", "diffkv window=8"]


def in_part(step) -> None:
    """A capture that fails in the middle of a step, when the host has noted more than the device has done."""
    launched = []

    def launch(kernel, grid, arguments, constants):
        launched.append(kernel)
        if len(launched) == 4:
            raise RuntimeError("operation not permitted when stream is capturing\nand a stack")
        with _disable_current_modes():
            kernel[grid](*arguments, **constants)

    with parts.recording(launch):
        step()


@pytest.mark.long  # every row is read twice, on interpreted kernels
@pytest.mark.parametrize("method", few(FAILING, FAILING[0]))
def test_a_capture_that_fails_loses_nothing(smallest, method: str):
    """The rows are read again and go on without graphs, with the tokens, bytes and fidelity of single steps; the count
    and a warning say so, once."""
    asked = [
        request("first", random_tokens(21), max_new_tokens=9, min_new_tokens=1),
        request("second", random_tokens(14, 1), max_new_tokens=7, min_new_tokens=1, gold=random_tokens(6, 2), **DRAWN),
        request("third", random_tokens(9, 4), max_new_tokens=5, min_new_tokens=1),
    ]
    policy, counts, settings = choices.make_method(method), {}, {"backend": "triton", "batch_size": 2}
    want = answers(smallest, policy, asked, capture=None, **settings | {"backend": "torch"})
    with pytest.warns(UserWarning, match=r"captured \(RuntimeError: operation not permitted when stream"):
        got = answers(smallest, policy, asked, capture=in_part, counts=counts, **settings)
    agree(*({key: comparable(outcome) for key, outcome in found.items()} for found in (got, want)))
    assert (counts["failed_captures"], counts["replayed"]) == (1, 0) and counts["eager_in_runs"] > 0


def test_a_rotary_embedding_that_asks_for_the_length_makes_single_steps(tiny_model):
    """transformers compares the longest position with a limit in every pass: no graph could hold that."""
    assert DecodeLoop(Runner(tiny_model(), choices.make_method("full"), backend="triton"), record).runs
    for rope in ("dynamic", "longrope"):
        model = load_model(settings_of(rope))
        assert not DecodeLoop(Runner(model, choices.make_method("full"), backend="triton"), record).runs


@pytest.mark.parametrize("method", few(METHODS, METHODS[2], METHODS[7]))
def test_a_run_gives_what_single_steps_give(smallest, method: str):
    """Tokens, bytes now and over time, kept slots and fidelity. One answer ends with a stop token while the step behind
    it is under way; one is drawn, and forced to a gold answer beside it."""
    first = request("first", random_tokens(21), max_new_tokens=7)
    (free,) = answers(smallest, choices.make_method(method), [first], backend="torch", fidelity_max_tokens=0).values()
    stop = free.token_ids[3]
    assert stop not in free.token_ids[1:3]
    asked = [
        request("first", random_tokens(21), max_new_tokens=9, min_new_tokens=1, stop_token_ids=(stop,)),
        request("second", random_tokens(14, 1), max_new_tokens=7, min_new_tokens=1, gold=random_tokens(6, 2), **DRAWN),
    ]
    want, got, counts = both(smallest, method, asked)
    agree(got, want)
    assert (got["first", 0]["finish"], len(got["first", 0]["token_ids"])) == ("stop", 3)
    assert got["second", 0]["status"] == "ok"
    assert counts["replayed"] > 0 or "continual" in method  # whose evictions are due too often here
    assert (counts["captures"] > 0) == (counts["replayed"] > 0)


def test_a_step_is_warmed_up_at_the_width_that_is_captured(smallest, monkeypatch: pytest.MonkeyPatch):
    """What a kernel is compiled for may hang on how many pages its lists have: on an H100, a capture that met a kernel
    of Quest for the first time was ended by the loading of its code."""
    own, asked = Pages.width, {True: set(), False: set()}

    def width(pages: Pages, numbers: Sequence[int], tier: int) -> int | None:
        found = own(pages, numbers, tier)
        asked[pages.counts.log is not None].add(found)
        return found

    monkeypatch.setattr(Pages, "width", width)
    policy, counts = choices.make_method("quest min_pages=1 read_budget=16 dense_layers=0"), {}
    wanted = [request("a", random_tokens(20, seed=1), max_new_tokens=12, min_new_tokens=0)]
    answers(smallest, policy, wanted, backend="triton", capture=record, counts=counts)
    assert counts["captures"] == 1
    assert asked[True] <= asked[False]


def test_steps_behind_a_bulk_eviction_are_replayed(smallest):
    """Of four steps one evicts and is made alone; whether the next one does is known before it is made."""
    asked = [request("only", random_tokens(9), max_new_tokens=10, min_new_tokens=1)]
    want, got, counts = both(smallest, "random_trace decode_every=4 budget=4 window=2", asked, fidelity_max_tokens=0)
    agree(got, want)
    assert got["only", 0]["kept"]["slots_per_tier"] < [9 + 9 - 3]
    assert (counts["replayed"], counts["eager_in_runs"], counts["one_at_a_time"]) == (5, 2, 2)


@pytest.mark.parametrize("method", ["full", "kivi residual_tokens=8 group=8"])
def test_steps_that_were_captured_beforehand_are_all_replayed(smallest, method: str):
    """For every number of rows, and answers are as ever; the pages that it took are free again."""
    asked = [request(str(n), random_tokens(9 + n, n), max_new_tokens=4 + 2 * n, min_new_tokens=0) for n in range(3)]
    policy, settings = choices.make_method(method), {"batch_size": 3, "fidelity_max_tokens": 0}
    want = answers(smallest, policy, asked, backend="torch", capture=None, **settings)
    found = []
    with engine(smallest, policy, backend="triton", capture=record, **settings) as running:
        batch = running.open_batch(RequestQueue(asked), on_outcome=found.append)
        running.steps.warm_up(batch.most, asked[2].prompt)
        assert running.steps.counts["captures"] == 3 and running.store.pages.pool.num_used == 0
        list(batch.answer())
        assert running.steps.counts["eager_in_runs"] == 0 < running.steps.counts["replayed"]
        assert running.steps.counts["captures"] == 3
    assert {outcome.sample_id: outcome.token_ids for outcome in found} == {
        sample_id: outcome.token_ids for (sample_id, _), outcome in want.items()
    }


def test_a_run_ends_for_who_comes_in_it(smallest):
    """A request that comes while others are decoded joins behind the next step, and each step is told once."""
    lengths = {"early": 20, "late": 4}
    asked = [request(name, random_tokens(9), max_new_tokens=most, min_new_tokens=0) for name, most in lengths.items()]
    now, told = [0.0], []
    clock = Clock(lambda: now[0])

    def on_step(step: dict) -> None:
        told.append((step["live_rows"], step["steps"]))

    policy = choices.make_method("full")
    with engine(smallest, policy, backend="triton", capture=record, batch_size=2, fidelity_max_tokens=0) as running:
        waiting = RequestQueue(asked, arrivals_s=[0.0, 5.0], clock=clock)
        batch = running.open_batch(waiting, on_outcome=lambda _: None, on_step=on_step)
        before = running.steps.awaited

        def awaited() -> bool:
            now[0] += 1.0
            return before()

        running.steps.awaited = awaited
        list(batch.answer())
    assert told[0] == (1, 5) and told[1][0] == 2
    assert sum(rows * steps for rows, steps in told) >= 19 + 3
