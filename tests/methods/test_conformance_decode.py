"""Every method along long answers: 40 tokens after 1, 5 and 300, on every path through the store 160 after 10 and 3,060
too; ledger against allocator."""

import dataclasses

import pytest
import torch
from conformance_helpers import cases, policy_of
from engine_helpers import answers, random_tokens, request
from selection import spread

from kvbench.cache import ledger
from kvbench.runs.verdict import complaint

# Prompt tokens and decode steps; five tokens are fewer than any window. The long one needs more than one chunk of the
# C++ kernels, and both residual buffers of 128 tokens overflow: that of the long row, which begins with 116, twice.
SHORT = {"one": (1, 40), "five": (5, 40), "some": (300, 40)}
LONG = {"one": (1, 40), "five": (5, 40), "ten": (10, 160), "long": (3060, 160)}
ANSWERS = spread(cases(), policy_of, {"short": SHORT, "long": LONG}, part=("short",))


def check_ledger(store, rows) -> None:
    """What the ledger says of the rows is what the pool and the tables hold, page by page and in sum."""
    pages = store.pages.table.used_page_ids()
    assert len(pages.unique()) == len(pages) == store.pages.pool.num_used
    assert store.pages.pool.num_used + store.pages.pool.num_free == store.pages.pool.num_pages
    items = [store.ledger.itemise(row) for row in rows]
    parts = ("payload_bytes", "quant_meta_bytes", "track_bytes", "slack_bytes")
    assert (
        sum(item[part] for item in items for part in parts) == store.pages.pool.num_used * store.pages.pool.page_bytes
    )
    held = store.ledger.resident_bytes(torch.tensor(rows)).tolist()
    assert held == [item["resident_bytes"] for item in items]


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("name", "prompts"), ANSWERS)
def test_long_answers_to_short_and_long_prompts(tiny_model, name, prompts):
    """Prompts in one batch, shorter than the window and far longer: full answers, a ledger that always adds up,
    and a method that finds its own work done."""
    loaded = dataclasses.replace(tiny_model("llama", "gqa3", 64), max_tokens=4096)
    policy, seen = policy_of(name), []
    requests = [request(key, random_tokens(n), max_new_tokens=steps + 1) for key, (n, steps) in prompts.items()]

    def check(running, step):
        seen.append(step)
        if len(seen) % 23 == 1:
            check_ledger(running.store, running.runner.open_rows)

    outcomes = answers(loaded, policy, requests, on_step=check)
    assert len(seen) == max(steps for _, steps in prompts.values())
    for key, (num_tokens, steps) in prompts.items():
        outcome = outcomes[key, 0]
        assert (outcome.status, outcome.finish, len(outcome.token_ids)) == ("ok", "length", steps + 1)
        held, kept = outcome.ledger, outcome.kept
        assert kept["tokens_seen"] == num_tokens + steps and kept["prompt_tokens"] == num_tokens
        assert held["resident_bytes"] == sum(held[item] for item in ledger.ITEMS)
        assert min(held[item] for item in ledger.ITEMS) >= 0
        assert held["peak_bytes"] >= held["resident_bytes"] and held["peak_bytes"] >= held["average_bytes"] > 0
        assert held["fp16_bytes"] == (num_tokens + steps) * 4 * 64 * 4
        assert 0 < kept["slot_ratio"] <= 1 and sum(kept["slots_per_tier"]) <= (num_tokens + steps) * kept["lists"]
        fields = 4 * len(policy.score.track)  # score and position, four bytes each
        if policy.reading is None:  # bounds of pages are counted with the tracked fields
            assert held["track_bytes"] == fields * sum(kept["slots_per_tier"])
        assert complaint(policy, vars(outcome)) is None
