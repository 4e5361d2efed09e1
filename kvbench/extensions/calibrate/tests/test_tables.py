"""The tables of duo_attention, triattention, kvquant and fp8, from a model's own queries, keys and values."""

import random
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from engine_helpers import random_tokens, request
from omegaconf import OmegaConf
from refusals import refused

from kvbench.engine.requests import Request
from kvbench.extensions.calibrate import tables
from kvbench.extensions.calibrate.tables import measure_books, measure_centres, measure_gates, measure_scales
from kvbench.methods.duo_attention import DuoAttention
from kvbench.methods.kvquant import KVQuant
from kvbench.methods.triattention import TriAttention
from kvbench.methods.uniform import Uniform
from kvbench.policy import read_table


def prompts(count, seed=0):
    """Requests of different lengths with three gold tokens."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(n):
        return tuple(torch.randint(1, 320, (n,), generator=generator).tolist())

    return [
        Request(sample_id=str(i), subset="t", segments=(tokens(9 + i), tokens(11)), gold=tokens(3), max_new_tokens=1)
        for i in range(count)
    ]


def test_gates_are_the_share_of_far_attention(tiny_model):
    """Every gate equals a sum over single attention weights between the sinks and the recent window: all attention with
    nothing left out, none with everything recent. The model's attention is restored."""
    loaded, requests = tiny_model(), prompts(2)
    model, before = loaded.model, loaded.model.config._attn_implementation
    assert measure_gates(loaded, prompts(1), 0, 0).sub(1).abs().max() < 1e-5
    assert measure_gates(loaded, prompts(1), 0, 99).abs().max() == 0
    assert model.config._attn_implementation == before
    gates = measure_gates(loaded, requests, sinks=2, recent=5)
    expected = torch.zeros_like(gates)
    model.set_attn_implementation("eager")
    for one in requests:
        tokens = [*one.segments[0], *one.segments[1], *one.gold]
        with torch.no_grad():
            weights = model(input_ids=torch.tensor([tokens[:-1]]), output_attentions=True).attentions
        answers = range(len(tokens) - 4, len(tokens) - 1)
        for layer in range(2):
            for head in range(6):
                far = [weights[layer][0, head, row, column] for row in answers for column in range(2, row - 4)]
                expected[layer, head // 3] += sum(far) / 3 / 3 / 2
    model.set_attn_implementation("sdpa")
    assert gates.shape == (2, 2)
    torch.testing.assert_close(gates, expected, atol=1e-6, rtol=0)
    assert gates.min() > 0.05
    assert gates.max() < 1


def projected(loaded, name, requests, measure):
    """The outputs of a projection of every layer for prompts while something is measured, and what was measured; the
    model's attention is restored."""
    before, seen = loaded.model.config._attn_implementation, [[], []]
    hooks = [
        getattr(layer.self_attn, name).register_forward_hook(
            lambda module, args, out, outputs=outputs: outputs.append(out[0])
        )
        for layer, outputs in zip(loaded.model.model.layers, seen, strict=True)
    ]
    result = measure(loaded, requests)
    for hook in hooks:
        hook.remove()
    assert loaded.model.config._attn_implementation == before
    return seen, result


def test_centres_are_means_of_projected_queries(tiny_model):
    """Every number equals a mean over what the layer's query projection gave, before any rotation."""
    requests = [request("0", random_tokens(9), random_tokens(4)), request("1", random_tokens(30))]
    seen, centres = projected(tiny_model("llama", "gqa3", 64), "q_proj", requests, measure_centres)
    for layer, parts in enumerate(seen):
        queries = torch.cat(parts).double().unflatten(-1, (6, 64)).transpose(0, 1)
        assert queries.shape[1] == 43
        length = torch.hypot(queries[..., :32], queries[..., 32:]).mean(1)
        want = torch.cat([queries.mean(1), length], -1).flatten()
        assert centres[layer].shape == want.shape and (centres[layer] - want).abs().max() < 1e-5


def distortion(levels: list[int], numbers: list[float]) -> float:
    """Mean square error of numbers that are put to their nearest level."""
    return sum(min((level - x) ** 2 for level in levels) for x in numbers) / len(numbers)


def table_of(numbers, size):
    """The table of numbers that are levels already."""
    return tables.table_of(tables._counts(torch.tensor(numbers).double(), torch.tensor(0.0), torch.tensor(1.0)), size)


@pytest.mark.parametrize("size", [4, 8, 16])
def test_tables_are_those_of_k_means(size):
    """Every level is the mean of what lies nearest to it, except for rounding, and no level that moves by three is
    better; a good deal better than levels that are equally far apart."""
    dice = random.Random(size)
    numbers = [
        min(255.0, max(0.0, dice.gauss(90, 25) if dice.random() < 0.7 else dice.gauss(180, 10))) for _ in range(4000)
    ]
    levels = table_of(numbers, size).tolist()
    assert len(levels) == size and levels == sorted(set(levels))
    for index, level in enumerate(levels):
        near = [x for x in numbers if min(levels, key=lambda other, x=x: abs(other - x)) == level]
        assert abs(sum(near) / len(near) - level) < 1.5
        for other in (level - 3, level + 3):
            moved = [*levels[:index], other, *levels[index + 1 :]]
            assert distortion(moved, numbers) > distortion(levels, numbers)
    equal = [round(255 * code / (size - 1)) for code in range(size)]
    assert distortion(levels, numbers) < 0.6 * distortion(equal, numbers)


@pytest.mark.parametrize(("numbers", "size"), [([255.0] * 9, 16), ([0.0] * 9, 4), ([100.0, 100.0, 101.0], 8)])
def test_fewer_numbers_than_levels_still_make_a_table(numbers, size):
    """Levels make room for one another within a byte, and one of them is what all numbers are."""
    levels = table_of(numbers, size).tolist()
    assert len(levels) == size == len(set(levels)) and levels == sorted(levels)
    assert levels[0] >= 0 and levels[-1] <= 255 and round(numbers[0]) in levels


@pytest.mark.parametrize(("outside", "sinks"), [(0.0, 0), (0.2, 3)])
def test_scales_are_the_ranges_of_projected_keys(tiny_model, outside, sinks):
    """Scale and zero span what the layer's key projection gave for each channel, before any rotation, without the first
    tokens of each prompt and a share of the numbers."""
    requests = [request("0", random_tokens(21)), request("1", random_tokens(30))]
    measure = lambda loaded, requests: measure_books(loaded, requests, outside, sinks)  # noqa: E731
    seen, books = projected(tiny_model("llama", "gqa3", 64), "k_proj", requests, measure)
    for layer, parts in enumerate(seen):
        keys = torch.cat([part[sinks:] for part in parts]).double().sort(0).values  # [n, H * D]
        cut = int(outside / 2 * len(keys))
        low, high = keys[cut], keys[len(keys) - 1 - cut]
        scale, zero = books[layer, 56:].chunk(2)
        assert (zero - low).abs().max() < 1e-5 and (scale - (high - low) / 255).abs().max() < 1e-6


def test_scales_are_the_largest_projected_values(tiny_model):
    """Over 448, by head and of all; keys after the rotation, which keeps no channel but the length of each pair; random
    tokens, over 200 and 100, are others, but the same ones for the same seed."""
    loaded = tiny_model("llama", "gqa3", 64)
    requests = [request("0", random_tokens(21)), request("1", random_tokens(30))]
    seen, scales = projected(
        loaded, "v_proj", requests, lambda loaded, requests: measure_scales(loaded, requests, True)
    )
    projections, tensor = projected(
        loaded, "k_proj", requests, lambda loaded, requests: measure_scales(loaded, requests, False)
    )
    for layer, parts in enumerate(seen):
        largest = torch.cat(parts).unflatten(-1, (2, 64)).abs().amax((0, 2))
        assert torch.allclose(scales[layer, 2:], largest / 448, rtol=1e-6)
        assert torch.equal(tensor[layer], torch.stack([scales[layer, :2].max(), scales[layer, 2:].max()]))
        pairs = torch.cat(projections[layer]).unflatten(-1, (2, 2, 32))
        bound = torch.hypot(pairs[:, :, 0], pairs[:, :, 1]).amax((0, 2)) / 448
        assert (scales[layer, :2] <= bound * (1 + 1e-5)).all() and (scales[layer, :2] >= bound / 2**0.5 * 0.9).all()
    seen, other = projected(
        loaded, "v_proj", requests, lambda loaded, requests: measure_scales(loaded, requests, False, seed=3)
    )
    assert torch.allclose(other[0, 1], torch.cat(seen[0]).abs().max() / 100, rtol=1e-6)
    assert [len(part) for part in seen[0]] == [21, 30] and other[0, 0] > 1.5 * tensor[0, 0]
    assert torch.equal(measure_scales(loaded, requests, False, seed=3), other)


COMMANDS = {
    "gates": (
        {"prompts": 2, "sinks": 2, "recent": 5},
        lambda loaded, requests: measure_gates(loaded, requests, 2, 5),
        {"atol": 5.1e-5, "rtol": 0},
        "table",
        DuoAttention,
        [("prompts", 0, ("setting-value", "gates.prompts", "gates.prompts=0"))],
    ),
    "centres": (
        {"prompts": 2},
        measure_centres,
        {"atol": 5.1e-5, "rtol": 0},
        "centres",
        TriAttention,
        [("prompts", 0, ("setting-value", "centres.prompts", "centres.prompts=0"))],
    ),
    "scales": (
        {"prompts": 2, "per": "head", "tokens": "task"},
        lambda loaded, requests: measure_scales(loaded, requests, True),
        {"atol": 0, "rtol": 1e-7},
        "scales",
        partial(Uniform, tier="fp8"),
        [
            ("per", "layer", ("name-unknown", "scales.per", "scales.per=layer")),
            ("tokens", "all", ("name-unknown", "scales.tokens", "scales.tokens=all")),
        ],
    ),
    "books": (
        {"prompts": 2, "outside": 0.0, "sinks": 1},
        lambda loaded, requests: measure_books(loaded, requests, 0.0, 1),
        {"atol": 0, "rtol": 1e-5},
        "books",
        KVQuant,
        [
            ("prompts", 0, ("setting-value", "books.prompts", "books.prompts=0")),
            ("sinks", -1, ("setting-value", "books.sinks", "books.sinks=-1")),
            ("outside", 0.7, ("setting-value", "books.outside", "books.outside=0.7")),
            ("sinks", 60, ("setting-value", "books.sinks", "books.sinks=60")),
        ],
    ),
}


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.smoke
def test_command_writes_a_table_that_the_method_reads(name, tiny_model, tmp_path, monkeypatch, capsys):
    """The file of the command is a table of the model's shape for a setting of the method; wrong settings are named."""
    settings, measure, bound, setting, method, wrong = COMMANDS[name]
    loaded, out = tiny_model("llama", "gqa3", 64), tmp_path / "out.tsv"
    requests = prompts(2) if name == "gates" else [request("0", random_tokens(60))]
    task = SimpleNamespace(name="t", requests=requests)
    parts = SimpleNamespace(load_model=lambda cfg: loaded, load_task=lambda *a, **k: task, check_task=print)
    monkeypatch.setattr(tables, "Loaders", lambda: parts)
    cfg = OmegaConf.create({name: settings | {"out": str(out)}, "seed": 0, "model": {}, "task": {}, "protocol": {}})
    assert getattr(tables, name)(cfg) == 0
    assert f"method.{setting}={out}" in capsys.readouterr().out
    table = torch.tensor(read_table(str(out)), dtype=torch.float64)
    torch.testing.assert_close(table, measure(loaded, requests).double(), **bound)
    for bits in (2, 3, 4) if name == "books" else (None,):
        method(**{setting: str(out)} | ({"bits": bits} if bits else {})).check_model(2, 2)
    for key, value, error in wrong:
        with refused(*error):
            getattr(tables, name)(OmegaConf.merge(cfg, {name: {key: value}}))
    if name == "gates":
        task.requests = [Request(sample_id="a", subset="t", segments=((1, 2),), max_new_tokens=1)]
        with refused("setting-value", "task", "task=t"):
            tables.gates(cfg)
