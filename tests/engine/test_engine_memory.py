"""Page budgets that are too small: for the batch, for the answers to come, for a single prompt."""

import pytest
from engine_helpers import NATIVE_METHODS, answers, comparable, random_tokens, request

from kvbench.methods.full import Full
from kvbench.methods.streaming_llm import StreamingLLM


def pages_of_one(loaded, policy, asked):
    """Most pages that one request needs at once, and their size."""
    most = [0]

    def watch(running, step):
        most[0] = max(most[0], running.store.pages.pool.num_used)

    outcome = answers(loaded, policy, [asked], on_step=watch)[asked.sample_id, 0]
    return most[0], outcome.ledger["page_bytes"]


@pytest.mark.parametrize("policy", NATIVE_METHODS.values(), ids=NATIVE_METHODS)
def test_out_of_memory_halves_the_batch_and_goes_on(loaded, policy):
    """With pages for one and a half requests a group of three runs one by one and loses nothing."""
    requests = [request(str(i), random_tokens(120, seed=i), max_new_tokens=40) for i in range(3)]
    want = answers(loaded, policy, requests)
    pages, page_bytes = pages_of_one(loaded, policy, requests[0])
    live = []
    got = answers(
        loaded,
        policy,
        requests,
        budget_bytes=pages * page_bytes * 3 // 2,
        on_step=lambda running, step: live.append(step["live_rows"]),
    )
    assert max(live) < 3 and live[-1] == 1
    for key, outcome in want.items():
        assert comparable(got[key]) == comparable(outcome)


@pytest.mark.parametrize("policy", NATIVE_METHODS.values(), ids=NATIVE_METHODS)
def test_memory_that_runs_out_while_decoding_halves_too(loaded, policy):
    """Two short prompts fit together at first; when their answers outgrow the budget each is answered alone."""
    requests = [request(str(i), random_tokens(10, seed=i), max_new_tokens=60) for i in range(2)]
    if isinstance(policy, StreamingLLM):
        policy = StreamingLLM(budget=60, tier="native")
    want = answers(loaded, policy, requests)
    pages, page_bytes = pages_of_one(loaded, policy, requests[0])
    live = []
    got = answers(
        loaded,
        policy,
        requests,
        budget_bytes=pages * page_bytes,
        on_step=lambda running, step: live.append(step["live_rows"]),
    )
    assert live[0] == 2 and live[-1] == 1
    for key, outcome in want.items():
        assert comparable(got[key]) == comparable(outcome)


def test_what_does_not_fit_alone_is_recorded_and_the_run_goes_on(loaded):
    """A prompt larger than the budget is `oom` with the reason and the remedy; the prompts around it are answered."""
    small = [request(str(i), random_tokens(20, seed=i)) for i in range(3)]
    large = request("large", random_tokens(600), num_samples=2, temperature=1.0)
    pages, page_bytes = pages_of_one(loaded, Full(), small[0])
    got = answers(loaded, Full(), [*small[:2], large, small[2]], batch_size=4, budget_bytes=6 * pages * page_bytes)
    assert [got[str(i), 0].status for i in range(3)] == ["ok"] * 3
    for repeat in range(2):
        assert (got["large", repeat].status, got["large", repeat].finish) == ("oom", "none")
        assert "raise store.budget_bytes, lower batch_size" in got["large", repeat].message
