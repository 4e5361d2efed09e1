"""Page budgets that are too small: for the batch, for the answers to come, for a single prompt."""

import pytest
from engine_helpers import NATIVE_METHODS, answers, comparable, random_tokens, request
from selection import few
from test_conversation import conversation
from test_shared_context import questions

from kvbench.methods.full import Full
from kvbench.methods.snapkv import SnapKV
from kvbench.methods.streaming_llm import StreamingLLM

PROMPTS = [request(str(i), random_tokens(120, seed=i), max_new_tokens=40) for i in range(3)]
SHORT = [request(str(i), random_tokens(10, seed=i), max_new_tokens=60) for i in range(2)]
SMALL_PAGES = {"page_bytes": 2048}
# Requests, settings, and room for so many of the first: prompts that do not fit together, read at once or in chunks;
# answers that outgrow the room; questions about one context; turns of conversations.
CASES = {f"prompts, {name}": (policy, PROMPTS, {}, 1.5) for name, policy in NATIVE_METHODS.items()}
CASES |= {f"answers, {name}": (policy, SHORT, {}, 1.0) for name, policy in NATIVE_METHODS.items()}
CASES["answers, streaming_llm"] = StreamingLLM(budget=60, tier="native"), SHORT, {}, 1.0
CASES |= {
    "chunks": (SnapKV(budget=0.5, window=8, tier="native"), PROMPTS, {"prefill_chunk": 32}, 1.5),
    "questions": (Full(), questions(max_new_tokens=40)[:4], SMALL_PAGES, 1.6),
    "turns": (Full(), [conversation(name, seed=seed) for seed, name in enumerate("abcd")], SMALL_PAGES, 2.2),
}


def pages_of_one(loaded, policy, asked, **settings):
    """Most pages that one request needs at once, and their size."""
    most = [0]

    def watch(running, step):
        most[0] = max(most[0], running.store.pages.pool.num_used)

    outcome = answers(loaded, policy, [asked], on_step=watch, **settings)[asked.sample_id, 0]
    return most[0], outcome.ledger["page_bytes"]


def watched(loaded, policy, requests, **settings):
    """Outcomes, and the rows of every step."""
    live = []
    got = answers(loaded, policy, requests, on_step=lambda _, step: live.append(step["live_rows"]), **settings)
    return got, live


TAKEN = ("prompts, diffkv", "answers, kivi")


@pytest.mark.parametrize("case", few(CASES, *TAKEN, "chunks", "questions", "turns"))
def test_without_pages_for_all_some_wait_and_nothing_is_lost(loaded, case):
    """As many run as there are pages for, down to one; tokens and bytes are those with room for all."""
    policy, requests, settings, room = CASES[case]
    pages, page_bytes = pages_of_one(loaded, policy, requests[0], **settings)
    (want, free), (got, live) = (
        watched(loaded, policy, requests, **settings, **limit)
        for limit in ({}, {"budget_bytes": int(pages * page_bytes * room)})
    )
    assert len(live) > len(free)
    for key, outcome in want.items():
        found, wanted = comparable(got[key]), comparable(outcome)
        if not loaded.rows_are_alone:  # sums over matrix products of another shape
            assert (found.pop("fidelity") is None) == (wanted.pop("fidelity") is None)
        assert found == wanted


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
