"""Scales of fp8 that a calibration found, per tensor and per head: vLLM's codes bit by bit, and attention over them."""

import numpy as np
import pytest
import torch
from refusals import refused
from store_helpers import make_store, plain_attention, random_layer, step_at

from kvbench.errors import NotForModel
from kvbench.kernels.backend import REFERENCE
from kvbench.methods.uniform import Uniform

HEADS, GROUP, LAYERS, DIM, SCALE = 2, 3, 3, 24, 0.2
SCALES = {  # numbers up to 4: of the first layer some beyond the largest float, and some on the border of two
    "tensor": [[2.0**-8, 0.02], [0.01, 0.001], [0.05, 0.08]],
    "head": [[0.004, 2.0**-7, 0.5, 0.04], [0.01, 0.02, 0.03, 0.04], [0.01, 7.0, 0.02, 0.3]],
}
TIERS = "fp8 fp16 fp16/fp8"  # the second layer and a head of the third one have no scales


def through_e4m3(x: torch.Tensor, scale: float) -> torch.Tensor:
    """What numbers are stored as, times the scale: the nearest float of e4m3, the even one of two, up to 448."""
    sizes = [(8 + m) * 2.0 ** (e - 10) if e else m * 2.0**-9 for e in range(16) for m in range(8)][:127]
    table, scaled = np.array(sizes), x.numpy() / np.float32(scale)
    between = (table[1:] + table[:-1]) / 2
    code = np.searchsorted(between, np.abs(scaled), "left")
    tie = np.isin(np.abs(scaled), between)
    code = np.where(tie & (code % 2 == 1), code + 1, code)
    return torch.from_numpy(np.copysign(table[code], scaled).astype(np.float32) * np.float32(scale))


def of_head(per: str, layer: int, head: int) -> tuple[float, float]:
    """The scale of a head's keys, and that of its values."""
    row = SCALES[per][layer]
    return (row[0], row[1]) if per == "tensor" else (row[head], row[HEADS + head])


def is_plain(layer: int, head: int) -> bool:
    """The head is stored in 16 bits."""
    return (layer, head) in ((1, 0), (1, 1), (2, 0))


def stored(per: str, layer: int, k: torch.Tensor, v: torch.Tensor, plain: bool = True) -> tuple[torch.Tensor, ...]:
    """What keys and values [H, n, D] of a layer stand for once they are stored."""
    return tuple(
        torch.stack(
            [
                x[head].half().float()
                if plain and is_plain(layer, head)
                else through_e4m3(x[head], of_head(per, layer, head)[side])
                for head in range(HEADS)
            ]
        )
        for side, x in enumerate((k, v))
    )


def policy(per: str) -> Uniform:
    """fp8 with scales, and 16 bits in places."""
    return Uniform(tier="fp8", scales=SCALES[per], tiers_by_layer=TIERS)


def store_of(policy: Uniform, backend: str = "torch", **more):
    """A store of three layers."""
    shape = {"num_layers": LAYERS, "num_q_heads": HEADS * GROUP, "num_kv_heads": HEADS, "head_dim": DIM}
    return make_store(policy, backend=backend, **shape | more)


def inputs() -> list[tuple[torch.Tensor, ...]]:
    """Queries, keys and values of all layers, with numbers on the border between two floats and beyond the largest."""
    layers = [random_layer(layer, HEADS, GROUP, 61, DIM) for layer in range(LAYERS)]
    for layer, (_, k, v) in enumerate(layers):
        for x, side in ((k, 0), (v, 1)):
            x[:, 3] = torch.arange(DIM) * (17 / 16) * of_head("tensor", layer, 0)[side]  # 17/16 lies between 1 and 9/8
            x[:, 4, :3] = 900 * of_head("tensor", layer, 0)[side]
    return layers


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("per", SCALES)
def test_codes_are_vllm_s_and_a_step_equals_an_oracle(per: str, backend: str):
    """Numbers over the scale in fp32, the nearest float, times the scale: bit by bit in the pages, and a step over them
    and over a segment behind them is a softmax in fp64. A layer in 16 bits has no scale."""
    layers, store = inputs(), store_of(policy(per), backend)
    row, length, end = store.open_row(), 50, 57
    for layer, (q, k, v) in enumerate(layers):
        store.prefill_layer(row, layer, q[:, :length], k[:, :length], v[:, :length], SCALE)
    for layer, (q, k, v) in enumerate(layers):
        out = store.append_chunk(row, layer, *(x[:, length:end] for x in (q, k, v)), SCALE)
        held = [
            torch.cat(pair, 1)
            for pair in zip(
                stored(per, layer, k[:, :length], v[:, :length]), (k[:, length:end], v[:, length:end]), strict=True
            )
        ]
        torch.testing.assert_close(
            out[:, -1].float(), plain_attention(q[:, end - 1], *held, SCALE), atol=1e-4, rtol=1e-5
        )
    outs = step_at(store, row, layers, end, SCALE)
    for layer, (q, k, v) in enumerate(layers):
        keys, values = stored(per, layer, k[:, : end + 1], v[:, : end + 1])
        torch.testing.assert_close(
            outs[layer].float(), plain_attention(q[:, end], keys, values, SCALE), atol=1e-4, rtol=1e-5
        )
        tiers, _ = store.holding.layer(torch.tensor([row]), layer)
        (raw_k,), (raw_v,), live = REFERENCE.gather_dense(store.pages.pool.pages, tiers, None)
        assert (live[0].sum(-1) == end + 1).all()
        for head in range(HEADS):
            by = (1.0, 1.0) if is_plain(layer, head) else map(np.float32, of_head(per, layer, head))
            for raw, scale, want in zip((raw_k, raw_v), by, (keys, values), strict=True):
                assert torch.equal(raw[head][live[0, head]] * scale, want[head])


@pytest.mark.parametrize("per", SCALES)
def test_a_prompt_in_chunks_sees_what_was_stored(per: str):
    """Later chunks attend to the numbers that the codes stand for; all layers are alike."""
    layers, store = inputs(), store_of(Uniform(tier="fp8", scales=SCALES[per]))
    row = store.open_row()
    store.open_chunks(row, 40)
    for own in (slice(0, 24), slice(24, 40)):
        for layer, (q, k, v) in enumerate(layers):
            out = store.read_chunk(row, layer, q[:, own], k[:, own], v[:, own], SCALE)
            past = stored(per, layer, k[:, :24], v[:, :24], plain=False) if own.start else (k[:, :0], v[:, :0])
            held = [torch.cat([a, b[:, own]], 1) for a, b in zip(past, (k, v), strict=True)]
            torch.testing.assert_close(
                out[:, -1].float(), plain_attention(q[:, own.stop - 1], *held, SCALE), atol=1e-4, rtol=1e-5
            )


@pytest.mark.parametrize(("per", "size"), [("tensor", 2 * 4 * LAYERS), ("head", 2 * 4 * LAYERS * HEADS)])
def test_scales_are_billed_once_and_slots_stay_as_they_were(per: str, size: int):
    """Four bytes a scale, as vLLM has them; a token takes no more than in fp8 without."""
    store = store_of(policy(per))
    assert store.ledger.book_bytes == size
    plain = make_store(Uniform(tier="fp8"), head_dim=DIM)
    assert store.pages.formats[0].slot.slot_bytes == plain.pages.formats[0].slot.slot_bytes == 2 * DIM


def test_wrong_scales_are_refused():
    """Other formats, numbers that are no scales, and another model's."""
    with refused("settings-conflict", "method.scales", "tier=fp8", "tier=int8"):
        Uniform(tier="int8", scales=SCALES["tensor"])
    for bad in ([[0.1]], [[0.1, 0.0]], [[0.1, -0.2]], [[0.1, 0.2, 0.3]]):
        with refused("setting-value", "method.scales"):
            Uniform(tier="fp8", scales=bad)
    for layers, heads in ((2, 2), (3, 3)):
        with pytest.raises(NotForModel, match="measure them with `kvbench calibrate what=scales`"):
            Uniform(tier="fp8", scales=SCALES["head"]).check_model(layers, heads)
    Uniform(tier="fp8", scales=SCALES["tensor"]).check_model(3, 5)
