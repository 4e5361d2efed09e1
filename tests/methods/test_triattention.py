"""TriAttention's scores against the paper's series in complex numbers, and what goes of an answer."""

import math

import pytest
import torch
from store_helpers import filled, held_positions, random_layer, step_one

from kvbench.errors import NotForModel
from kvbench.methods.triattention import TriAttention

HEADS, GROUP, LENGTH, DIM = 2, 3, 19, 8
INV_FREQ = torch.tensor([1.0, 0.31, 0.1, 0.02])


def table(layers: int, per: int, seed: int = 0) -> list[list[float]]:
    """Random mean queries of `per` heads; their mean lengths are above the lengths of the means."""
    make = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(layers):
        row = []
        for _ in range(per):
            mean = torch.randn(DIM, generator=make)
            extra = torch.rand(DIM // 2, generator=make)
            row += [*mean.tolist(), *(torch.hypot(mean[: DIM // 2], mean[DIM // 2 :]) + extra).tolist()]
        rows.append(row)
    return rows


def series(row: list[float], per: int, key: torch.Tensor, position: int, now: int, reach: int) -> float:
    """Score of one rotated key [D] for the best of its `per` query heads: the mean over offsets of the sum over
    frequencies of |q| |k| cos(w (now + offset - position) + phi), and (E|q| - |E q|) |k|."""
    half, best = DIM // 2, -math.inf
    plain = [
        complex(float(key[f]), float(key[f + half])) * complex(math.cos(w * position), -math.sin(w * position))
        for f, w in enumerate(INV_FREQ.tolist())
    ]
    offsets = [2**i for i in range(64) if 2**i <= reach]
    for head in range(per):
        own = row[head * 3 * half : (head + 1) * 3 * half]
        total = 0.0
        for f, w in enumerate(INV_FREQ.tolist()):
            center = complex(own[f], own[f + half])
            relative = center * plain[f].conjugate()
            phi = math.atan2(relative.imag, relative.real)
            waves = [math.cos(w * (now + offset - position) + phi) for offset in offsets]
            total += abs(center) * abs(plain[f]) * sum(waves) / len(waves)
            total += (own[2 * half + f] - abs(center)) * abs(plain[f])
        best = max(best, total)
    return best


def read(policy, layers):
    """A store of a model with rotary positions that has read a prompt; also its row."""
    return filled(policy, layers, scale=0.5, inv_freq=INV_FREQ, track=("pos",))


@pytest.mark.parametrize(("per", "reach"), [(GROUP, 1), (GROUP, 100), (1, 65536)])
def test_prompt_tokens_are_ranked_by_the_series(per, reach):
    """Without protection, each head keeps the prompt tokens of the largest scores, by its own rows of the table."""
    centres, budget = table(2, HEADS * per), 7
    policy = TriAttention(centres=centres, reach=reach, budget=budget, protect="none", decode_every=0)
    layers, want = [random_layer(3 + layer, HEADS, GROUP, LENGTH, DIM) for layer in range(2)], []
    for layer, (_, k, _) in enumerate(layers):
        for head in range(HEADS):
            own = centres[layer][head * per * 3 * DIM // 2 : (head + 1) * per * 3 * DIM // 2]
            score = torch.tensor([series(own, per, k[head, p], p, LENGTH, reach) for p in range(LENGTH)])
            want.append(sorted(score.topk(budget).indices.tolist()))
    assert held_positions(*read(policy, layers)) == want


def test_the_prompt_stays_and_the_answer_is_thinned():
    """Nine tokens behind the prompt, at an eviction down to four: the prompt is there, and the four best."""
    centres = table(1, HEADS * GROUP, seed=5)
    policy = TriAttention(centres=centres, reach=8, budget=4, decode_every=9)
    store, row = read(policy, [random_layer(0, HEADS, GROUP, LENGTH, DIM)])
    new = torch.randn(9, HEADS, DIM)
    for key in new:
        step_one(store, row, [(torch.randn(HEADS * GROUP, DIM), key, key)])
    store.begin_step(torch.tensor([row]))
    for head, held in enumerate(held_positions(store, row)):
        own = centres[0][head * GROUP * 3 * DIM // 2 : (head + 1) * GROUP * 3 * DIM // 2]
        score = torch.tensor([series(own, GROUP, new[i, head].half(), LENGTH + i, LENGTH + 9, 8) for i in range(9)])
        best = sorted(LENGTH + i for i in score.topk(4).indices.tolist())
        assert sorted(held)[: LENGTH + 4] == [*range(LENGTH), *best]


@pytest.mark.parametrize("centres", [None, table(3, 2), [[0.5] * 7] * 2])
def test_a_model_without_its_table_is_refused(centres):
    """None, another model's layers, or numbers that no KV head has: with the command that makes the table."""
    with pytest.raises(NotForModel, match=r"method.centres has \d layers.*`kvbench calibrate what=centres` measures"):
        TriAttention(centres=centres).check_model(2, 2)
    TriAttention(centres=table(2, 2)).check_model(2, 2)
    TriAttention(centres=table(2, 6)).check_model(2, 2)
