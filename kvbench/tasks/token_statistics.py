"""Statistics of every forced token together: perplexity, and how far a method is from the full cache."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from kvbench.stats.blocks import over_tokens

# Name -> which numbers of the forced tokens, and the statistic of them. `log_ratio` is the mean NLL minus the full
# cache's; NLL and KL are in nats, first choices are shares.
STATISTICS: dict[str, tuple[str, Callable[[np.ndarray], float]]] = {
    "perplexity": ("nll", lambda nll: np.exp(np.mean(nll))),
    "perplexity_full": ("nll_full", lambda nll: np.exp(np.mean(nll))),
    "log_ratio": ("excess", np.mean),
    "kl_mean": ("kl", np.mean),
    "kl_median": ("kl", np.median),
    "kl_99": ("kl", lambda kl: np.quantile(kl, 0.99)),
    "kl_max": ("kl", np.max),
    "same_first_choice": ("same_first_choice", np.mean),
    "right_first_choice": ("right_first_choice", np.mean),
}


def token_statistics(records: Iterable[Mapping[str, Any]]) -> dict[str, dict]:
    """The `STATISTICS` of all tokens of a run, each with its 95 % interval; empty without such tokens.

    First answers that ended well count, without the tokens that the prompt's own pass predicts.

    Source: the statistics are those of llama.cpp's `perplexity --kl-divergence`.
    Differs: intervals by resampling blocks of tokens; llama.cpp takes neighbouring tokens for independent.
    """
    texts: list[dict[str, list[float]]] = []
    for record in records:
        found = record.get("per_token")
        if found and record["status"] == "ok" and not record.get("repeat"):
            first = int(found["exact"][0])
            text = {name: values[first:] for name, values in found.items()}
            texts.append(text | {"excess": np.subtract(text["nll"], text["nll_full"]).tolist()})
    if not any(text["nll"] for text in texts):
        return {}
    numbers = {
        name: over_tokens([text[column] for text in texts], statistic)
        for name, (column, statistic) in STATISTICS.items()
    }
    # The largest of a resample is never larger than the largest, so there is no such interval.
    numbers["kl_max"].low = numbers["kl_max"].high = None
    numbers["kl_max"].interval = ""
    return {name: asdict(estimate) for name, estimate in numbers.items()}
