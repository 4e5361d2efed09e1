"""What is measured of forced tokens, against plain formulas on whole matrices of logits."""

import pytest
import torch
from engine_helpers import NATIVE_METHODS, answers, own_logits, random_tokens, request

from kvbench.engine.fidelity import FidelityMeter, copied_tokens


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


@pytest.mark.parametrize("vocabulary", [2, 7, 40])
@pytest.mark.parametrize(("before", "after"), [(0, 5), (1, 9), (2, 1), (3, 8), (57, 33), (200, 1)])
def test_a_copied_token_ends_a_run_of_three_of_the_prompt(vocabulary, before, after) -> None:
    """A token is copied where it and the two before it stand in the prompt in this order, the border crossed too;
    against a plain search, at all places and at some."""
    torch.manual_seed(vocabulary * 1000 + before + after)
    prompt, behind = (torch.randint(vocabulary, (size,)).tolist() for size in (before, after))
    text, held = prompt + behind, {tuple(prompt[at : at + 3]) for at in range(before - 2)}
    wanted = [at >= 2 and tuple(text[at - 2 : at + 1]) in held for at in range(before, before + after)]
    assert list(copied_tokens(prompt, behind, range(after))) == wanted
    assert list(copied_tokens(prompt, behind, range(0, after, 2))) == wanted[::2]


@pytest.mark.parametrize(("settings", "first"), [({}, 1), ({"exact_first": False}, 0), ({"warmup": 7}, 7)])
def test_the_kl_of_what_is_not_copied(settings, first) -> None:
    """The mean over measured tokens that are no copies; none where all are, and the whole KL where none is."""
    copied = tuple(at % 3 > 0 for at in range(50))
    meter, ours, full, _ = forced(50, copied=copied, **settings)
    kl, is_new = (full.exp() * (full - ours)).sum(-1)[first:], ~torch.tensor(copied)[first:]
    found = meter.report()
    assert found["kl_new"] == pytest.approx(float(kl[is_new].mean()), rel=1e-4)
    assert found["num_new"] == int(is_new.sum()) < found["num_measured"]
    assert meter.per_token()["copied"] == list(map(float, copied))
    whole = forced(50, **settings)[0].report()
    assert whole["kl_new"] == pytest.approx(whole["kl_mean"]) and whole["num_new"] == whole["num_measured"]
    none = forced(50, copied=(True,) * 50, **settings)[0].report()
    assert none["kl_new"] is None and none["num_new"] == 0


def test_copies_are_told_from_the_prompt_of_a_request(loaded) -> None:
    """A run forces an answer that begins as the prompt does and ends in tokens of its own: all but the first two of the
    copy are copied, and the KL of the others is theirs alone."""
    prompt = random_tokens(60)
    fresh = [(token + 1) % 100 for token in prompt[10:20]]
    asked = request("a", prompt, gold=(*prompt[5:20], *fresh), max_new_tokens=0)
    found = answers(loaded, NATIVE_METHODS["snapkv"], [asked], fidelity_per_token=True)["a", 0]
    copied = found.per_token["copied"]
    assert copied[2:15] == [1.0] * 13 and sum(copied[15:]) == 0
    kl = [nats for nats, one in zip(found.per_token["kl"][1:], copied[1:], strict=True) if not one]
    assert found.fidelity["num_new"] == len(kl) and found.fidelity["kl_new"] == pytest.approx(
        sum(kl) / len(kl), rel=1e-3
    )
