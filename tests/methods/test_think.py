"""ThinK: which channels go, what attention sees then, and what is held; with the parts of the cache that it needs."""

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from refusals import refused
from store_helpers import filled, make_store, plain_attention, random_layer, step_at

from kvbench.cache.holding import Channels
from kvbench.cache.layout import compile_formats
from kvbench.cache.options import StoreOptions
from kvbench.kernels.format import SlotFormat
from kvbench.methods.think import ChannelLogits, ThinK
from kvbench.policy import Compaction, Policy, PrefillPlan, Probability, ScoreSpec, Tier, check_chunk

LAYERS, HEADS, GROUP, DIM, WINDOW, SCALE = 2, 2, 3, 20, 6, 0.3


def tokens(count: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Queries [L, Hq, n, D], keys and values [L, H, n, D], with channels of very different sizes in every list."""
    make = torch.Generator().manual_seed(seed)
    q = torch.randn(LAYERS, HEADS * GROUP, count, DIM, generator=make)
    k, v = (torch.randn(LAYERS, HEADS, count, DIM, generator=make) for _ in range(2))
    sizes = torch.rand(LAYERS, HEADS, 1, DIM, generator=torch.Generator().manual_seed(9)) * 3  # the lists' own
    return q, k * sizes, v


def read_prompt(policy: Policy, length: int, seed: int = 0, **options):
    """A store with one prompt, its row, and the prompt."""
    prompt = tokens(length, seed)
    return *filled(policy, list(zip(*prompt, strict=True)), scale=SCALE, **options), prompt


def read(store, prompt) -> int:
    """Reads a prompt into a row of its own."""
    row = store.open_row()
    for layer, own in enumerate(zip(*prompt, strict=True)):
        store.prefill_layer(row, layer, *own, SCALE)
    return row


def thinned(prompt, keep: float, window: int = WINDOW) -> torch.Tensor:
    """The oracle: keys [L, H, n, D] with 0 where a channel goes, as the official code says it, list by list."""
    q, k, _ = prompt
    k = k.clone()
    before = max(0, k.shape[2] - window)
    for layer in range(LAYERS):
        for head in range(HEADS):
            own = q[layer, head * GROUP : (head + 1) * GROUP, -window:].double()
            worth = own.pow(2).mean(1).sum(0) * prompt[1][layer, head].double().pow(2).mean(0)
            pruned = worth.topk(DIM - math.ceil(keep * DIM - 1e-9), largest=False).indices
            k[layer, head, :before, pruned] = 0.0
    return k


def step(store, row: int, new) -> list[torch.Tensor]:
    """A decode step by token 0 of `new`."""
    return step_at(store, row, list(zip(*new, strict=True)), 0, SCALE)


def expected(prompt, keys: torch.Tensor, news) -> list[torch.Tensor]:
    """What the last of some steps gives, layer by layer."""
    k = torch.cat([keys, *(new[1] for new in news)], 2)
    v = torch.cat([prompt[2], *(new[2] for new in news)], 2)
    return [plain_attention(news[-1][0][layer, :, 0], k[layer], v[layer], SCALE) for layer in range(LAYERS)]


@pytest.mark.parametrize(
    ("keep", "length"),
    [*((keep, 40) for keep in (1.0, 0.6, 0.25, 0.01)), *((0.1, WINDOW + more) for more in (1 - WINDOW, -1, 0, 1))],
)
def test_attention_misses_the_weakest_channels_of_the_prompt(keep, length):
    """Steps equal attention over keys whose weakest channels are 0; the window's and new tokens' keys are whole, and so
    are prompts no longer than the window."""
    store, row, prompt = read_prompt(ThinK(keep_channels=keep, window=WINDOW, native=True), length)
    keys, news = thinned(prompt, keep), []
    assert bool((keys == 0).any()) == (keep < 1 and length > WINDOW) and bool((keys[:, :, -WINDOW:] != 0).all())
    for index in range(3):
        news.append(tokens(1, seed=index + 1))
        for got, want in zip(step(store, row, news[-1]), expected(prompt, keys, news), strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=2e-6)


def test_rows_have_orders_of_their_own_and_forks_take_theirs_along():
    """Two prompts in one batch, and a fork whose source is closed and taken by another prompt."""
    store, row, prompt = read_prompt(ThinK(keep_channels=0.5, window=WINDOW, native=True), 30, rows=3)
    other = tokens(25, seed=7)
    second, fork = read(store, other), store.fork_row(row)
    store.close_row(row)
    third = read(store, tokens(50, seed=8))
    assert third == row
    new = tokens(2, seed=4)
    news = [tuple(x[:, :, index : index + 1] for x in new) for index in range(2)]
    store.begin_step(torch.tensor([fork, second]))
    for layer in range(LAYERS):
        out = store.attend(layer, *(x[layer].transpose(0, 1) for x in new), SCALE)
        for got, text, one in zip(out, (prompt, other), news, strict=True):
            want = expected(text, thinned(text, 0.5), [one])[layer]
            torch.testing.assert_close(got, want, rtol=0, atol=2e-6)
    store.end_step()


def test_a_later_segment_sees_the_same_keys():
    """A segment that comes at once attends to pruned keys in its list's order, and is stored whole."""
    store, row, prompt = read_prompt(ThinK(keep_channels=0.5, window=WINDOW, native=True), 30)
    segment, keys = tokens(4, seed=5), thinned(prompt, 0.5)
    assert store.takes_chunks
    for layer in range(LAYERS):
        out = store.append_chunk(row, layer, *(x[layer] for x in segment), SCALE)
        for index in range(4):
            k, v = (
                torch.cat([own[layer], x[layer, :, : index + 1]], 1)
                for own, x in ((keys, segment[1]), (prompt[2], segment[2]))
            )
            want = plain_attention(segment[0][layer, :, index], k, v, SCALE)
            torch.testing.assert_close(out[:, index], want, rtol=0, atol=2e-6)
    new = tokens(1, seed=6)
    for got, want in zip(step(store, row, new), expected(prompt, keys, [segment, new]), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=2e-6)


def test_snapkv_chooses_the_tokens_that_stay():
    """With `keep_tokens` the window's attention, max-pooled, says which tokens before it stay, thin."""
    store, row, prompt = read_prompt(ThinK(keep_channels=0.5, window=WINDOW, keep_tokens=0.5, native=True), 40)
    q, k, v = prompt
    new, keys = tokens(1, seed=3), thinned(prompt, 0.5)
    outs = step(store, row, new)
    for layer in range(LAYERS):
        for head in range(HEADS):
            own = q[layer, head * GROUP : (head + 1) * GROUP, -WINDOW:]
            logits = own @ k[layer, head].T * SCALE
            logits = logits + torch.full((WINDOW, 40), float("-inf")).triu(40 - WINDOW + 1)
            score = logits.softmax(-1).sum(1).mean(0)[: 40 - WINDOW]
            score = torch.nn.functional.max_pool1d(score[None], 7, 1, 3)[0]
            best = score.sort(descending=True, stable=True).indices[: 20 - WINDOW]  # a pool makes ties
            stays = torch.cat([best, torch.arange(40 - WINDOW, 40)])
            have = (
                torch.cat([x[layer, head, stays], y[layer, head]])[None]
                for x, y in zip((keys, v), new[1:], strict=True)
            )
            want = plain_attention(new[0][layer, head * GROUP : (head + 1) * GROUP, 0], *have, SCALE)
            torch.testing.assert_close(outs[layer][head * GROUP : (head + 1) * GROUP], want, rtol=0, atol=2e-6)
    assert store.ledger.report(row)[1]["slots_per_tier"] == [(WINDOW + 1) * 4, (20 - WINDOW) * 4]


# Bytes ----


@pytest.mark.parametrize("keep", [1.0, 0.6, 0.25])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_bytes_are_the_closed_formula(keep, head_dim):
    """2 d of a value and 2 ceil(d keep) of a thin key; the order is a byte per channel, layer and head, and all of it
    is what the tensors have."""
    policy = ThinK(keep_channels=keep)
    layers, length, new = [random_layer(layer, HEADS, 2, 305, head_dim) for layer in range(LAYERS)], 300, 5
    store, row = filled(policy, layers, length, rows=3)
    for at in range(length, length + new):
        step_at(store, row, layers, at)
    items, lists = store.ledger.itemise(row), LAYERS * HEADS
    thin, whole = length - 32, 32 + new
    kept = math.ceil(head_dim * keep - 1e-9)
    assert items["payload_bytes"] == lists * 2 * (thin * (kept + head_dim) + whole * 2 * head_dim)
    assert items["quant_meta_bytes"] == items["track_bytes"] == items["residual_bytes"] == 0
    size = store.pages.pool.page_bytes
    per_page = [size // (16 * (kept_k + head_dim)) * 8 for kept_k in (head_dim, kept)]
    pages = lists * sum(-(-count // each) for count, each in zip((whole, thin), per_page, strict=True))
    assert items["slack_bytes"] == pages * size - items["payload_bytes"]
    orders = store.holding.channels
    assert isinstance(orders, Channels) and orders.allocated_bytes == 3 * lists * head_dim
    room = length + 128  # of the row, and no more of what the store was made for
    tables = lists * 4 * (-(-room // min(per_page)) + 2 + 2) + store.counters.row_bytes
    assert items["table_bytes"] == tables + lists * head_dim
    assert items["resident_bytes"] == pages * (size + 4) + tables + lists * head_dim
    held = store.pages.pool.allocated_bytes + store.pages.table.allocated_bytes + store.counters.allocated_bytes
    assert store.allocated_bytes == held + orders.allocated_bytes


def test_thin_pages_hold_nothing_of_what_was_dropped():
    """Half of the channels, whose bytes are the same whatever the dropped ones were: nothing is masked."""
    prompt = tokens(40)
    dropped = (thinned(prompt, 0.5) == 0) & (torch.arange(40) < 40 - WINDOW)[:, None]
    louder = prompt[1].masked_fill(dropped, 0.0)
    louder[dropped] = prompt[1][dropped] * 0.9  # not so much that another channel goes
    found = []
    for keys in (prompt[1], louder):
        store, _, _ = read_prompt(ThinK(keep_channels=0.5, window=WINDOW), 1, rows=2)
        row = read(store, (prompt[0], keys, prompt[2]))
        lists, slots = store.pages.lists_of(torch.tensor([row])), torch.arange(40 - WINDOW)
        each = lists.repeat_interleave(len(slots))
        page, slot = store.pages.table.lookup(each, 1, slots.repeat(len(lists)))
        found.append(store.pages.field(1, "k_codes")[page, :, slot])  # [slots of all lists, channels]
        assert found[-1].shape[1] == 10
    assert torch.equal(*found)


@pytest.mark.parametrize("keep", [0.6, 0.3])
def test_a_projection_bills_the_same(keep):
    """`kvbench bytes` counts what a store holds, orders included."""
    from kvbench.sizing.project import project

    store, row, _ = read_prompt(ThinK(keep_channels=keep, window=WINDOW), 60)
    step(store, row, tokens(1, seed=1))
    shape = replace(store.shape, dtype=torch.float32)
    (least, most) = project(ThinK(keep_channels=keep, window=WINDOW), shape, 60, 1)
    mine = store.ledger.itemise(row)
    assert least == most
    for item in ("payload_bytes", "slack_bytes", "free_list_bytes"):
        assert least.items[item] == mine[item]


@pytest.mark.parametrize(("head_dim", "item_bytes"), [(64, 1), (256, 1), (258, 2)])
def test_an_order_takes_one_byte_a_channel_where_that_numbers_all(head_dim, item_bytes):
    """The last channel has number 255 of 256."""
    shape = make_store(ThinK(window=WINDOW), num_layers=2, head_dim=head_dim).shape
    channels, order = Channels(1, shape), torch.arange(head_dim).flip(0)[None]
    channels.hold(0, 1, order)
    assert channels.row_bytes == 2 * head_dim * item_bytes
    assert torch.equal(channels.of(torch.tensor([0]))[1][0, 1], order)


# What is refused ----


@dataclass(frozen=True)
class Plain(Probability):
    """Measures no channels."""


@dataclass(frozen=True)
class Crooked(Probability):
    """Measures channels, of too few."""

    in_chunks: ClassVar[bool] = False

    def of_channels(self, seen):
        return seen.k.sum(1)[:, 1:]


@dataclass(kw_only=True)
class Declared(Policy):
    """A method of the given declarations."""

    in_chunks = False


def declared(**declarations) -> Policy:
    """A policy with thin keys, and with other declarations."""
    policy = Declared()
    policy.tiers = (Tier(), Tier(k_kept=0.5))
    policy.score = ScoreSpec(statistic=ChannelLogits(), prefill_queries=4)
    for name, value in declarations.items():
        setattr(policy, name, value)
    return policy


REFUSED = {
    "statistic": ({"score": ScoreSpec(statistic=Plain(), prefill_queries=4)}, "Plain does not measure them"),
    "chunks": ({"in_chunks": True}, "or read a prompt in chunks"),
    "compact": ({"compaction": Compaction(4)}, "it cannot measure keys later"),
    "position": ({"position_mode": "pre_rope"}, "which are stored with their positions"),
    "granularity": ({"granularity": "q_head"}, "orders the channels of KV heads' keys"),
    "turned": ({"tiers": (Tier(rotated="keys"), Tier(k_kept=0.5))}, "mixes the key channels"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_go_with_an_order_of_channels_is_refused(case):
    """Each in a sentence, before anything is read."""
    changes, said = REFUSED[case]
    shape = make_store(ThinK()).shape
    with pytest.raises(ValueError, match=said):
        compile_formats(declared(**changes), shape, StoreOptions())
    assert len(compile_formats(declared(), shape, StoreOptions())) == 2


def test_settings_that_do_not_fit_are_refused():
    """Rotation, chunks, coded keys of few channels, and shares out of range."""
    with refused("settings-conflict", "store.rotation", "store.rotation=hadamard", "ThinK"):
        make_store(ThinK(), rotation="hadamard")
    with refused("settings-conflict", "prefill.chunk", "prefill.chunk=64", "ThinK"):
        check_chunk(ThinK(), 64)
    for kept, bits, rule in ((0.0, 16, "must be a number"), (1.5, 16, "must be a number"), (0.5, 8, "with k_bits=8")):
        with pytest.raises(ValueError, match=rf"k_kept={kept} {rule}"):
            Tier(k_kept=kept, k_bits=bits)
    with pytest.raises(ValueError, match="k_channels=5 goes with keys of 16 bits, not with k_bits=8"):
        SlotFormat(head_dim=16, k_bits=8, v_bits=8, k_channels=5)
    with pytest.raises(ValueError, match=r"k_channels=17 must be 0 \(all\) to head_dim=16"):
        SlotFormat(head_dim=16, k_bits=16, v_bits=16, k_channels=17)
    assert Tier(k_kept=0.6).name == "k16v16-keys0.6" and Tier(k_kept=0.5, native=True).name == "native-keys0.5"


@pytest.mark.parametrize(
    ("channels", "said"),
    [
        (None, "channels is None, but it must be a tensor"),
        (torch.zeros(1, HEADS, DIM), "channels is float32, but it must hold integers"),
        (torch.zeros(1, HEADS, DIM, dtype=torch.int64), "channels must name every key channel of a list once"),
    ],
)
def test_a_plan_orders_all_channels(channels, said):
    """Each of them once, in every list; and only where the statistic measures them."""

    class Wrong(ThinK):
        def plan_prefill(self, view):
            return PrefillPlan(tier_of=view.filled(0), channels=channels)

    with pytest.raises(ValueError, match=said):
        read_prompt(Wrong(window=WINDOW), 20)

    class Extra(Policy):
        def plan_prefill(self, view):
            return PrefillPlan(tier_of=view.filled(0), channels=torch.arange(DIM).expand(1, HEADS, DIM))

    with pytest.raises(ValueError, match="the method's statistic measures none"):
        read_prompt(Extra(), 20)


def test_a_statistic_measures_every_channel():
    """And its answer has one number for each."""
    with refused("method-broken", None, "Crooked.of_channels", "19", "20"):
        read_prompt(declared(score=ScoreSpec(statistic=Crooked(), prefill_queries=4)), 20)

    class Looks(Policy):
        def plan_prefill(self, view):
            return PrefillPlan(tier_of=view.filled(0), channels=view.channels)

    with pytest.raises(ValueError, match="the view of a prompt has no channels"):
        read_prompt(Looks(), 20)
