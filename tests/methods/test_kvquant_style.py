"""Keys stored before the rotary embedding: what lies in the pages, and what attention sees of it."""

from dataclasses import dataclass
from functools import partial

import pytest
import store_helpers
import torch
from refusals import refused
from store_helpers import filled, make_store, plain_attention, random_layer, step_at

from kvbench.methods.kvquant_style import KVQuantStyle
from kvbench.policy import Policy, Tier

DIM = 16
INV_FREQ = 1.0 / 100.0 ** (torch.arange(0, DIM, 2) / DIM)


rotated = partial(store_helpers.rotated, inv_freq=INV_FREQ)


def inputs(num_tokens: int):
    """Queries of four heads, keys and values of two, before any rotation."""
    return random_layer(num_tokens, 2, 2, num_tokens, DIM)


def read(policy, num_tokens: int, raw_q, raw_k, v):
    """A store that has read a prompt, keys rotated to their positions as a model gives them; also its row."""
    return filled(policy, [(rotated(raw_q, 0), rotated(raw_k, 0), v)], num_tokens, 0.25, inv_freq=INV_FREQ)


def step(store, row, position: int, raw_q, raw_k, v) -> torch.Tensor:
    """Feeds the token at `position`; returns the attention output [Hq, D]."""
    return step_at(store, row, [(rotated(raw_q, 0), rotated(raw_k, 0), v)], position, 0.25)[0]


def in_pages(store, row) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values fp32 [H, n, D] as the pages of a one-layer row hold them, not rotated."""
    lists = store.pages.lists_of(torch.tensor([row]))
    count = int(store.holding.slots_per_tier(lists)[0][0])
    index = torch.arange(count).repeat(len(lists))
    page, slot = store.pages.table.lookup(lists.repeat_interleave(count), 0, index)
    keys, values = store.pages.backend.read_slots(store.pages.pool.pages, store.pages.formats[0], page, slot)
    return keys.unflatten(0, (-1, count)), values.unflatten(0, (-1, count))


@dataclass(kw_only=True)
class Plain(Policy):
    """Keeps everything in one token-axis tier, before the rotary embedding, and has no residual buffer."""

    tier: str = "native"
    position_mode = "pre_rope"

    def __post_init__(self) -> None:
        self.tiers = (Tier.parse(self.tier),)


@pytest.mark.parametrize(
    "policy", [KVQuantStyle(group=8, native=True), KVQuantStyle(group=8, native=True, pre_rope=False), Plain()]
)
@pytest.mark.parametrize("num_tokens", [1, 8, 21])
def test_attention_sees_true_positions(policy, num_tokens):
    """Unquantised, every step equals plain attention on keys rotated by transformers, through buffer and pages."""
    raw_q, raw_k, v = inputs(num_tokens + 20)
    store, row = read(policy, num_tokens, raw_q, raw_k, v)
    q, k = rotated(raw_q, 0), rotated(raw_k, 0)
    for position in range(num_tokens, num_tokens + 20):
        out = step(store, row, position, raw_q, raw_k, v)
        want = plain_attention(q[:, position], k[:, : position + 1], v[:, : position + 1], 0.25)
        assert (out - want).abs().max() < 2e-5


@pytest.mark.parametrize("chunk", [1, 6, 12])
def test_a_later_segment_sees_true_positions(chunk):
    """Without a buffer a segment behind a prompt comes at once: it and the step after it equal plain attention on keys
    rotated by transformers, and its keys lie unrotated."""
    last = 11 + chunk
    raw_q, raw_k, v = inputs(last + 1)
    store, row = read(Plain(), 11, raw_q, raw_k, v)
    q, k = rotated(raw_q, 0), rotated(raw_k, 0)
    out = store.append_chunk(row, 0, *(x[:, 11:last] for x in (q, k, v)), 0.25)
    assert store.takes_chunks and not make_store(KVQuantStyle(group=8), inv_freq=INV_FREQ, head_dim=DIM).takes_chunks
    assert (in_pages(store, row)[0] - raw_k[:, :last]).abs().max() < 1e-5
    want = [plain_attention(q[:, i], k[:, : i + 1], v[:, : i + 1], 0.25) for i in range(11, last + 1)]
    out = torch.cat([out, step(store, row, last, raw_q, raw_k, v)[:, None]], 1)
    assert (out - torch.stack(want, 1)).abs().max() < 2e-5


def test_pages_hold_raw_keys_quantised_per_channel():
    """21 prompt tokens in groups of 8: 16 lie in pages as round((k - min) / scale) of the raw channel over 8 tokens,
    five wait; with the third step the next group follows from the buffer."""
    raw_q, raw_k, v = inputs(40)
    store, row = read(KVQuantStyle(bits=4, group=8), 21, raw_q, raw_k, v)

    def by_hand(x):
        """4-bit codes per channel over groups of 8 tokens, scale and zero in fp16."""
        grouped = x.unflatten(1, (-1, 8))
        low = grouped.amin(2, keepdim=True).half().float()
        scale = ((grouped.amax(2, keepdim=True) - grouped.amin(2, keepdim=True)) / 15).half().float()
        return (((grouped - low) / scale).round().clamp(0, 15) * scale + low).flatten(1, 2)

    keys, _ = in_pages(store, row)
    assert keys.shape[1] == 16 and (keys - by_hand(raw_k[:, :16])).abs().max() < 2e-3
    for position in range(21, 24):
        step(store, row, position, raw_q, raw_k, v)
    keys, values = in_pages(store, row)
    # The buffer is fp16 and rotated: a value near the border between two codes may take the other one, one step away.
    off = (keys - by_hand(raw_k[:, :24])).abs()
    step_size = (raw_k[:, :24].unflatten(1, (-1, 8)).amax(2) - raw_k[:, :24].unflatten(1, (-1, 8)).amin(2)).max() / 15
    assert keys.shape[1] == 24 and off.max() < 1.05 * step_size and (off > 2e-3).float().mean() < 0.02
    assert (values - v[:, :24]).abs().max() < (v.amax(-1) - v.amin(-1)).max() / 15 / 2 + 2e-3


def test_rotation_spoils_channels_that_are_far_from_zero():
    """Keys that differ between channels far more than between tokens: 2 bits before the rotation lose over ten times
    less than after it."""
    raw_q, raw_k, v = inputs(64)
    raw_k = 0.05 * raw_k + 4 * torch.randn(2, 1, DIM)
    errors = {}
    for pre_rope in (True, False):
        store, row = read(KVQuantStyle(bits=2, group=32, pre_rope=pre_rope), 64, raw_q, raw_k, v)
        keys, _ = in_pages(store, row)
        errors[pre_rope] = float(((rotated(keys, 0) if pre_rope else keys) - rotated(raw_k, 0)).pow(2).mean().sqrt())
    assert errors[True] < 0.1 * errors[False]


def test_models_that_cannot_rotate_are_refused():
    """Without plain rotary frequencies the method says what to set instead, and does run with it."""
    with refused("unsupported", None, "KVQuantStyle", "method.pre_rope=false"):
        make_store(KVQuantStyle(), inv_freq=None)
    make_store(KVQuantStyle(pre_rope=False), inv_freq=None)


def test_policies_that_lose_slots_are_refused():
    """A position is known by the slot, so nothing that evicts can be stored before its rotation."""

    class Evicting(Plain):
        acts_in_decode = True

    with refused("method-broken", None, "position_mode='pre_rope'"):
        make_store(Evicting(), inv_freq=INV_FREQ, head_dim=DIM)
