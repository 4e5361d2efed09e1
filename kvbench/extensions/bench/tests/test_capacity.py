"""Capacity of a memory: counted as the store counts, and tried with real pages."""

import io

import pytest
from refusals import refused
from rich.console import Console

from kvbench.extensions.bench import capacity, show
from kvbench.kernels.bench import bench

COMMON = {"model": "random preset=tiny num_layers=1 dtype=float32", "kernels": "torch", "device": "cpu", "threads": [1]}
SMALL = {"kv_mb": [1], "context": 160, "new_tokens": 2, "longest": 320}


def test_what_is_counted_is_what_fits(tmp_path):
    """A budget or a precision decides what is held: the count is right to a sequence, and to one part in 128 of a
    prompt; where attention decides, only trying tells."""
    methods = ["full", "snapkv budget=0.5", "diffkv window=16"]
    settings = capacity.Settings(**COMMON, **SMALL, methods=methods)
    settings.check()
    kept = []
    document = bench.run(settings, keep=lambda so_far: kept.append(len(so_far["cells"])))
    bench.check_document(document)
    (cell,) = document["cells"]
    rows = {row["name"]: row for row in cell["variants"]}
    for name in methods[:2]:
        row = rows[name]
        assert abs(row["tried_batch"] - row["counted_batch"]) <= 1
        counted = min(row["counted_prompt"], settings.longest)
        assert row["tried_prompt"] == pytest.approx(counted, rel=0.03)
    assert rows["diffkv window=16"]["counted_batch"] is rows["diffkv window=16"]["counted_prompt"] is None
    batches = [rows[name]["tried_batch"] for name in ("full", "diffkv window=16", "snapkv budget=0.5")]
    assert kept == [1] and batches == sorted(set(batches)) and batches[0] > 0
    text = io.StringIO()
    Console(width=200, file=text).print(show.render(document))
    assert "longest prompt, tried" in text.getvalue() and "320+" in text.getvalue()
    assert show.draw(document, tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_a_model_that_is_not_here_is_counted(tmp_path):
    """Nothing is loaded; what a window holds takes a prompt of any length."""
    options = COMMON | {"kv_mb": [200], "context": 256, "new_tokens": 2, "longest": 256, "shape": "llama3-8b"}
    settings = capacity.Settings(**options, methods=["full", "streaming_llm budget=128"])
    (cell,) = (document := bench.run(settings))["cells"]
    full, window = cell["variants"]
    token_bytes = 32 * 8 * 128 * 4
    assert full["counted_prompt"] == pytest.approx(2e8 / token_bytes, rel=0.05)
    assert full["counted_batch"] == pytest.approx(2e8 / token_bytes / 258, rel=0.2)  # and pages that are not full
    assert window["counted_prompt"] == capacity.LONGEST and window["tried_prompt"] is None
    assert show.draw(document, tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("num_bytes", [10**6, 8 * 10**6, 77 * 10**6])
def test_a_page_is_no_end_of_growth(num_bytes, monkeypatch):
    """Two lengths in one page hold as many bytes, which says nothing of what longer prompts take."""
    memory = object.__new__(capacity.Memory)
    memory._settings, memory._num_bytes = capacity.Settings(**COMMON, **SMALL), num_bytes
    monkeypatch.setattr(memory, "_counted_bytes", lambda tokens: 700_000 + -(-tokens // 64) * 750_000)
    exact = (num_bytes - 700_000) // 750_000 * 64
    assert exact - exact // capacity.PRECISION <= memory._counted_prompt() <= exact


@pytest.mark.parametrize("limit", [0, 1, 7, 100, 1000])
@pytest.mark.parametrize("guess", [0, 1, 90, 5000])
def test_the_search_ends_at_the_largest_from_any_guess(limit, guess):
    """Exactly, or to a part of itself, and never above what may be."""
    assert capacity.largest(lambda n: n <= limit, guess, 10**6) == limit
    assert capacity.largest(lambda n: n <= limit, guess, 60) == min(limit, 60)
    assert limit - limit // 16 - 1 <= capacity.largest(lambda n: n <= limit, guess, 10**6, 16) <= limit


def test_settings_that_make_no_sense_are_refused():
    """Before a model is loaded."""
    with refused("settings-conflict", "capacity.context", "context=600", "longest=320"):
        capacity.Settings(**COMMON, **SMALL | {"context": 600}).check()
    with refused("name-unknown", "model", "model=llama9"):
        capacity.Settings(**COMMON, shape="llama9").check()
