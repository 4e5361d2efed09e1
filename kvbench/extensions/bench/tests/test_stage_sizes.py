"""Peak memory of the stages of a GPU's evidence, counted on tensors without data."""

import importlib
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
import torch.fx.experimental._config
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

pytest.importorskip("triton", reason="triton is not installed (pip install -e '.[test]')")

from no_data import without_data
from selection import few

from kvbench.engine.runner import Runner
from kvbench.extensions.bench import decode, decoders, throughput
from kvbench.extensions.bench.evidence_gpu import STAGES, words_of
from kvbench.kernels import memory
from kvbench.kernels.bench import attention, machine, peers
from kvbench.kernels.bench.bench import read_words
from kvbench.kernels.bench.rounds import Absent
from kvbench.kernels.gpu import parts
from kvbench.kernels.gpu.backend import Gpu
from kvbench.kernels.gpu.table import DevicePool
from kvbench.models.load import LoadedModel
from kvbench.models.random_weights import byte_tokenizer, random_config, random_model
from kvbench.runs import choices

CARD_BYTES = 80e9  # the smallest H100's
SPARE = 0.1  # of it, for CUDA's own context, kernels, graphs, and what an allocator wastes
META = torch.device("meta")
aten = torch.ops.aten


class Card(TorchDispatchMode):
    """A device whose tensors have no data. It counts the bytes that live on it, and gives an answer to whatever the
    host asks: 1 to one number, true to a mask, and zeros to more."""

    ANSWERS: ClassVar = {torch.bool: True, torch.float32: 1.0, torch.float64: 1.0}

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = self.peak_bytes = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensor = args[0] if args and isinstance(args[0], torch.Tensor) and args[0].device == META else None
        if tensor is not None:
            if function is aten._local_scalar_dense.default:
                return self.ANSWERS.get(tensor.dtype, 1)
            if function is aten._to_copy.default and kwargs.get("device") == torch.device("cpu"):
                return torch.zeros(tensor.shape, dtype=kwargs.get("dtype") or tensor.dtype)
        return self.counted(function(*args, **kwargs))

    def counted(self, made):
        """Counts tensors whose memory is new, until it is free."""
        for x in tree_leaves(made):
            if isinstance(x, torch.Tensor) and x.device == META:
                storage = x.untyped_storage()
                if (key := storage._cdata) not in self._known:
                    self._known.add(key)
                    self.live_bytes += storage.nbytes()
                    self.peak_bytes = max(self.peak_bytes, self.live_bytes)
                    weakref.finalize(storage, self._free, key, storage.nbytes())
        return made

    def _free(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.live_bytes -= nbytes


def fused_attention(q, k, v, attn_mask=None, is_causal=False, scale=None, enable_gqa=False, **_):
    """The memory that attention takes on a GPU: of the fused kernels the output and a number per query; a mask comes
    to them in the queries' type, in rows of a multiple of eight, and heads are repeated before."""
    assert q.element_size() == 2, "there is no fused kernel for the type"
    assert attn_mask is None or not enable_gqa, "a mask and groups: the plain kernel"
    masks = [torch.empty(attn_mask.shape, dtype=q.dtype, device=q.device) for _ in range(2 * (attn_mask is not None))]
    sums = torch.empty(q.shape[:-1], device=q.device)
    del masks, sums
    return torch.empty_like(q)


def bare_model(text: str) -> LoadedModel:
    """A model whose weights have no data."""
    wanted = choices.read_choice("model", text)
    config = random_config(wanted["preset"], num_layers=wanted["num_layers"])
    dtype = getattr(torch, wanted["dtype"])
    return LoadedModel(
        model=random_model(config, seed=0, dtype=dtype, device=META).eval().requires_grad_(False),
        tokenizer=byte_tokenizer(config.vocab_size),
        name=wanted["preset"],
        fingerprint="0" * 64,
        max_tokens=config.max_position_embeddings,
        dtype=dtype,
        device=META,
        chat_template=False,
    )


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[Card]:
    """A card on which benches run, without data and without launches."""
    generator = torch.Generator
    monkeypatch.setattr(torch, "Generator", lambda device=None: generator())
    monkeypatch.setattr(F, "scaled_dot_product_attention", fused_attention)
    monkeypatch.setattr(memory, "free_bytes", lambda device: 10**15)  # what is needed, not what is there
    monkeypatch.setattr(decoders, "cuda_graph", lambda work: [work() for _ in range(3)] and work)
    monkeypatch.setattr(decoders, "capture_on", lambda device: lambda step: (step(), step)[1])
    # The plain reference, which is compared with, has as many pages; its tables ask the host for more than a number.
    monkeypatch.setattr(decoders, "Runner", lambda *args, **how: Runner(*args, **how | {"backend": "triton"}))
    for module in (decode, throughput):
        monkeypatch.setattr(module, "capture_on", decoders.capture_on)
    monkeypatch.setitem(attention.TOLERANCE, "meta", 0.0)
    # The kernels in CUDA C++, which do nothing here: what is prepared for them is counted.
    nothing = SimpleNamespace(**dict.fromkeys(("plan", "decode", "scores"), lambda *_: None))
    monkeypatch.setattr(attention, "gpu_backend", lambda device, decode: Gpu(lambda form, where: nothing))
    monkeypatch.setattr(DevicePool, "check", lambda pool: None)
    monkeypatch.setattr(DevicePool, "num_free", property(lambda pool: pool.num_pages))
    read = decoders.StoreDecoder.prefill

    def prefill(self, prompts):  # the others of a batch as the first one
        read(self, prompts[:1])
        self.repeat(len(self.rows) + len(prompts) - 1)

    one_step = decoders.StoreDecoder.step

    def step(self, tokens):  # those behind the first one as that
        if not hasattr(self, "step_result"):
            self.step_result = one_step(self, tokens)
        return self.step_result

    def row_bytes(self):  # what a full cache has; a method with less has more rows in as many bytes
        return torch.full((len(self.rows),), self.runner.shape.fp16_bytes(len(self._first)))

    for done in (prefill, step, row_bytes):
        monkeypatch.setattr(decoders.StoreDecoder, done.__name__, done)
    everything = torch.fx.experimental._config.patch(meta_nonzero_assume_all_nonzero=True)
    with everything, without_data(), parts.recording(lambda *_: None), Card() as live_card:

        def make_model(text: str, device: str) -> LoadedModel:
            model = bare_model(text)
            live_card.peak_bytes = live_card.live_bytes  # making the model takes no memory of a card
            return model

        monkeypatch.setattr(choices, "make_model", make_model)
        yield live_card


def cells_of(stage) -> list[tuple]:
    """The name, the settings and the cell of everything that a stage's bench measures; none where it is no bench."""
    _, _, module, *words = words_of(stage, Path("results"), dry=False)
    loaded = importlib.import_module(module)
    settings = read_words(loaded.Settings, words) if hasattr(loaded, "Settings") else None
    return [(stage.name, settings, cell) for cell in settings.cells([0])] if settings else []


# The checks of kernels and methods take some megabytes in each of their processes, the manager's tables, which ask the
# host for more than numbers, some hundred, and what is served is given its bytes.
CELLS = [cell for stage in STAGES if stage.name not in ("manager", "serve") for cell in cells_of(stage)]
NAMES = [f"{stage} {' '.join(map(str, cell.values()))}" for stage, _, cell in CELLS]
SOON = ("attention-64 9x3x64 4096 1 0", "prefill 32x8x128 8192 0", "decode-4k prompt 1 4096 0 full")


@pytest.mark.parametrize("name", few(NAMES, *SOON))
def test_a_cell_fits_the_smallest_card(card, name):
    """Weights, every cache of a cell, its checks, and what its calls take beside; a tenth of the card is spare. What a
    cell of attention says before it is built that it needs is what it takes."""
    stage, settings, cell = CELLS[NAMES.index(name)]
    bench = SimpleNamespace(device="meta", backend=Gpu(), notes=[], more={}, environment={}, stage=lambda text: None)
    bench.bandwidth = machine.Bandwidth("meta")
    settings.kernels = "triton"
    settings.prepare(bench)
    for variant in settings.variants(bench, cell):
        if variant.before_round is not None:
            variant.before_round()
        if variant.check is None:
            variant.call(0)
        elif variant.name in [peer.name for peer in peers.PEERS if not peer.is_there]:
            with pytest.raises(Absent):
                variant.check()
        elif variant.name.startswith("K16V16, cuda"):
            with pytest.raises(ValueError, match="take no keys of 16 bits"):
                variant.check()
        else:
            variant.check()
    assert card.peak_bytes <= (1 - SPARE) * CARD_BYTES, f"{card.peak_bytes / 1e9:.1f} GB"
    if isinstance(settings, attention.Settings):
        assert settings.need_bytes(cell, "cuda") == pytest.approx(card.peak_bytes, rel=0.06)


def test_no_cell_of_attention_is_skipped_on_the_smallest_card(monkeypatch):
    """Cells of 32 sequences, where fewer bytes pay most, are measured: they need less than a card has."""
    monkeypatch.setattr(machine, "available_bytes", lambda device: (1 - SPARE) * CARD_BYTES)
    cells = [(settings, cell) for _, settings, cell in CELLS if isinstance(settings, attention.Settings)]
    assert max(cell["batch"] * cell["length"] for _, cell in cells) == 32 * 32_768
    for settings, cell in cells:
        settings._check_memory(cell, "cuda")
