"""A rotation of channels that spreads outliers over all of them before keys and values are stored."""

import math
import random
from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.cache.options import RotationKind
from kvbench.errors import SettingsConflict
from kvbench.kernels.backend import REFERENCE, Backend
from kvbench.policy import Policy

GGML_BLOCK = 64  # the least number of channels that llama.cpp turns together


class Rotation:
    """Turns queries, keys and values on their way into the store, and attention's output back.

    The matrix is a Hadamard matrix, with random signs of its rows or without, and orthogonal: the products of queries
    and keys stay what they are, and a channel that is far larger than the others, which would stretch the scale of a
    quantiser, becomes a little of every channel. All heads and layers share it, and so do all runs.

    Args:
        matrix: fp32 [D, D], orthogonal; None = nothing is turned.
        backend: Multiplies; where its rows are alone, a row that is turned is the same bits in any company.

    Source: QuaRot (Ashkboos et al. 2024) section 3, for keys; TurboQuant (Zandieh et al. 2025), for both sides;
        llama.cpp, src/llama-kv-cache.cpp since pull request 21038 (April 2026), for its types.
    Differs: the model's weights stay as they are; the cache turns queries and output itself. Turned numbers are rounded
        to the model's dtype before they are coded, where llama.cpp codes fp32.
    """

    def __init__(self, matrix: Tensor | None = None, backend: Backend = REFERENCE) -> None:
        self._turn = self._turn_back = None
        if matrix is not None:
            self._turn, self._turn_back = backend.multiplier(matrix), backend.multiplier(matrix.T)

    @property
    def idle(self) -> bool:
        return self._turn is None

    def apply(self, x: Tensor) -> Tensor:
        """Rotate `x` [..., D] into the channels of the store, in its dtype."""
        return x if self._turn is None else self._turn(x.float()).to(x.dtype)

    def back(self, x: Tensor) -> Tensor:
        """Rotate `x` [..., D] back from the channels of the store, in its dtype."""
        return x if self._turn_back is None else self._turn_back(x.float()).to(x.dtype)


def hadamard(head_dim: int, most: int | None = None, *, randomised: bool = True) -> Tensor:
    """Orthogonal matrix fp32 [D, D]: random signs times a Hadamard matrix.

    In blocks of the largest power of two that divides the head dim, of at most `most` channels.
    """
    block = min(head_dim & -head_dim, most or head_dim)
    matrix = torch.ones(1, 1)
    while len(matrix) < block:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    blocks = torch.block_diag(*[matrix] * (head_dim // block)) / math.sqrt(block)
    if not randomised:
        return blocks
    dice = random.Random(0)  # Python's generator gives the same numbers in every version
    return torch.tensor([dice.choice((-1.0, 1.0)) for _ in range(head_dim)])[:, None] * blocks


@dataclass(frozen=True)
class Rotations:
    """The rotation of each side on its way into the store: queries with keys, attention's output with values."""

    keys: Rotation
    values: Rotation


def rotations_of(
    kind: RotationKind, policy: Policy, head_dim: int, device: torch.device, backend: Backend
) -> Rotations:
    """Rotations of a store's option and of its tiers' formats; raises the errors of `check_rotation`."""
    kinds = check_rotation(kind, policy)
    if "llama.cpp" not in kinds:
        matrix = hadamard(head_dim).to(device) if kinds else None
        return Rotations(Rotation(matrix, backend), Rotation(matrix if "both" in kinds else None, backend))
    sides = []
    for bits, most in (([t.k_bits for t in policy.tiers], None), ([t.v_bits for t in policy.tiers], GGML_BLOCK)):
        turns = min(bits) < 16 and head_dim % GGML_BLOCK == 0
        sides.append(Rotation(hadamard(head_dim, most, randomised=False).to(device) if turns else None, backend))
    return Rotations(*sides)


def check_rotation(kind: RotationKind, policy: Policy) -> set[str]:
    """Rotated sides: none, `keys`, `both`, or those of `llama.cpp`.

    Refuses a rotation where stored keys get their position on reading, in the model's channel basis, and formats with
    different rotations.
    """
    tier_kinds: set[str] = {tier.rotated for tier in policy.tiers if kind != "off" and tier.rotated != "none"}
    kinds: set[str] = {"both"} if kind == "hadamard" else tier_kinds
    if "llama.cpp" in kinds and len(kinds) > 1:
        names = ", ".join(tier.name for tier in policy.tiers if tier.rotated != "none")
        raise SettingsConflict(
            f"the formats {names} are rotated in different ways, but a cache has one rotation; choose formats of one "
            "engine, or set store.rotation=hadamard or off",
            setting="store.rotation",
        )
    if kinds and policy.position_mode != "absolute":
        source, remedy = f"the format {policy.tiers[0].name}, which is rotated,", "set store.rotation=off"
        if kind == "hadamard":
            source, remedy = "store.rotation=hadamard", "set store.rotation=none"
        raise SettingsConflict(
            f"{source} needs keys that are stored with their positions, but {type(policy).__name__} stores them "
            f"without (position_mode={policy.position_mode}); {remedy}, or method.position_mode=absolute or "
            "method.pre_rope=false where the method has that option",
            setting="store.rotation",
        )
    return kinds
