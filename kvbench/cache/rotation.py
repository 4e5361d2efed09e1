"""A rotation of channels that spreads outliers over all of them before keys and values are stored."""

import math
import random
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvbench.policy import Policy

Kind = Literal["none", "hadamard"]
KINDS: tuple[Kind, ...] = ("none", "hadamard")


class Rotation:
    """Turns queries, keys and values on their way into the store, and attention's output back.

    `hadamard` multiplies with a Hadamard matrix whose rows have random signs, an orthogonal matrix: the products of
    queries and keys stay what they are, and a channel that is far larger than the others, which would stretch the scale
    of a quantiser, becomes a little of every channel. A head dim that is no power of two is turned in blocks of the
    largest one that divides it. All heads and layers share the signs, and so do all runs.

    Args:
        kind: `none` or `hadamard`.

    Source: QuaRot (Ashkboos et al. 2024) section 3, for keys; TurboQuant (Zandieh et al. 2025), for both sides.
    Differs: the model's weights stay as they are; the cache turns queries and output itself.
    """

    def __init__(self, kind: Kind, head_dim: int, device: torch.device | str = "cpu") -> None:
        self._matrix = None if kind == "none" else hadamard(head_dim).to(device)

    @property
    def idle(self) -> bool:
        return self._matrix is None

    def apply(self, x: Tensor) -> Tensor:
        """x [..., D] in the channels of the store, in its own dtype."""
        return x if self._matrix is None else (x.float() @ self._matrix).to(x.dtype)

    def back(self, x: Tensor) -> Tensor:
        """x [..., D] from the channels of the store, in its own dtype."""
        return x if self._matrix is None else (x.float() @ self._matrix.T).to(x.dtype)


def hadamard(head_dim: int) -> Tensor:
    """The matrix, fp32 [D, D] and orthogonal: random signs times a Hadamard matrix, in blocks."""
    block = head_dim & -head_dim  # the largest power of two in it
    matrix = torch.ones(1, 1)
    while len(matrix) < block:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    dice = random.Random(0)  # Python's generator gives the same numbers in every version
    signs = torch.tensor([dice.choice((-1.0, 1.0)) for _ in range(head_dim)])
    return signs[:, None] * torch.block_diag(*[matrix] * (head_dim // block)) / math.sqrt(block)


@dataclass(frozen=True)
class Rotations:
    """The rotation of each side on its way into the store: queries with keys, attention's output with values."""

    keys: Rotation
    values: Rotation


def rotations_of(kind: Kind, policy: Policy, head_dim: int, device: torch.device) -> Rotations:
    """The rotations of a store: those that its option asks for, and those that belong to a tier's format; raises
    ValueError where `check_rotation` does."""
    asked = check_rotation(kind, policy)
    keys: Kind = "hadamard" if asked - {"none"} else "none"
    values: Kind = "hadamard" if "both" in asked else "none"
    return Rotations(Rotation(keys, head_dim, device), Rotation(values, head_dim, device))


def check_rotation(kind: Kind, policy: Policy) -> set[str]:
    """What is turned. Refuses it where stored keys get their position on reading, in the model's own channels."""
    asked = {tier.turned for tier in policy.tiers} | ({"both"} if kind != "none" else set())
    if asked != {"none"} and policy.position_mode != "absolute":
        source = f"store.rotation={kind}" if kind != "none" else f"the format {policy.tiers[0].name}, which is rotated,"
        remedy = "set store.rotation=none" if kind != "none" else "choose another one"
        raise ValueError(
            f"{source} needs keys that are stored with their positions, but {type(policy).__name__} stores them "
            f"without (position_mode={policy.position_mode}); {remedy}, or method.position_mode=absolute or "
            "method.pre_rope=false where the method has that option"
        )
    return asked
