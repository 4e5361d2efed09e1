"""The Triton backend through the whole engine, in the interpreter or on a GPU where there is one."""

import os

import pytest
from places import CONF

pytest.importorskip("triton", reason="triton is not installed (pip install 'kvbench[test]')")

from engine_helpers import answers, random_tokens, request
from hydra.utils import instantiate
from omegaconf import OmegaConf

METHODS = CONF / "method"
needs_interpreter = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="the tiny model is on the CPU, the kernels run on the GPU here"
)


@needs_interpreter
@pytest.mark.parametrize("method", ["diffkv", "kivi"])
def test_methods_answer_alike_on_triton(method: str, tiny_model):
    """Two tiers with demotions and scores, per-channel keys behind a residual buffer: equal tokens and bytes."""
    settings = OmegaConf.load(METHODS / f"{method}.yaml")
    if method == "kivi":
        settings.residual_tokens = 32
    else:
        settings.window = 16
    requests = [request("a", random_tokens(50), max_new_tokens=2), request("b", random_tokens(12), max_new_tokens=2)]
    want, got = (
        answers(tiny_model(), instantiate(settings), requests, batch_size=2, backend=backend, fidelity_max_tokens=0)
        for backend in ("torch", "triton")
    )
    for key, outcome in want.items():
        assert outcome.status == got[key].status == "ok"
        assert outcome.token_ids == got[key].token_ids
        assert outcome.ledger == got[key].ledger and outcome.kept == got[key].kept
