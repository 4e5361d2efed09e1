"""The tail of a distribution: values so rare that a mean does not show them."""

from collections.abc import Sequence

import numpy as np

# Name -> share of the KL divergences of an answer, or of all tokens of a run, that are no larger.
KL_TAILS = {"kl_99": 0.99, "kl_999": 0.999}


def fewest(share: float) -> int:
    """Values that a quantile needs: with fewer, it would be the largest of them up to rounding."""
    return round(1 / (1 - share))


def quantile(values: Sequence[float], share: float) -> float | None:
    """Quantile of the values, linearly interpolated; None where they are fewer than `fewest`.

    Source: llama.cpp's `perplexity`, `percentile`.
    """
    return float(np.quantile(values, share)) if len(values) >= fewest(share) else None
