"""The model of most tests of the engine."""

import pytest


@pytest.fixture
def loaded(tiny_model):
    """The tiny Llama of two layers with three query heads per KV head, in fp32."""
    return tiny_model("llama", "gqa3", 64)
