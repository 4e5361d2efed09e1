"""Writing, reading and moving slots against an oracle that works byte by byte."""

import pytest
import torch
from oracles.slow_pages import Layout, SlowPage, stored_vector
from page_helpers import DTYPES

from kvbench.kernels.backend import REFERENCE
from kvbench.kernels.format import PageFormat, SlotFormat
from kvbench.kernels.reference.pages import read_pages, region


def both(head_dim: int, k_bits: int, v_bits: int, page_bytes: int, kind: str = "fp16", **extra) -> tuple:
    """The same format in the code's terms and in the oracle's."""
    track = tuple(name for name in ("score", "pos") if extra.get(name))
    slot = SlotFormat(
        head_dim=head_dim,
        k_bits=k_bits,
        v_bits=v_bits,
        dtype=DTYPES[kind],
        track=track,
        **{name: value for name, value in extra.items() if name not in ("score", "pos")},
    )
    return PageFormat(slot, page_bytes), Layout(head_dim, k_bits, v_bits, page_bytes, kind, **extra)


def vectors(count: int, head_dim: int, seed: int) -> torch.Tensor:
    """Vectors with outliers, one constant and one zero."""
    x = torch.randn(count, head_dim, generator=torch.Generator().manual_seed(seed))
    x[:, 1] *= 30
    x[0], x[1] = 0.3, 0.0
    return x


TOKEN_CASES = {
    "k16v16": (64, 16, 16, 2304, "fp16", {"pos": True}),
    "bf16": (80, 16, 16, 2688, "bf16", {}),
    "native-fp32": (16, 32, 32, 1088, "fp32", {"score": True}),
    "k8v4": (64, 8, 4, 1024, "fp16", {"score": True, "pos": True}),
    "k4v2": (128, 4, 2, 960, "fp16", {"score": True, "pos": True}),
    "k2v1-odd": (80, 2, 1, 400, "fp16", {}),
    "k1v8": (16, 1, 8, 352, "fp16", {"pos": True}),
    "splits": (64, 8, 4, 1040, "fp16", {"k_groups": 2, "v_groups": 4}),
    "splits-low": (80, 4, 2, 1024, "fp16", {"k_groups": 4, "v_groups": 2, "score": True}),
    "symmetric": (64, 8, 4, 1008, "fp16", {"symmetric": True, "pos": True}),
    "fp8": (64, 8, 8, 1040, "fp16", {"fp8": True}),
    "fp8-half": (64, 8, 4, 1040, "fp16", {"fp8": True}),
    "k16v4": (64, 16, 4, 1536, "bf16", {}),
    "k3v3": (64, 3, 3, 1040, "fp16", {"pos": True}),
    "k3v3-symmetric": (80, 3, 3, 1040, "fp16", {"symmetric": True, "k_groups": 2}),
    "fp8-per-token": (64, 8, 8, 1200, "fp16", {"k_code": "e4m3_scaled", "v_code": "e4m3_scaled"}),
    "lloyd": (64, 4, 3, 960, "fp16", {"k_code": "lloyd", "v_code": "lloyd"}),
    "lloyd-low": (80, 3, 2, 960, "fp16", {"k_code": "lloyd", "v_code": "lloyd", "score": True}),
    "turboquant": (128, 3, 3, 2000, "fp16", {"k_code": "lloyd"}),
    "turboquant-paired": (128, 8, 4, 2000, "fp16", {"k_code": "e4m3_scaled"}),
    "nvfp4": (64, 4, 4, 960, "fp16", {"k_code": "nvfp4", "v_code": "nvfp4", "k_groups": 4, "v_groups": 4}),
    "mxfp4": (80, 4, 4, 960, "fp16", {"k_code": "mxfp4", "v_code": "mxfp4", "k_groups": 5, "v_groups": 2}),
}


@pytest.mark.parametrize("case", TOKEN_CASES.values(), ids=TOKEN_CASES.keys())
def test_written_page_bytes_equal_the_slow_oracle(case: tuple):
    """Scattered writes give, byte for byte, the page that the oracle writes; bytes of other slots do not change."""
    head_dim, k_bits, v_bits, page_bytes, kind, extra = case
    fmt, layout = both(head_dim, k_bits, v_bits, page_bytes, kind, **extra)
    tokens = fmt.tokens_per_page
    pages = torch.randint(256, (3, page_bytes), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    slow = [SlowPage(layout, bytes(page.tolist())) for page in pages]
    order = torch.randperm(3 * tokens, generator=torch.Generator().manual_seed(2))[: 2 * tokens]
    page, slot = order // tokens, order % tokens
    k, v = vectors(len(order), head_dim, 3), vectors(len(order), head_dim, 4)
    score = torch.rand(len(order), generator=torch.Generator().manual_seed(5))
    REFERENCE.write_keys(pages, fmt, page, slot, k)
    REFERENCE.write_values(pages, fmt, page, slot, v)
    REFERENCE.write_tracked(pages, fmt, page, slot, score, order + 1000)
    for m, (p, s) in enumerate(zip(page.tolist(), slot.tolist(), strict=True)):
        slow[p].write_key(s, k[m].tolist())
        slow[p].write_value(s, v[m].tolist())
        if layout.score:
            slow[p].put("score", s, score[m].numpy().tobytes())
        if layout.pos:
            slow[p].put("pos", s, int(order[m] + 1000).to_bytes(4, "little"))
    assert [bytes(p.tolist()) for p in pages] == [bytes(p.raw) for p in slow]


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize(
    ("head_dim", "bits", "group"), [(64, 2, 32), (128, 4, 32), (80, 4, 16), (16, 1, 8), (64, 8, 24)]
)
def test_pages_with_channel_keys_equal_the_slow_oracle(head_dim: int, bits: int, group: int, symmetric: bool):
    """Groups of keys with one scale per channel lie byte for byte where the oracle puts them, values beside them."""
    if symmetric and bits == 1:
        bits = 2
    page_bytes = -(-(2 * group * (head_dim * bits // 4 + 12) + 8 * head_dim) // 16) * 16
    fmt, layout = both(
        head_dim, bits, bits, page_bytes, k_channel_group=group, v_groups=2, symmetric=symmetric, pos=True
    )
    tokens = fmt.tokens_per_page
    assert tokens >= 2 * group
    pages = torch.randint(256, (2, page_bytes), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    slow = [SlowPage(layout, bytes(page.tolist())) for page in pages]
    starts = [(1, group), (0, 0), (1, 0)]  # page 0 keeps one group unwritten
    page = torch.tensor([p for p, _ in starts]).repeat_interleave(group)
    slot = torch.cat([torch.arange(s, s + group) for _, s in starts])
    k, v = vectors(len(page), head_dim, 3), vectors(len(page), head_dim, 4)
    k[:group, 5] = -0.7  # a channel without spread
    REFERENCE.write_keys(pages, fmt, page, slot, k)
    REFERENCE.write_values(pages, fmt, page, slot, v)
    for g, (p, first) in enumerate(starts):
        block = slice(g * group, (g + 1) * group)
        slow[p].write_key_group(first, k[block].tolist())
        for offset, value in enumerate(v[block].tolist()):
            slow[p].write_value(first + offset, value)
    assert [bytes(p.tolist()) for p in pages] == [bytes(p.raw) for p in slow]
    keys, _ = REFERENCE.read_slots(pages, fmt, page, slot)
    for channel in (0, 5, head_dim - 1):
        want = stored_vector(k[:group, channel].tolist(), bits, symmetric=symmetric, metadata_first=True)
        assert keys[:group, channel].tolist() == want.tolist()


@pytest.mark.parametrize("case", TOKEN_CASES.values(), ids=TOKEN_CASES.keys())
def test_slots_read_as_the_oracle_says_and_pages_agree(case: tuple):
    """Single slots and whole pages dequantise to the same numbers, those of the scalar definition."""
    head_dim, k_bits, v_bits, page_bytes, kind, extra = case
    fmt, layout = both(head_dim, k_bits, v_bits, page_bytes, kind, **extra)
    tokens = fmt.tokens_per_page
    pages = torch.zeros(2, page_bytes, dtype=torch.uint8)
    page, slot = torch.arange(2).repeat_interleave(tokens), torch.arange(tokens).repeat(2)
    k, v = vectors(2 * tokens, head_dim, 3), vectors(2 * tokens, head_dim, 4)
    REFERENCE.write_keys(pages, fmt, page, slot, k)
    REFERENCE.write_values(pages, fmt, page, slot, v)
    keys, values = REFERENCE.read_slots(pages, fmt, page, slot)
    dense_k, dense_v = read_pages(pages, fmt, torch.tensor([0, 1]))
    assert torch.equal(dense_k.transpose(1, 2).flatten(0, 1), keys)
    assert torch.equal(dense_v.flatten(0, 1), values)
    if layout.fp8:
        assert (keys - k).abs().le(k.abs() / 16 + 2.0**-10).all()  # e4m3: 3 mantissa bits, least step 2^-9
        return
    sides = (keys, k, k_bits, layout.k_groups, layout.k_code), (values, v, v_bits, layout.v_groups, layout.v_code)
    for got, x, bits, groups, code in sides:
        for m in (0, 1, 2, 2 * tokens - 1):
            want = stored_vector(x[m].tolist(), bits, kind=kind, groups=groups, symmetric=layout.symmetric, code=code)
            assert got[m].tolist() == want.tolist()


def test_lossless_tiers_return_what_was_written():
    """16-bit tiers give the model's own numbers back exactly, native fp32 too."""
    for kind, bits, dtype in (("fp16", 16, torch.float16), ("bf16", 16, torch.bfloat16), ("fp32", 32, torch.float32)):
        fmt, _ = both(64, bits, bits, 8192, kind)
        x = vectors(8, 64, 1).to(dtype)
        pages = torch.zeros(1, 8192, dtype=torch.uint8)
        page, slot = torch.zeros(8, dtype=torch.int64), torch.arange(8)
        REFERENCE.write_keys(pages, fmt, page, slot, x)
        REFERENCE.write_values(pages, fmt, page, slot, x.flip(0))
        keys, values = REFERENCE.read_slots(pages, fmt, page, slot)
        assert torch.equal(keys, x.float())
        assert torch.equal(values, x.flip(0).float())


@pytest.mark.parametrize("case", TOKEN_CASES.values(), ids=TOKEN_CASES.keys())
def test_moving_slots_copies_their_bytes_and_nothing_else(case: tuple):
    """Moved slots read exactly as before, tracked fields included, and all other slots stay."""
    head_dim, k_bits, v_bits, page_bytes, kind, extra = case
    fmt, _ = both(head_dim, k_bits, v_bits, page_bytes, kind, **extra)
    tokens = fmt.tokens_per_page
    pages = torch.zeros(2, page_bytes, dtype=torch.uint8)
    page, slot = torch.arange(2).repeat_interleave(tokens), torch.arange(tokens).repeat(2)
    REFERENCE.write_keys(pages, fmt, page, slot, vectors(2 * tokens, head_dim, 3))
    REFERENCE.write_values(pages, fmt, page, slot, vectors(2 * tokens, head_dim, 4))
    REFERENCE.write_tracked(pages, fmt, page, slot, torch.arange(2.0 * tokens), torch.arange(2 * tokens))

    def everything() -> torch.Tensor:
        score, pos = REFERENCE.read_tracked(pages, fmt, page, slot)
        parts = [*REFERENCE.read_slots(pages, fmt, page, slot)]
        parts += [x[:, None].float() for x in (score, pos) if x is not None]
        return torch.cat(parts, 1)

    want = everything()
    source, target = torch.tensor([tokens + 1, 2 * tokens - 1]), torch.tensor([0, tokens])
    REFERENCE.move_slots(pages, fmt, source // tokens, source % tokens, target // tokens, target % tokens)
    want[target] = want[source]
    assert torch.equal(everything(), want)


def test_slots_of_a_channel_group_do_not_move():
    """A slot that shares key scales cannot move alone, and the message says what to do."""
    fmt, _ = both(64, 2, 2, 2048, k_channel_group=32)
    one = torch.tensor([0])
    with pytest.raises(ValueError, match=r"per-channel keys \(group 32\) cannot move one by one; evict before"):
        REFERENCE.move_slots(torch.zeros(1, 2048, dtype=torch.uint8), fmt, one, one, one, one + 1)


def test_untracked_fields_read_as_absent():
    """Writing tracked fields that a format lacks does nothing; reading gives None."""
    fmt, _ = both(64, 8, 4, 1024, pos=True)
    pages = torch.zeros(1, 1024, dtype=torch.uint8)
    one = torch.tensor([0])
    REFERENCE.write_tracked(pages, fmt, one, one, torch.tensor([2.0]), torch.tensor([7]))
    score, pos = REFERENCE.read_tracked(pages, fmt, one, one)
    assert score is None
    assert pos.tolist() == [7]
    assert region(pages, fmt, "pos")[0, 0] == 7
    assert int((pages != 0).sum()) == 1
