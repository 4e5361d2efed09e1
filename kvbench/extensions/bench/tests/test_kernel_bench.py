"""The benches of attention, of score passes over prompts and of page management: they need torch alone, build pages by
the real writer, and refuse what is wrong."""

import dataclasses
import io
import json
import os
import subprocess
import sys

import pytest
import torch
from places import ROOT
from rich.console import Console
from torch.utils._python_dispatch import TorchDispatchMode

from kvbench.extensions.bench import show
from kvbench.kernels.backend import REFERENCE, Backend
from kvbench.kernels.bench import attention, bench, caches, machine, manager, prefill, products
from kvbench.kernels.bench.attention import Settings
from kvbench.kernels.dispatch import get_backend
from kvbench.kernels.operands import PLAIN

SMALL = "shapes=[6x2x64] lengths=[96] batches=[2] rounds=2 threads=[1]".split()
SMALL += ["formats=[K16V16,K4V2,KIVI2,K8V4+K4V2,K4V2+KVQ4]"]
SMALL += ["working_set_mb=1", "max_buffers=3", "dense=[fp32]", "kernels=torch"]


@pytest.fixture(autouse=True)
def small_probe(monkeypatch):
    """A bandwidth probe that costs nothing; the subprocess has the real one."""
    monkeypatch.setattr(machine, "PROBE_BYTES", 1 << 20)


# Stands for a machine that has torch and nothing else of what kvbench is built on.
BLOCKED = """
import importlib.abc, runpy, sys
names = {"hydra", "omegaconf", "transformers", "rich", "matplotlib", "datasets", "lm_eval", "scipy", "pandas"}
class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in names:
            raise ImportError(name + " is not on this machine")
sys.meta_path.insert(0, Absent())
sys.argv = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


def run_alone(module, *words):
    """Runs a bench in a process where everything but torch is missing."""
    command = [sys.executable, "-c", BLOCKED, module, *words]
    return subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)


def test_attention_bench_runs_with_torch_alone(tmp_path):
    """Without hydra, transformers, rich or matplotlib it measures, prints a table and writes a document that checks."""
    done = run_alone("kvbench.kernels.bench.attention", *SMALL, f"out={tmp_path / 'a.json'}")
    assert done.returncode == 0, done.stderr
    assert "x sdpa fp32" in done.stdout and "K8V4+K4V2 + scores" in done.stdout
    document = json.loads((tmp_path / "a.json").read_text())
    bench.check_document(document)
    (cell,) = document["cells"]
    rows = {row["name"]: row for row in cell["variants"]}
    assert {len(row["seconds"]) for row in rows.values()} == {2}
    assert rows["K4V2 + scores"]["versus"]["name"] == "K4V2"
    assert rows["K4V2"]["max_error"] < 1e-4 and rows["K4V2"]["token_bytes"] == 16 + 32 + 8
    assert document["environment"]["backend"] == "torch"
    assert any("plain reference" in note for note in document["notes"])


MODULES = {"attention": attention, "prefill": prefill, "manager": manager, "products": products}


@pytest.mark.parametrize("name", MODULES)
def test_help_names_every_setting(name, capsys):
    """--help prints each setting with its default and meaning, and runs nothing."""
    module = MODULES[name]
    assert bench.main(module.Settings, ["--help"]) == 0
    shown = capsys.readouterr().out
    for item in dataclasses.fields(module.Settings):
        (line,) = [i for i, text in enumerate(shown.splitlines()) if text.startswith(f"  {item.name}=")]
        assert shown.splitlines()[line + 1].strip().endswith("."), f"{item.name} has no meaning"
    assert f"python -m kvbench.kernels.bench.{name}" in shown and "out=FILE" in shown


def test_user_errors_of_the_script_are_one_line(monkeypatch, capsys):
    """An unknown setting ends with exit code 2 and what there is; device=cuda without a GPU says what torch sees."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for word, said in (("length=3", "length=3 is no setting; there are"), ("device=cuda", "device=cuda: torch ")):
        assert bench.main(Settings, [word]) == 2
        assert capsys.readouterr().err.startswith(f"error: {said}")


def test_words_are_read_as_they_are_written():
    """quick=true changes defaults only; `false` is no, not a word; buffers go beyond a GPU's cache unless the user says
    how far."""
    made = bench.read_words(Settings, ["quick=true", "lengths=[128,256]"])
    assert made.lengths == [128, 256] and made.batches == Settings.quick["batches"] and made.rounds == 5
    assert bench.read_words(Settings, []).rounds == 11
    for text, value in (("false", False), ("true", True), ("False", False)):
        made = bench.read_words(Settings, [f"peers={text}", f"graph={text}"])
        assert made.peers is value and made.graph is value
    assert (made.working_set("cpu"), made.working_set("cuda:1")) == (64, 512)
    assert bench.read_words(Settings, ["working_set_mb=7"]).working_set("cuda") == 7


def test_keys_before_the_rotary_embedding_are_rotated_to_their_tokens():
    """A key that attention reads of KVQ4, behind 32 tokens of another format, is rotated to its token, except for the
    step between two of sixteen levels of its channel."""
    k, v = torch.randn(2, 3, 2, 96, 64, generator=torch.Generator().manual_seed(1)).unbind()
    held = caches.build_caches("K16V16+K4V2+KVQ4", k, v, Backend(), num_buffers=1, seed=0)
    last = held.buffers[0][2]
    angles = torch.arange(64, 96)[:, None] / 10000 ** (torch.arange(32) / 32)
    first, second = k[:, :, 64:].chunk(2, -1)
    rotated = torch.cat(
        [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1
    )
    dense, _, live = REFERENCE.gather_dense(held.pages, [last], None)
    step = (k[:, :, 64:].amax((0, 2)) - k[:, :, 64:].amin((0, 2))).max() / 15
    assert (dense[live].view_as(rotated) - rotated).abs().max() < 2**0.5 * step  # two channels' steps, turned into one


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("graph=maybe", "graph=maybe is neither true nor false"),
        ("formats=[K5V2]", "formats=K5V2 does not exist"),
        ("shapes=[9x2x64]", "2 KV heads do not divide 9"),
        ("shapes=[big]", "query heads x KV heads x head dim"),
        ("rounds=0", "rounds=0 must be a whole number of at least 1"),
        ("lengths=[]", "lengths=.. must be a list"),
        ("scores=[all]", "scores=all does not exist"),
        ("threads=[-1]", "threads=-1 must be"),
        ("clock=sun", "clock=sun does not exist"),
        ("clock=cpu", "clock=cpu counts one thread, but threads=.1, 0."),
    ],
)
def test_settings_out_of_range_are_refused(word, message):
    """Every refusal names value and rule."""
    with pytest.raises(ValueError, match=message):
        bench.read_words(Settings, [word])


@pytest.mark.parametrize("name", ["K16V16", "K8V4", "K4V2", "KIVI2", "FP8", "K8V4+K4V2"])
def test_every_buffer_holds_the_cache_in_separate_pages(name):
    """Buffers share no page, all pages are used, each gives exact attention over what was written."""
    generator = torch.Generator().manual_seed(1)
    k, v = (torch.randn(2, 2, 192, 64, generator=generator) for _ in range(2))
    q = torch.randn(2, 6, 64, generator=generator)
    backend = get_backend("torch")
    held = caches.build_caches(name, k, v, backend, num_buffers=3, seed=0)
    ids = torch.cat([t.ids.flatten() for tiers in held.buffers for t in tiers])
    assert ids.sort()[0].tolist() == list(range(len(held.pages)))
    for buffer in range(3):
        assert caches.paged_error(backend, held, q, 0.125, "max", buffer) < 1e-5
    # The pages hold the keys that went in, up to rounding: nothing was written to the wrong head or token.
    dense, _, live = backend.gather_dense(held.pages, held.buffers[2], None)
    step = 8 / 3 if name == "KIVI2" else 8 / 15  # of keys within +-4, at 2 bits and at 4 or more
    assert (dense[live].view(2, 2, 192, 64) - k).abs().max() < 0.55 * step


class Lazy(Backend):
    """Leaves out the last tokens: faster, and wrong."""

    def paged_decode(self, q, pages, tiers, ring, scale, **how):
        short = [dataclasses.replace(t, num_k=t.num_k - 3, num_v=t.num_v - 3) for t in tiers]
        return super().paged_decode(q, pages, short, ring, scale, **how)


class Careless(Backend):
    """Right attention with wrong scores."""

    def paged_decode(self, q, pages, tiers, ring, scale, **how):
        out, lse, scores = super().paged_decode(q, pages, tiers, ring, scale, **how)
        return out, lse, [s * 1.01 for s in scores]


class Failing(Backend):
    """Cannot write."""

    def write_values(self, *arguments):
        raise RuntimeError("no kernel image for this device")


class Short(Backend):
    """Counts one query too few."""

    def prompt_scores(self, q, k, scale, columns, reduction, lse=None, softmax=PLAIN):
        fewer = columns.queries - 1 if columns.queries > 0 else 200
        return super().prompt_scores(q, k, scale, dataclasses.replace(columns, queries=fewer), reduction)


class Forgetful(Backend):
    """Passes over the first token of what a chunk stands behind."""

    def chunk_attention(self, q, k, v, history, scale, softmax=PLAIN):
        past_k, past_v, live = history
        if live is not None:
            live = live.clone()
            live[:, 0] = False
        return super().chunk_attention(q, k, v, (past_k, past_v, live), scale)


DENSE, PAGED = {"sdpa fp32", "sdpa fp32 grouped"}, {"K16V16", "K4V2", "KIVI2", "K8V4+K4V2", "K4V2+KVQ4"}
SCORED = {f"{name} + scores" for name in PAGED}
PROMPT = "shapes=[2x2x64] lengths=[310] windows=[8] rounds=1 threads=[1]".split()
CHUNKS = "attention in two chunks"
WHOLE = {"attention", "sdpa", "eager, all queries", CHUNKS, "attention, then that of a replay"}
SCORE_PASSES = {f"attention + scores of {queries}" for queries in ("the last 8", "all queries")}


@pytest.mark.parametrize(
    ("backend", "module", "words", "refused", "timed", "reason"),
    [
        (Lazy, attention, SMALL, PAGED | SCORED, DENSE, "not timed"),
        (Careless, attention, SMALL, SCORED, DENSE | PAGED, "not timed"),
        (Failing, attention, SMALL, PAGED, DENSE, "RuntimeError: no kernel image"),
        (Short, prefill, PROMPT, SCORE_PASSES, WHOLE, "not timed"),
        (Forgetful, prefill, PROMPT, {CHUNKS}, (WHOLE | SCORE_PASSES) - {CHUNKS}, "not timed"),
    ],
)
def test_what_is_wrong_is_refused(monkeypatch, backend, module, words, refused, timed, reason):
    """It is named in the document with the reason and not timed; it costs its own rows only."""
    monkeypatch.setattr(bench, "get_backend", lambda name, device: backend())
    document = bench.run(bench.read_words(module.Settings, words))
    (cell,) = document["cells"]
    assert {row["name"] for row in cell["variants"]} == timed
    assert len(cell["refused"]) == len(refused) and {entry["name"] for entry in cell["refused"]} == refused
    assert all(reason in entry["reason"] for entry in cell["refused"])
    assert not bench.is_complete(document)
    first = min(refused)
    assert any(note.startswith(f"{first} at shape ") for note in document["notes"])


def test_nan_is_never_the_smaller_error():
    """One NaN among the errors makes the whole NaN, wherever it stands."""
    for errors in ([0.1, float("nan")], [float("nan"), 0.1]):
        assert not caches.worst(errors) <= 1e9


def test_what_does_not_fit_is_left_out(monkeypatch):
    """Memory is asked before a cell is built, and before the full matrix is tried; the document names both."""
    monkeypatch.setattr(machine, "available_bytes", lambda device: 1000)
    document = bench.run(bench.read_words(Settings, SMALL))
    (cell,) = document["cells"]
    assert "GB are free" in cell["skipped"] and not cell["variants"]
    bench.check_document(document)
    words = "shapes=[2x2x64] lengths=[64] windows=[8] rounds=1 threads=[1] kernels=torch".split()
    document = bench.run(bench.read_words(prefill.Settings, words))
    assert any("left out: its matrices" in note for note in document["notes"])
    assert all(not row["name"].startswith("eager") for row in document["cells"][0]["variants"])


def test_documents_that_contradict_themselves_are_refused():
    """Another schema, a missing part, a time that is no number."""
    row = {"name": "a", "seconds": [1.0], "median": 1.0, "q1": 1.0, "q3": 1.0}
    good = {"schema": 1, "what": "attention", "started": "", "elapsed_s": 1, "settings": {}, "environment": {}}
    good |= {"notes": [], "cells": [{"cell": {"n": 1}, "variants": [row]}]}
    bench.check_document(good)
    everything_refused = {"cell": {"n": 2}, "variants": [], "refused": [{"name": "a", "reason": "wrong"}]}
    assert "attention: n 2" in bench.plain_table(good | {"cells": [everything_refused]})
    with pytest.raises(ValueError, match="schema 7"):
        bench.check_document(good | {"schema": 7})
    with pytest.raises(ValueError, match="notes missing"):
        bench.check_document({key: value for key, value in good.items() if key != "notes"})
    for bad in (row | {"seconds": [float("nan")]}, row | {"q1": 2.0}):
        with pytest.raises(ValueError, match="a at n 1"):
            bench.check_document(good | {"cells": [{"cell": {"n": 1}, "variants": [bad]}]})


def test_a_loaded_machine_is_named_as_such():
    """The warning counts cores and names the remedy; a quiet machine with kernels of its own gets none."""
    from kvbench.kernels.bench.machine import doubts

    where = {"load_average": 3.0, "num_cpus": 2, "device": "cpu", "omp_wait_policy": "", "gomp_spincount": ""}

    class Compiled(Backend):
        name, is_reference = "compiled", False

    (note,) = doubts(where, "wall", Compiled())
    assert "load average 3.0 on 2 cores" in note and "clock=cpu" in note
    assert doubts(where | {"load_average": 0.4}, "wall", Compiled()) == []
    sleeping = where | {"omp_wait_policy": "passive"}
    assert len(doubts(sleeping, "wall", Backend())) == 3
    assert len(doubts(sleeping | {"gomp_spincount": "0"}, "wall", Backend())) == 3
    assert len(doubts(sleeping | {"gomp_spincount": "1000"}, "wall", Backend())) == 2


def test_score_passes_are_timed_with_attention():
    """The window, all queries, two chunks and the full matrix agree with a matrix in fp64; their cost is over
    attention's time."""
    words = "shapes=[6x2x64] lengths=[333] windows=[8] rounds=2 threads=[1] kernels=torch".split()
    document = bench.run(bench.read_words(prefill.Settings, words))
    bench.check_document(document)
    (cell,) = document["cells"]
    assert not cell["refused"]
    rows = {row["name"]: row for row in cell["variants"]}
    assert set(rows) == WHOLE | SCORE_PASSES
    assert rows["attention + scores of the last 8"]["versus"]["name"] == "attention"
    assert all(row["max_error"] < 1e-4 for row in rows.values())
    assert "costs" in _shown(document)


def test_both_managers_hold_the_same_pages():
    """All at once and one by one give every list the same pages through every operation, wrapping around."""
    words = "lists=[5,33] tokens_per_page=8 start_tokens=11 rounds=3 threads=[1]".split()
    document = bench.run(bench.read_words(manager.Settings, words))
    bench.check_document(document)
    assert len(document["cells"]) == 6
    for cell in document["cells"]:
        assert not cell["refused"], cell["refused"]
        assert [row["name"] for row in cell["variants"]] == ["all at once", "one by one"]
    assert "compact, free, take" in _shown(document)


@pytest.mark.parametrize("operation", manager._OPERATIONS)
def test_managers_agree_after_many_operations(operation):
    """The lists are the same again after the counters of the circular list have gone around several times."""
    small = manager.Settings(lists=[7], tokens_per_page=4, start_tokens=9)
    state = manager._State(7, small, "cpu", Backend())
    both = state.variants(operation)
    for _ in range(80):
        for variant in both:
            variant.call(0)
    assert state.pages_agree() == 0.0 and state.pool.start > 3 * state.pool.num_pages
    assert state.table.num_slots[0].tolist() == state.host.slots == state.start.tolist()


def test_a_manager_that_gives_out_other_pages_is_refused(monkeypatch):
    """A batched manager whose pages differ from the sequential one's is not timed."""
    real = manager.PageTable.reserve

    def rolled(self, lists, tier, count, **named):
        first = real(self, lists, tier, count, **named)
        self.entries.copy_(self.entries.roll(1, 0))
        return first

    monkeypatch.setattr(manager.PageTable, "reserve", rolled)
    words = "lists=[5] tokens_per_page=8 start_tokens=11 rounds=1 threads=[1]".split()
    document = bench.run(bench.read_words(manager.Settings, words))
    assert all([entry["name"] for entry in cell["refused"]] == ["all at once"] for cell in document["cells"])


def _shown(document):
    """The output of the command."""
    from rich.console import Console

    from kvbench.extensions.bench import show

    console = Console(width=200)
    with console.capture() as captured:
        console.print(show.render(document))
    return captured.get()


def test_a_part_is_there_before_its_reading_is_timed(monkeypatch):
    """Pages that a virtual machine's host took back made a probe of 256 MB take twenty times as long, at times."""
    monkeypatch.setattr(machine, "PROBE_BYTES", 1 << 16)
    monkeypatch.setattr(machine, "PROBE_STEP_BYTES", 1 << 14)
    probe, read = machine.Bandwidth("cpu"), []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function is torch.ops.aten.sum.default:
                read.append((args[0].data_ptr(), args[0].numel() * args[0].stride(0)))
            return function(*args, **(kwargs or {}))

    variant = probe.variant()
    with Watch():
        for _ in range(5):
            variant.before_round()
            variant.call(0)
    touched, timed = read[::2], read[1::2]
    assert touched == timed and {size for _, size in timed} == {(1 << 14) // 8}
    assert len({at for at, _ in timed}) == 4 and timed[0] == timed[4]


def test_products_are_shown_with_torchs_and_the_limit(monkeypatch):
    """Each row says what the machine could do: what must be read and multiplied, at the speed of probes of the same
    rounds, whichever takes longer."""
    monkeypatch.setattr(machine, "PROBE_BYTES", 1 << 20)
    monkeypatch.setattr(machine, "PROBE_PRODUCT", (64, 64, 64))
    words = ["matrices=[33x70,8x96]", "rows=[1,5]", "dtypes=[fp32,bf16]", "threads=[1]", "rounds=2"]
    document = bench.run(bench.read_words(products.Settings, [*words, "device=cpu", "working_set_mb=1"]))
    bench.check_document(document)
    assert len(document["cells"]) == 4
    for cell in document["cells"]:
        assert not cell["refused"] and [row["name"] for row in cell["variants"]] == ["torch", "streamed"]
        rows, numbers, itemsize = cell["cell"]["rows"], 33 * 70 + 8 * 96, 4 if cell["cell"]["dtype"] == "fp32" else 2
        read_s = numbers * itemsize / cell["probe"]["bytes_per_s"]
        multiply_s = 2 * numbers * rows / cell["product"]["flops_per_s"]
        for row in cell["variants"]:
            assert row["limit_tokens_per_s"] == pytest.approx(rows / max(read_s, multiply_s))
    text = io.StringIO()
    Console(width=200, file=text).print(show.render(document))
    assert "of the limit" in text.getvalue() and "GFLOP/s" in text.getvalue()


def test_a_product_that_is_wrong_is_not_timed(monkeypatch):
    """One number of a hundred that is off."""
    right = products.RowProducts.__call__
    monkeypatch.setattr(
        products.RowProducts, "__call__", lambda self, x, w: right(self, x, w).index_fill_(1, torch.tensor([3]), 0.0)
    )
    monkeypatch.setattr(machine, "PROBE_BYTES", 1 << 20)
    words = ["matrices=[100x70]", "rows=[2]", "dtypes=[fp32]", "threads=[1]", "rounds=1", "device=cpu"]
    document = bench.run(bench.read_words(products.Settings, [*words, "working_set_mb=1"]))
    assert "exceeds" in document["cells"][0]["refused"][0]["reason"]
