"""What belongs to one model in a method's settings, made for the tiny models."""

import math
import random


def open_settings(method: str, kv_heads: int = 2, layers: int = 2) -> dict:
    """Returns what a method's YAML leaves open because it belongs to one model, for a tiny model."""
    shares = [[0.2, 0.8] if layer % 2 else [0.9, 0.1] for layer in range(layers)]
    if method == "triattention":  # one mean query per KV head, of width 64
        centres = [[round(math.sin(i * (layer + 1)), 3) for i in range(kv_heads * 96)] for layer in range(layers)]
        return {"centres": centres}
    if method == "kvquant":
        return {"books": kvquant_books(kv_heads, layers=layers)}
    if method == "headkv":
        return {"table": [(each * kv_heads)[:kv_heads] for each in shares]}
    if method == "duo_attention":
        return {"table": [(each * kv_heads)[:kv_heads] for each in shares], "sinks": 4, "recent": 20}
    return {}


def kvquant_books(kv_heads: int = 2, head_dim: int = 64, layers: int = 2, seed: int = 0) -> list[list[float]]:
    """Returns books that no two layers share: tables that are not equally far apart, and channels of unequal width."""
    dice = random.Random(seed)

    def layer() -> list[float]:
        tables = [sorted(dice.sample(range(256), 2**bits)) for bits in (2, 3, 4) for _ in "kv"]
        width = [round(dice.uniform(3.0, 6.0), 3) for _ in range(kv_heads * head_dim)]
        return [*sum(tables, []), *(each / 255 for each in width), *(-each / 2 for each in width)]

    return [layer() for _ in range(layers)]
