"""From declarations to page formats: what is refused, what is just allowed, and what a tier becomes on a model."""

from dataclasses import dataclass, field, replace

import pytest
import torch
from refusals import refused

from kvbench.cache.layout import ModelShape, compile_formats, compile_tier
from kvbench.cache.options import StoreOptions
from kvbench.methods.kivi import Kivi
from kvbench.methods.kvquant_style import KVQuantStyle
from kvbench.methods.uniform import Uniform
from kvbench.policy import Budget, Compaction, Policy, ReadSpec, Residual, ScoreSpec, Tier
from kvbench.policy.tiers import NAMED

SHAPE = ModelShape(
    num_layers=3, num_q_heads=6, num_kv_heads=2, head_dim=16, dtype=torch.float32, device=torch.device("cpu")
)
READING = ReadSpec(budget=Budget.parse(0.5), page_tokens=16)
CHANNEL = Tier(k_bits=2, v_bits=2, k_axis="channel", k_group=8)


@dataclass(kw_only=True)
class Declared(Policy):
    """Declares what it is told."""

    told: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value in self.told.items():
            setattr(self, name, value)


def formats(options: StoreOptions | None = None, **told):
    """The page formats of a method that declares these."""
    return compile_formats(Declared(told=told), SHAPE, options or StoreOptions())


def test_bytes_of_the_uncompressed_cache():
    """Keys and values of 2 bytes an element in every head of every layer."""
    assert SHAPE.fp16_bytes(10) == 10 * 3 * 2 * 16 * 2 * 2


@pytest.mark.parametrize(
    ("tier", "k", "v"),
    [
        (Tier(k_bits=4, v_bits=2, k_group=8, v_group=4), 2, 4),
        (Tier(k_bits=4, v_bits=2, k_splits=4, v_splits=2), 4, 2),
        (Tier(k_bits=4, v_bits=2), 1, 1),
        (Tier(k_bits=4, v_bits=2, k_group=16, v_group=16), 1, 1),
    ],
)
def test_scales_per_vector(tier, k, v):
    """A group length divides the head dim; without one the splits count."""
    slot = compile_tier(tier, SHAPE, ())
    assert (slot.k_groups, slot.v_groups, slot.k_channel_group) == (k, v, 0)


@pytest.mark.parametrize(
    ("dtype", "stored", "native_bits"),
    [(torch.float32, torch.float16, 32), (torch.float16, torch.float16, 16), (torch.bfloat16, torch.bfloat16, 16)],
)
def test_sixteen_bits_are_those_of_the_model(dtype, stored, native_bits):
    """fp16, but bf16 for bf16 models; a native tier has the model's own type."""
    shape = replace(SHAPE, dtype=dtype)
    assert compile_tier(Tier(), shape, ()).dtype == stored
    native = compile_tier(Tier(native=True, k_bits=8), shape, ())
    assert (native.dtype, native.k_bits, native.v_bits) == (dtype, native_bits, native_bits)


def test_keys_with_scales_per_channel():
    """They take whole groups of tokens, and one set of scales for each."""
    slot = compile_tier(CHANNEL, SHAPE, ())
    assert (slot.channel_keys, slot.k_channel_group, slot.group_tokens) == (True, 8, 8)


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({"tiers": ()}, "Declared has 0 tiers"),
        ({"tiers": (Tier(),) * 5}, "Declared has 5 tiers"),
        ({"tiers": (Tier(k_bits=4, k_group=5),)}, "k_group=5 does not divide the head dim 16"),
        ({"tiers": (Tier(v_bits=4, v_group=5),)}, "v_group=5 does not divide the head dim 16"),
        ({"tiers": (CHANNEL,)}, "need a residual buffer"),
        ({"tiers": (CHANNEL,), "residual": Residual(num_tokens=12)}, "must be a multiple of the key group 8"),
        ({"tiers": (Tier(), Tier()), "residual": Residual(num_tokens=8)}, "works with one tier"),
        (
            {"score": ScoreSpec(decode_update=True, track=("score",)), "residual": Residual(num_tokens=8)},
            "without decode_update",
        ),
        ({"score": ScoreSpec(track=("pos",)), "residual": Residual(num_tokens=8)}, "behind a residual buffer"),
        ({"reading": READING, "acts_in_decode": True}, "read by bounds only"),
        ({"reading": READING, "compaction": Compaction()}, "read by bounds only"),
        ({"reading": READING, "score": ScoreSpec(decode_update=True, track=("score",))}, "read by bounds only"),
        ({"reading": READING, "residual": Residual(num_tokens=8)}, "read by bounds only"),
        ({"reading": READING, "tiers": (Tier(), Tier(k_bits=8))}, "read by bounds only"),
        ({"reading": READING, "position_mode": "pre_rope"}, "read by bounds only"),
    ],
)
def test_declarations_that_do_not_go_together(told, said):
    """Each is refused with the method's name or the setting's."""
    with pytest.raises(ValueError, match=said):
        formats(**told)


def test_what_just_goes_together():
    """One tier, three tiers, a residual of one key group, and one of any length where keys have no groups."""
    assert len(formats(tiers=(Tier(),))) == 1 and len(formats(tiers=(Tier(), Tier(k_bits=8), CHANNEL_FREE))) == 3
    assert formats(tiers=(CHANNEL,), residual=Residual(num_tokens=8))[0].slot.group_tokens == 8
    assert formats(residual=Residual(num_tokens=5))[0].slot.track == ()


CHANNEL_FREE = Tier(k_bits=4, v_bits=4)


@pytest.mark.parametrize("told", [{}, {"reading": READING}])
def test_a_pool_holds_one_page_at_least(told):
    """A byte budget of exactly one page is enough, and of one byte less is not."""
    size = formats(**told)[0].page_bytes
    assert formats(StoreOptions(budget_bytes=size), **told)[0].page_bytes == size
    with refused("setting-value", "store.budget_bytes", f"store.budget_bytes={size - 1}", size):
        formats(StoreOptions(budget_bytes=size - 1), **told)


@pytest.mark.parametrize(
    ("device", "asked", "slots"), [("cpu", "auto", 48), ("cpu", "tiles", 64), ("cuda", "auto", 64)]
)
def test_a_gpu_has_pages_of_whole_tiles(device: str, asked: str, slots: int):
    """Of 8 and 4 bits at 128 channels; what a GPU has can be asked for anywhere, as where its bytes are counted."""
    policy = Declared(told={"tiers": (Tier(k_bits=8, v_bits=4),)})
    shape = replace(SHAPE, head_dim=128, device=torch.device(device))
    (fmt,) = compile_formats(policy, shape, StoreOptions(page_bytes=asked))
    assert fmt.tokens_per_page == slots
    (fixed,) = compile_formats(policy, shape, StoreOptions(page_bytes=9600))
    assert fixed.page_bytes == 9600


def test_tracked_fields_come_in_one_order():
    """What the method asks for and what the user does, each once."""
    asked = ScoreSpec(track=("pos",))
    assert formats(StoreOptions(track=("score",)), score=asked)[0].slot.track == ("score", "pos")
    assert formats(StoreOptions(track=("pos",)), score=asked)[0].slot.track == ("pos",)
    assert formats()[0].slot.track == ()


@pytest.mark.parametrize("tier", [Tier(), Tier(k_bits=4, v_bits=4), Tier(native=True)])
@pytest.mark.parametrize("tokens", [8, 16, 40])
def test_readable_pages_hold_their_tokens_and_bounds(tier, tokens):
    """As many slots as the method says, beside the smallest and the largest value of each key channel, and less than
    16 bytes of padding for it and for what a slot's quantum leaves."""
    reading = replace(READING, page_tokens=tokens)
    (page,) = formats(reading=reading, tiers=(tier,))
    slot = page.slot
    assert page.bounds and page.tokens_per_page == tokens and page.bounds_bytes == 2 * 16 * slot.dtype.itemsize
    assert page.page_bytes % 16 == 0
    assert 0 <= page.page_bytes - tokens * slot.slot_bytes - page.bounds_bytes < 16


def test_a_fixed_page_is_refused_where_the_method_fixes_its_tokens():
    """Both cannot be had; elsewhere the page has the bytes that were asked for."""
    assert formats(StoreOptions(page_bytes=4096))[0].page_bytes == 4096
    with refused("settings-conflict", "store.page_bytes", "16"):
        formats(StoreOptions(page_bytes=4096), reading=READING)


@pytest.mark.parametrize(("name", "size"), [("mxfp4", 32), ("nvfp4", 16), ("q4_0", 32)])
def test_a_format_with_groups_of_its_own_is_named(name, size):
    """Where its blocks do not divide a head, no setting is blamed that the method lacks."""
    shape = replace(SHAPE, head_dim=8 * 11)
    with refused("unsupported", None, name, size, "88") as error:
        compile_tier(NAMED[name], shape, ())
    assert "_group" not in str(error.value)


@pytest.mark.parametrize(
    ("policy", "setting"),
    [
        (Kivi(group=24, residual_tokens=48), "method.group=24"),
        (Uniform(tier="int4", splits=3), "method.splits=3"),
        (KVQuantStyle(v_splits=3), "method.v_splits=3"),
    ],
)
def test_what_does_not_divide_a_head_is_named_as_it_was_set(policy, setting):
    """The setting is the method's own, not the tier's field that follows from it."""
    with refused("setting-value", None, setting, "16"):
        compile_formats(policy, SHAPE, StoreOptions())
