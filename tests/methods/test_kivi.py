"""KIVI: which tokens are quantised when, and what attention then reads."""

import pytest
import torch
from refusals import refused
from store_helpers import filled, make_store, plain_attention, random_layer, step_at

from kvbench.methods.kivi import Kivi


def states_of(policy, num_tokens, num_steps):
    """Runs a prompt and steps; returns per stage (keys quantised, in the ring, values quantised, in the ring)."""
    layers = [random_layer(layer, 2, 2, num_tokens + num_steps, 32) for layer in range(2)]
    (store, row), states = filled(policy, layers, num_tokens, 0.25), []
    for step in range(num_steps + 1):
        if step:
            step_at(store, row, layers, num_tokens + step - 1, 0.25)
        ring = store.holding.ring
        fields = torch.stack([ring.num_k, ring.num_tokens - ring.num_k, ring.num_v, ring.num_tokens - ring.num_v], 1)
        assert (fields == fields[0]).all()
        states.append(fields[0].tolist())
    return states


def test_default_states_at_the_edges_of_the_residual():
    """With 128 tokens held, keys saw-tooth between 0 and 127 held and values stay at 128."""
    assert states_of(Kivi(), 127, 3) == [[0, 127, 0, 127], [128, 0, 0, 128], [128, 1, 1, 128], [128, 2, 2, 128]]
    assert states_of(Kivi(bits=4), 128, 1) == [[128, 0, 0, 128], [128, 1, 1, 128]]
    assert states_of(Kivi(), 1, 1) == [[0, 1, 0, 1], [0, 2, 0, 2]]


def quantised(x: torch.Tensor, bits: int) -> torch.Tensor:
    """KIVI's min/max quantiser over the last axis: fp16 scale and minimum, codes from the rounded values."""
    low = x.amin(-1, keepdim=True)
    scale = ((x.amax(-1, keepdim=True) - low) / (2**bits - 1)).half().float()
    low = low.half().float()
    codes = torch.where(scale > 0, (x - low) / scale, 0.0).round().clamp(0, 2**bits - 1)
    return codes * scale + low


def oracle_cache(k, v, num_k, num_v, group, bits):
    """What the store should hold: keys per channel over `group` tokens, values per token over `group` channels."""
    k_seen, v_seen = k.half().float(), v.half().float()
    if num_k:
        old = k[:, :num_k].unflatten(1, (-1, group)).transpose(2, 3)
        k_seen[:, :num_k] = quantised(old, bits).transpose(2, 3).flatten(1, 2)
    if num_v:
        old = v[:, :num_v].unflatten(2, (-1, group))
        v_seen[:, :num_v] = quantised(old, bits).flatten(2)
    return k_seen, v_seen


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize(("num_tokens", "residual"), [(1, 8), (16, 16), (19, 8), (45, 16), (70, 32)])
def test_attention_reads_what_kivi_would_hold(bits, num_tokens, residual):
    """Each step attends over old groups dequantised and the residual in fp16, the token that fills it included."""
    total = num_tokens + 40
    # Values that fp16 holds exactly, because the ring rounds to fp16 before it quantises and the oracle does not.
    q, k, v = prompt = [x.half().float() for x in random_layer(num_tokens, 2, 3, total, 16)]
    store, row = filled(Kivi(bits=bits, group=8, residual_tokens=residual), [prompt], num_tokens, 0.25)
    num_k, num_v = num_tokens - num_tokens % residual, max(0, num_tokens - residual)
    for at in range(num_tokens, total):
        (out,) = step_at(store, row, [prompt], at, 0.25)
        seen = oracle_cache(k[:, : at + 1], v[:, : at + 1], num_k, num_v, 8, bits)
        assert (out - plain_attention(q[:, at], *seen, 0.25)).abs().max() < 1e-4
        num_k = at + 1 if at + 1 - num_k == residual else num_k  # keys and values leave after this attention
        num_v = max(num_v, at + 1 - residual)


def test_a_constant_channel_stays_what_it_is():
    """A group whose keys and values are all 0.5 has scale 0: it reads back as 0.5, without NaN."""
    q, k = torch.zeros(1, 24, 16), torch.full((1, 24, 16), 0.5)
    store, row = filled(Kivi(group=8, residual_tokens=8), [(q, k, k)])
    tiers, ring = store.holding.layer(torch.tensor([row]), 0)
    keys, values, live = store.pages.backend.gather_dense(store.pages.pool.pages, tiers, ring)
    assert live.sum() == 24
    assert (keys[live] == 0.5).all() and (values[live] == 0.5).all()


def test_the_residual_is_billed_in_16_bits():
    """Of 192 tokens and a residual of 64 all keys are quantised, and the newest 64 values are not."""
    store, row = filled(Kivi(bits=2, group=16, residual_tokens=64), [random_layer(0, 1, 1, 192, 64)])
    ring = store.holding.ring
    assert (int(ring.num_k[0]), int(ring.num_v[0])) == (192, 128)
    assert store.ledger.itemise(row)["residual_bytes"] == 64 * 64 * 2


def test_a_group_that_does_not_divide_the_head_is_refused():
    """A value group must divide the head dim of the model at hand."""
    with refused("setting-value", "method.group", "method.group=32", "80"):
        make_store(Kivi(), head_dim=80)
