"""Quest: bounds of pages by hand and by an oracle, and attention that is given only the chosen pages."""

import pytest
import torch
from refusals import refused
from store_helpers import make_store, plain_attention, random_layer, step_one

from kvbench.cache.layout import compile_formats
from kvbench.cache.options import StoreOptions
from kvbench.kernels.backend import REFERENCE, Backend
from kvbench.kernels.reference.pages import region
from kvbench.methods.quest import Quest
from kvbench.runs.verdict import complaint

DIM = 16


def filled(policy, lengths: list[int], total: int, group: int = 3):
    """A store whose rows have read prompts of the given lengths, with what was and will be read; one layer."""
    store = make_store(policy, num_q_heads=2 * group, num_kv_heads=2, head_dim=DIM, rows=len(lengths))
    tensors, rows = [], []
    for seed, length in enumerate(lengths):
        q, k, v = random_layer(total + seed, 2, group, total, DIM)
        tensors.append((2 * q, k, v))
        rows.append(store.open_row())
        store.prefill_layer(rows[-1], 0, *(x[:, :length] for x in tensors[-1]), 0.25)
    return store, rows, tensors


def step(store, rows: list[int], tensors, at: list[int]) -> torch.Tensor:
    """One decode step of all rows, each at its own position; returns [S, Hq, D]."""
    q, k, v = (torch.stack([t[i][:, p] for t, p in zip(tensors, at, strict=True)]) for i in range(3))
    store.begin_step(torch.tensor(rows))
    out = store.attend(0, q, k, v, 0.25)
    store.end_step()
    return out


def read_by_hand(q, k, size: int, count: int) -> list[list[int]]:
    """Tokens that each KV head reads for q [Hq, D] over k [H, n, D]: the newest page and the best others."""
    chosen = []
    for head, keys in enumerate(k):
        pages = [keys[i : i + size] for i in range(0, len(keys), size)]
        group = q.view(len(k), -1, q.shape[-1])[head]
        bounds = [max(float(torch.maximum(g * p.amin(0), g * p.amax(0)).sum()) for g in group) for p in pages[:-1]]
        best = sorted(range(len(bounds)), key=lambda i: (-bounds[i], i))[: count - 1]
        tokens = [t for page in sorted([*best, len(pages) - 1]) for t in range(page * size, (page + 1) * size)]
        chosen.append([t for t in tokens if t < len(keys)])
    return chosen


def test_bounds_choose_the_page_that_the_query_points_to():
    """Three pages of 8 keys with channels 0 and 1 in [1, 2] x [-3, 0], [-5, 0.5] x [0, 1], 0 x 0, then the newest.

    Bounds for the query (1, -1) are 2 + 3 = 5, 0.5 + 0 and 0; for (-1, 1) they are -1 + 0, 5 + 1 = 6 and 0. Values are
    the page's unit vector, so the output shows which pages were read: the newest and the one with the largest bound.
    """
    store = make_store(Quest(read_budget=16, page_tokens=8, min_pages=1, dense_layers=0), head_dim=DIM)
    k, v = torch.zeros(1, 24, DIM), torch.eye(DIM)[torch.arange(24) // 8][None]
    k[0, [0, 5], 0], k[0, 1:5, 0], k[0, 6:8, 0], k[0, 3, 1] = torch.tensor([1.0, 2.0]), 1.5, 1.5, -3.0
    k[0, 8, 0], k[0, 9, 0], k[0, 10, 1] = -5.0, 0.5, 1.0
    row = store.open_row()
    store.prefill_layer(row, 0, torch.zeros(1, 24, DIM), k, v, 1.0)
    for direction, best in (((1.0, -1.0), 0), ((-1.0, 1.0), 1)):
        q = torch.zeros(1, 1, DIM)
        q[0, 0, :2] = torch.tensor(direction)
        (out,) = step_one(store, row, [(q[0], torch.zeros(1, DIM), torch.eye(DIM)[3:4])])
        assert (out[0, 0] > 0).nonzero()[:, 0].tolist() == [best, 3]


def test_of_two_pages_one_may_be_read():
    """The newest, with the token that the step has written."""
    policy = Quest(read_budget=8, page_tokens=8, min_pages=1, dense_layers=0, tier="native")
    store, rows, tensors = filled(policy, [9], 20)
    (out,) = step(store, rows, tensors, [9])
    q, k, v = tensors[0]
    torch.testing.assert_close(out, plain_attention(q[:, 9], k[:, 8:10], v[:, 8:10], 0.25))


@pytest.mark.parametrize("dense", [0, 1, 2, 5])
def test_first_layers_read_everything(dense):
    """And the others the newest page alone, where the budget is of one."""
    policy = Quest(read_budget=8, page_tokens=8, min_pages=1, dense_layers=dense, tier="native")
    store = make_store(policy, num_layers=3, num_q_heads=4, num_kv_heads=2, head_dim=DIM)
    layers = [random_layer(seed, 2, 2, 31, DIM) for seed in range(3)]
    row = store.open_row()
    for layer, (q, k, v) in enumerate(layers):
        store.prefill_layer(row, layer, q[:, :30], k[:, :30], v[:, :30], 0.25)
    outputs = step_one(store, row, [tuple(x[:, 30] for x in tensors) for tensors in layers], 0.25)
    for layer, (out, (q, k, v)) in enumerate(zip(outputs, layers, strict=True)):
        first = 0 if layer < dense else 24
        torch.testing.assert_close(out[0], plain_attention(q[:, 30], k[:, first:], v[:, first:], 0.25))


@pytest.mark.parametrize("size", [8, 16])
@pytest.mark.parametrize("group", [3, 1, 7])
def test_steps_equal_attention_over_the_chosen_tokens(size, group):
    """30 steps of a long and a short row with 3, 1 and 7 query heads per KV head: outputs are those of an oracle."""
    count, lengths = 3, [121, 5]
    policy = Quest(read_budget=count * size, page_tokens=size, min_pages=1, dense_layers=0, tier="native")
    store, rows, tensors = filled(policy, lengths, 160, group)
    left_out = 0
    for number in range(30):
        at = [length + number for length in lengths]
        out = step(store, rows, tensors, at)
        for (q, k, v), position, own in zip(tensors, at, out, strict=True):
            tokens = read_by_hand(q[:, position], k[:, : position + 1], size, count)
            for head, held in enumerate(tokens):
                part = slice(head * group, (head + 1) * group)
                want = plain_attention(q[part, position], k[head : head + 1, held], v[head : head + 1, held], 0.25)
                assert (own[part] - want).abs().max() < 1e-5
                left_out += position + 1 - len(held)
    assert left_out > 1000


def test_attention_is_given_only_what_it_reads():
    """No mask: the kernel gets three page ids per list instead of ten, and the slots that lie in them."""
    policy = Quest(read_budget=24, page_tokens=8, dense_layers=0)
    store, rows, tensors = filled(policy, [77], 100)
    seen = []

    class Watching(Backend):
        def paged_decode(self, q, pages, tiers, *arguments, **named):
            seen.append((tiers[0].ids.clone(), tiers[0].num_k.clone()))
            return super().paged_decode(q, pages, tiers, *arguments, **named)

    store.pages.backend = Watching()
    step(store, rows, tensors, [77])
    ((ids, num_k),) = seen
    assert ids.shape == (1, 2, 3) and num_k.tolist() == [[22, 22]]  # two whole pages, and 6 of 8 in the tenth
    step(store, rows, tensors, [78])
    assert seen[1][1].tolist() == [[23, 23]]


def test_rows_may_read_different_shares():
    """A ratio is of each row's own prompt: 6 and 3 of their pages of 8, the newest included, in one call."""
    store, rows, tensors = filled(Quest(read_budget=0.5, page_tokens=8, dense_layers=0), [96, 40], 120)
    step(store, rows, tensors, [96, 40])
    bounds = 2 * DIM * 2
    for row, whole, prompt in zip(rows, (5, 2), (96, 40), strict=True):
        meter, pages = store.ledger.meters[row], prompt // 8 + 1
        assert meter.read_bytes == 2 * ((whole * 8 + 1) * 4 * DIM + pages * bounds)
        assert meter.readable_bytes == 2 * (prompt + 1) * 4 * DIM


def test_a_share_of_what_was_seen_grows_with_the_answer():
    """Half of the tokens held in each step, in whole pages rounded down, three at least: a page more is read as soon as
    the answer has brought sixteen tokens."""
    policy = Quest(read_budget="50%seen", page_tokens=8, dense_layers=0)
    lengths, bounds = [45, 3], 2 * DIM * 2
    store, rows, tensors = filled(policy, lengths, 100)
    before, counts = [0, 0], set()
    for number in range(50):
        at = [length + number for length in lengths]
        step(store, rows, tensors, at)
        for index, position in enumerate(at):
            seen, meter = position + 1, store.ledger.meters[rows[index]]
            pages, read = -(-seen // 8), max(3, seen // 2 // 8)
            tokens = seen - 8 * max(0, pages - read)  # the newest page is always read
            assert tokens <= max(seen // 2, 3 * 8)
            want = 2 * (tokens * 4 * DIM + (pages * bounds if pages > read else 0))
            assert meter.read_bytes - before[index] == want
            before[index] = meter.read_bytes
            counts.add(read)
    assert counts == {3, 4, 5}


def test_what_is_read_is_reported():
    """The share of bytes read, bounds included, over all steps; exactly 1 in layers that read everything."""
    for dense, expected in ((1, 1.0), (0, None)):
        policy = Quest(read_budget=24, page_tokens=8, dense_layers=dense)
        store, rows, tensors = filled(policy, [80], 100)
        for position in range(80, 90):
            step(store, rows, tensors, [position])
        _, kept = store.ledger.report(rows[0])
        if expected is None:
            slots = [16 + position % 8 + 1 for position in range(80, 90)]
            pages = [position // 8 + 1 for position in range(80, 90)]
            expected = (sum(slots) * 4 * DIM + sum(pages) * 4 * DIM) / (sum(range(81, 91)) * 4 * DIM)
        assert kept["read_ratio"] == pytest.approx(expected) and kept["slot_ratio"] == 1.0
        assert complaint(policy, {"kept": kept}) is None
    assert "attention read 1.050" in complaint(policy, {"kept": {"read_ratio": 1.05}})


def test_bounds_follow_every_way_of_writing():
    """Prompt, appended segment and steps, in pages that another row has used before: smallest and largest key of each
    page, in fp16 as the keys are stored, and billed."""
    store, rows, _ = filled(Quest(read_budget=24, page_tokens=8), [50], 60)
    store.close_row(rows[0])
    row, (q, k, v) = store.open_row(), (torch.randn(6, 60, DIM), *0.1 * torch.randn(2, 2, 60, DIM))
    store.prefill_layer(row, 0, q[:, :21], k[:, :21], v[:, :21], 0.25)
    store.append_chunk(row, 0, q[:, 21:35], k[:, 21:35], v[:, 21:35], 0.25)
    for position in range(35, 43):
        step(store, [row], [(q, k, v)], [position])
    lists = store.pages.lists_of(torch.tensor([row]))
    ids = store.pages.table.page_ids(lists, 0, 6)
    for name, want in (("k_low", torch.Tensor.amin), ("k_high", torch.Tensor.amax)):
        held = region(store.pages.pool.pages, store.pages.formats[0], name)[ids]
        for page in range(6):
            assert torch.equal(held[:, page], want(k[:, page * 8 : min(43, page * 8 + 8)].half(), 1))
    items = store.ledger.itemise(row)
    assert items["track_bytes"] == 2 * 6 * 2 * DIM * 2 and items["payload_bytes"] == 2 * 43 * 4 * DIM


def test_no_logit_exceeds_its_bound():
    """With one query head and count 2, the page of the largest logit before the newest page has to have a bound at
    least as large as that logit; the chosen page therefore has one too."""
    store, rows, tensors = filled(Quest(page_tokens=8, tier="native"), [64], 80, group=1)
    lists = store.pages.lists_of(torch.tensor(rows))
    (tier,), _ = store.holding.layer(torch.tensor(rows), 0, [8])
    q, k, _ = tensors[0]
    low, high = (
        region(store.pages.pool.pages, tier.fmt, n)[store.pages.table.page_ids(lists, 0, 8)]
        for n in ("k_low", "k_high")
    )
    bound = torch.maximum(q[:, 70, None] * low, q[:, 70, None] * high).sum(-1)
    logits = torch.einsum("hd,hnd->hn", q[:, 70], k[:, :64]).unflatten(1, (8, 8))
    assert (bound >= logits.amax(-1) - 1e-4).all()
    chosen = REFERENCE.choose_pages(q[None, :, 70], store.pages.pool.pages, tier, torch.tensor([2]), 2, "max")
    best = bound[:, :7].argmax(1)
    ids = tier.ids[0]
    assert chosen.ids[0].tolist() == [[int(ids[h, best[h]]), int(ids[h, 7])] for h in range(2)]


def test_what_does_not_go_with_bounds_is_refused():
    """A policy that evicts and another page size are refused with the rule."""

    class Evicting(Quest):
        acts_in_decode = True

    with pytest.raises(ValueError, match="Evicting: pages are read by bounds only where every token stays"):
        make_store(Evicting())
    store = make_store(Quest())
    with refused("settings-conflict", "store.page_bytes", "page_bytes=4096", "16"):
        compile_formats(Quest(), store.shape, StoreOptions(page_bytes=4096))
