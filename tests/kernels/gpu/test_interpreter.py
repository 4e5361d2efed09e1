"""Triton's interpreter, whose functions are put in place once per launch."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed (pip install -e '.[test]')")

import triton
import triton.language as tl
from triton.runtime import interpreter
from triton_helpers import DEVICE

from kvbench.kernels.gpu import parts

pytestmark = [
    pytest.mark.skipif(DEVICE.type != "cpu", reason="with a GPU nothing is interpreted"),
    pytest.mark.skipif(not hasattr(interpreter, "_LangPatchScope"), reason="before Triton 3.9 it is left as it is"),
]


@triton.jit
def _twice(x):
    return x + tl.broadcast_to(x, x.shape)


@triton.jit
def _sums(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    row = tl.load(x + tl.program_id(0) * N + i)
    tl.store(out + tl.program_id(0), tl.sum(_twice(row), 0) + tl.max(row, 0) + tl.sum(tl.zeros([N], tl.float32), 0))


def language() -> list:
    """What triton.language offers."""
    places = (tl, tl.core, tl.math, tl.tensor, tl.dtype)
    return [getattr(place, name) for place in places for name in dir(place) if callable(getattr(place, name))]


def test_the_language_is_looked_through_once(monkeypatch: pytest.MonkeyPatch):
    """A second launch looks through nothing, and computes what the first one did; behind each, and behind one that
    fails, triton.language is what it was."""
    before = language()
    x, found = torch.randn(3, 8, generator=torch.Generator().manual_seed(0)), []
    looked, plain = [], interpreter._patch_builtin
    monkeypatch.setattr(interpreter, "_patch_builtin", lambda *which: looked.append(which) or plain(*which))
    for _ in range(2):
        looked.clear()
        found.append(torch.empty(3))
        parts.launch(_sums, (3,), x, found[-1], N=8)
        assert language() == before
    assert not looked
    torch.testing.assert_close(found[0], 2 * x.sum(1) + x.max(1).values)
    assert torch.equal(*found)
    with pytest.raises(interpreter.InterpreterError):
        parts.launch(_sums, (3,), x, found[0], N=7)  # no power of two
    assert language() == before
