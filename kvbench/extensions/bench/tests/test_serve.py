"""Serving a load of requests on a tiny random model: who comes when, what is counted, and what is shown."""

import io
from functools import partial
from types import SimpleNamespace

import pytest
from refusals import refused
from rich.console import Console

from kvbench.engine.engine import Engine
from kvbench.extensions.bench import serve, show
from kvbench.extensions.bench.simulated import Here
from kvbench.kernels.bench import bench
from kvbench.runs import choices

COMMON = {"model": "random preset=tiny num_layers=1 dtype=float32", "kernels": "torch", "device": "cpu", "threads": [1]}
SMALL = {"kv_mb": 1, "requests": 6, "prompts": [20, 60], "answers": [4, 12], "max_batch": 4, "peers": False}


@pytest.mark.smoke
def test_a_load_is_served_by_every_method(tmp_path):
    """Every request is answered within the memory, latencies and rates fit together, each rate is a cell of its own,
    and a table and a picture come out."""
    methods = ["full", "kivi bits=2 residual_tokens=32"]
    settings = serve.Settings(**COMMON, **SMALL, methods=methods, rates=[50.0, 500.0], chunk=16)
    settings.check()
    kept = []
    document = bench.run(settings, keep=lambda so_far: kept.append(len(so_far["cells"])))
    bench.check_document(document)
    assert kept == [1, 2] and [cell["cell"]["rate"] for cell in document["cells"]] == [50.0, 500.0]
    whole = {name for name in methods if not choices.make_method(name).in_chunks}
    said = "{} reads whole prompts: it cannot read them in chunks".format
    assert {name for name in methods if said(name) in document["notes"]} == whole
    for cell in document["cells"]:
        assert [row["name"] for row in cell["variants"]] == methods and not cell["refused"]
        for row in cell["variants"]:
            assert row["oom"] == 0 and 0 < row["mean_batch"] <= row["most_requests"] <= 4
            assert 0 < row["ttft_p50_s"] <= row["ttft_p95_s"] <= row["ttft_p99_s"]
            assert 0 < row["tpot_p50_s"] <= row["tpot_p95_s"] <= row["tpot_p99_s"]
            assert 0 < row["goodput_per_s"] <= row["requests_per_s"] < row["tokens_per_s"]
            assert 0 < max(held for _, held in row["pages"]) <= 1e6
            assert row["seconds"] == [row["median"]] and row["median"] > cell["cell"]["rate"] ** -1
    text = io.StringIO()
    Console(width=200, file=text).print(show.render(document))
    assert "poisson, 500/s" in text.getvalue() and "gave way" in text.getvalue()
    assert show.draw(document, tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_transformers_serves_the_same_load(tmp_path):
    """Its continuous batching answers every request with as many tokens; its clock is the wall's alone."""
    options = COMMON | SMALL | {"methods": ["full"], "arrivals": "all", "peers": True}
    (cell,) = (document := bench.run(serve.Settings(**options)))["cells"]
    full, peer = cell["variants"]
    assert peer["name"] == "transformers" and peer["oom"] == 0 and peer["mean_batch"] is None
    tokens = [row["tokens_per_s"] * row["median"] for row in (full, peer)]
    assert tokens == pytest.approx([sum(answer for *_, answer in serve.Settings(**options).load(1.0))] * 2)
    assert 0 < peer["ttft_p50_s"] <= peer["ttft_p99_s"] < peer["median"] and peer["tpot_p50_s"] > 0
    assert show.draw(document, tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
    (cell,) = bench.run(serve.Settings(**options, clock="cpu"))["cells"]
    assert [row["name"] for row in cell["variants"]] == ["full"]
    assert "works in a thread of its own" in cell["refused"][0]["reason"]


def test_loads_follow_their_settings(tmp_path):
    """At once, apart, in bursts, or as a file says; alike for every method, and as fast as the rate in the mean."""
    settings = serve.Settings(**COMMON, requests=400, burst=4)
    apart = settings.load(8.0)
    assert apart == settings.load(8.0) and apart != serve.Settings(**COMMON, requests=400, seed=1).load(8.0)
    times = [at for at, _, _ in apart]
    assert times == sorted(times) and 400 / times[-1] == pytest.approx(8.0, rel=0.15)
    assert 256 <= min(p for _, p, _ in apart) < 270 and 750 < max(p for _, p, _ in apart) <= 768
    bursts = [at for at, _, _ in serve.Settings(**COMMON, requests=400, burst=4, arrivals="burst").load(8.0)]
    assert len(set(bursts)) == 100 and 400 / bursts[-1] == pytest.approx(8.0, rel=0.3)
    assert {at for at, _, _ in serve.Settings(**COMMON, arrivals="all").load(8.0)} == {0.0}
    trace = tmp_path / "trace.csv"
    trace.write_text("5,10,2\n6,20,3\n9,30,4\n")
    load = serve.Settings(**COMMON, arrivals=str(trace)).load(0.5)
    assert load == [(0.0, 10, 2), (1.0, 20, 3), (4.0, 30, 4)]
    assert len(serve.Settings(**COMMON, arrivals=str(trace), requests=2).load(0.5)) == 2


def test_goodput_counts_those_within_both_targets():
    """Of three requests, one waits too long, and one gets its tokens too slowly."""
    run = {"ttft_s": [1.0, 3.0, 1.0], "tpot_s": [0.1, 0.1, 0.4], "tokens": 60, "took_s": 6.0, "oom": 1, "times": None}
    got = serve.figures([run | {"preemptions": 2, "rows": [1, 3], "pages": [(0.0, 5)]}], 2.0, 0.2)
    assert (got["goodput_per_s"], got["requests_per_s"], got["tokens_per_s"]) == (1 / 6, 0.5, 10.0)
    assert (got["ttft_p50_s"], got["mean_batch"], got["oom"], got["preemptions"]) == (1.0, 2.0, 1.0, 2.0)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"rates": [0]}, ("setting-value", "serve.rates", "rates=[0]")),
        ({"tpot_s": "fast"}, ("setting-value", "serve.tpot_s", "tpot_s=fast")),
        ({"prompts": [9, 3]}, ("setting-value", "serve.prompts", "prompts=[9, 3]")),
        ({"arrivals": "no/such.csv"}, ("file-missing", "serve.arrivals", "arrivals=no/such.csv")),
        ({"methods": ["full", "full"]}, ("setting-value", "serve.methods", "methods=['full', 'full']")),
        ({"times": ["a.json"], "chunk": 16}, ("settings-conflict", "serve.chunk", "chunk=16")),
    ],
)
def test_bad_settings_are_refused(changes, error):
    """Before a model is loaded."""
    with refused(*error):
        serve.Settings(**COMMON | changes).check()


@pytest.mark.parametrize("line", ["5,1", "x,1,2", "2,0,2", "2,1,1", "0.5,1,2", "nan,1,2"])
def test_a_line_that_is_no_request_is_named(tmp_path, line):
    """With its number."""
    trace = tmp_path / "trace.csv"
    trace.write_text(f"1,2,3\n{line}\n")
    with refused("file-content", "serve.arrivals", f"trace.csv:2: '{line}'"):
        serve.Settings(**COMMON, arrivals=str(trace)).check()


def test_buffers_may_take_more_than_half_where_all_of_a_request_fits():
    """KIVI's buffers are most of what a short request holds: as many requests go on at once as the memory has room
    for, and not as many as fill half of it with buffers."""
    settings = serve.Settings(**COMMON, **(SMALL | {"max_batch": 12}), methods=["kivi bits=2 residual_tokens=32"])
    load = [(0.0, 40, 8)] * 12
    progress = SimpleNamespace(notes=[], stage=lambda _: None, advance=lambda: None)
    model, most = choices.make_model(settings.model, "cpu"), {}
    for kv_mb in (0.12, 0.2):
        settings.kv_mb = kv_mb
        serving = serve.Serving(settings, progress, settings.methods[0], load, [[5] * 40] * 12, Here(model, "cpu"))
        serving.open()
        row = sum(serving._engine.store.ledger.fixed_row_bytes())
        serving.answer(0)
        (measured,) = serving.runs
        held = max(held for _, held in measured["pages"])
        most[kv_mb] = serving.most_requests
        assert (measured["oom"], measured["preemptions"]) == (0, 0) and held > 0
        assert serving.most_requests * row > kv_mb * 1e6 / 2
    assert most[0.2] > most[0.12] > 1


@pytest.mark.parametrize(("kv_mb", "lost"), [(1, 0), (0.02, 6)])
def test_steps_that_can_be_captured_are_replayed(kv_mb: float, lost: int):
    """Answers of a known length need no say of the host, as a least length would; each step of a run is told; and where
    the memory holds no prompt, which is read before the clock runs, all requests are lost and the bench goes on."""
    pytest.importorskip("triton", reason="triton is not installed (pip install -e '.[test]')")
    from kvbench.kernels.gpu.emulator import record

    settings = serve.Settings(**COMMON | {"kernels": "triton"}, **SMALL, methods=["full"])
    settings.kv_mb = kv_mb
    model, load = choices.make_model(settings.model, "cpu"), [(0.0, 40, 8)] * 6
    progress = SimpleNamespace(notes=[], stage=lambda _: None, advance=lambda: None)
    machine = Here(model, "wall")
    machine.engine = partial(Engine, model, capture=record)
    serving = serve.Serving(settings, progress, "full", load, [[5] * 40] * 6, machine)
    serving.open()
    counts = serving._engine.steps.counts
    serving.answer(0)
    (run,) = serving.runs
    assert run["oom"] == lost and run["tokens"] == 8 * (6 - lost)
    assert counts["one_at_a_time"] == 0 == counts["failed_captures"]
    assert (counts["replayed"] > 0) == (not lost) and sum(run["rows"]) >= 7 * (6 - lost)
