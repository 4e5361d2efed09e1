"""Page formats: bytes per slot, regions, and the choice of the page size."""

from itertools import pairwise

import pytest
import torch
from oracles.slow_pages import Layout
from store_helpers import golden

from kvbench.cache.layout import ModelShape, compile_tier
from kvbench.kernels.format import PageFormat, SlotFormat, choose_page_bytes
from kvbench.kernels.reference.pages import region
from kvbench.policy.tiers import Tier

BOTH = ("score", "pos")


def slot_of(tier: Tier, head_dim: int, track: tuple[str, ...] = (), dtype: torch.dtype = torch.float16) -> SlotFormat:
    """The slot format that a model with this head dim and dtype gets for a tier."""
    shape = ModelShape(
        num_layers=1, num_q_heads=1, num_kv_heads=1, head_dim=head_dim, dtype=dtype, device=torch.device("cpu")
    )
    return compile_tier(tier, shape, track)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_bytes_per_token_are_those_of_the_ledger_table(head_dim: int):
    """Payload and quantisation metadata per token equal the golden bytes of every named format."""
    table = golden(f"bytes{head_dim}")
    for name, want in table.items():
        if name == "fp16":
            tier = Tier()
        elif name.endswith("_tok"):
            tier = Tier(k_bits=int(name[3]), v_bits=int(name[3]))
        else:
            bits, group = int(name[4]), int(name.split("_g")[1])
            tier = Tier(k_bits=bits, v_bits=bits, k_axis="channel", k_group=group, v_group=group)
        slot = slot_of(tier, head_dim)
        assert slot.slot_bytes == want, name
        assert slot.k_code_bytes + slot.v_code_bytes == (want if name == "fp16" else head_dim * int(tier.k_bits) / 4), (
            name
        )


# DiffKV artefact, raw bytes with score and position: (k bits, v bits, k splits, v splits) -> d=128.
DIFFKV_RAW = {
    (8, 8, 1, 1): 272,
    (8, 4, 1, 2): 212,
    (8, 4, 1, 1): 208,
    (8, 2, 1, 1): 176,
    (4, 4, 1, 1): 144,
    (4, 2, 2, 4): 128,
    (4, 2, 1, 1): 112,
    (4, 1, 1, 1): 96,
}


@pytest.mark.parametrize(("config", "want"), DIFFKV_RAW.items())
def test_bytes_with_score_and_position_are_those_of_diffkv(config: tuple, want: int):
    """Raw bytes per token of DiffKV's formats at d=128, and the closed formula at d=64."""
    kb, vb, kg, vg = config
    tier = Tier(k_bits=kb, v_bits=vb, k_splits=kg, v_splits=vg)
    assert slot_of(tier, 128, BOTH).slot_bytes == want
    assert slot_of(tier, 64, BOTH).slot_bytes == 64 * (kb + vb) / 8 + 4 * (kg + vg) + 8


def test_sixteen_and_thirty_two_bit_tiers_follow_the_model():
    """fp16 models store fp16, bf16 models bf16, and `native` the model's own dtype."""
    assert slot_of(Tier(), 64, dtype=torch.float32).dtype is torch.float16
    assert slot_of(Tier(), 64, dtype=torch.bfloat16).dtype is torch.bfloat16
    native = slot_of(Tier(native=True), 64, dtype=torch.float32)
    assert (native.dtype, native.slot_bytes) == (torch.float32, 512)


def test_fp8_applies_to_eight_bit_sides_only():
    """With fp8, an eight-bit side has no metadata and the other side keeps its codes and its metadata."""
    assert slot_of(Tier(k_bits=8, v_bits=8, fp8=True), 64).slot_bytes == 128
    assert slot_of(Tier(k_bits=8, v_bits=4, fp8=True), 64).slot_bytes == 64 + 32 + 4


# Bytes of a token and head at D = 64 and 128, worked out by hand: payload and metadata of both sides.
NAMED_BYTES = {
    "fp8_per_token_head": (64 + 2 + 64 + 2, 128 + 2 + 128 + 2),
    "int8_per_token_head": (64 + 2 + 64 + 2, 128 + 2 + 128 + 2),
    "turboquant_k8v4": (64 + 32 + 4, 128 + 64 + 4),  # vLLM's slot sizes from here on: keys, then values
    "turboquant_4bit": (32 + 2 + 32 + 4, 64 + 2 + 64 + 4),
    "turboquant_3bit": (24 + 2 + 24 + 4, 48 + 2 + 48 + 4),
    "lloyd-k4v2": (32 + 2 + 16 + 2, 64 + 2 + 32 + 2),
    "nvfp4": (32 + 4 + 32 + 4, 64 + 8 + 64 + 8),
    "mxfp4": (32 + 2 + 32 + 2, 64 + 4 + 64 + 4),
    "k3v3": (24 + 4 + 24 + 4, 48 + 4 + 48 + 4),
}


@pytest.mark.parametrize("name", NAMED_BYTES)
def test_named_formats_take_the_bytes_that_they_are_known_for(name: str):
    """Formats of serving engines, by the formulas that those publish; but per-token scales, fp32 in vLLM, are fp16."""
    for head_dim, want in zip((64, 128), NAMED_BYTES[name], strict=True):
        assert slot_of(Tier.parse(name), head_dim).slot_bytes == want


FORMATS = [
    {"k_bits": kb, "v_bits": vb, **extra}
    for kb, vb, extra in [
        (16, 16, {}),
        (16, 16, {"dtype": torch.bfloat16}),
        (32, 32, {"dtype": torch.float32}),
        (8, 8, {}),
        (8, 4, {}),
        (4, 2, {}),
        (2, 1, {}),
        (1, 1, {}),
        (8, 8, {"fp8": True}),
        (16, 4, {}),
        (2, 16, {}),
        (8, 4, {"k_groups": 2, "v_groups": 4}),
        (4, 8, {"fp8": True}),
        (4, 4, {"symmetric": True}),
        (2, 2, {"k_channel_group": 16, "v_groups": 2}),
        (4, 2, {"k_channel_group": 24}),
        (2, 2, {"k_channel_group": 32, "symmetric": True}),
        (3, 3, {}),
        (8, 8, {"k_code": "e4m3_scaled", "v_code": "e4m3_scaled"}),
        (4, 3, {"k_code": "lloyd", "v_code": "lloyd"}),
        (3, 3, {"k_code": "lloyd"}),
        (4, 4, {"k_code": "nvfp4", "v_code": "nvfp4", "k_groups": 4, "v_groups": 4}),
        (4, 4, {"k_code": "mxfp4", "v_code": "mxfp4", "k_groups": 2, "v_groups": 2}),
        (2, 4, {"k_code": "book_channels", "v_code": "book", "k_apart": 1, "v_apart": 3}),
        (3, 3, {"k_code": "book_channels", "v_code": "book", "k_apart": 2, "v_apart": 4}),
        (4, 2, {"k_code": "book_channels", "v_code": "book"}),
        (16, 16, {"k_channels": 11}),
        (16, 4, {"k_channels": 9}),
    ]
]


@pytest.mark.parametrize("track", [(), ("pos",), BOTH])
@pytest.mark.parametrize("head_dim", [16, 64, 72, 80, 128])
@pytest.mark.parametrize("fields", FORMATS, ids=str)
def test_regions_tile_a_page_and_can_be_viewed(fields: dict, head_dim: int, track: tuple):
    """Regions follow one another without overlap inside the page, have the described sizes, and view as their types."""
    slot = SlotFormat(head_dim=head_dim, track=track, **fields)
    fmt = PageFormat(slot, 8464)
    kind = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}[slot.dtype]
    want = Layout(
        head_dim,
        slot.k_bits,
        slot.v_bits,
        8464,
        kind,
        slot.k_channel_group,
        slot.k_groups,
        slot.v_groups,
        slot.symmetric,
        slot.fp8,
        "score" in track,
        "pos" in track,
        slot.k_code,
        slot.v_code,
        slot.k_apart,
        slot.v_apart,
        slot.k_channels,
    )
    assert fmt.tokens_per_page == want.tokens
    assert fmt.tokens_per_page % 8 == 0
    assert {name: length for name, (_, length) in fmt.regions.items()} == want.sizes(want.tokens)
    spans = list(fmt.regions.values())
    assert all(offset + length == following for (offset, length), (following, _) in pairwise(spans))
    assert spans[0][0] == 0
    assert sum(spans[-1]) == fmt.used_bytes <= 8464
    assert slot.slot_bytes * fmt.tokens_per_page == pytest.approx(fmt.used_bytes)
    pages = torch.zeros(3, 8464, dtype=torch.uint8)
    for name, (offset, length) in fmt.regions.items():
        if not length:
            continue
        view = region(pages, fmt, name)
        assert view.shape[0] == 3
        assert view[0].nbytes == length
        # A page has a multiple of 8 slots: of an odd number of elements kept apart, a byte of each ends on 8 bytes.
        odd = slot.k_apart % 2 or slot.v_apart % 2
        assert offset % (16 if head_dim % 16 == 0 and not odd else 8) == 0
        view[1] = 1
        assert (pages[1] != 0).nonzero()[:, 0].min() >= offset
        assert (pages[1] != 0).nonzero()[:, 0].max() < offset + length
        assert not pages[[0, 2]].any()
        pages.zero_()


def brute_fill(slot: SlotFormat, size: int) -> float:
    """Used share of a page, slots added one quantum at a time."""
    layout = Layout(
        slot.head_dim,
        slot.k_bits,
        slot.v_bits,
        size,
        k_channel_group=slot.k_channel_group,
        k_groups=slot.k_groups,
        v_groups=slot.v_groups,
        symmetric=slot.symmetric,
        fp8=slot.fp8,
        score="score" in slot.track,
        pos="pos" in slot.track,
    )
    return sum(layout.sizes(layout.tokens).values()) / size


@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize(
    "tiers",
    [
        [Tier()],
        [Tier(k_bits=8, v_bits=4), Tier(k_bits=4, v_bits=2)],
        [
            Tier(k_bits=8, v_bits=4, v_splits=2),
            Tier(k_bits=4, v_bits=2, k_splits=2, v_splits=4),
            Tier(k_bits=1, v_bits=1),
        ],
        [Tier(k_bits=2, v_bits=2, k_axis="channel", k_group=40, v_group=16)],
    ],
    ids=["fp16", "diffkv", "three", "kivi40"],
)
def test_chosen_page_size_wastes_least_in_the_worst_tier(tiers: list[Tier], head_dim: int):
    """No page size in the search range has a higher worst fill, and no smaller one the same."""
    slots = [slot_of(t, head_dim, BOTH) for t in tiers]
    chosen = choose_page_bytes(slots)
    fills = {s: min(brute_fill(slot, s) for slot in slots) for s in range(64 * head_dim, 132 * head_dim + 1, 16)}
    best = max(fills.values())
    assert chosen == min(size for size, fill in fills.items() if fill > best - 1e-9)
    assert min(PageFormat(s, chosen).fill for s in slots) == pytest.approx(best)


def test_pages_of_whole_tiles_are_the_fullest_of_those_that_no_tile_cuts():
    """Slots in 64s in both tiers of DiffKV, with the fields it tracks and without; whole key groups; and where no
    searched size has whole tiles, as of 16 bits, the fullest page."""
    both = [Tier(k_bits=8, v_bits=4), Tier(k_bits=4, v_bits=2)]
    for track in ((), BOTH):
        slots = [slot_of(tier, 128, track) for tier in both]
        size = choose_page_bytes(slots, tiled=True)
        assert [PageFormat(slot, size).tokens_per_page for slot in slots] == [64, 128]
        cut = {
            one: min(brute_fill(slot, one) for slot in slots)
            for one in range(64 * 128, 132 * 128 + 1, 16)
            if all(int(one / slot.slot_bytes) // 8 * 8 % 64 == 0 for slot in slots)
        }
        assert size == max(cut, key=lambda one: (round(cut[one], 9), -one))
        assert size != choose_page_bytes(slots)
    grouped = [slot_of(Tier(k_bits=2, v_bits=2, k_axis="channel", k_group=32, v_group=32), 128)]
    assert choose_page_bytes(grouped, tiled=True) == choose_page_bytes(grouped)
    wide = [slot_of(Tier(), 128)]
    assert choose_page_bytes(wide, tiled=True) == choose_page_bytes(wide) != 64 * 512


def test_page_search_starts_at_one_group_of_the_largest_format():
    """Where a group of slots outgrows the usual range, the page is at least that large and holds it."""
    slot = slot_of(Tier(k_bits=8, v_bits=8, k_axis="channel", k_group=128, v_group=16), 16)
    size = choose_page_bytes([slot])
    assert size >= slot.slot_bytes * 128 > 132 * 16
    assert PageFormat(slot, size).tokens_per_page == 128


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"k_bits": 6}, "k_bits=6 is not one of"),
        ({"k_code": "nf4"}, "'nf4' names no code; choose one of min_max"),
        ({"v_bits": 8, "v_code": "lloyd"}, "lloyd codes of 8 bits do not exist; choose 2 or 3 or 4 bits"),
        ({"k_code": "nvfp4", "k_channel_group": 16}, "k_channel_group=16 goes with min_max and symmetric keys only"),
        ({"v_bits": 5}, "min_max codes of 5 bits do not exist; choose 1 or 2 or 3 or 4 or 8 bits"),
        ({"k_bits": 32}, r"k_bits=32 does not match dtype=torch.float16, which has 16 bits"),
        ({"v_bits": 16, "dtype": torch.float32}, r"v_bits=16 does not match dtype=torch.float32"),
        ({"head_dim": 60, "k_bits": 1}, "head_dim=60 x k_bits=1 is not a whole number of bytes"),
        ({"k_groups": 3}, "k_groups=3 does not divide head_dim=64; choose a group size"),
        ({"v_groups": 0}, "v_groups=0 does not divide head_dim=64"),
        (
            {"k_code": "book", "k_groups": 4, "k_apart": 1},
            "k_apart=1 goes with codes of calibrated tables in one group",
        ),
        ({"v_apart": 2}, "v_apart=2 goes with codes of calibrated tables in one group"),
        ({"v_code": "book", "v_apart": 64}, "v_apart=64 goes with .* of which there are 64; set it to 0"),
        ({"k_channels": 8}, "k_channels=8 goes with keys of 16 bits, not with k_bits=4"),
        ({"k_channels": 8, "k_bits": 16, "keys_only": True}, "k_channels=8 .*, not with keys that are values, too"),
        ({"k_channel_group": 12}, "k_channel_group=12 must be a multiple of 8 tokens"),
    ],
)
def test_impossible_slots_are_refused(fields: dict, message: str):
    """Every impossible slot format names the value and the rule."""
    with pytest.raises(ValueError, match=message):
        SlotFormat(**{"head_dim": 64, "k_bits": 4, "v_bits": 4, **fields})


def test_impossible_pages_are_refused_with_a_size_that_works():
    """A page too small for a group names the least size, which is then accepted; odd sizes are refused."""
    slot = SlotFormat(head_dim=64, k_bits=2, v_bits=2, k_channel_group=32, v_groups=2)
    with pytest.raises(
        ValueError, match=r"page_bytes=1024 is below one group of 32 slots \(1536 B\); set store.page_bytes=1536"
    ):
        PageFormat(slot, 1024)
    assert PageFormat(slot, 1536).tokens_per_page == 32
    with pytest.raises(ValueError, match="page_bytes=1000 must be a multiple of 16"):
        PageFormat(slot, 1000)


def test_a_page_that_fits_a_group_exactly_holds_it():
    """Channel groups that do not divide the head dim lose nothing to rounding: pages of exact size hold every group."""
    for head_dim in (16, 32, 64, 80):
        for group in range(8, 257, 8):
            for bits in (1, 2, 3, 4, 8):
                slot = SlotFormat(head_dim=head_dim, k_bits=bits, v_bits=bits, k_channel_group=group)
                need = group * (2 * head_dim * bits // 8 + 4) + 4 * head_dim
                if need % 16 == 0:
                    assert PageFormat(slot, need).tokens_per_page == group, (head_dim, group, bits)
