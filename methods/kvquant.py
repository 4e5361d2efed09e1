"""KVQuant: keys per channel before the rotary embedding, by tables and scales that a calibration found."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import kvbench.policy as kv

WIDTHS = (2, 3, 4)  # bits that books have tables for; of each, the keys' table and then the values'
TABLES = sum(2 * 2**bits for bits in WIDTHS)


@dataclass(kw_only=True)
class KVQuant(kv.Policy):
    """Stores keys before the rotary embedding and values as codes of calibrated tables, outliers apart.

    The tables are per layer; the first tokens of a prompt stay in 16 bits.

    A key's scale and zero belong to its channel for good and are stored outside the pages, so that every token is coded
    as it comes; a value vector has its own. Keys are rotated when they are read.

    Args:
        bits: 2, 3 or 4 for keys and values.
        books: The model's tables and scales: the path of a file that `kvbench calibrate what=books` wrote, or a list of
            lists. null = none, then the model is refused.
        sinks: First tokens of a prompt that stay in 16 bits; >= 0.
        outliers: Elements of each key and of each value whose rest, what their code misses, is kept apart in 16 bits
            with a byte that says which one it is; >= 0.
        native: Store the model's own dtype instead (lossless; for tests).

    Source: KVQuant (Hooper et al. 2024), sections 3.1 to 3.3 and 3.5, from memory; SqueezeAILab/KVQuant.
    Differs: outliers are so many of every vector (1 of 64 is 1.6 %), where the paper takes those beyond a threshold,
        1 % in all: of a value the largest, which its scale does not span then, and of a key those that their codes miss
        by most. They lie in the slot, as what is added to the code's level, not in a sparse matrix. The tables are of
        plain k-means, where the paper weighs numbers by squared gradients, and their levels are whole numbers from 0 to
        255 of a vector's or channel's range. Sinks lie in a page of their own in each head, whose empty rest is billed.
    """

    bits: Annotated[int, kv.Choice(WIDTHS, unit="bits")] = 4
    books: Annotated[str | Sequence[Sequence[float]] | None, kv.TABLE_OR_PATH] = None
    sinks: Annotated[int, kv.Whole(0, kv.MAX_TOKENS, unit="tokens")] = 1
    outliers: Annotated[int, kv.Whole(0, 8, unit="elements")] = 1
    native: bool = False

    position_mode = "pre_rope"

    def declare(self) -> None:
        bits, apart = self.bits, self.outliers
        coded = kv.Tier(k_bits=bits, v_bits=bits, k_code="book_channels", v_code="book", k_apart=apart, v_apart=apart)
        whole = kv.Tier(native=self.native)
        self.tiers = (whole if self.native else coded, whole)[: 2 if self.sinks else 1]
        if self.books is not None:  # the numbers themselves, so that a run's identity does not hang on a path
            self.books = kv.read_table(self.books, "books")
            self.codebooks = None if self.native else _read(self.books, self.bits)

    def check_model(self, num_layers: int, num_kv_heads: int) -> None:
        super().check_model(num_layers, num_kv_heads)
        layers = 0 if self.codebooks is None else len(self.codebooks.scale)
        fits = self.codebooks is not None and len(self.codebooks.scale[0]) % num_kv_heads == 0
        if not self.native and (layers != num_layers or not fits):
            raise kv.NotForModel(
                f"method.books has {layers} layers, but the model has {num_layers} layers x {num_kv_heads} KV heads; "
                "kvquant needs the books of this model, which `kvbench calibrate what=books` measures: give them as "
                "method.books=PATH",
                setting="method.books",
            )

    def plan_prefill(self, view: kv.PrefillView) -> kv.PrefillPlan:
        tier_of = view.filled(0)
        tier_of[..., : self.sinks] = len(self.tiers) - 1
        return kv.PrefillPlan(tier_of=tier_of)

    def bounds(self, extent: kv.Extent) -> kv.Bounds:
        return kv.quantised(extent, [0], beyond=self.sinks)


def _read(rows: Sequence[Sequence[float]], bits: int) -> kv.CodeBooks:
    """The books of a width, from lines with the tables of all widths and then the scales and zeros of key channels.

    Raises:
        ValueError: The lines are no books.
    """
    half, odd = divmod(len(rows[0]) - TABLES, 2)
    first, size = sum(2 * 2**each for each in WIDTHS if each < bits), 2**bits
    tables = [[row[at : at + size] for row in rows] for at in (first, first + size)]
    if half < 1 or odd or any(level not in range(256) for table in tables for row in table for level in row):
        raise kv.SettingValue(
            f"method.books: a line has {TABLES} levels from 0 to 255 and then a scale and a zero for each key channel "
            f"of a layer, but this one has {len(rows[0])} numbers and is none; "
            "`kvbench calibrate what=books` writes such a file",
            setting="method.books",
        )
    keys, values = (tuple(tuple(map(int, row)) for row in table) for table in tables)
    return kv.CodeBooks(
        keys=keys,
        values=values,
        scale=tuple(tuple(row[TABLES : TABLES + half]) for row in rows),
        zero=tuple(tuple(row[TABLES + half :]) for row in rows),
    )
