"""Precision by layer and head: the settings, and the tiers that they declare."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from kvbench.errors import SettingValue
from kvbench.policy.base import Policy
from kvbench.policy.declare import TierTable
from kvbench.policy.settings import TierRule, TierText
from kvbench.policy.tiers import Tier
from kvbench.rules import Readable, Several, Whole, shown

MAX_TIERS = 4
MAX_LAYERS = 1024


@dataclass(frozen=True)
class TiersByLayer(Readable):
    """Rule of settings that `read_table` reads."""

    text = (
        "one precision per layer, such as '2*fp16 26*int4 2*fp16', with one per KV head where they differ, such as "
        "fp16/int4; or the layers with another one, such as '0:fp16 -1:int8'"
    )

    def check(self, name: str, value: object) -> None:
        if not isinstance(value, str):
            raise SettingValue(f"{name}={shown(value)} must be {self.text}", setting=name)
        read_table(value, name)


def read_table(text: str, name: str = "tiers_by_layer") -> tuple[list[tuple[str, ...]], dict[int, str]]:
    """Reads a table of precisions, separated by blanks or commas.

    A row per layer, of a precision or one per KV head; or layers with theirs, negative ones counted from the last.
    Raises ValueError for another form.
    """
    rows: list[tuple[str, ...]] = []
    named: dict[int, str] = {}
    entries = re.split(r"[\s,]+", text.strip().lower())
    for entry in entries:
        match = re.fullmatch(r"(?:(?P<layer>-?[0-9]{1,4}):|(?P<count>[0-9]{1,4})\*)?(?P<tiers>[a-z0-9_/-]+)", entry)
        tiers = tuple(match["tiers"].split("/")) if match else ()
        if match is None or not all(map(TierRule().fits, tiers)) or (match["layer"] and len(tiers) > 1):
            raise SettingValue(
                f"{name}={shown(text)} has {entry!r}, but it must be {TiersByLayer().text}", setting=name
            )
        if match["layer"]:
            layer = int(match["layer"])
            if layer in named:
                raise SettingValue(f"{name}={shown(text)} names layer {layer} twice; name it once", setting=name)
            named[layer] = tiers[0]
        else:
            rows += [tiers] * int(match["count"] or 1)
    if (rows and named) or not (rows or named) or len(rows) > MAX_LAYERS:
        raise SettingValue(f"{name}={shown(text)} must be {TiersByLayer().text}", setting=name)
    return rows, named


def write_table(tiers: Sequence[str]) -> str:
    """Text of a table with one precision per layer, equal neighbours joined: `2*fp16 26*int4 2*fp16`."""
    runs: list[tuple[str, int]] = []
    for tier in tiers:
        last = runs.pop() if runs and runs[-1][0] == tier else (tier, 0)
        runs.append((tier, last[1] + 1))
    return " ".join(tier if count == 1 else f"{count}*{tier}" for tier, count in runs)


@dataclass(kw_only=True)
class ByLayer(Policy):
    """A method of one precision, which some layers and heads may have another one of.

    A subclass declares its own precision in `tiers` and calls `spread` then; its plans have tier 0 only.

    Args:
        tiers_by_layer: Other precisions than the method's own, at most four in all: one per layer from the first to the
            last, such as '2*fp16 26*int4 2*fp16' (fp16/int4: one per KV head); or the layers that differ, such as
            '0:fp16 -1:int8', where -1 is the last. null = all layers alike.
        protect_layers: Layers that are stored as `protect_tier` says, whatever the others are; -1 is the last.
        protect_tier: Precision of these layers.
    """

    tiers_by_layer: Annotated[str | None, TiersByLayer()] = None
    protect_layers: Annotated[Sequence[int], Several(Whole(-MAX_LAYERS, MAX_LAYERS - 1), least=0, ordered=False)] = ()
    protect_tier: TierText = "fp16"

    def other_tier(self, text: str) -> Tier:
        """Format of a precision of some layers. Default: the precision's own."""
        return Tier.parse(text)

    def spread(self) -> None:
        """Declares the tiers of all layers, in addition to the method's.

        Raises:
            ValueError: They are more than four.
        """
        self.protect_layers = tuple(self.protect_layers)  # a stored run has a list: the same method
        if self.tiers_by_layer is None and not self.protect_layers:
            return
        rows, named = ([], {}) if self.tiers_by_layer is None else read_table(self.tiers_by_layer)
        used = [] if rows else [self.tiers[0]]

        def index(text: str) -> int:
            tier = self.other_tier(text)
            if tier not in used:
                used.append(tier)
            return used.index(tier)

        table = TierTable(
            rows=tuple(tuple(map(index, row)) for row in rows),
            named={layer: index(text) for layer, text in named.items()},
            protected={layer: index(self.protect_tier) for layer in self.protect_layers},
        )
        if len(used) > MAX_TIERS:
            names = ", ".join(tier.name for tier in used)
            raise SettingValue(
                f"the layers have {len(used)} precisions ({names}), but a cache holds {MAX_TIERS}; give fewer "
                "different ones",
                setting="method.tiers_by_layer",
            )
        self.tiers, self.by_layer = tuple(used), table

    def check_model(self, num_layers: int, num_kv_heads: int) -> None:
        super().check_model(num_layers, num_kv_heads)
        if self.by_layer is not None:
            self.by_layer.of_model(num_layers, num_kv_heads)
