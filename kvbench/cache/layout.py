"""Page formats from a policy's tiers and a model's shape."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from kvbench.cache.options import StoreOptions
from kvbench.cache.ranks import ALONE, Ranks
from kvbench.cache.rotation import check_rotation
from kvbench.errors import BrokenRule, SettingsConflict, SettingValue, Unsupported
from kvbench.kernels.format import PageFormat, SlotFormat, choose_page_bytes
from kvbench.kernels.operands import PLAIN, Softmax, Window
from kvbench.policy import Policy, ReadSpec, Tier


@dataclass(frozen=True)
class DeviceSpan:
    """Consecutive layers of a model on one device, that of their weights and of their part of the cache."""

    device: torch.device
    num_layers: int


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Shape of a model for the store: all its layers and heads, on any device.

    Layers of another kind have their shapes in `other_kinds`: the policy acts on these layers, which see everything,
    and numbers them from 0.

    Args:
        device: Device of the cache; of a model on several, the first one, where plans are made.
        inv_freq: Rotary inverse frequencies fp32 [D_rot / 2], or None when keys cannot be re-rotated.
        output_projections: Per layer, the model's own weight [E, Hq * D] after attention, or None when not found; of
            heads that are divided among processes, this one's columns.
        key_biases: Per layer, the bias of the key projection [H * D], of the heads of this process; None where not
            every layer has one that is added to keys as they are.
        device_spans: Devices of the layers, in their order; empty = all on `device`.
        ranks: The processes among which the heads are divided.
        softmax: Caps and sinks of all layers, of the query heads that this process holds.
        window: Look-back of these layers; None = to everything.
        other_kinds: Shapes of layers of other kinds that hold keys and values.
        numbers: The model's own numbers of these layers; empty = they are all of its layers.
        state_bytes: Bytes of the states of further layers per sequence, whatever its length.
        keys_only: The keys are the values, too, and are held once (latent attention).
        shared: The model's layers that attend over the keys and values of another one, and which one that is, by the
            model's own numbers.
    """

    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    inv_freq: Tensor | None = None
    output_projections: Sequence[Tensor] | None = None
    key_biases: Sequence[Tensor] | None = None
    device_spans: tuple[DeviceSpan, ...] = ()
    ranks: Ranks = ALONE
    softmax: Softmax = PLAIN
    window: Window | None = None
    other_kinds: "tuple[ModelShape, ...]" = ()
    numbers: tuple[int, ...] = ()
    state_bytes: int = 0
    keys_only: bool = False
    shared: Mapping[int, int] = field(default_factory=dict, hash=False)

    @property
    def is_whole(self) -> bool:
        return len(self.device_spans) < 2 and self.ranks.size == 1

    @property
    def is_uniform(self) -> bool:
        """True if these are all layers of the model, and hold nothing else."""
        return not self.numbers and not self.state_bytes

    @cached_property
    def kinds(self) -> dict[int, tuple[int, int]]:
        """Lookup by layer index: index of its shape (0 for this one, then `other_kinds`), and its index there."""
        shapes = (self, *self.other_kinds)
        each = [(kind, shape.numbers or range(shape.num_layers)) for kind, shape in enumerate(shapes)]
        return {number: (kind, index) for kind, numbers in each for index, number in enumerate(numbers)}

    @cached_property
    def attending(self) -> tuple[int, ...]:
        """The model's own numbers of all layers with attention, in their order."""
        return tuple(sorted({*self.kinds, *self.shared}))

    @cached_property
    def heads_here(self) -> tuple[int, int]:
        """Query and KV heads of a layer that this process holds."""
        return self.num_q_heads // self.ranks.size, self.num_kv_heads // self.ranks.size

    def parts(self) -> "list[tuple[int, ModelShape]]":
        """Parts of this process in order: index of a part's first layer, and the shape of its local layers."""
        parts, first = [], 0
        num_q_heads, num_kv_heads = self.heads_here
        for span in self.device_spans or (DeviceSpan(self.device, self.num_layers),):
            inv_freq = None if self.inv_freq is None else self.inv_freq.to(span.device)
            sinks, here = self.softmax.sinks, slice(first, first + span.num_layers)
            shape = replace(
                self,
                num_layers=span.num_layers,
                num_q_heads=num_q_heads,
                num_kv_heads=num_kv_heads,
                device=span.device,
                inv_freq=inv_freq,
                device_spans=(),
                softmax=Softmax(self.softmax.cap, None if sinks is None else sinks[here].to(span.device)),
            )
            parts.append((first, shape))
            first += span.num_layers
        return parts

    def on_host(self) -> "ModelShape":
        """Copy of this shape on one device, in main memory, with placeholder numbers in its tensors."""
        sinks = self.softmax.sinks
        return replace(
            self,
            device=torch.device("cpu"),
            device_spans=(),
            ranks=ALONE,
            inv_freq=None if self.inv_freq is None else torch.ones(self.inv_freq.shape),
            key_biases=None if self.key_biases is None else [torch.zeros(bias.shape) for bias in self.key_biases],
            softmax=Softmax(self.softmax.cap, None if sinks is None else torch.zeros(sinks.shape)),
            other_kinds=tuple(each.on_host() for each in self.other_kinds),
        )

    def fp16_bytes(self, num_tokens: int) -> int:
        """Bytes of an uncompressed 16-bit cache of this many tokens: the denominator of every ratio.

        As the model itself would hold it, windows and states included.
        """
        total = self.layers_fp16_bytes(num_tokens) + self.state_bytes
        return total + sum(each.fp16_bytes(num_tokens) for each in self.other_kinds)

    def layers_fp16_bytes(self, num_tokens: int) -> int:
        """Bytes of an uncompressed 16-bit cache of these layers alone, without states and other kinds."""
        if self.window is not None:
            num_tokens = min(num_tokens, self.window.num_tokens)
        return num_tokens * self.num_layers * self.num_kv_heads * self.head_dim * (2 if self.keys_only else 4)


def most_slots(policy: Policy, prompt_tokens: int, new_tokens: int) -> int:
    """Most slots of one list over all tiers after a prompt and along its answer, by which a page table is sized."""
    return min(policy.max_slots(prompt_tokens, new_tokens), prompt_tokens + new_tokens)


def compile_tier(tier: Tier, shape: ModelShape, track: tuple[str, ...], policy: Policy | None = None) -> SlotFormat:
    """Slot format of a tier on a model.

    Raises ValueError, in the words of the policy's settings, where groups or splits do not divide the head dim.
    """
    kept = tier.key_channels(shape.head_dim)
    few = kept if kept < shape.head_dim else 0
    dtype = shape.dtype if tier.native else torch.bfloat16 if shape.dtype == torch.bfloat16 else torch.float16
    if tier.native:
        bits = dtype.itemsize * 8
        return SlotFormat(
            head_dim=shape.head_dim,
            k_bits=bits,
            v_bits=bits,
            dtype=dtype,
            track=track,
            k_channels=few,
            keys_only=shape.keys_only,
        )
    channel = tier.k_axis == "channel"
    return SlotFormat(
        head_dim=shape.head_dim,
        k_bits=tier.k_bits,
        v_bits=tier.v_bits,
        k_channel_group=tier.k_group if channel else 0,
        k_groups=1 if channel else _num_groups("k", tier, shape, policy),
        v_groups=_num_groups("v", tier, shape, policy),
        symmetric=tier.symmetric,
        fp8=tier.fp8,
        k_code=tier.k_code,
        v_code=tier.v_code,
        k_apart=tier.k_apart,
        v_apart=0 if shape.keys_only else tier.v_apart,
        dtype=dtype,
        track=track,
        k_channels=few,
        keys_only=shape.keys_only,
    )


def _num_groups(side: str, tier: Tier, shape: ModelShape, policy: Policy | None) -> int:
    """Scales per vector of one side."""
    group, splits = (tier.k_group, tier.k_splits) if side == "k" else (tier.v_group, tier.v_splits)
    name, size = ("group", group) if group else ("splits", splits)
    if shape.head_dim % size:
        wrong = f"does not divide the head dim {shape.head_dim}"
        if tier.has_form:
            raise Unsupported(
                f"{tier.name} shares a scale among {size} channels, which {wrong}; choose another format, such as int4"
            )
        known = (key for key in (name, f"{side}_{name}") if hasattr(policy, key))
        setting = next((f"method.{key}" for key in known), f"{side}_{name}")
        raise SettingValue(f"{setting}={size} {wrong}; choose a divisor", setting=setting)
    return shape.head_dim // group if group else splits


def compile_formats(policy: Policy, shape: ModelShape, options: StoreOptions) -> tuple[PageFormat, ...]:
    """Page formats of all tiers, sharing one page size; raises ValueError for what does not go together."""
    tiers = policy.tiers
    if not 1 <= len(tiers) <= 4:
        raise BrokenRule(f"{type(policy).__name__} has {len(tiers)} tiers; the page tables hold one to four")
    if policy.by_layer is not None:
        _check_layers(policy, shape)
    _check_channels(policy, options)
    if shape.keys_only:
        _check_keys_only(policy, options)
    wanted = {*policy.score.track, *options.track}
    track = tuple(name for name in ("score", "pos") if name in wanted)
    slots = [compile_tier(tier, shape, track, policy) for tier in tiers]
    if any(s.channel_keys for s in slots):
        if policy.residual is None:
            raise BrokenRule(
                f"{type(policy).__name__}: keys with per-channel scales are written in groups and need a residual "
                "buffer"
            )
        for slot in slots:
            if policy.residual.num_tokens % slot.group_tokens:
                raise SettingsConflict(
                    f"residual={policy.residual.num_tokens} must be a multiple of the key group {slot.group_tokens}, "
                    "because the buffer leaves in whole groups"
                )
    if policy.residual is not None and ((len(tiers) > 1 and policy.by_layer is None) or policy.score.decode_update):
        raise BrokenRule(f"{type(policy).__name__}: a residual buffer works with one tier and without decode_update")
    if policy.residual is not None and track:
        raise SettingsConflict(
            f"store.track={list(track)} cannot be kept behind a residual buffer, whose tokens have no such fields; "
            "set store.track=[]",
            setting="store.track",
        )
    if policy.reading is not None:
        return (_readable_format(policy, policy.reading, slots, options),)
    page_bytes = options.on(shape.device).page_bytes
    size = page_bytes if isinstance(page_bytes, int) else choose_page_bytes(slots, tiled=page_bytes == "tiles")
    formats = tuple(PageFormat(slot, size) for slot in slots)
    if options.budget_bytes is not None and options.budget_bytes < size:
        raise SettingValue(
            f"store.budget_bytes={options.budget_bytes} is below one page ({size} B); raise it or set store.page_bytes",
            setting="store.budget_bytes",
        )
    return formats


def _check_layers(policy: Policy, shape: ModelShape) -> None:
    name, setting = type(policy).__name__, "method.tiers_by_layer or method.protect_layers"
    if policy.acts_in_decode or policy.compaction or policy.score.decode_update or policy.reading is not None:
        raise SettingsConflict(
            f"{name} ranks or reads single slots while decoding, for which all layers have one precision; leave "
            f"{setting} out, or choose a method that decides about the prompt alone",
            setting="method.tiers_by_layer",
        )
    assert policy.by_layer is not None, "the caller looked"
    table = policy.by_layer.of_model(shape.num_layers, shape.num_kv_heads)
    if policy.residual is not None and any(len(set(row)) > 1 for row in table):
        raise SettingsConflict(
            f"{name} has a residual buffer, which leaves a layer's heads together; give {setting} one precision per "
            "layer",
            setting="method.tiers_by_layer",
        )


def _check_channels(policy: Policy, options: StoreOptions) -> None:
    orders, statistic = policy.score.orders_channels, type(policy.score.statistic).__name__
    if not orders and all(tier.k_kept == 1 for tier in policy.tiers):
        return
    name = type(policy).__name__
    if not orders:
        raise BrokenRule(f"{name} stores some key channels only, but {statistic} does not measure them (of_channels)")
    looks = policy.compaction or policy.reading is not None or policy.score.statistic.answers("of_token")
    if looks or policy.residual is not None or policy.by_layer is not None or policy.in_chunks:
        raise Unsupported(
            f"{name} orders key channels once, behind the prompt: it cannot measure keys later, read pages by bounds, "
            "have a residual buffer or precisions by layer, or read a prompt in chunks"
        )
    if policy.position_mode != "absolute" or policy.granularity != "kv_head":
        raise BrokenRule(f"{name} orders the channels of KV heads' keys, which are stored with their positions")
    by_tier = options.rotation != "off" and any(tier.rotated != "none" for tier in policy.tiers)
    if options.rotation == "hadamard" or by_tier:
        raise SettingsConflict(
            f"store.rotation={options.rotation} mixes the key channels that {name} tells apart; set "
            "store.rotation=none",
            setting="store.rotation",
        )


def _check_keys_only(policy: Policy, options: StoreOptions) -> None:
    """Refuses what treats a vector in one way as a key and in another as a value, where it is both."""
    name = type(policy).__name__
    asks = "of a model with latent attention keys and values are the same vectors, held once"
    if check_rotation(options.rotation, policy):
        raise SettingsConflict(
            f"store.rotation={options.rotation} or the format of {name} turns keys; {asks}, and are not turned; choose "
            "another format, or set store.rotation=off",
            setting="store.rotation",
        )
    if policy.score.orders_channels or policy.codebooks is not None or policy.head_scales is not None:
        raise Unsupported(f"{name} has channels or tables of codes for keys alone; {asks}; choose another method")
    if "attention_call" in policy.score.statistic.needs:
        raise Unsupported(f"{name} makes a layer's queries again by itself; {asks}; choose another method")


def _readable_format(policy: Policy, reading: ReadSpec, slots: list[SlotFormat], options: StoreOptions) -> PageFormat:
    """Pages of as many slots as the policy's `ReadSpec` says, each with the bounds of its keys."""
    moves = policy.acts_in_decode or policy.compaction or policy.score.decode_update
    if moves or policy.residual is not None or len(slots) > 1 or policy.position_mode != "absolute":
        raise BrokenRule(
            f"{type(policy).__name__}: pages are read by bounds only where every token stays in the one tier it was "
            "written to, with its position, and no scores are updated"
        )
    if isinstance(options.page_bytes, int):
        raise SettingsConflict(
            f"store.page_bytes={options.page_bytes}: the method fixes {reading.page_tokens} tokens per page; "
            "set store.page_bytes=auto",
            setting="store.page_bytes",
        )
    needed = reading.page_tokens // slots[0].token_quantum * slots[0].quantum_bytes
    bounds = 2 * slots[0].head_dim * slots[0].dtype.itemsize
    page = PageFormat(slots[0], -(-(needed + bounds) // 16) * 16, bounds=True)
    if options.budget_bytes is not None and options.budget_bytes < page.page_bytes:
        raise SettingValue(
            f"store.budget_bytes={options.budget_bytes} is below one page ({page.page_bytes} B); raise it",
            setting="store.budget_bytes",
        )
    return page
