"""Attention of layers that do not see everything, beside masks over the whole matrix."""

import pytest
import torch

from kvbench.kernels.backend import REFERENCE
from kvbench.kernels.operands import PLAIN, Softmax, Window

# fp32: rounding of up to 300 weights that are summed; bf16 keeps 8 bits of every output.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def masked(q, k, v, window, scale, softmax):
    """Attention of all tokens by a loop over queries, in fp64; a sink takes its share and gives nothing."""
    out, group = torch.zeros(q.shape, dtype=torch.float64), len(q) // len(k)
    for head in range(len(q)):
        for at in range(q.shape[1]):
            first = at // window.num_tokens * window.num_tokens if window.in_chunks else at + 1 - window.num_tokens
            keys, values = (x[head // group, max(0, first) : at + 1].double() for x in (k, v))
            logits = keys @ q[head, at].double() * scale
            if softmax.cap:
                logits = softmax.cap * (logits / softmax.cap).tanh()
            if softmax.sinks is not None:
                logits = torch.cat([logits, softmax.sinks[head : head + 1].double()])
            out[head, at] = logits.softmax(0)[: len(values)] @ values
    return out


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("window", "length", "heads", "softmax"),
    [
        (Window(1), 5, (2, 1), PLAIN),
        (Window(7), 300, (6, 2), PLAIN),  # more than one block of queries
        (Window(7, in_chunks=True), 300, (6, 2), Softmax(cap=1.5)),
        (Window(300), 290, (1, 1), PLAIN),
        (Window(40), 50, (6, 2), Softmax(2.0, torch.linspace(-1, 2, 6))),
        (Window(270, in_chunks=True), 530, (2, 1), Softmax(sinks=torch.tensor([0.5, float("-inf")]))),
    ],
)
def test_a_prompt_sees_what_its_windows_hold(window, length, heads, softmax, dtype):
    """At once, and in two parts of which the second finds some of the first one in another order, with gaps."""
    make = torch.Generator().manual_seed(length)
    q, k, v = (torch.randn(n, length, 8, generator=make).to(dtype) for n in (heads[0], *[heads[1]] * 2))
    want = masked(q, k, v, window, 0.7, softmax)
    found = REFERENCE.window_attention(q, k, v, None, 0, window, 0.7, softmax)
    assert found.dtype is dtype
    assert float((found.double() - want).abs().max()) < TOLERANCE[dtype]
    cut = length // 3
    order = torch.randperm(cut, generator=make)
    first = max(0, cut - window.num_tokens)
    past = [torch.cat([x[:, order].float(), torch.full((heads[1], 3, 8), 1e4)], 1) for x in (k, v)]
    pos = torch.cat([order.masked_fill(order < first, -1), torch.full((3,), -1)]).expand(heads[1], -1)
    own = (x[:, cut:] for x in (q, k, v))
    later = REFERENCE.window_attention(*own, (past[0], past[1], pos), cut, window, 0.7, softmax)
    assert float((later.double() - want[:, cut:]).abs().max()) < TOLERANCE[dtype]
