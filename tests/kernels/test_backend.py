"""The compiled backend against the reference through the whole engine."""

from pathlib import Path

import pytest
from engine_helpers import answers, open_settings, random_tokens, request
from hydra.utils import instantiate
from omegaconf import OmegaConf
from places import CONF

from kvbench.kernels.cpu.abi import load
from kvbench.kernels.cpu.build import BuildError

METHODS = sorted((CONF / "method").glob("*.yaml"))


@pytest.mark.parametrize("path", METHODS, ids=[path.stem for path in METHODS])
def test_every_method_answers_alike_on_both_backends(path: Path, tiny_model):
    """Greedy tokens, bytes and kept tokens of a short and a long prompt; the tiny model's logits are far apart."""
    try:
        load()
    except BuildError as error:
        pytest.skip(str(error))
    requests = [request("a", random_tokens(170)), request("b", random_tokens(23), max_new_tokens=12)]
    settings = open_settings(path.stem)
    want, got = (
        answers(tiny_model(), instantiate(OmegaConf.load(path), **settings), requests, batch_size=2, backend=backend)
        for backend in ("torch", "cpu")
    )
    for key, outcome in want.items():
        assert outcome.status == got[key].status == "ok"
        assert outcome.token_ids == got[key].token_ids
        assert outcome.ledger == got[key].ledger and outcome.kept == got[key].kept
