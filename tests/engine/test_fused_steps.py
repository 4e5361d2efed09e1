"""Decode steps of a model with `model.linear=fused`, whose tokens are rotated as they are written."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed (pip install -e '.[test]')")

from engine_helpers import random_tokens

from kvbench.engine.runner import Runner
from kvbench.kernels.gpu import parts
from kvbench.runs import choices

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy warns of what empty slots hold
    pytest.mark.usefixtures("without_overflow_checks"),
]
MODEL = "random preset=tiny num_layers=2 dtype=float32"


@pytest.fixture(scope="module")
def models():
    """One plain and one fused, with the same weights."""
    found = [choices.make_model(f"{MODEL} linear={linear}", "cpu") for linear in ("plain", "fused")]
    assert [model.linear for model in found] == ["plain", "fused"]
    return found


def logits_of(model, method: str, backend: str = "triton") -> tuple[torch.Tensor, dict[str, int]]:
    """Logits of two prompts and of three steps of both, and the bytes held."""
    runner = Runner(model, choices.make_method(method), backend=backend)
    runner.reserve(rows=2, prompt_tokens=20, new_tokens=4)
    read = [runner.read(random_tokens(length, length)) for length in (20, 9)]
    rows, found = [row for row, _ in read], [logits[0] for _, logits in read]
    for step in range(3):
        found += list(runner.step(rows, [5 + step, 9 + step]))
    return torch.stack(found), runner.store.ledger.itemise(rows[0])


METHODS = ("full", "h2o budget=12", "kivi residual_tokens=8 group=8", "streaming_llm sinks=2 budget=12")


@pytest.mark.long
@pytest.mark.parametrize("method", METHODS)
def test_logits_are_near_the_plain_model_s(models, method: str):
    """Within 1e-4 of the largest; bytes are the same. A key that is rotated in fp32, and quantised from there, may
    fall on another code, where methods quantise: 2e-2."""
    (want, held), (got, mine) = (logits_of(model, method) for model in models)
    bound = 2e-2 if method.startswith("kivi") else 1e-4
    torch.testing.assert_close(got, want, rtol=0, atol=bound * float(want.abs().max()))
    assert held == mine


def test_the_write_of_a_token_rotates_it(models):
    """And no other launch; behind a residual buffer, one does."""
    for method, rotations in (("full", 0), ("kivi residual_tokens=8 group=8", 2)):
        runner = Runner(models[1], choices.make_method(method), backend="triton")
        runner.reserve(rows=1, prompt_tokens=9, new_tokens=4)
        row, _ = runner.read(random_tokens(9, 1))
        launched: list[str] = []

        def note(kernel, grid, arguments, constants, launched=launched) -> None:
            launched.append(kernel.__name__)
            kernel[grid](*arguments, **constants)

        with parts.recording(note):
            runner.step([row], [5])
        assert (launched.count("_turn_both"), launched.count("_angles")) == (rotations, 1)
        assert launched.count("_norm_row") == 5 and launched.count("_gate_rows") == 2


def test_the_reference_rotates_first(models):
    """Another backend than the kernels' is given rotated queries and keys."""
    want, got = (logits_of(model, "full", "torch")[0] for model in models)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4 * float(want.abs().max()))
