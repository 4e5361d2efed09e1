"""False confirmations: how often a calibration confirms what it should not, and that looks are counted."""

import json

import numpy as np
import pytest
from graded import Bench, gentle, make_cfg, smaller

from kvbench.calibrate.choose import ALLOWED, false_confirmations
from kvbench.calibrate.command import _earlier_looks, main
from kvbench.calibrate.plan import Rule

RULE = Rule(criterion="nll", margin=0.05, proof="interval", tie=0.01, resamples=499, seed=0)


def rate(shape, proof, *, num_points=16, num_tuning=32, num_held_out=48):
    """The simulated rate at the default grid and sample counts of docs/calibration.md."""
    rule = Rule(**(vars(RULE) | {"proof": proof}))
    return false_confirmations(
        shape, rule, num_points=num_points, num_tuning=num_tuning, num_held_out=num_held_out, trials=300
    )


@pytest.mark.parametrize("name", ["normal", "skewed", "few carry all"])
def test_the_default_proof_confirms_seldom_what_it_should_not(name):
    """By the interval it is below 10 % for every shape of loss; by the mean it is several times as often."""
    rng = np.random.default_rng(0)
    shape = {
        "normal": rng.normal(0, 0.05, 400),
        "skewed": rng.lognormal(-4, 1.5, 400),
        "few carry all": (rng.random(400) < 0.05) * 1.0,
    }[name]
    by_interval, by_mean = rate(shape, "interval"), rate(shape, "mean")
    assert by_interval < ALLOWED and by_mean > max(0.1, 2 * by_interval)


def test_the_default_is_the_interval():
    """What conf/command/calibrate.yaml says is the proof that was simulated, and its margins are those of compare."""
    from kvbench.cli.commands import compose_command
    from kvbench.results.measures import LOSSES

    wanted = compose_command("calibrate", ["method=snapkv"]).calibrate
    assert wanted.proof == "interval"
    assert {name: wanted.margin[name] for name in LOSSES} == {n: lost.measure.margin for n, lost in LOSSES.items()}


def test_nothing_lost_is_no_luck():
    """Where no sample loses anything no setting can be lucky; too few samples prove nothing."""
    assert false_confirmations(np.zeros(9), RULE, num_points=3, num_tuning=9, num_held_out=9) == 0.0
    noise = np.random.default_rng(0).normal(size=50)
    assert false_confirmations(noise, RULE, num_points=3, num_tuning=4, num_held_out=4) == 0.0


def test_looks_are_counted(tmp_path, capsys):
    """A second calibration with another margin on the same held-out samples is the second look, and says so; the same
    one again is no further look."""

    bench = Bench(gentle, smaller)
    for margin in (0.05, 0.2, 0.2):
        main(make_cfg(tmp_path, calibrate__margin__nll=margin), bench.parts())
    shown = capsys.readouterr().out
    files = list(tmp_path.rglob("calibration.json"))
    found = sorted(json.loads(path.read_text())["looks"] for path in files)
    assert found == [1, 2] and "have judged 2 calibrations" in shown
    assert "If every setting truly lost the margin" in " ".join(shown.split())
    folder = files[0].parent.parent
    assert _earlier_looks(folder, "none", json.loads(files[0].read_text())["sets"]["held_out"]["fingerprint"]) == 2
