"""Attention of a chunk of a prompt, and what is held read back: the Triton kernels against plain torch."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed (pip install 'kvbench[test]')")

from triton_helpers import DEVICE, move_tier, poisoned_memory  # noqa: F401

from kvbench.kernels.backend import REFERENCE
from kvbench.kernels.format import PageFormat, SlotFormat
from kvbench.kernels.gpu.backend import Gpu
from kvbench.kernels.operands import TierPages

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy warns of what is not live
# Of values of a normal distribution: fp32 sums of up to 200 products in another order, with exp2 beside exp.
CLOSE = 1e-5


def softmax_attention(q, k, v, history, scale: float) -> torch.Tensor:
    """Each query by itself, in fp64."""
    past_k, past_v, live = history
    out = torch.empty(q.shape, dtype=torch.float64)
    for head in range(len(q)):
        h = head // (len(q) // len(k))
        for i in range(q.shape[1]):
            keys, values = (
                torch.cat([past[h][live[h]].double(), own[h, : i + 1].double()])
                for past, own in ((past_k, k), (past_v, v))
            )
            out[head, i] = ((keys @ q[head, i].double()) * scale).softmax(0) @ values
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("group", "chunk", "past", "head_dim"), [(1, 1, 0, 64), (3, 33, 70, 80), (2, 70, 1, 32), (4, 5, 32, 128)], ids=str
)
def test_a_chunk_attends_to_what_is_held_and_to_itself(group, chunk, past, head_dim, dtype):
    """Over live entries alone, of which a list may have none, by tensors that are not contiguous; what is not live may
    be anything."""
    make = torch.Generator().manual_seed(chunk)
    q, k, v = (torch.randn(h, chunk, 2 * head_dim, generator=make).to(dtype) for h in (2 * group, 2, 2))
    q, k, v = (x[..., :head_dim] for x in (q, k, v))
    past_k, past_v = (torch.randn(2, past, head_dim, generator=make) for _ in range(2))
    live = torch.rand(2, past, generator=make) < 0.5
    live[1] = False
    want = softmax_attention(q, k, v, (past_k, past_v, live), 0.2)
    past_k[~live] = past_v[~live] = float("nan")
    backend, history = Gpu(), tuple(x.to(DEVICE) for x in (past_k, past_v, live))
    got = backend.chunk_attention(*(x.to(DEVICE) for x in (q, k, v)), history, 0.2)
    assert got.dtype == torch.float32 and backend.fallbacks == set()
    torch.testing.assert_close(got.double().cpu(), want, rtol=CLOSE, atol=CLOSE)


@pytest.mark.parametrize(
    "slots",
    [
        [SlotFormat(64, 16, 16)],
        [SlotFormat(64, 8, 4), SlotFormat(64, 4, 2)],
        [SlotFormat(80, 2, 2, k_channel_group=16)],
        [SlotFormat(64, 3, 3, k_code="lloyd")],
    ],
    ids=["k16v16", "k8v4 and k4v2", "kivi", "lloyd"],
)
@pytest.mark.parametrize("rotated", [False, True])
def test_what_is_read_back_is_what_the_reference_reads(slots, rotated):
    """Keys, values and what is live, to the last bit, rotated and not, of lists of any length."""
    make, size = torch.Generator().manual_seed(len(slots)), 6400
    formats = [PageFormat(slot, size) for slot in slots]
    counts = torch.tensor([[0, 3], [1, 2]])  # pages of each list
    pages = torch.zeros(2 * 2 * 3 * len(formats) + 1, size, dtype=torch.uint8)
    tiers, free = [], torch.randperm(len(pages), generator=make)
    for fmt in formats:
        ids, free = free[:12].view(2, 2, 3), free[12:]
        held = (counts * fmt.tokens_per_page - 5).clamp(min=0) // fmt.slot.group_tokens * fmt.slot.group_tokens
        page = ids.flatten().repeat_interleave(fmt.tokens_per_page)
        slot = torch.arange(fmt.tokens_per_page).repeat(12)
        for write in (REFERENCE.write_keys, REFERENCE.write_values):
            write(pages, fmt, page, slot, torch.randn(len(page), fmt.slot.head_dim, generator=make))
        angles = torch.rand(2, 3 * fmt.tokens_per_page, fmt.slot.head_dim // 2, generator=make) if rotated else None
        tiers.append(TierPages(fmt, ids, held, held, angles))
    want, backend = REFERENCE.gather_dense(pages, tiers, None), Gpu()
    there = [move_tier(tier) for tier in tiers]
    got = backend.gather_dense(pages.to(DEVICE), there, None)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(got, want, strict=True)) and backend.fallbacks == set()
