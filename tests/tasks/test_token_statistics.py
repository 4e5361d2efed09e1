"""Statistics over all forced tokens of a run, against plain formulas."""

import numpy as np
import pytest

from kvbench.tasks.token_statistics import token_statistics


def records(*counts: int):
    """Answers of so many forced tokens, the first of which is exact; and all that is measured, by name."""
    rng, made, rest = np.random.default_rng(0), [], {}
    for place, count in enumerate(counts):
        text = {name: rng.exponential(1.0, count).tolist() for name in ("nll", "nll_full", "kl")}
        text |= {name: rng.integers(0, 2, count).tolist() for name in ("same_first_choice", "right_first_choice")}
        made.append({"status": "ok", "repeat": 0, "sample_id": str(place), "per_token": text | {"exact": [1.0]}})
        for name, values in text.items():
            rest[name] = np.append(rest.get(name, []), values[1:])
    return made, rest


def test_tails_and_delta_p() -> None:
    """They are of the tokens of all answers together, however short each is, with intervals that hold them; the
    largest has none."""
    made, rest = records(*[130] * 8)
    found = token_statistics(made)
    change = np.exp(-rest["nll"]) - np.exp(-rest["nll_full"])
    for name, value in {
        "kl_99": np.quantile(rest["kl"], 0.99),
        "kl_999": np.quantile(rest["kl"], 0.999),
        "dp_mean": change.mean(),
        "dp_rms": np.sqrt((change**2).mean()),
    }.items():
        assert found[name]["value"] == pytest.approx(value)
        assert found[name]["low"] <= value <= found[name]["high"]
    assert found["kl_max"]["value"] == rest["kl"].max() and found["kl_max"]["low"] is None


def test_a_tail_needs_its_tokens() -> None:
    """Of 999 tokens there is no 99.9 %, of 99 no 99 %: it would be the largest by another name."""
    for count, there in ((1000, ["kl_99"]), (1001, ["kl_99", "kl_999"]), (100, []), (101, ["kl_99"])):
        found = token_statistics(records(count)[0])
        assert [name for name in ("kl_99", "kl_999") if name in found] == there, count
