"""Serving that is simulated: the same requests join and give way as where a model answers, at the times looked up."""

import io
import json
from types import SimpleNamespace

import pytest
from refusals import refused
from rich.console import Console

from kvbench.engine.engine import Engine
from kvbench.engine.supported import model_shape
from kvbench.extensions.bench import serve, show
from kvbench.extensions.bench.simulated import Here, Simulated
from kvbench.extensions.bench.times import Measured, Times, read_times, summary
from kvbench.kernels.bench import bench
from kvbench.models.load import load_model
from kvbench.runs import choices
from kvbench.sizing.shapes import sized

MODEL = {"kind": "random", "preset": "tiny", "num_layers": 1, "dtype": "float32", "device": "cpu", "linear": "streamed"}
OPTIONS = {"kernels": "torch", "device": "cpu", "threads": [1], "requests": 6, "prompts": [40, 90], "answers": [9, 30]}


def step_s(rows: int, tokens: int) -> float:
    """Seconds of a step."""
    return 0.01 + 0.002 * rows + 1e-5 * tokens


def prompt_s(tokens: int) -> float:
    """Seconds of a prompt."""
    return 0.004 + 1e-4 * tokens + 1e-7 * tokens**2


@pytest.fixture(scope="module")
def model():
    """One layer."""
    loaded = load_model(MODEL)
    yield loaded
    loaded.model.set_attn_implementation("sdpa")


def linear_times() -> Times:
    """Times that lie on the lines above."""
    steps = [(rows, tokens, step_s(rows, tokens), 3) for rows in (1, 2, 5) for tokens in (50 * rows, 90 * rows)]
    return Times(steps, [(tokens, prompt_s(tokens), 2) for tokens in (30, 60, 90, 120)])


def measured(model, methods) -> Measured:
    """A document of it, with these times."""
    shape = model_shape(model.model)
    sizes = {"layers": shape.num_layers, "q_heads": shape.num_q_heads, "kv_heads": shape.num_kv_heads}
    named = sized("tiny", source="", head_dim=shape.head_dim, context=4096, dtype="float32", **sizes)
    return Measured(named, model.max_tokens, "elsewhere", dict.fromkeys(methods, linear_times()), [])


class Timed:
    """A real engine whose passes take the times above, whatever they take."""

    share, spent_s = 1.0, 0.0

    def __init__(self, model) -> None:
        self._model = model

    def tick(self) -> float:
        return self.spent_s

    row_bytes, shape_of = Here.row_bytes, Here.shape_of

    def engine(self, *args, **named) -> Engine:
        engine = Engine(self._model, *args, **named)
        runner = engine.runner
        read, step = runner.read, runner.try_step

        def timed_read(prompt, *args):
            result = read(prompt, *args)
            self.spent_s += prompt_s(len(prompt))
            return result

        def timed_step(rows, tokens):
            result = step(rows, tokens)
            self.spent_s += step_s(len(rows), sum(engine.store.counters.seen[row] for row in rows))
            return result

        runner.read, runner.try_step = timed_read, timed_step
        return engine


SQUEEZED = "kv_compress budget=24 block=8 obs_window=4 continual=pages store.page_bytes=2112"


@pytest.mark.parametrize("method", ["full", "snapkv budget=0.5", "kivi bits=2 residual_tokens=32"])
def test_the_same_join_and_give_way(model, method):
    """In a memory that is too small for all, every figure of a load is that of a model whose passes take as long."""
    settings = serve.Settings(**OPTIONS, kv_mb=1, max_batch=4)
    settings.kv_mb = 0.06 if "snapkv" in method else 0.12  # of a model of one layer
    load = settings.load(20.0)
    progress = SimpleNamespace(notes=[], stage=lambda _: None, advance=lambda: None)
    runs = []
    for machine in (Timed(model), Simulated(measured(model, [method]), method)):
        serving = serve.Serving(settings, progress, method, load, [[5] * prompt for _, prompt, _ in load], machine)
        serving.open()
        serving.answer(0)
        runs += serving.runs
    real, simulated = runs
    assert max(real["rows"]) > 1 and ("snapkv" not in method or real["preemptions"] > 0)
    for name in ("rows", "tokens", "oom", "preemptions"):
        assert simulated[name] == real[name], name
    for name in ("ttft_s", "tpot_s", "took_s"):
        assert simulated[name] == pytest.approx(real[name]), name
    assert [held for _, held in simulated["pages"]] == [held for _, held in real["pages"]]


def test_pages_that_run_out_are_freed_before_anybody_gives_way(model):
    """A real one and a simulated one count compressions and no preemption, and the document says who shares a pool."""
    settings, notes = serve.Settings(**OPTIONS, kv_mb=1, max_batch=4), []
    settings.kv_mb = 0.06
    load = settings.load(20.0)
    progress = SimpleNamespace(notes=notes, stage=lambda _: None, advance=lambda: None)
    for machine in (Timed(model), Simulated(measured(model, [SQUEEZED]), SQUEEZED)):
        texts = [[5] * prompt for _, prompt, _ in load]
        serving = serve.Serving(settings, progress, SQUEEZED, load, texts, machine)
        serving.open()
        serving.answer(0)
        (run,) = serving.runs
        assert run["oom"] == run["preemptions"] == 0 < run["compressions"]
        assert serve.figures([run, run], 1.0, 1.0)["compressions"] == run["compressions"]
    assert len(notes) == 1 and notes[0].startswith(SQUEEZED) and "pool" in notes[0]


def test_a_method_that_attention_decides_has_the_bytes_that_were_measured(model):
    """A row counts as what was measured: so more of them fit into a memory."""
    times = measured(model, ["diffkv"])
    load = [(0.0, 400, 4)] * 6
    settings = serve.Settings(**OPTIONS | {"requests": 6}, kv_mb=1, max_batch=6)
    settings.kv_mb = 0.2
    progress = SimpleNamespace(notes=[], stage=lambda _: None, advance=lambda: None)
    most = []
    for share in (1.0, 0.5):
        machine = Simulated(times, "diffkv")
        serving = serve.Serving(settings, progress, "diffkv", load, [[5] * 400] * 6, machine)
        serving.open()
        serving.answer(0)
        assert machine.share == pytest.approx(share, abs=0.1)  # tables, which no share is of, are a part of the bytes
        held = serving.runs[0]["times"]["ends"][0][2]
        times.methods["diffkv"].ends = [(400, 3, 0.5 * held)]
        most.append(max(serving.runs[0]["rows"]))
    assert most[1] > most[0]


def test_times_are_looked_up_on_the_lines_that_were_measured():
    """Between numbers of rows, beyond them, and at other lengths; prompts too."""
    times = linear_times().fit()
    for rows, tokens in [(1, 70), (2, 100), (3, 200), (5, 10), (9, 500)]:
        assert times.step_s(rows, tokens) == pytest.approx(step_s(rows, tokens))
    for tokens in (10, 75, 500):
        assert times.prompt_s(tokens) == pytest.approx(prompt_s(tokens))
    one = Times([(4, 400, 0.5, 1)], [(100, 2.0, 1)]).fit()
    assert (one.step_s(4, 9), one.step_s(8, 9), one.prompt_s(100)) == (0.5, 0.5, pytest.approx(2.0))
    with pytest.raises(ValueError, match="has no times of prompts and steps"):
        Times([(4, 400, 0.5, 1)]).fit()


def test_a_load_is_kept_as_means():
    """Of steps with as many rows, those that hold less and more apart; of prompts in order of length."""
    steps = [(2, 10, 1.0), (1, 5, 0.5), (2, 30, 2.0), (2, 20, 1.5)]
    means = summary(steps, [(length, length / 10) for length in range(16, 0, -1)], [(7, 3, 99)])
    assert means["steps"] == [[1, 5, 0.5, 1], [2, 15, 1.25, 2], [2, 30, 2.0, 1]]
    assert len(means["prompts"]) == 8 and means["prompts"][0] == [1.5, pytest.approx(0.15), 2]
    assert means["ends"] == [[7, 3, 99]] and summary([], [], [])["steps"] == []


def test_a_document_is_simulated_and_shown_with_the_measured_one(tmp_path):
    """bench.json of serve in, the same table out, without a model."""
    options = OPTIONS | {"model": "random preset=tiny num_layers=1 dtype=float32", "peers": False, "rates": [50.0]}
    options |= {"methods": ["full"], "kv_mb": 1, "requests": 3}
    path = tmp_path / "bench.json"
    bench.write(document := bench.run(serve.Settings(**options)), path)
    there = document["cells"][0]["variants"][0]
    settings = serve.Settings(**options | {"methods": ["full", "kivi bits=2"], "times": [str(path)]})
    simulated_document = bench.run(settings)
    (cell,) = simulated_document["cells"]
    (row,) = cell["variants"]
    assert row["measured"]["tokens_per_s"] == there["tokens_per_s"] and row["tokens_per_s"] > 0
    assert "kivi bits=2" in cell["refused"][0]["reason"] and len(row["times"]["ends"]) == 3
    text = io.StringIO()
    Console(width=240, file=text).print(show.render(simulated_document))
    assert "x measured" in text.getvalue() and "simulated with times of" in text.getvalue()
    held = json.loads(path.read_text())
    del held["model"]["shape"]
    path.write_text(json.dumps(held))
    with refused("file-content", "serve.times", "bench.json"):
        read_times([path])


def test_a_document_of_decode_has_times_too(tmp_path):
    """Steps of each batch, of a graph where there is one; prompts; bytes. Of two machines, none."""
    shape = {"layers": 32, "q_heads": 32, "kv_heads": 8, "head_dim": 128}
    model = {"name": "m", "fingerprint": "f", "dtype": "torch.bfloat16", "linear": "plain", "max_tokens": 8192}
    common = {"q1": 0.0, "q3": 9.0, "seconds": [1.0], "cache_bytes": 4000}
    rows = [("full", 0.8), ("full, graph", 0.4)]
    decode = [{"name": name, "median": median, "tokens_per_call": 16, **common} for name, median in rows]
    prompt = [{"name": "full", "median": 0.25, **common}]
    cells = [
        {"cell": {"phase": "prompt", "batch": 1, "context": 512}, "variants": prompt},
        {"cell": {"phase": "decode", "batch": 4, "context": 512}, "variants": decode},
    ]
    document = {"schema": 1, "what": "decode", "started": "", "elapsed_s": 1, "settings": {}, "notes": []}
    document |= {"environment": {"device_name": "H200"}, "cells": cells, "model": model | {"shape": shape}}
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    paths[0].write_text(json.dumps(document))
    loaded = read_times(paths[:1])
    assert loaded.shape.store_shape.num_kv_heads == 8 and loaded.device_name == "H200"
    times = loaded.times("full")
    assert times.step_s(4, 2048) == pytest.approx(0.1) and times.prompt_s(512) == pytest.approx(0.25)
    assert set(times.ends) == {(512, 0, 1000.0)}
    document["environment"]["device_name"] = "A100"
    paths[1].write_text(json.dumps(document))
    with refused("settings-conflict", "serve.times", "a.json", "b.json"):
        read_times(paths)
    with refused("name-unknown", None, "serve.times=kivi"):
        loaded.times("kivi")


def test_requests_that_fill_no_page_are_simulated(model):
    """All of them wait in a residual buffer, which had said that a page stands for none."""
    method = "kivi bits=2 residual_tokens=2048"
    machine = Simulated(measured(model, [method]), method)
    policy, options = choices.make_cache(method)
    assert machine.engine(policy, store=options, batch_size=1, seed=0) is not None
    assert machine.share == 1.0
