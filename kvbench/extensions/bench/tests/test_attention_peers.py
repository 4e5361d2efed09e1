"""The attention bench: FlashAttention and FlashInfer as their documents call them, residual buffers, lists of unlike
length, the kernels in CUDA C++, and how near rows come to what a device can do."""

import sys
from types import ModuleType

import pytest
import torch
from rich.console import Console

from kvbench.extensions.bench import show
from kvbench.kernels.backend import REFERENCE
from kvbench.kernels.bench import attention, bench, caches, instructions, machine, peers, roofline
from kvbench.kernels.bench.rounds import measure_cell, refuse_wrong
from kvbench.kernels.cpu.build import find_compiler

SMALL = "shapes=[6x2x64] batches=[2] rounds=1 threads=[1] working_set_mb=1 max_buffers=2 dense=[fp32]".split()


@pytest.fixture(autouse=True)
def small_probe(monkeypatch):
    """A bandwidth probe, and workspaces, that cost nothing."""
    monkeypatch.setattr(machine, "PROBE_BYTES", 1 << 20)
    monkeypatch.setattr(peers, "WORKSPACE_BYTES", 1 << 10)


class Wrapper:
    """FlashInfer 0.5.3's `BatchDecodeWithPagedKVCacheWrapper` by its documentation, in plain torch."""

    takes_scales = True

    def __init__(self, workspace, kv_layout="NHD", use_tensor_cores=False):
        assert workspace.dtype == torch.uint8 and not workspace.any() and kv_layout == "NHD"
        self.use_tensor_cores = use_tensor_cores

    def plan(self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, **how):
        assert {x.dtype for x in (indptr, indices, last_page_len)} == {torch.int32}
        self.lists = [indices[a:b].long() for a, b in zip(indptr[:-1].tolist(), indptr[1:].tolist(), strict=True)]
        self.last, self.shape = last_page_len.tolist(), (num_qo_heads, num_kv_heads, head_dim, page_size)
        self.how = how

    def run(self, q, paged_kv_cache, k_scale=None, v_scale=None):
        keys, values = paged_kv_cache
        (_, heads, dim, size), how = self.shape, self.how
        assert (q.dtype, keys.dtype) == (how["q_data_type"], how["kv_data_type"]) and keys.shape[1:] == (
            size,
            heads,
            dim,
        )
        scales = [(scale or 1.0) if self.takes_scales else 1.0 for scale in (k_scale, v_scale)]
        out = []
        for one, pages, last in zip(q.float(), self.lists, self.last, strict=True):
            used = (len(pages) - 1) * size + last
            k, v = (x[pages].flatten(0, 1)[:used].float() * s for x, s in zip((keys, values), scales, strict=True))
            logits = torch.einsum("hgd,nhd->hgn", one.view(heads, -1, dim), k) * how["sm_scale"]
            out.append(torch.einsum("hgn,nhd->hgd", logits.softmax(-1), v).flatten(0, 1))
        return torch.stack(out).to(q.dtype)


def install(monkeypatch, **members):
    """Puts a package in the place of FlashInfer."""
    module = ModuleType("flashinfer")
    vars(module).update(members)
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr(peers, "find_spec", lambda name: sys.modules.get(name))


def drawn(length=96):
    """Queries, keys and values of two sequences, of two KV heads with three query heads each."""
    make = torch.Generator().manual_seed(2)
    shapes = ((2, 6, 64), (2, 2, length, 64), (2, 2, length, 64))
    return [torch.randn(shape, generator=make) * 3 for shape in shapes]


@pytest.mark.smoke
def test_flashinfer_reads_the_same_keys_and_values(monkeypatch):
    """In bf16 and in fp8 with one factor each, on either kind of cores, every buffer in pages of its own; bytes are
    those of their type."""
    install(monkeypatch, BatchDecodeWithPagedKVCacheWrapper=Wrapper)
    q, k, v = drawn()
    made = {variant.name: variant for variant in peers.variants(q, k, v, 1, 2)}
    right, refused = refuse_wrong(list(made.values()))
    assert {variant.name for variant in right} == {name for name in made if name.startswith("flashinfer")}
    assert [entry["name"] for entry in refused] == ["flash-attn bf16"] and refused[0]["absent"]
    assert made["flashinfer bf16"].bytes_per_call == 2 * made["flashinfer fp8"].bytes_per_call == 2 * 2 * k.numel()
    assert made["flashinfer bf16"].num_buffers == 2
    wide = made["flashinfer bf16"].call
    assert torch.equal(wide(0), wide(1)) and wide(0).shape == q.shape
    # 8 bits have 3 of mantissa: what they change is far more than what bf16 rounds, and the check knows of it.
    assert (made["flashinfer fp8"].call(0) - wide(0)).abs().max() > 4 * right[0].extra["max_error"]


def test_factors_of_fp8_are_applied(monkeypatch):
    """Without them the rows of fp8 are refused, and those of bf16 stand."""
    blind = type("Blind", (Wrapper,), {"takes_scales": False})
    install(monkeypatch, BatchDecodeWithPagedKVCacheWrapper=blind)
    right, refused = refuse_wrong(peers.variants(*drawn(), 1, 1))
    assert {variant.extra["dtype"] for variant in right} == {"bfloat16"}
    assert {entry["name"] for entry in refused if not entry.get("absent")} == {
        peer.name for peer in peers.PEERS if peer.kind == torch.float8_e4m3fn
    }


def test_a_peer_that_is_not_installed_has_a_row_that_says_so(monkeypatch):
    """With the command that installs it; nothing of it is a fault. One that cannot compile is."""
    monkeypatch.setattr(peers, "find_spec", lambda name: None)
    cell = measure_cell(
        {"n": 1}, peers.variants(*drawn(), 1, 1), baselines=[], rounds=1, seed=0, timer=lambda work: 1.0
    )
    assert [entry["name"] for entry in cell["refused"]] == [peer.name for peer in peers.PEERS]
    assert all("pip install" in entry["reason"] for entry in cell["refused"])
    document = {"what": "attention", "settings": {}, "environment": {}, "notes": [], "cells": [cell]}
    assert bench.is_complete(document)
    shown = bench.plain_table(document)
    assert all(any(peer.name in line and "not timed" in line for line in shown.splitlines()) for peer in peers.PEERS)

    class Uncompiled(Wrapper):
        def plan(self, *arguments, **how):
            raise RuntimeError("ninja: build stopped")

    install(monkeypatch, BatchDecodeWithPagedKVCacheWrapper=Uncompiled)
    refused = refuse_wrong(peers.variants(*drawn(), 1, 1))[1]
    assert sum("ninja" in entry["reason"] for entry in refused) == 4
    assert not bench.is_complete({"cells": [{"refused": refused}]})


def measured(*words):
    """The cells of a bench."""
    document = bench.run(bench.read_words(attention.Settings, [*SMALL, *words]))
    bench.check_document(document)
    return document


@pytest.mark.parametrize("name", ["K16V16", "K4V2", "KIVI2"])
def test_newest_tokens_lie_in_a_residual_buffer(name):
    """Attention and scores over pages and a full buffer are those of all tokens; bytes are of both."""
    q, k, v = drawn(160)
    held = caches.build_caches(name, k, v, REFERENCE, num_buffers=2, seed=0, ring_tokens=64)
    for group in (None, "max"):
        assert caches.paged_error(REFERENCE, held, q, 0.125, group, 1) < 1e-5
    slot = caches.slot_format(name, 64)
    per_list = 96 * caches.slot_read_bytes(slot) + 64 * 2 * 64 * 2
    assert held.read_bytes == pytest.approx(4 * per_list) and held.token_bytes == pytest.approx(per_list / 160)
    newest = held.rings[1]
    assert torch.equal(newest.k[:, :, 130 % 64], k[:, :, 130].half())
    if name == "K16V16":  # whose pages round no more than the buffer does
        out, *_ = REFERENCE.paged_decode(q, held.pages, held.buffers[0], newest, 0.125)
        assert caches.dense_error(out, q, k, v, 0.125) < 1e-2


def test_rings_and_lists_of_unlike_length_are_separate_cells():
    """One tier lies behind a residual buffer; lists are between an eighth of a length and all of it, and their bytes
    are fewer. Cells without either are named as before."""
    document = measured("lengths=[1024]", "formats=[K4V2,K8V4+K4V2]", "rings=[0,128]", "lists=[equal,unlike]")
    plain, unlike, ring = (cell["cell"] for cell in document["cells"])
    assert plain == {"shape": "6x2x64", "length": 1024, "batch": 2, "threads": 1}
    assert (unlike, ring) == (plain | {"lists": "unlike"}, plain | {"ring": 128})
    rows = [{row["name"]: row for row in cell["variants"]} for cell in document["cells"]]
    assert not any(cell["refused"] for cell in document["cells"])
    assert "K8V4+K4V2" in rows[1] and "K8V4+K4V2" not in rows[2]
    lengths = attention.unlike_lengths(2, 2, 1024, 0)
    assert lengths.max() == 1024 > lengths.min() >= 128 and not (lengths % 128).any()
    for name in ("K4V2", "K8V4+K4V2 + scores"):
        share = rows[1][name]["bytes_per_call"] / rows[0][name]["bytes_per_call"]
        assert share == pytest.approx(int(lengths.sum()) / 4096)


def test_lists_that_are_read_too_far_are_refused(monkeypatch):
    """A backend that reads a list's dead slots is not timed in a cell of unlike lists."""

    class Blind(type(REFERENCE)):
        def paged_decode(self, q, pages, tiers, ring, scale, **how):
            longest = [type(t)(t.fmt, t.ids, *[t.num_k.amax().expand_as(t.num_k)] * 2) for t in tiers]
            return super().paged_decode(q, pages, longest, ring, scale, **how)

    monkeypatch.setattr(bench, "get_backend", lambda name, device: Blind())
    document = measured("lengths=[256]", "formats=[K4V2]", "lists=[unlike]", "scores=[none]")
    assert [entry["name"] for entry in document["cells"][0]["refused"]] == ["K4V2"]


def test_the_kernels_in_cuda_have_separate_rows():
    """Their source, built for this CPU, next to Triton's; a format that they do not take is refused, so that nobody
    takes Triton's time for theirs."""
    pytest.importorskip("triton", reason="triton is not installed (pip install -e '.[test]')")
    find_compiler()
    words = ["shapes=[2x1x64]", "batches=[1]", "lengths=[64]", "formats=[K8V4,K16V16]", "decodes=[triton,host]"]
    with pytest.warns(UserWarning, match="decode attention by triton"):
        document = measured(*words, "kernels=triton", "max_buffers=1")
    (cell,) = document["cells"]
    rows = {row["name"]: row for row in cell["variants"]}
    assert rows["K8V4, host + scores"]["versus"]["name"] == "K8V4, host" and rows["K8V4, host"]["decode"] == "host"
    assert {entry["name"] for entry in cell["refused"]} == {"K16V16, host", "K16V16, host + scores"}
    assert all("keys of 16 bits" in entry["reason"] for entry in cell["refused"])


def test_forms_in_cuda_are_compiled_in_one_call(monkeypatch):
    """Those that the cells' rows will ask for, by as many threads as there are cores; what fails is noted. Without such
    rows, or without a card, nothing is compiled."""
    pytest.importorskip("triton", reason="triton is not installed (pip install -e '.[test]')")
    from kvbench.kernels.cpu.build import BuildError
    from kvbench.kernels.gpu import cuda_build, cuda_counts

    assert cuda_counts.compiled is cuda_build.compiled  # imported before it is replaced
    compiled = []

    def compiled_for(form, target):
        compiled.append((form, target))
        if form.head_dim == 128 and form.scores:
            raise BuildError("no NVRTC")

    monkeypatch.setattr(cuda_build, "compiled", compiled_for)
    words = ["formats=[K4V4,K16V16,K8V4+K4V2]", "shapes=[32x8x128,9x3x64]", "queries=bf16", "decodes=[triton,cuda]"]
    settings = bench.read_words(attention.Settings, [*words, "threads=[1]", "rings=[0,128]"])
    made = type("Made", (), {"environment": CARD, "notes": [], "stage": lambda self, text: None})()
    settings.prepare(made)
    forms = [form for form, _ in compiled]
    assert (
        len(forms) == len(set(forms)) == 2 * 2 * (2 + 1)
    )  # head dims x scores x (one tier with and without a ring, two)
    assert {target for _, target in compiled} == {"sm_90"} and {form.queries for form in forms} == {3, 4}
    assert len(made.notes) == 3 and all("no NVRTC" in note for note in made.notes)
    for other in (made, type("Cpu", (), {"environment": {}})()):
        compiled.clear()
        bench.read_words(attention.Settings, words[: 3 if other is made else 4]).prepare(other)
        assert not compiled


# Of a card with 4 TB/s, and 528 schedulers at 2 GHz.
CARD = {"target": "sm_90", "peak_bytes_per_s": 4e12, "peak_instructions_per_s": 528 * 2e9}
PAGED = {"name": "K4V4", "kind": "paged", "format": "K4V4", "scores": "none", "token_bytes": 136.0, "ratios": {}}


def document_of(*rows):
    """A document of one cell, as it would come from that card."""
    cell = {"cell": {"shape": "32x8x128", "length": 16384, "batch": 8}, "variants": list(rows), "refused": []}
    cell |= {"probe": {"name": "copy bandwidth", "bytes_per_s": 3e12}, "twice": None}
    settings = {"queries": "bf16", "clock": "wall"}
    return {"what": "attention", "settings": settings, "environment": dict(CARD), "notes": [], "cells": [cell]}


def test_a_row_says_how_near_it_is_to_the_device():
    """The longer one of bytes over bandwidth and instructions over issue rate; without a device's own bandwidth the
    probe's counts, and without either nothing is said."""
    row = PAGED | {"median": 100e-6, "q1": 1e-4, "q3": 1e-4, "bytes_per_call": int(200e6)}
    document = document_of(row)
    (cell,) = document["cells"]
    assert roofline.share(row, cell, CARD) == "50 % (bytes)"
    assert roofline.share(row, cell, {}) == "67 % (bytes)"
    assert roofline.share(row, {}, {}) == "-"
    counted = row | {"instructions_per_call": 528 * 2e9 * 80e-6}
    assert roofline.limits(counted, cell, CARD) == pytest.approx({"bytes": 50e-6, "instructions": 80e-6})
    assert roofline.share(counted, cell, CARD) == "80 % (instructions)"
    assert "50 % (bytes)" in bench.plain_table(document)
    console = Console(width=200)
    with console.capture() as captured:
        console.print(show._cell_table(document, cell))
    assert "50 % (bytes)" in captured.get()
    assert roofline.peaks("cpu") == {}


def test_instructions_are_counted_for_a_document(monkeypatch):
    """Those of the kernels in CUDA C++ as `cuda_counts` has them, per token that the row read; other documents are
    refused."""
    pytest.importorskip("triton", reason="triton is not installed (pip install -e '.[test]')")
    from kvbench.kernels.cpu.build import BuildError
    from kvbench.kernels.gpu import cuda_build
    from kvbench.kernels.gpu.compile import nvidia_tool
    from kvbench.kernels.gpu.cuda_counts import form_named, usage

    try:
        cuda_build.nvrtc()
    except BuildError as error:
        pytest.skip(str(error))
    if not nvidia_tool("nvdisasm", "--version", binary=b""):
        pytest.skip("triton's package has no nvdisasm here")
    tokens = 8 * 8 * 16_384
    times = {"median": 1e-4, "q1": 1e-4, "q3": 1e-4, "bytes_per_call": 136 * tokens}
    dense = times | {"name": "sdpa bf16", "kind": "dense", "ratios": {}}
    monkeypatch.setattr(instructions, "_in_triton", lambda *form: 25.0)
    document = document_of(PAGED | times, PAGED | times | {"decode": "cuda"}, dense)
    assert instructions.count(document) == 2
    triton_row, cuda_row, dense_row = document["cells"][0]["variants"]
    wanted = usage(form_named("K4V4", 128, out="fp32"), "sm_90").per_token
    assert cuda_row["instructions_per_call"] == pytest.approx(wanted * tokens, rel=1e-6)
    assert triton_row["instructions_per_call"] == 25 * tokens and "instructions_per_call" not in dense_row
    with pytest.raises(ValueError, match="NVIDIA GPU"):
        instructions.count(document | {"environment": {}})


def test_mainloops_of_triton_are_counted():
    """A form's warp instructions per token, as `registers` counts them; kernels that are interpreted cannot be."""
    pytest.importorskip("triton", reason="triton is not installed (pip install -e '.[test]')")
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET"):
        instructions._in_triton("K4V4", 64, 4, "bf16", False, False, "sm_90")


def test_keys_and_values_in_8_bits_have_separate_scales():
    """Either, times its scale, is what was stored, within half a step of three bits of mantissa; the largest element is
    the type's largest."""
    generator = torch.Generator().manual_seed(3)
    k, v = (factor * torch.randn(2, 3, 5, 8, generator=generator) for factor in (1.0, 20.0))
    held = peers._stored(torch.float8_e4m3fn, k, v, 4)
    for stored, scale, exact in zip((held.k, held.v), held.scales, (k, v), strict=True):
        assert stored.float().abs().max() == peers.E4M3_MOST
        torch.testing.assert_close(stored.float() * scale, exact, rtol=2**-4, atol=2**-9 * scale)
