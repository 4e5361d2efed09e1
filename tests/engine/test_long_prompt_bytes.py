"""What reading a prompt of 131,072 tokens takes with a model of 8 billion parameters, counted on meta tensors.

All that the model, its attention and the scores make is counted as it comes and goes; pages are tensors of the size
that a method keeps. What fused kernels and the allocator take for themselves is not in it: no GPU was there to measure.
"""

from types import SimpleNamespace

import pytest
import torch
import transformers

from kvbench.engine import hf, sessions
from kvbench.engine.supported import model_shape
from kvbench.kernels.backend import REFERENCE
from kvbench.kernels.reference.prompts import attention_with_lse
from kvbench.models.random_weights import random_config
from kvbench.policy import rank_descending

LiveBytes = pytest.importorskip("kvbench.extensions.bench.chunks").LiveBytes

TOKENS = 131_072
GPU_BYTES = 80e9


class Counted:
    """Stands for the store on meta tensors: holds a share of every layer once it is planned.

    Args:
        shape: The model's.
        share: Of the prompt's tokens, what is kept.
        together: All layers are planned at once.
        past: Tokens that a chunk finds held, in every layer.
    """

    def __init__(self, shape, share: float, together: bool = False, past: int = 0) -> None:
        self.shape, self.share, self.together = shape, share, together
        self.policy = SimpleNamespace(score=SimpleNamespace(statistic=SimpleNamespace(needs=frozenset())))
        self.pages = [self.page(past) for _ in range(shape.num_layers if past else 0)]
        self.waiting = []

    def kind_of(self, layer):
        """Its layers are all alike."""
        return self, layer

    def page(self, tokens: int) -> torch.Tensor:
        """Keys and values of one layer in 16 bits."""
        size = 2 * self.shape.num_kv_heads * self.shape.head_dim
        return torch.empty(tokens, size, dtype=torch.bfloat16, device="meta")

    def prompt_attention(self, layer, q, k, v, scale):
        """As on a GPU, with the log-sum-exp that scores of all queries take."""
        return attention_with_lse(q, k, v, scale)

    def prefill_layer(self, row, layer, q, k, v, scale, call, lse) -> None:
        """Column sums and ranks, then copies of what is kept on their way to its pages."""
        if self.share < 1:
            columns = lse * 1.0
            rank_descending(columns.view(len(k), -1, k.shape[1]).mean(1))
        self.waiting.append((k, v))
        if not self.together or layer + 1 == self.shape.num_layers:
            for keys, values in self.waiting:
                kept = int(self.share * keys.shape[1])
                copies = [torch.empty_like(x[:, :kept]) for x in (keys, values)]
                self.pages.append(self.page(kept))
                del copies
            self.waiting = []

    def read_chunk(self, row, layer, q, k, v, scale):
        """The chunk over what is held, in fp32."""
        past = torch.empty(len(k), len(self.pages[layer]), k.shape[2], device="meta")
        live = torch.empty(past.shape[:2], dtype=torch.bool, device="meta")
        return REFERENCE.chunk_attention(q, k, v, (past, past.clone(), live), scale)


@pytest.fixture(scope="module")
def llama():
    """Llama-3.1-8B without memory, in bf16, with kvbench's attention."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(random_config("llama3.1-8b"), dtype=torch.bfloat16)
    hf.attach(model)
    return model


def peak(model, store: Counted, tokens: int, mode: type[sessions.Session]) -> int:
    """Bytes at the worst moment of reading so many tokens, weights and pages included."""
    weights = sum(weight.nbytes for weight in model.parameters())
    before = sum(page.nbytes for page in store.pages)
    ids = torch.empty(1, tokens, dtype=torch.int64, device="meta")
    with LiveBytes() as live:
        session = sessions.PromptChunk(store, 0) if mode is sessions.PromptChunk else sessions.Prefill(store, 0, tokens)
        hf.forward(model, session, ids, ids, TOKENS - tokens, 1)
    return weights + before + live.peak_bytes


def test_a_prompt_of_128k_tokens_fits_into_80_gb(llama):
    """With the full cache, a quarter of it, and a quarter that all layers compete for; in chunks with less."""
    shape = model_shape(llama)
    assert 16.0e9 < sum(weight.nbytes for weight in llama.parameters()) < 16.1e9
    full, quarter, together = (
        peak(llama, Counted(shape, *settings), TOKENS, sessions.Prefill) for settings in ((1.0,), (0.25,), (0.25, True))
    )
    chunked = peak(llama, Counted(shape, 0.25, past=TOKENS // 4), 512, sessions.PromptChunk)
    cache = shape.fp16_bytes(TOKENS)
    assert cache == 2**34
    assert 16e9 + cache < full < GPU_BYTES
    assert chunked < quarter < together < GPU_BYTES
    assert quarter - chunked > 8e9, "the activations of the whole prompt are gone"
