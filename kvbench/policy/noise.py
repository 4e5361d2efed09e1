"""Random numbers that depend on whole numbers alone, drawn where these lie."""

import torch
from torch import Tensor


def uniform(seed: int, *place: Tensor) -> Tensor:
    """Numbers drawn evenly between 0 and 1: the same in any batch and on any device, and without the host.

    Args:
        seed: A whole number, at most 2**63 - 1.
        place: int64 tensors that broadcast.

    Returns:
        fp32 in their common shape, never 0; one of 2**24 values.
    """
    mixed = torch.full((), seed, dtype=torch.int64, device=place[0].device)
    for number in place:  # overflow wraps, as meant
        mixed = (mixed + number + 1) * 0x5851F42D4C957F2D
        mixed = mixed ^ ((mixed >> 29) & 0x7FFFFFFFF)
        mixed = mixed * 0x2545F4914F6CDD1D
        mixed = mixed ^ ((mixed >> 32) & 0xFFFFFFFF)
    return ((mixed & 0xFFFFFF).float() + 0.5) / 2**24
