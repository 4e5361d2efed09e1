"""Statistics of every forced token together: perplexity, and how far a method is from the full cache."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np

from kvbench.stats.blocks import over_tokens
from kvbench.stats.tails import KL_TAILS, fewest

# Name -> which numbers of the forced tokens, and the statistic of them. `log_ratio` is the mean NLL minus the full
# cache's; NLL and KL are in nats, first choices are shares. `dp` is what the forced token's probability changed by.
STATISTICS: dict[str, tuple[str, Callable[[np.ndarray], float]]] = {
    "perplexity": ("nll", lambda nll: np.exp(np.mean(nll))),
    "perplexity_full": ("nll_full", lambda nll: np.exp(np.mean(nll))),
    "log_ratio": ("excess", np.mean),
    "kl_mean": ("kl", np.mean),
    "kl_median": ("kl", np.median),
    **{name: ("kl", partial(np.quantile, q=share)) for name, share in KL_TAILS.items()},
    "kl_max": ("kl", np.max),
    "dp_mean": ("dp", np.mean),
    "dp_rms": ("dp", lambda dp: np.sqrt(np.mean(np.square(dp)))),
    "same_first_choice": ("same_first_choice", np.mean),
    "right_first_choice": ("right_first_choice", np.mean),
}


def token_statistics(records: Iterable[Mapping[str, Any]]) -> dict[str, dict]:
    """The `STATISTICS` of all tokens of a run, each with its 95 % interval; empty without such tokens.

    First answers that ended well count, without the tokens that the prompt's own pass predicts. A tail of the KL is
    there where the tokens are as many as it needs (`fewest`).

    Source: the statistics are those of llama.cpp's `perplexity --kl-divergence`.
    Differs: intervals by resampling blocks of tokens; llama.cpp takes neighbouring tokens for independent.
    """
    texts: list[dict[str, list[float]]] = []
    for record in records:
        tokens = record.get("per_token")
        if tokens and record["status"] == "ok" and not record.get("repeat"):
            first = int(tokens["exact"][0])
            text = {name: values[first:] for name, values in tokens.items()}
            nll, full = (np.array(text[name]) for name in ("nll", "nll_full"))
            texts.append(text | {"excess": (nll - full).tolist(), "dp": (np.exp(-nll) - np.exp(-full)).tolist()})
    count = sum(len(text["nll"]) for text in texts)
    if not count:
        return {}
    numbers = {
        name: over_tokens([text[column] for text in texts], statistic)
        for name, (column, statistic) in STATISTICS.items()
        if name not in KL_TAILS or count >= fewest(KL_TAILS[name])
    }
    # The largest of a resample is never larger than the largest, so there is no such interval.
    numbers["kl_max"].low = numbers["kl_max"].high = None
    numbers["kl_max"].interval = ""
    return {name: asdict(estimate) for name, estimate in numbers.items()}
