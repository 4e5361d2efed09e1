"""The whole-model benches on a tiny random model: what is run, what is refused, and the arithmetic of rates."""

import io

import pytest
import torch
from refusals import refused
from rich.console import Console

from kvbench.engine import hf
from kvbench.engine.prompt_cache import PromptCache
from kvbench.extensions.bench import chunks, decode, show, throughput
from kvbench.extensions.bench.decoders import PeerDecoder, StaticDecoder, StoreDecoder, peak_bytes
from kvbench.kernels.backend import Backend
from kvbench.kernels.bench import bench, machine
from kvbench.models import matrices
from kvbench.runs import choices

MODEL = "random preset=tiny num_layers=2 dtype=float32"
COMMON = {"model": MODEL, "context": 96, "rounds": 2, "steps": 1, "threads": [1], "kernels": "torch", "device": "cpu"}


@pytest.fixture(scope="module")
def model():
    """A model of two layers."""
    return choices.make_model(MODEL, "cpu")


def test_decode_measures_prompts_and_every_batch(monkeypatch):
    """transformers' own cache, its dependency-free quantised one and every method, at both batch sizes; what is shown
    is tokens per second. The process gets its number of threads back."""
    counts = [7]
    monkeypatch.setattr(torch, "get_num_threads", lambda: counts[-1])
    monkeypatch.setattr(torch, "set_num_threads", counts.append)
    methods = ["full", "snapkv budget=0.5 window=8", "kivi bits=2 residual_tokens=32"]
    settings = decode.Settings(**COMMON, methods=methods, batches=[1, 2], prefill_rounds=1, peak=False)
    settings.check()
    document = bench.run(settings)
    assert counts == [7, 1, 1, 1, 7]
    bench.check_document(document)
    assert [cell["cell"]["phase"] for cell in document["cells"]] == ["prompt", "decode", "decode"]
    for cell in document["cells"]:
        assert not cell["refused"], cell["refused"]
        assert {"transformers", "transformers fp8", *methods} == {row["name"] for row in cell["variants"]}
    rows = {row["name"]: row for row in document["cells"][2]["variants"]}
    assert rows["full"]["tokens_per_call"] == 2 and len(rows["full"]["seconds"]) == 2
    # Two sequences of 96 tokens, 2 layers, keys and values in fp32.
    shape = choices.make_model(MODEL, "cpu").model.config
    elements = 2 * 96 * 2 * 2 * shape.num_key_value_heads * shape.head_dim
    assert rows["transformers"]["cache_bytes"] == 4 * elements
    assert 2 * elements <= rows["full"]["cache_bytes"] < 2.6 * elements
    assert rows["snapkv budget=0.5 window=8"]["cache_bytes"] < rows["full"]["cache_bytes"]
    # What the machine could do: at this size, reading the matrices and the cache.
    cell, config = document["cells"][2], choices.make_model(MODEL, "cpu").model.config
    heads = (config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim
    layer = config.hidden_size * (heads + config.num_attention_heads * config.head_dim + 3 * config.intermediate_size)
    numbers = 2 * layer + config.hidden_size * config.vocab_size
    read_s = (4 * numbers + rows["full"]["cache_bytes"]) / cell["probe"]["bytes_per_s"]
    multiply_s = 2 * numbers * 2 / cell["product"]["flops_per_s"]
    assert rows["full"]["limit_tokens_per_s"] == pytest.approx(2 / max(read_s, multiply_s))
    text = io.StringIO()
    Console(width=200, file=text).print(show.render(document))
    assert text.getvalue().count("of the limit") == 2


@pytest.fixture(autouse=True)
def small_probes(monkeypatch):
    """Keeps the probes of the machine's limits from taking longer than what is tested."""
    monkeypatch.setattr(machine, "PROBE_BYTES", 1 << 20)
    monkeypatch.setattr(machine, "PROBE_PRODUCT", (64, 64, 64))


@pytest.mark.skipif(
    any(matrices.why_not(way, torch.float32, torch.device("cpu")) for way in ("packed", "streamed")),
    reason="matrices cannot be packed here, or there is no compiler",
)
def test_packed_and_plain_rows_are_shown_with_streamed_ones():
    """Every row comes three times in the same rounds, transformers' own too, each by a model of its own kind, and speed
    is told relative to all of transformers'."""
    options = {"methods": ["full"], "batches": [1], "prefill_rounds": 1, "linear": ["plain", "packed", "streamed"]}
    settings = decode.Settings(**COMMON, **options, peak=False, quantised=False)
    settings.check()
    document = bench.run(settings)
    names = [f"{name}{mark}" for mark in ("", ", plain", ", packed") for name in ("transformers", "full")]
    for cell in document["cells"]:
        assert not cell["refused"], cell["refused"]
        rows = {row["name"]: row for row in cell["variants"]}
        assert list(rows) == names and cell["twice"]["name"] == "transformers"
        assert list(rows["full, packed"]["ratios"]) == [*names[::2], "full"]
    models = decode.make_models(settings, "cpu", [])
    assert "no streamed rows: all rows without a mark are" in document["notes"]
    kinds = {mark: type(model.model.model.layers[0].mlp.up_proj) for mark, model in models.items()}
    assert kinds == {"": matrices.StreamedLinear, ", packed": matrices.PackedLinear, ", plain": torch.nn.Linear}
    variants = decode.decode_variants(settings, models[", packed"], 1, ", packed")
    assert [each.before_round.__self__.__class__ for each in variants] == [PeerDecoder, StoreDecoder]
    assert variants[0].before_round.__self__.loaded is models[", packed"]
    text = io.StringIO()
    Console(width=200, file=text).print(show.render(document))
    for way in (" (float32, streamed)", ", packed (float32)", ", plain (float32)"):
        assert f"x transformers{way}" in text.getvalue()


def test_packed_rows_that_cannot_be_had_are_a_note(monkeypatch):
    """The other rows are measured, and the reason is told."""
    monkeypatch.setattr(matrices, "why_not", lambda *args: "of the weather")
    settings, notes = decode.Settings(**COMMON, linear=["packed"]), []
    assert list(decode.make_models(settings, "cpu", notes)) == [""]
    assert notes == ["no packed rows: model.linear=packed was not done, because of the weather"]
    packed = decode.Settings(**COMMON | {"model": f"{MODEL} linear=packed"})
    assert decode.make_models(packed, "cpu", notes)[""].linear == "plain"
    assert notes[1] == "model.linear=packed was not done, because of the weather"


def test_a_row_may_have_another_layout():
    """`store.` words go to the store, the others to the method; wrong ones are refused before anything runs."""
    policy, options = choices.make_cache("int4 tier=k4v2 store.rotation=hadamard store.track=[pos]")
    assert [tier.name for tier in policy.tiers] == [tier.name for tier in choices.make_method("int4 tier=k4v2").tiers]
    assert (options.rotation, options.track) == ("hadamard", ("pos",))
    assert choices.make_cache("full")[1].rotation == "none"
    for words, error in (
        ("store.spin=1", ("setting-unknown", "store.spin")),
        ("store.rotation=left", ("setting-value", "store.rotation", "store.rotation='left'")),
    ):
        with refused(*error):
            decode.Settings(**COMMON, methods=[f"int4 {words}"]).check()


def test_all_decoders_give_the_same_logits(model, monkeypatch):
    """kvbench's runner in the model's own precision and transformers' static cache, eager and through a replay that
    stands for a CUDA graph: at every step the same logits as transformers' growing cache, batch for batch, and what
    capturing put behind the prompt is forgotten."""
    text = choices.sample_tokens(model, 2, 40)
    prompts, answers = [tokens[:32] for tokens in text], [tokens[32:] for tokens in text]
    steps = [[line[index] for line in answers] for index in range(4)]
    peer = PeerDecoder(model)
    peer.prefill(prompts)
    expected = [peer.step(tokens) for tokens in steps]
    store = StoreDecoder(model, "full tier=native", rows=2, context=32, new_tokens=8, kernels="torch")
    eager, static = StaticDecoder(model, 40), StaticDecoder(model, 40)
    for decoder in (store, eager, static):
        decoder.prefill(prompts)
        if decoder is static:
            for _ in range(3):
                static._go()
            hf.rewind(static.cache, 32)
        assert torch.allclose(decoder.logits, peer.logits, atol=1e-4)
        for tokens, logits in zip(steps, expected, strict=True):
            assert torch.allclose(decoder.step(tokens), logits, atol=1e-4)
    assert static.cache_bytes() > peer.cache_bytes() * 40 / 36 * 0.99
    settings = decode.Settings(**COMMON, methods=["full"], quantised=False)
    variant = decode.static_variant(settings, model, prompts, answers)
    variant.call(0)
    assert variant.name == decode.STATIC and variant.extra["tokens_per_call"] == 2
    monkeypatch.setattr(hf, "native_cache", lambda *args: (_ for _ in ()).throw(ImportError("no such cache")))
    with pytest.raises(ImportError, match="no such cache"):
        decode.static_variant(settings, model, prompts, answers).check()


def test_a_decode_kernel_that_is_wrong_is_refused(model, monkeypatch):
    """A backend whose attention is off by one in a hundred is refused; the copies that were checked leave no trace."""

    class Off(Backend):
        def paged_decode(self, *arguments, **named):
            out, lse, scores = super().paged_decode(*arguments, **named)
            return out * 1.5, lse, scores

    settings = decode.Settings(**COMMON, methods=["full"], batches=[1], quantised=False)
    (peer, full) = decode.decode_variants(settings, model, 1)
    assert peer.name == "transformers" and peer.check is None
    assert full.check() <= 1e-6
    decoder = full.before_round.__self__
    store = decoder.runner.store

    def state():
        return decoder.cache_bytes(), store.counters.tokens_seen.tolist(), store.pages.pool.num_used

    before = state()
    store.pages.backend = Off()
    assert full.check() > full.tolerance
    assert state() == before


def test_throughput_fills_the_memory_and_no_more():
    """Every batch is the largest that fits at its final length, and a method that cannot hold one is named."""
    methods = ["full", "snapkv budget=0.25 window=8", "kivi bits=2 residual_tokens=32"]
    settings = throughput.Settings(**COMMON, methods=methods, kv_mb=1, new_tokens=6)
    settings.check()
    document = bench.run(settings)
    bench.check_document(document)
    (cell,) = document["cells"]
    assert not cell["refused"]
    rows = {row["name"]: row for row in cell["variants"]}
    for name, row in rows.items():
        assert row["cache_bytes"] <= 1e6
        if name != "transformers":
            assert (row["batch"] + 1) * row["sequence_bytes"] > 1e6
    assert rows["snapkv budget=0.25 window=8"]["batch"] > rows["full"]["batch"] > rows["transformers"]["batch"] > 0
    assert rows["full"]["rate_ratios"]["full"] == {"median": 1.0, "q1": 1.0, "q3": 1.0}


def test_timed_prompts_are_read_every_time(model):
    """No prompt that is timed is replayed from what was kept of an earlier reading."""
    settings = decode.Settings(**COMMON, methods=["full"], quantised=False)
    full = decode.prompt_variants(settings, {"": model})[-1]
    decoder = full.before_round.__self__
    for _ in range(3):
        full.call(0)
    assert decoder.runner.prompts.num_read == 3 and decoder.runner.prompts.num_reused == 0


def test_a_prompt_is_read_once_for_all_methods(model, monkeypatch):
    """Untimed prefill: each further method reuses the kept prompt, with a cache of its own."""
    caches = []

    class Kept(PromptCache):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            caches.append(self)

    for module in (decode, throughput):
        monkeypatch.setattr(module, "PromptCache", Kept)
    methods = ["full", "snapkv budget=0.5 window=8", "h2o budget=0.25"]
    variants = decode.decode_variants(decode.Settings(**COMMON, methods=methods, quantised=False), model, 2)
    assert (caches[0].num_read, caches[0].num_reused) == (2, 4) and len({v.extra["cache_bytes"] for v in variants}) == 4
    settings = throughput.Settings(**COMMON, methods=methods, kv_mb=1, new_tokens=6)
    text, prompts = choices.sample_tokens(model, 2, 96 + 6), Kept(1 << 30, keeps_queries=True)
    variants = [v for name in methods for v in throughput.store_variants(name, settings, model, text, [], prompts)]
    batches = [variant.extra["batch"] for variant in variants]
    assert prompts.num_read == 2 and batches == sorted(batches)


def test_rates_count_the_batch():
    """Twice the tokens in the same time is twice the throughput."""
    rows = [
        {"name": "transformers", "seconds": [2.0, 4.0], "tokens_per_call": 10},
        {"name": "full", "seconds": [2.0, 4.0], "tokens_per_call": 20},
    ]
    throughput.Settings(**COMMON).finish({"variants": rows})
    assert rows[1]["rate_ratios"]["transformers"]["median"] == 2.0
    assert rows[0]["rate_ratios"]["full"]["median"] == 0.5


def test_one_sequence_that_does_not_fit_is_said(model):
    """No batch of zero is timed."""
    notes = []
    settings = throughput.Settings(**COMMON, kv_mb=1, new_tokens=8, max_batch=2)
    assert throughput.fitting(settings, 2_000_000, "full", notes) == 0
    assert throughput.fitting(settings, 100_000, "kivi", notes) == 2
    assert "full: one sequence behind 96 tokens holds 2.0 MB" in notes[0] and "max_batch=2" in notes[1]


def test_lengths_are_cells_of_one_bench(tmp_path):
    """Each prompt length has its own cells, whose caches hold so many tokens; 0 stands for `context`; the picture has
    them side by side."""
    more = {"methods": ["full"], "lengths": [0, 32]}
    decoding = decode.Settings(**COMMON, **more, batches=[1], prefill_rounds=1, peak=False, quantised=False)
    filling = throughput.Settings(**COMMON, **more, kv_mb=1, new_tokens=6)
    assert [(cell["phase"], cell["context"]) for cell in decoding.cells([1])] == [
        *(("prompt", 96), ("prompt", 32)),
        *(("decode", 96), ("decode", 32)),
    ]
    documents = [bench.run(settings) for settings in (decoding, filling)]
    rows = [
        {r["name"]: r for r in c["variants"]}
        for d in documents
        for c in d["cells"]
        if c["cell"].get("phase") != "prompt"
    ]
    assert rows[0]["transformers"]["cache_bytes"] == 3 * rows[1]["transformers"]["cache_bytes"]
    assert rows[3]["full"]["batch"] > rows[2]["full"]["batch"]
    for document in documents:
        assert show.draw(document, tmp_path / "bench.png").stat().st_size > 0


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        (throughput.Settings, {"new_tokens": 5}, "new_tokens=5 is below the 96 tokens"),
        (decode.Settings, {"methods": []}, "methods=.. must be one or more"),
        (decode.Settings, {"methods": ["full", "full"]}, "each once"),
        (decode.Settings, {"methods": ["fulll"]}, "method=fulll does not exist. Did you mean full"),
        (decode.Settings, {"methods": ["snapkv budge=1"]}, "method.budge"),
        (decode.Settings, {"model": "smol"}, "model=smol does not exist"),
        (decode.Settings, {"batches": [0]}, "batches=0"),
        (decode.Settings, {"model": f"{MODEL} linear=packed", "linear": ["packed"]}, "would time rows twice"),
        (decode.Settings, {"linear": ["packed", "packed"]}, "would time rows twice"),
        (decode.Settings, {"linear": ["plane"]}, "linear=plane does not exist. Did you mean plain"),
    ],
)
def test_settings_out_of_range_are_refused(kind, changes, message):
    """Before anything is loaded."""
    with pytest.raises(ValueError, match=message):
        kind(**changes).check()


def test_prompts_longer_than_the_model_are_refused(model):
    """The message names the model's length and what to lower."""
    with refused("prompt-length", "context", f"{model.max_tokens + 1}"):
        choices.sample_tokens(model, 1, model.max_tokens + 1)


def test_bytes_of_a_prompt_are_measured():
    """The form in chunks has the smaller peaks and the same bytes in the end; a bench of decode steps measures a
    prompt's peak, in a process of its own."""
    measured = chunks.main({"method": "snapkv budget=0.25", "context": 1024, "chunk": 128})
    whole, chunked = measured["at_once"], measured["in_chunks"]
    assert chunked["alive_bytes"] < whole["alive_bytes"] and chunked["peak_bytes"] < whole["peak_bytes"]
    assert chunked["resident_bytes"] == whole["resident_bytes"]
    order = {"model": "random preset=tiny", "device": "cpu", "context": 256, "name": "snapkv budget=0.25"}
    assert peak_bytes(order | {"kind": None, "kernels": "torch", "threads": 1}) >= 0
