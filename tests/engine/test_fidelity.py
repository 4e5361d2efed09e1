"""What is measured of forced tokens, against plain formulas on whole matrices of logits."""

import pytest
import torch
from engine_helpers import NATIVE_METHODS, answers, own_logits, random_tokens, request

from kvbench.engine.fidelity import FidelityMeter


def forced(count: int, **settings):
    """A meter that was fed `count` tokens of made-up logits; theirs, the full cache's, and the tokens."""
    torch.manual_seed(count)
    ours, full = torch.randn(count, 33) * 2, torch.randn(count, 33) * 2
    gold = torch.randint(33, (count,))
    meter = FidelityMeter(tuple(gold.tolist()), full, **settings)
    for index in range(count):
        meter.take(meter.measure(index, ours[index]).tolist())
    return meter, ours.double().log_softmax(-1), full.double().log_softmax(-1), gold


@pytest.mark.parametrize(("settings", "first"), [({}, 1), ({"exact_first": False}, 0), ({"warmup": 7}, 7)])
def test_tails_and_changes_of_probability(settings, first) -> None:
    """Quantiles of the KL, its maximum and the RMS of delta p are over the measured tokens alone, which the drift and
    the tokens' own numbers count from; a quantile of too few tokens is none."""
    meter, ours, full, gold = forced(107, **settings)
    found = meter.report()
    kl = (full.exp() * (full - ours)).sum(-1)[first:]
    change = (ours.exp() - full.exp())[torch.arange(107), gold][first:]
    assert found["kl_99"] == pytest.approx(float(kl.quantile(0.99)), rel=1e-4)  # sums in fp32
    assert found["kl_max"] == pytest.approx(float(kl.max()), rel=1e-4)
    assert found["dp_rms"] == pytest.approx(float(change.square().mean().sqrt()), rel=1e-4)
    assert found["kl_999"] is None and found["num_measured"] == 107 - first
    assert sum(meter.drift()["tokens"]) == 107 - first and meter.per_token()["exact"] == [first]
    short = forced(99, **settings)[0].report()
    assert short["kl_99"] is None and short["dp_rms"] > 0


def test_of_a_single_exact_token_there_is_nothing() -> None:
    """No number is made of no token."""
    found = forced(1)[0].report()
    assert [found[name] for name in ("kl_99", "kl_999", "kl_max", "dp_rms")] == [None] * 4


def test_warm_up_tokens_are_fed_and_not_measured(loaded) -> None:
    """Of a prompt of one token and a text behind it, the second half is measured, with the first in the cache; with the
    full cache the numbers are those of a plain pass."""
    (first, *rest) = random_tokens(40)
    asked = request("a", (first,), gold=tuple(rest), warmup_tokens=20, max_new_tokens=0)
    found = answers(loaded, NATIVE_METHODS["full"], [asked], fidelity_per_token=True)["a", 0]
    logp = own_logits(loaded, [first, *rest], 0)[:39].log_softmax(-1)
    nll = -logp[torch.arange(39), torch.tensor(rest)]
    assert found.fidelity["num_measured"] == 19 and found.fidelity["num_tokens"] == 39
    assert found.fidelity["nll"] == pytest.approx(float(nll[20:].mean()), abs=1e-4)
    assert found.fidelity["kl_max"] < 1e-4 and found.per_token["exact"] == [20.0]
    assert found.per_token["nll"] == pytest.approx(nll.tolist(), abs=1e-3)
