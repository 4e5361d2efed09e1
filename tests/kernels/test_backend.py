"""The compiled backend against the reference through the whole engine."""

import pytest
from engine_helpers import answers, random_tokens, request
from selection import method_of, per_path

from kvbench.config.files import options
from kvbench.kernels.cpu.abi import load
from kvbench.kernels.cpu.build import BuildError


@pytest.mark.every(2)
@pytest.mark.parametrize("name", per_path(options("method")))
def test_every_method_answers_alike_on_both_backends(name: str, tiny_model):
    """Greedy tokens, bytes and kept tokens of a short and a long prompt; the tiny model's logits are far apart."""
    try:
        load()
    except BuildError as error:
        pytest.skip(str(error))
    requests = [request("a", random_tokens(170), max_new_tokens=11), request("b", random_tokens(23), max_new_tokens=6)]
    want, got = (
        answers(tiny_model(), method_of(name), requests, batch_size=2, backend=backend) for backend in ("torch", "cpu")
    )
    for key, outcome in want.items():
        assert outcome.status == got[key].status == "ok"
        assert outcome.token_ids == got[key].token_ids
        assert outcome.ledger == got[key].ledger and outcome.kept == got[key].kept
