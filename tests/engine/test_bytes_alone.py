"""Bytes of a request depend on the request alone: not on what is beside it, nor on the longest of the run."""

import pytest
import torch
from engine_helpers import answers, engine, random_tokens, request
from selection import few
from test_layer_kinds import KINDS, small  # noqa: F401

from kvbench.engine.requests import Turn
from kvbench.methods.full import Full
from kvbench.methods.h2o import H2O
from kvbench.methods.kivi import Kivi
from kvbench.methods.snapkv import SnapKV
from kvbench.methods.think import ThinK
from kvbench.methods.uniform import Uniform

# Every way of holding tokens: pages, rings, two tiers in a table, tiers by layer, and a budget in bytes. `tests/engine/
# test_request_alone.py` has all methods.
POLICIES = {
    "full": Full(),
    "protected": Uniform(tier="int4", protect_layers=(0,)),
    "think": ThinK(),
    "snapkv": SnapKV(budget=20, window=4, tier="k8v4"),
    "h2o": H2O(budget=24, window=4),
    "kivi": Kivi(bits=2, group=8, residual_tokens=16),
    "in bytes": SnapKV(budget="80KiB", window=4),
}
SETTINGS = {
    "plain": {},
    "group": {"group": 2},
    "chunks": {"prefill_chunk": 16},
    "pool": {"budget_bytes": 400 * 1024, "page_bytes": 1024},
}


def some(**fields) -> list:
    """The request "it", a shorter one, one with a longer prompt, and one with a longer answer."""
    asked = [request("short", random_tokens(4), max_new_tokens=2)]
    asked.append(request("it", random_tokens(37), **{"max_new_tokens": 5} | fields))
    asked.append(request("long", random_tokens(150, seed=1), max_new_tokens=3))
    return [*asked, request("talks", random_tokens(9, seed=2), max_new_tokens=60)]


def check(loaded, policy, asked, **settings) -> None:
    """The request "it" has the bytes and slots that it has alone, whatever it is answered or reserved for with."""
    settings, it = {"fidelity_max_tokens": 4} | settings, asked[1]

    def held(company, **more):
        found = answers(loaded, policy, company, **settings | more)
        mine = [outcome for (name, _), outcome in found.items() if name == "it"]
        assert {outcome.status for outcome in mine} == {"ok"}
        return [(outcome.ledger, outcome.kept, outcome.turns) for outcome in mine]

    want = held([it], batch_size=1)
    assert held([asked[0], it], batch_size=2) == want
    assert held([it, asked[2]], batch_size=2) == want
    assert held(asked[::-1], batch_size=3) == want
    assert held([it], sizing=asked) == want  # what a resume or a shard leaves


@pytest.mark.parametrize(
    ("name", "how"),
    few(
        [(name, how) for name in POLICIES for how in SETTINGS if how != "chunks" or name != "think"],
        *((name, "plain") for name in POLICIES),
        *(("snapkv", how) for how in SETTINGS),
        ("kivi", "chunks"),
    ),
)
def test_bytes_are_those_of_a_request_alone(loaded, name, how):
    """Every item, the peaks and the averages; of two samples of an answer with a forced one, too."""
    check(loaded, POLICIES[name], some(gold=random_tokens(6), num_samples=2, temperature=0.5), **SETTINGS[how])


@pytest.mark.parametrize("kind", few([*KINDS], "gemma3_text", "llama4_text", "qwen3_next", "deepseek_v3"))
def test_windows_and_states_are_billed_alone(small, kind):  # noqa: F811
    """Layers of other kinds have tables of their own, which are no longer than the row needs either."""
    check(small(kind), Full(), some())


def test_windows_behind_the_last_full_layer_are_billed_alone(small):  # noqa: F811
    """Peaks are noted before the first of their layers comes."""
    kinds = ["full_attention", "sliding_attention", "sliding_attention", "sliding_attention"]
    check(small("gemma3_text", layer_types=kinds), Full(), some())


def test_turns_are_billed_alone(loaded):
    """A conversation is billed for all its turns, and for no other one's."""
    turns = [Turn(tokens=random_tokens(6, seed=4)), Turn(tokens=random_tokens(3, seed=5))]
    check(loaded, POLICIES["snapkv"], some(turns=turns))


@pytest.mark.parametrize("last", [False, True])
def test_a_shared_context_is_billed_for_its_own_question(loaded, last):
    """Of two questions to one context that have answers of unlike length, each is billed for its own, peaks too."""
    context = random_tokens(70)
    asked = [
        request("one", context, random_tokens(3, seed=3), max_new_tokens=60 if last else 2),
        request("it", context, random_tokens(5, seed=4), max_new_tokens=4),
        request("third", context, random_tokens(4, seed=5), max_new_tokens=90),
    ]
    asked = asked[:2] if last else asked[1:]
    together = answers(loaded, Full(), asked, batch_size=2)["it", 0]
    alone = answers(loaded, Full(), [one for one in asked if one.sample_id == "it"])["it", 0]
    assert (together.ledger, together.kept) == (alone.ledger, alone.kept)


def test_what_a_row_does_not_need_is_slack_of_the_store(loaded):
    """Rows, free pages and the slack of tables make up what is allocated; a row has as many table entries as pages."""
    lengths, new = (5, 300), (40, 3)
    with engine(loaded, Full()) as running:
        runner = running.runner
        runner.reserve(rows=2, prompt_tokens=300, new_tokens=40)
        rows = [runner.read(random_tokens(n), new_tokens=m)[0] for n, m in zip(lengths, new, strict=True)]
        for _ in range(40):
            runner.step(rows[:1], [7])
        store, each = runner.store, runner.store.pages.pool.page_bytes + 4
        held = [store.ledger.row_bytes(row) for row in rows]
        free = store.pages.pool.num_free * each
        assert sum(held) + store.ledger.table_slack_bytes + free == store.allocated_bytes
        assert store.ledger.table_slack_bytes > 0
        fixed = [sum(store.ledger.fixed_row_bytes(n, m)) for n, m in zip(lengths, new, strict=True)]
        pages = store.pages.num_pages(torch.tensor(rows)).tolist()
        assert held == [count * each + own for count, own in zip(pages, fixed, strict=True)]
        assert all(own >= 4 * count for count, own in zip(pages, fixed, strict=True))
        runner.close_all()
        assert store.ledger.table_slack_bytes == 0
