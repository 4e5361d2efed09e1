"""Every method along long answers: 300 tokens after 1, 5, 10 and 3,000; the ledger against the allocator on the way."""

import dataclasses

import pytest
import torch
from conformance_helpers import distinct, policy_of
from engine_helpers import answers, random_tokens, request

from kvbench import ledger

PROMPTS = {"one": 1, "five": 5, "ten": 10, "long": 3000}  # five tokens are fewer than any window


def check_ledger(store, rows) -> None:
    """What the ledger says of the rows is what the pool and the tables hold, page by page and in sum."""
    pages = store.table.used_page_ids()
    assert len(pages.unique()) == len(pages) == store.pool.num_used
    assert store.pool.num_used + store.pool.num_free == store.pool.num_pages
    items = [ledger.itemise(store, row) for row in rows]
    parts = ("payload_bytes", "quant_meta_bytes", "track_bytes", "slack_bytes")
    assert sum(item[part] for item in items for part in parts) == store.pool.num_used * store.pool.page_bytes
    held = ledger.resident_bytes(store, torch.tensor(rows)).tolist()
    assert held == [item["resident_bytes"] for item in items]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", distinct())
def test_300_tokens_from_short_and_long_prompts(tiny_model, name):
    """Four prompts in one batch, shorter than the window and far longer: full answers, a ledger that always adds up,
    and a method that finds its own work done."""
    loaded = dataclasses.replace(tiny_model("llama", "gqa3", 64), max_tokens=4096)
    policy, steps = policy_of(name), []
    requests = [request(key, random_tokens(n), max_new_tokens=301) for key, n in PROMPTS.items()]

    def check(running, step):
        steps.append(step)
        if len(steps) % 43 == 1:
            check_ledger(running.store, running._open)

    outcomes = answers(loaded, policy, requests, on_step=check)
    assert len(steps) == 300
    for key, num_tokens in PROMPTS.items():
        outcome = outcomes[key, 0]
        assert (outcome.status, outcome.finish, len(outcome.token_ids)) == ("ok", "length", 301)
        held, kept = outcome.ledger, outcome.kept
        assert kept["tokens_seen"] == num_tokens + 300 and kept["prompt_tokens"] == num_tokens
        assert held["resident_bytes"] == sum(held[item] for item in ledger.ITEMS)
        assert min(held[item] for item in ledger.ITEMS) >= 0
        assert held["peak_bytes"] >= held["resident_bytes"] and held["peak_bytes"] >= held["average_bytes"] > 0
        assert held["fp16_bytes"] == (num_tokens + 300) * 4 * 64 * 4
        assert 0 < kept["slot_ratio"] <= 1 and sum(kept["slots_per_tier"]) <= (num_tokens + 300) * kept["lists"]
        fields = 4 * len(policy.score.track)  # score and position, four bytes each
        assert held["track_bytes"] == fields * sum(kept["slots_per_tier"])
        assert policy.check_outcome(vars(outcome)) is None
