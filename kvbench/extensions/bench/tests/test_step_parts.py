"""`bench what=parts`: what a call took itself, the parts of a method's step, and that nothing stays on the clock."""

import io
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from kvbench.extensions.bench import parts, show
from kvbench.kernels.bench import bench

COMMON = {"model": "random preset=tiny num_layers=2 dtype=float32", "context": 160, "rounds": 2, "steps": 1}
COMMON |= {"threads": [1], "kernels": "torch", "device": "cpu"}


def test_a_call_inside_another_counts_once():
    """Planning takes 2 s itself and asks for 3 s of reserving; all of it is given back as it was."""
    now = [0.0]

    def wait(seconds):
        now[0] += seconds

    inner = SimpleNamespace(take=lambda: wait(3))
    outer = SimpleNamespace(plan=lambda: (wait(2), inner.take()))
    before = outer.plan, inner.take
    clock = parts.Clock(torch.device("cpu"), lambda: now[0])
    with clock.over([(outer, "plan", "planning"), (inner, "take", "reserving")]):
        outer.plan()
        inner.take()
    assert dict(clock.seconds) == {"planning": 2, "reserving": 6}
    assert (outer.plan, inner.take) == before


def test_parts_of_a_prompt_and_a_step(tmp_path):
    """They add up; scores are those of the method that has some; the full cache plans nothing worth naming, and the
    model computes as before."""
    settings = parts.Settings(**COMMON, methods=["full", "h2o budget=0.5"])
    settings.check()
    document = bench.run(settings)
    bench.check_document(document)
    for cell in document["cells"]:
        assert not cell["refused"], cell["refused"]
        rows = {row["name"]: row for row in cell["variants"]}
        assert list(rows) == ["full", "full, by parts", "h2o budget=0.5", "h2o budget=0.5, by parts"]
        for name in ("full", "h2o budget=0.5"):
            shares = rows[name + parts.BY_PARTS]["parts"]
            for each in zip(*shares.values(), strict=True):
                assert sum(each) == pytest.approx(1) and min(each) >= 0
            assert all(min(shares[part]) > 0 for part in ("projections", "attention", "planning", "writing", "rest"))
        of_full, of_h2o = (rows[name + parts.BY_PARTS]["parts"]["scores"] for name in ("full", "h2o budget=0.5"))
        assert max(of_full) < min(of_h2o)
    assert all("forward" not in vars(layer) for layer in parts.matrices_of(settings._model))
    text = io.StringIO()
    Console(width=200, file=text).print(show.render(document))
    assert "the clock costs" in text.getvalue() and "h2o budget=0.5" in text.getvalue()
    assert show.draw(document, tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
