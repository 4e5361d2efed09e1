"""Decode steps of several caches in one pass of the model: what each run gets is what it gets alone."""

import random
from contextlib import ExitStack

import pytest
from engine_helpers import answers, comparable, engine, random_tokens, request
from selection import method_of
from test_request_alone import ABSENT, streamed  # noqa: F401

from kvbench.cache.store import CompressedStore
from kvbench.engine import cross_run_batch, hf, sessions
from kvbench.engine.cross_run_batch import Step, join
from kvbench.engine.requests import Request
from kvbench.kernels.pool import PoolExhausted

pytestmark = pytest.mark.skipif(bool(ABSENT), reason=ABSENT)

NAMES = ("full", "snapkv", "h2o", "kivi", "diffkv", "quest")


def some_requests(dice):
    """Five requests of unequal lengths: greedy, drawn in two samples, and with a forced answer."""
    made = [request(str(n), random_tokens(dice.randint(20, 60)), max_new_tokens=dice.randint(2, 9)) for n in range(3)]
    made.append(request("gold", random_tokens(33), gold=random_tokens(7), max_new_tokens=3))
    return [*made, request("drawn", random_tokens(21), temperature=0.8, num_samples=2, max_new_tokens=6)]


def go_through(streamed, names, asked, most, batch_size=3):  # noqa: F811
    """Answers requests by several methods in turn, steps joined; outcomes by method, or what ended it."""
    with ExitStack() as stack:
        engines = [stack.enter_context(engine(streamed, method_of(name), batch_size=batch_size)) for name in names]
        found, work = [{} for _ in engines], {}
        for number, one in enumerate(engines):
            one.gives_steps = True

            def keep(outcome, into=found[number]):
                into[outcome.sample_id, outcome.repeat] = outcome

            work[number] = one.running(asked, on_outcome=keep, sizing=asked)
        due = dict.fromkeys(work)
        while work:
            join([step for step in due.values() if isinstance(step, Step)], most)
            for number in list(work):
                try:
                    due[number] = next(work[number])
                    while isinstance(due[number], Request):
                        due[number] = next(work[number])
                except StopIteration:
                    del work[number], due[number]
                except Exception as error:
                    found[number] = error
                    del work[number], due[number]
        assert all(one.runner.open_rows == [] and one.store.pages.pool.num_used == 0 for one in engines)
    return found


def agree(found, wanted):
    """Two runs agree on all but times."""
    return {key: comparable(one) for key, one in found.items()} == {key: comparable(one) for key, one in wanted.items()}


@pytest.fixture
def passes(monkeypatch):
    """Rows and caches of every pass of the model that decodes."""
    seen, forward = [], hf.forward

    def counted(model, session, ids, *arguments):
        if isinstance(session, cross_run_batch._Pass):
            seen.append((len(ids), len(session.parts)))
        elif isinstance(session, sessions.Decode):
            seen.append((len(ids), 1))
        return forward(model, session, ids, *arguments)

    monkeypatch.setattr(hf, "forward", counted)
    return seen


@pytest.mark.parametrize("most", [7, 16])
def test_answers_are_those_of_separate_runs(streamed, passes, most):  # noqa: F811
    """Tokens, bytes and every number that is measured, of several methods whose rows begin and end at other times; no
    pass has more rows than it may, unless one cache has, and there are fewer passes."""
    asked = some_requests(random.Random(most))
    alone = [answers(streamed, method_of(name), asked, batch_size=3) for name in NAMES]
    before = len(passes)
    assert all(caches == 1 for _, caches in passes)
    found = go_through(streamed, NAMES, asked, most)
    assert all(agree(*each) for each in zip(found, alone, strict=True))
    together = passes[before:]
    assert any(caches > 1 for _, caches in together) and len(together) < before
    assert all(rows <= most or caches == 1 for rows, caches in together)


@pytest.mark.parametrize(
    ("call", "error"),
    [("attend", ValueError("a fault")), ("attend", MemoryError("once")), ("begin_step", PoolExhausted("no page"))],
)
def test_what_a_cache_raises_is_its_own(streamed, monkeypatch, call, error):  # noqa: F811
    """Raised once by the second of three caches in a pass: a fault ends its run alone, want of memory has its requests
    begin again, and the others go on as if nothing had been."""
    asked, names, raised, calls = some_requests(random.Random(3)), ("snapkv", "kivi", "h2o"), [], [0, 0]
    alone = [answers(streamed, method_of(name), asked) for name in names]
    own = getattr(CompressedStore, call)

    def faulty(store, *given, **named):
        calls[store.policy == method_of("kivi")] += 1
        if calls[True] == 5 and not raised:
            raised.append(error)
            raise error
        return own(store, *given, **named)

    monkeypatch.setattr(CompressedStore, call, faulty)
    found = go_through(streamed, names, asked, 99, 8)
    assert raised and agree(found[0], alone[0]) and agree(found[2], alone[2])
    if isinstance(error, ValueError):
        assert isinstance(found[1], ValueError) and "a fault" in str(found[1])
    else:
        assert agree(found[1], alone[1])


def test_a_pass_without_memory_has_all_its_requests_begin_again(streamed, monkeypatch):  # noqa: F811
    """The products of a joint pass find no memory once: every run begins again with half as many, and answers alike."""
    asked, names, raised, forward = some_requests(random.Random(4)), ("snapkv", "kivi"), [], hf.forward
    alone = [answers(streamed, method_of(name), asked) for name in names]

    def scarce(model, session, *arguments):
        if isinstance(session, cross_run_batch._Pass) and len(raised) < 2:
            raised.append(session)
            raise MemoryError("once")
        return forward(model, session, *arguments)

    monkeypatch.setattr(hf, "forward", scarce)
    found = go_through(streamed, names, asked, 99, 8)
    assert raised and all(agree(*each) for each in zip(found, alone, strict=True))


def test_a_row_that_is_not_finite_ends_alone(streamed, monkeypatch):  # noqa: F811
    """Attention of one row of the second cache in a pass gives NaN: its sample says so with the layer, no other."""
    asked, names = some_requests(random.Random(5)), ("snapkv", "kivi")
    alone = [answers(streamed, method_of(name), asked) for name in names]
    own = CompressedStore.attend

    def spoiled(store, layer, q, k, v, scale):
        out = own(store, layer, q, k, v, scale)
        if store.policy == method_of("kivi") and layer == 1 and len(out) > 1:
            out[0] = float("nan")
        return out

    monkeypatch.setattr(CompressedStore, "attend", spoiled)
    found = go_through(streamed, names, asked, 99, 8)
    assert agree(found[0], alone[0])
    bad = [one for one in found[1].values() if one.status == "nan"]
    assert bad and all("first bad attention layer: 1" in one.message for one in bad)
    assert {key: comparable(one) for key, one in found[1].items() if one.status == "ok"}.items() <= {
        key: comparable(one) for key, one in alone[1].items()
    }.items()
