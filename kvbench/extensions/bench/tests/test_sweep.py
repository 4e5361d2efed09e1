"""The sweep of kernel sizes: every variant is verified, sizes reach the launch, and all are compiled before."""

import json
import subprocess

import pytest
from rich.console import Console

pytest.importorskip("triton", reason="triton is not installed (pip install -e '.[test]')")

from kvbench.extensions.bench import show
from kvbench.kernels.bench import bench, machine, sweep
from kvbench.kernels.cpu.build import find_compiler
from kvbench.kernels.gpu.parts import Tuning, recording, tuned, tuning

WORDS = "shapes=[2x1x64] lengths=[160] batches=[1] rounds=1 threads=[1] working_set_mb=1 max_buffers=1".split()
WORDS += (
    "device=cpu kernels=triton block_slots=[16,32] warps=[1,2] stages=[3] stage_kb=[24,36] page_slots=[0,128]".split()
)


@pytest.fixture(autouse=True)
def small_probe(monkeypatch):
    """A bandwidth probe that costs nothing."""
    monkeypatch.setattr(machine, "PROBE_BYTES", 1 << 20)


def swept(*words):
    """The document of a sweep that compiles in no other process."""
    return bench.run(bench.read_words(sweep.Settings, [*WORDS, "jobs=0", *words]))


def test_every_size_is_a_row(tmp_path):
    """Slots, warps and stages of Triton's kernel, bytes under way of that in CUDA C++, and pages of both, next to each
    as it is; all are verified."""
    find_compiler()
    document = swept("formats=[K4V4]", "decodes=[triton,host]")
    (cell,) = document["cells"]
    assert not cell["refused"]
    names = [row["name"] for row in cell["variants"]]
    sizes = [f"triton, {slots} slots, {warps} warps, 3 stages" for slots in (16, 32) for warps in (1, 2)]
    pages = [f"{decode}, pages of 128 slots" for decode in ("triton", "host")]
    assert names == ["triton, as it is", *sizes, "host, as it is", "host, 24 KiB under way", *pages]
    console = Console(width=200)
    with console.capture() as captured:
        console.print(show.render(document))
    assert all(name in captured.get() for name in names)
    assert show.draw(document, tmp_path / "sweep.png") == tmp_path / "sweep.png"
    assert all({"triton, as it is", "host, as it is"} <= set(row["ratios"]) for row in cell["variants"])


def test_sizes_reach_the_launch(monkeypatch):
    """Programs, loops and pipelines are those of the row's name, and nothing of them is left behind."""
    seen = []
    with recording(lambda kernel, grid, arguments, constants: seen.append((kernel.__name__, constants))):
        monkeypatch.setattr(sweep.caches, "build_caches", built := _kept(sweep.caches.build_caches))
        settings = bench.read_words(sweep.Settings, [*WORDS, "jobs=0", "formats=[K4V4]", "decodes=[triton]"])
        made = settings.variants(bench.Bench(settings), settings.cells([1])[0])
        for variant in made:
            variant.call(0)
    assert built.calls == 2
    attended = [constants for name, constants in seen if name == "_attend"]
    launches = [(each["A_BT"], each["num_warps"], each["num_stages"]) for each in attended]
    assert launches[1:5] == [(16, 1, 3), (16, 2, 3), (32, 1, 3), (32, 2, 3)] and len(launches) == len(made) == 6
    assert attended[0]["A_T"] != attended[5]["A_T"] == 128
    with tuned(Tuning(block_slots=16)):
        assert tuning().block_slots == 16
    assert tuning() == Tuning()


def _kept(build):
    """Counts the calls of a function."""

    def counting(*arguments, **how):
        counting.calls += 1
        return build(*arguments, **how)

    counting.calls = 0
    return counting


def test_keys_in_groups_are_read_within_them():
    """No turn is longer than a group of tokens that share scales, and pages hold whole groups."""
    settings = bench.read_words(sweep.Settings, [*WORDS, "jobs=0", "page_slots=[0,48,64]", "block_slots=[32,64]"])
    labels = [label for label, _, _ in settings._options("triton", 0, 32)]
    assert labels[1:] == [f"triton, 32 slots, {warps} warps, 3 stages" for warps in (1, 2)]


def test_all_are_compiled_before_one_is_timed(monkeypatch):
    """By as many processes as are asked for, each with its share of the same settings; one that ends early is named."""
    begun = []

    class Process:
        returncode = 1

        def __init__(self, command, **_):
            begun.append(command)

        def communicate(self):
            return "", "Traceback\nRuntimeError: no space left"

        def poll(self):
            return 1

    real = bench.measure_cell
    monkeypatch.setattr(subprocess, "Popen", Process)
    monkeypatch.setattr(bench, "measure_cell", lambda *args, **how: begun.append("timed") or real(*args, **how))
    words = ["formats=[K4V4]", "decodes=[triton]", "block_slots=[16]", "warps=[1]", "page_slots=[0]", "jobs=3"]
    document = bench.run(bench.read_words(sweep.Settings, [*WORDS, *words]))
    assert begun[3:] == ["timed"] and [command[-1] for command in begun[:3]] == [f"share={n}/3" for n in range(3)]
    (*_, module), *settings = begun[0][:3], *begun[0][3:]
    assert module == "kvbench.kernels.bench.sweep"
    child = bench.read_words(sweep.Settings, settings)
    assert (child.jobs, child.block_slots, child.share) == (0, [16], "0/3")
    assert sum("no space left" in note for note in document["notes"]) == 3
    json.dumps(document)


def test_shares_are_all_of_it(monkeypatch):
    """Every variant of every cell is compiled by one process."""
    verified = []
    monkeypatch.setattr(sweep, "refuse_wrong", lambda variants: verified.extend(each.name for each in variants))
    words = [*WORDS, "jobs=0", "formats=[K4V4,K8V4]", "decodes=[triton]", "page_slots=[0]", "stages=[2]"]
    for index in range(3):
        assert sweep.run([*words, f"share={index}/3"]) == 0
    assert len(verified) == 2 * 5 and set(verified[:10]) == set(verified)


@pytest.mark.parametrize("word", ["share=3/3", "share=x", "block_slots=[24]", "decodes=[torch]"])
def test_settings_out_of_range_are_refused(word):
    """Each names its value."""
    with pytest.raises(ValueError, match=word.partition("=")[0]):
        bench.read_words(sweep.Settings, [word])
