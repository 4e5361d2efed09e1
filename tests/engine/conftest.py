"""The models of most tests of the engine, and whole runs on interpreted kernels."""

from dataclasses import replace

import pytest

from kvbench.models.load import load_model


@pytest.fixture
def loaded(tiny_model):
    """The tiny Llama of two layers with three query heads per KV head, in fp32; narrow, since the width is most of a
    test's time."""
    return tiny_model("llama", "gqa3", 64, narrow=True)


@pytest.fixture(scope="module")
def without_overflow_checks():
    """Triton's interpreter without a check of every sum and product of integers, a fifth of its time: for whole runs,
    whose kernels have tests of their own."""
    builder = pytest.importorskip("triton.runtime.interpreter").interpreter_builder
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))
        yield


@pytest.fixture(scope="module")
def smallest():
    """A model of one layer with one KV head: what the interpreter does takes its time."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    settings = {"kind": "random", "preset": "tiny", "overrides": heads, "num_layers": 1, "seed": 0}
    # What stands for a CUDA graph here replays torch's operations, of which streamed products are none.
    model = load_model(settings | {"dtype": "float32", "device": "cpu", "linear": "plain"})
    yield model
    model.model.set_attn_implementation("sdpa")
