"""What a budget in bytes buys: the largest number of tokens whose bytes, counted by hand, stay within it."""

import pytest
import torch
from refusals import refused
from selection import FULL
from store_helpers import make_store

from kvbench.methods.ada_snapkv import AdaSnapKV
from kvbench.methods.h2o import H2O
from kvbench.methods.minikv import MiniKV
from kvbench.methods.quest import Quest
from kvbench.methods.snapkv import SnapKV
from kvbench.methods.streaming_llm import StreamingLLM
from kvbench.policy import Budget

LAYERS, HEADS, PROMPT = 2, 2, 150
LISTS = LAYERS * HEADS


def store_of(policy):
    """A store of two layers and two heads with room for one prompt."""
    return make_store(policy, num_layers=LAYERS, num_q_heads=HEADS, num_kv_heads=HEADS, head_dim=16, max_tokens=PROMPT)


def fullest(policy, new: int) -> tuple[int, int, int]:
    """Most bytes that a row really holds behind a prompt and along so many steps; tokens it was told, bytes of a page
    per list."""
    torch.manual_seed(0)
    store = store_of(policy)
    row = store.open_row(new_tokens=new)
    for layer in range(LAYERS):
        store.prefill_layer(row, layer, *3 * torch.randn(3, HEADS, PROMPT, 16), 0.25)
    held = [store.ledger.row_bytes(row)]
    for _ in range(new):
        store.begin_step(torch.tensor([row]))
        for layer in range(LAYERS):
            store.attend(layer, *torch.randn(3, 1, HEADS, 16), 0.25)
        store.end_step()
        held.append(store.ledger.row_bytes(row))
    assert sum(store.ledger.itemise(row).values()) == 2 * held[-1]
    page = store.pages.pool.page_bytes + store.pages.pool.free_list.element_size()
    return max(held), int(store.budget.tokens[row]), LISTS * page


POLICIES = {
    "snapkv": lambda budget: SnapKV(budget=budget, window=4),
    "ada": lambda budget: AdaSnapKV(budget=budget, window=4, alpha=0.0),
    "again": lambda budget: SnapKV(budget=budget, window=4, decode_every=5),
    "h2o": lambda budget: H2O(budget=budget),
    "streaming_llm": lambda budget: StreamingLLM(budget=budget, position_mode="absolute"),
    "minikv": lambda budget: MiniKV(budget=budget, residual_tokens=32, depth=2),
    "minikv uniform": lambda budget: MiniKV(budget=budget, residual_tokens=32, allocation="uniform"),
    "k4v2": lambda budget: SnapKV(budget=budget, window=4, tier="k4v2"),
}


def test_states_of_recurrent_layers_are_paid_from_the_budget():
    """Behind them it buys what a budget without them bought."""
    states = 4096
    plain, recurrent = (
        make_store(
            SnapKV(budget=f"{budget}B", window=4),
            num_layers=LAYERS,
            num_q_heads=HEADS,
            num_kv_heads=HEADS,
            head_dim=16,
            max_tokens=PROMPT,
            state_bytes=held,
        ).budget.solve(PROMPT, 20)
        for budget, held in ((20000, 0), (20000 + states, states))
    )
    assert plain == recurrent


@pytest.mark.every(2)
@pytest.mark.parametrize("name", POLICIES)
def test_bytes_stay_within_the_budget_and_use_it(name):
    """Along answers of 0 and 50 tokens (exhaustive: 7 too): never more than asked, and less than a page per list fewer;
    one token more per list would be too much wherever lists hold equally many."""
    make = POLICIES[name]
    for new in (0, 7, 50) if FULL else (0, 50):
        with refused("setting-value", "method.budget", "budget=1B") as caught:
            store_of(make("1B")).budget.solve(PROMPT, new)
        least = int(str(caught.value).split("method.budget=")[1].split("B")[0])
        for more in (0, 2500, 9000):
            budget = least + more
            policy = make(f"{budget}B")
            held, tokens, page_each = fullest(policy, new)
            assert held <= budget
            if policy.most_tokens(tokens, PROMPT, new) < PROMPT + new:
                assert held > budget - page_each
            fit = store_of(policy).budget
            assert tokens == fit.solve(PROMPT, new)
            assert fit.bytes_of(tokens, PROMPT, new) <= budget
            if tokens < PROMPT:
                assert fit.bytes_of(tokens + 1, PROMPT, new) > budget
        with refused("setting-value", "method.budget", f"method.budget={least}B"):
            store_of(make(f"{least - 1}B")).budget.solve(PROMPT, new)


def test_bytes_are_counted_by_hand():
    """Four lists of fp16 slots of 64 bytes in pages of T slots: tables, counters and the solved number are fixed."""
    store = store_of(SnapKV(budget="24KiB", window=4))
    fmt, fixed = store.pages.formats[0], sum(store.ledger.fixed_row_bytes(PROMPT, 20))
    entries = -(-(PROMPT + 20) // fmt.tokens_per_page) + 1
    assert fixed == LISTS * (entries + 1) * 4 + 2 * 8 + 8
    per_list = (24 * 1024 - fixed) // (fmt.page_bytes + 4) // LISTS
    assert store.budget.solve(PROMPT, 20) == per_list * fmt.tokens_per_page - 20
    assert store_of(SnapKV(budget=0.5, window=4)).budget.tokens.numel() == 0


@pytest.mark.parametrize("page_bytes", ["auto", 512])
def test_a_budget_buys_the_same_whatever_the_store_was_made_for(page_bytes):
    """Tables for a longer prompt or answer than a row's are no part of its budget."""
    policy, sizes = SnapKV(budget="24KiB", window=4), {"head_dim": 16, "page_bytes": page_bytes}
    own, longer, later = (
        make_store(policy, max_tokens=prompt, new_tokens=new, **sizes).budget
        for prompt, new in ((PROMPT, 20), (4000, 20), (PROMPT, 4000))
    )
    for prompt, new in ((PROMPT, 20), (40, 7), (3, 0)):
        for tokens in range(1, prompt):
            want = own.bytes_of(tokens, prompt, new)
            assert want == longer.bytes_of(tokens, prompt, new) == later.bytes_of(tokens, prompt, new)
        assert own.solve(prompt, new) == longer.solve(prompt, new) == later.solve(prompt, new)


def test_a_fork_has_its_source_s_tokens_and_steps_keep_to_them():
    """A row that is copied goes on under the same number of tokens."""
    store = make_store(H2O(budget="9KiB"), rows=2, head_dim=16, max_tokens=PROMPT)
    row = store.open_row(new_tokens=20)
    store.prefill_layer(row, 0, *torch.randn(3, 1, PROMPT, 16), 0.25)
    copy = store.fork_row(row)
    rows = torch.tensor([row, copy])
    found = store.view(rows).budget_tokens(Budget.parse("9KiB"))
    assert found.tolist() == [int(store.budget.tokens[row])] * 2 and 0 < found[0] < PROMPT


def test_a_budget_of_reads_counts_slots_alone():
    """Quest holds everything; its bytes are of what steps read."""
    policy = Quest(read_budget="4KiB")
    assert policy.byte_budget is None
    store = make_store(policy, head_dim=16, max_tokens=PROMPT)
    row = store.open_row()
    store.prefill_layer(row, 0, *torch.randn(3, 1, PROMPT, 16), 0.25)
    assert store.view(torch.tensor([row])).budget_tokens(Budget.parse("4KiB")).tolist() == [64]


def test_official_rounding_goes_with_no_bytes():
    """Released code may spend more than its budget."""
    with refused("settings-conflict", "method.official_rounding", "official_rounding=true", "budget=1MiB"):
        AdaSnapKV(budget="1MiB", official_rounding=True)
