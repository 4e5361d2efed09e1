"""Statistics of every forced token together: perplexity, and how far a method is from the full cache."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from kvbench.stats.blocks import over_tokens


def measured(record: Mapping[str, Any]) -> dict[str, list[float]] | None:
    """The numbers of a record's forced tokens, without those that the prompt's own pass predicts.

    Returns:
        None for an answer that did not end well, one after the first, or a run without `fidelity.per_token`.
    """
    found = record.get("per_token")
    if not found or record["status"] != "ok" or record.get("repeat"):
        return None
    first = int(found["exact"][0])
    return {name: values[first:] for name, values in found.items() if name != "exact"}


def token_statistics(records: Iterable[Mapping[str, Any]]) -> dict[str, dict]:
    """The statistics of all tokens of a run.

    Args:
        records: Journal records.

    Returns:
        Name -> an estimate with its 95 % interval: `perplexity`, `perplexity_full`, `log_ratio` (mean NLL minus the
        full cache's, nats), `kl_mean`, `kl_median`, `kl_99` and `kl_max` (nats; no interval of the largest),
        `same_first_choice` and `right_first_choice` (shares). Empty without such tokens.

    Source: the statistics are those of llama.cpp's `perplexity --kl-divergence`.
    Differs: intervals by resampling blocks of tokens; llama.cpp takes neighbouring tokens for independent.
    """
    texts = [found for record in records if (found := measured(record)) is not None]
    if not texts or not any(text["nll"] for text in texts):
        return {}
    columns = {name: [text[name] for text in texts] for name in texts[0]}
    kl = columns["kl"]
    excess = [np.subtract(text["nll"], text["nll_full"]) for text in texts]
    numbers = {
        "perplexity": over_tokens(columns["nll"], _perplexity),
        "perplexity_full": over_tokens(columns["nll_full"], _perplexity),
        "log_ratio": over_tokens([values.tolist() for values in excess]),
        "kl_mean": over_tokens(kl),
        "kl_median": over_tokens(kl, _median),
        "kl_99": over_tokens(kl, _last_percent),
        "kl_max": over_tokens(kl, np.max),
        "same_first_choice": over_tokens(columns["same_first_choice"]),
        "right_first_choice": over_tokens(columns["right_first_choice"]),
    }
    # The largest of a resample is never larger than the largest, so there is no such interval.
    numbers["kl_max"].low = numbers["kl_max"].high = None
    numbers["kl_max"].interval = ""
    return {name: asdict(estimate) for name, estimate in numbers.items()}


def _perplexity(nll: np.ndarray) -> float:
    return float(np.exp(np.mean(nll)))


def _median(values: np.ndarray) -> float:
    return float(np.median(values))


def _last_percent(values: np.ndarray) -> float:
    return float(np.quantile(values, 0.99))
