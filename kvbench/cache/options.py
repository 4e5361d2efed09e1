"""Options of the store, which are read without torch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Literal

from kvbench.rules import MAX_BYTES, TABLE_OR_PATH, Choice, Number, Several, Whole, check_settings
from kvbench.rules.counting import Unless

if TYPE_CHECKING:
    import torch

RotationKind = Literal["none", "hadamard", "off"]
ROTATIONS: tuple[RotationKind, ...] = ("none", "hadamard", "off")
OffsetKind = Literal["none", "prompt", "bias"]
OFFSETS: tuple[OffsetKind, ...] = ("none", "prompt", "bias")


@dataclass(frozen=True, kw_only=True)
class StoreOptions:
    """The layout of the store's memory.

    Args:
        page_bytes: Page size in bytes; `tiles`: the size that wastes least for the method's tiers among those whose
            slots a GPU's kernels read in whole tiles, where there is one; or `auto`: `tiles` on a GPU, elsewhere the
            size that wastes least of all.
        budget_bytes: Limit on the page pool; None lets it grow, and on a GPU makes it once from what is free.
        memory_share: Most of a GPU's free memory that the page pool takes where `budget_bytes` is None; the rest is for
            reading prompts.
        track: Further per-slot fields (`score`, `pos`) to keep and bill, for inspection.
        rotation: Which `Rotation` keys and values take before they are stored: `none` but the one of their format,
            `hadamard`, or `off`: not even that.
        windows: The precision of layers with windows: `exact`, or that of the `method`.
        key_offset: The vector that the keys of each layer and KV head are stored less (`KeyOffsets`): `none`, the mean
            of the `prompt`'s keys, the `bias` of the model's key projection (of keys that are stored without their
            positions), or a table with a line per layer of the channels of all its KV heads. Windows of the method's
            precision take the mean too, and nothing of the others.
    """

    page_bytes: Annotated[
        int | Literal["auto", "tiles"], Whole(16, 2**24, unit="bytes", multiple_of=16, also=("auto", "tiles"))
    ] = "auto"
    budget_bytes: Annotated[int | None, Whole(1, MAX_BYTES, unit="bytes")] = None
    memory_share: Annotated[float, Number(0, 1, above=True)] = 0.9
    track: Annotated[tuple[str, ...], Several(Choice(("score", "pos")), least=0, ordered=False)] = ()
    rotation: Annotated[RotationKind, Choice(ROTATIONS)] = "none"
    windows: Annotated[Literal["exact", "method"], Choice(("exact", "method"))] = "exact"
    key_offset: Annotated[str | Sequence[Sequence[float]], TABLE_OR_PATH, Unless("none")] = "none"

    def __post_init__(self) -> None:
        check_settings(self, "store.")

    def on(self, device: "torch.device") -> "StoreOptions":
        """Copy with `page_bytes=auto` resolved for a device."""
        is_tiled = self.page_bytes == "auto" and device.type == "cuda"
        return replace(self, page_bytes="tiles") if is_tiled else self
