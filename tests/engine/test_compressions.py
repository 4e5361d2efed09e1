"""Evictions where pages run out: before any request begins again, of all rows at once, down to their budget."""

import pytest
from engine_helpers import answers, engine, random_tokens, request
from refusals import refused

from kvbench.cache.options import StoreOptions
from kvbench.engine.request_queue import RequestQueue
from kvbench.engine.runner import Runner
from kvbench.engine.supported import check_fit
from kvbench.methods.kv_compress import KVCompress
from kvbench.models.load import load_model
from kvbench.runs.answers import finish

PAGE_BYTES, BLOCK, BUDGET = 2112, 8, 24  # pages of eight slots
GIVEN = {"budget": BUDGET, "block": BLOCK, "obs_window": 4}


@pytest.fixture(scope="module")
def loaded():
    """Two layers, whose products give a row the same bits whatever is beside it."""
    given = {"kind": "random", "preset": "tiny", "num_layers": 2, "seed": 0, "linear": "streamed"}
    model = load_model(given | {"dtype": "float32", "device": "cpu"})
    yield model
    model.model.set_attn_implementation("sdpa")


def requests_of(count: int, answer: int = 60, **fields) -> list:
    """Requests whose answers are twice as long as their prompts."""
    return [
        request(str(index), random_tokens(30, seed=index), max_new_tokens=answer, **fields) for index in range(count)
    ]


def served(loaded, policy, requests, budget_bytes: int, monkeypatch=None) -> tuple[dict, int, int, list]:
    """Outcomes, preemptions, compressions; and of each compression the blocks of every row before it and after it."""
    found, seen, compact_really = {}, [], Runner.compact
    with engine(loaded, policy, budget_bytes=budget_bytes, page_bytes=PAGE_BYTES, shares_pool=True) as running:

        def blocks() -> dict[int, int]:
            counters, pages = running.store.counters, running.store.pages
            lists = pages.table.num_slots[0].view(pages.shape[0], -1).long()
            rows = running.runner.open_rows
            assert all(counters.seen[row] for row in rows)
            return {row: int((-(-lists[row] // BLOCK)).sum()) for row in rows}

        def compact(runner, rows):
            before = blocks()
            compact_really(runner, rows)
            seen.append((before, blocks()))

        if monkeypatch is not None:
            monkeypatch.setattr(Runner, "compact", compact)
        batch = running.open_batch(
            RequestQueue(requests), on_outcome=lambda one: found.update({(one.sample_id, one.repeat): one})
        )
        finish(batch.answer())
        assert running.store.pages.pool.num_used == 0 and running.runner.open_rows == []
    return found, batch.preemptions, batch.compressions, seen


def test_compressions_come_before_anybody_begins_again(loaded, monkeypatch):
    """Of answers that outgrow the pool: with evictions after prompts alone requests begin again; with those where pages
    run out none does, and each row is back to the blocks of its budget, none of them below."""
    requests = requests_of(4)
    pool_bytes = 60 * PAGE_BYTES
    _, preemptions, compressions, _ = served(loaded, KVCompress(**GIVEN), requests, pool_bytes)
    assert preemptions > 0 and compressions == 0
    found, preemptions, compressions, seen = served(
        loaded, KVCompress(**GIVEN, continual="pages"), requests, pool_bytes, monkeypatch
    )
    assert preemptions == 0 < compressions == len(seen)
    assert [found[str(index), 0].status for index in range(4)] == ["ok"] * 4
    config = loaded.model.config
    limit = config.num_hidden_layers * config.num_key_value_heads * BUDGET // BLOCK
    assert any(max(before.values()) > limit for before, _ in seen)
    for before, after in seen:
        assert after == {row: min(held, limit) for row, held in before.items()}


def test_where_compressions_are_not_enough_the_last_begins_again(loaded):
    """Of requests with two answers, whose pages part once they differ, the pool does not hold the budgets of all: both
    are counted, and everyone is answered in the end."""
    requests = requests_of(3, num_samples=2, temperature=1.0)
    policy = KVCompress(**GIVEN, continual="pages")
    found, preemptions, compressions, _ = served(loaded, policy, requests, 50 * PAGE_BYTES)
    assert preemptions > 0 and compressions > 0
    assert {one.status for one in found.values()} == {"ok"} and len(found) == 6


def test_with_pages_enough_nothing_is_evicted_behind_a_prompt(loaded):
    """Tokens and what was kept are those of evictions after prompts alone."""
    requests = requests_of(3, answer=20)
    policy = KVCompress(**GIVEN, continual="pages")
    got, preemptions, compressions, _ = served(loaded, policy, requests, 400 * PAGE_BYTES)
    assert (preemptions, compressions) == (0, 0)
    want = answers(loaded, KVCompress(**GIVEN), requests, batch_size=1, page_bytes=PAGE_BYTES)
    assert {key: (one.token_ids, one.kept) for key, one in got.items()} == {
        key: (one.token_ids, one.kept) for key, one in want.items()
    }


def test_it_is_refused_where_neighbours_share_no_pool(loaded):
    """Of a run, whose answers must not hang on the requests that are answered with them, and of a model without
    weights; and a share of all tokens seen needs evictions at every step."""
    policy = KVCompress(**GIVEN, continual="pages")
    with refused("settings-conflict", "method.continual", "continual=pages"), engine(loaded, policy):
        pass
    with refused("settings-conflict", "method.continual", "continual=pages"):
        check_fit(loaded, policy, StoreOptions(), None)
    with refused("settings-conflict", "method.budget", "continual=pages"):
        KVCompress(budget="50%seen", continual="pages")
