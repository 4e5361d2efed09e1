"""The books of kvquant, found from a model's own keys and values."""

import random

import pytest
import torch
from engine_helpers import random_tokens, request
from omegaconf import OmegaConf

from kvbench.calibrate import books
from kvbench.methods.kvquant import KVQuant
from kvbench.policy import read_table


def distortion(levels: list[int], numbers: list[float]) -> float:
    """Mean square error of numbers that are put to their nearest level."""
    return sum(min((level - x) ** 2 for level in levels) for x in numbers) / len(numbers)


@pytest.mark.parametrize("size", [4, 8, 16])
def test_tables_are_those_of_k_means(size):
    """Every level is the mean of what lies nearest to it, but for rounding, and no level that moves by three is
    better; a good deal better than levels that are equally far apart."""
    dice = random.Random(size)
    numbers = [
        min(255.0, max(0.0, dice.gauss(90, 25) if dice.random() < 0.7 else dice.gauss(180, 10))) for _ in range(4000)
    ]
    found = books.table_of(books._counts(torch.tensor(numbers).double()), size).tolist()
    assert len(found) == size and found == sorted(set(found))
    for index, level in enumerate(found):
        near = [x for x in numbers if min(found, key=lambda other, x=x: abs(other - x)) == level]
        assert abs(sum(near) / len(near) - level) < 1.5
        for other in (level - 3, level + 3):
            moved = [*found[:index], other, *found[index + 1 :]]
            assert distortion(moved, numbers) > distortion(found, numbers)
    equal = [round(255 * code / (size - 1)) for code in range(size)]
    assert distortion(found, numbers) < 0.6 * distortion(equal, numbers)


@pytest.mark.parametrize(("numbers", "size"), [([255.0] * 9, 16), ([0.0] * 9, 4), ([100.0, 100.0, 101.0], 8)])
def test_fewer_numbers_than_levels_still_make_a_table(numbers, size):
    """Levels make room for one another within a byte, and one of them is what all numbers are."""
    found = books.table_of(books._counts(torch.tensor(numbers).double()), size).tolist()
    assert len(found) == size == len(set(found)) and found == sorted(found)
    assert found[0] >= 0 and found[-1] <= 255 and round(numbers[0]) in found


@pytest.mark.parametrize(("outside", "sinks"), [(0.0, 0), (0.2, 3)])
def test_scales_are_the_ranges_of_projected_keys(tiny_model, outside, sinks):
    """Scale and zero span what the layer's key projection gave for each channel, before any rotation, without the first
    tokens of each prompt and a share of the numbers; the model's attention is restored."""
    loaded = tiny_model("llama", "gqa3", 64)
    asked = [request("0", random_tokens(21)), request("1", random_tokens(30))]
    before, seen = loaded.model.config._attn_implementation, [[], []]
    hooks = [
        layer.self_attn.k_proj.register_forward_hook(lambda module, args, out, own=own: own.append(out[0, sinks:]))
        for layer, own in zip(loaded.model.model.layers, seen, strict=True)
    ]
    found = books.measure(loaded, asked, outside, sinks)
    for hook in hooks:
        hook.remove()
    assert loaded.model.config._attn_implementation == before
    for layer, parts in enumerate(seen):
        keys = torch.cat(parts).double().sort(0).values  # [n, H * D]
        cut = int(outside / 2 * len(keys))
        low, high = keys[cut], keys[len(keys) - 1 - cut]
        scale, zero = found[layer, 56:].chunk(2)
        assert (zero - low).abs().max() < 1e-5 and (scale - (high - low) / 255).abs().max() < 1e-6


def test_command_writes_books_that_the_method_reads(tiny_model, tmp_path, monkeypatch, capsys):
    """The file of the command is a model's for method.books, and codes its keys far better than equal levels would."""
    loaded, out = tiny_model("llama", "gqa3", 64), tmp_path / "books.tsv"
    task = type("Task", (), {"name": "t", "requests": [request("0", random_tokens(60))]})
    parts = type(
        "Parts", (), {"load_model": lambda cfg: loaded, "load_task": lambda *a, **k: task, "check_task": print}
    )
    monkeypatch.setattr(books, "default_parts", lambda: parts)
    own = {"prompts": 2, "outside": 0.0, "sinks": 1, "out": str(out)}
    cfg = OmegaConf.create({"books": own, "seed": 0, "model": {}, "task": {}, "protocol": {}})
    assert books.main(cfg) == 0
    assert f"method.books={out}" in capsys.readouterr().out
    table = torch.tensor(read_table(str(out)), dtype=torch.float64)
    torch.testing.assert_close(table, books.measure(loaded, task.requests, 0.0, 1), atol=0, rtol=1e-5)
    for bits in (2, 3, 4):
        KVQuant(bits=bits, books=str(out)).check_model(2, 2)
    for key, value, message in (
        ("prompts", 0, "books.prompts=0 must be a whole number of at least 1"),
        ("sinks", -1, "books.sinks=-1 must be a whole number of at least 0"),
        ("outside", 0.7, "books.outside=0.7 must be"),
        ("sinks", 60, "books.sinks=60 leaves no token of any prompt"),
    ):
        changed = OmegaConf.merge(cfg, {"books": {key: value}})
        with pytest.raises(ValueError, match=message):
            books.main(changed)
