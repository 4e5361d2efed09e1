"""The rule of a calibration, its statistics against plain oracles, its settings, its sweep on a real engine, and how
often it confirms what it should not."""

import json
from dataclasses import fields
from types import SimpleNamespace

import numpy as np
import pytest
from fake_parts import altered
from graded import Bench, content_of, file_of, gentle, make_cfg, smaller
from omegaconf import OmegaConf
from refusals import refused

from kvbench.config.methods import method_settings
from kvbench.engine.prompt_cache import PromptCache
from kvbench.engine.requests import Request
from kvbench.extensions.calibrate.choose import (
    ALLOWED,
    Measured,
    accepts,
    choose,
    evaluate,
    false_confirmations,
    loss,
    why,
)
from kvbench.extensions.calibrate.command import _earlier_looks, main
from kvbench.extensions.calibrate.measure import Sweep, Trial
from kvbench.extensions.calibrate.plan import Rule, describe_data, read_plan, split
from kvbench.runs.calibration import load
from kvbench.runs.parts import Loaders
from kvbench.stats.intervals import Estimate

RULE = Rule(criterion="nll", margin=0.1, proof="interval", tie=0.0, resamples=499, seed=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"calibrate__parameters": ["alpha_m"]}, "calibrate.parameters=alpha_m does not exist. Did you mean alpha_"),
        ({"calibrate__parameters": ["window"]}, "calibrate.grid.window=None is no list of values"),
        ({"calibrate__parameters": []}, "must name at least one setting"),
        ({"calibrate__grid": {"budget": [1]}}, "method=graded has none of the settings budget"),
        ({"calibrate__grid__alpha_h": [1, 1]}, "holds a value twice"),
        ({"calibrate__criterion": "accuracy"}, "calibrate.criterion=accuracy does not exist"),
        ({"calibrate__proof": "hope"}, "calibrate.proof=hope does not exist"),
        ({"calibrate__margin__nll": 0}, "calibrate.margin.nll=0 must be a number above 0"),
        ({"calibrate__margin__nll": float("nan")}, "calibrate.margin.nll=nan must be a number above 0"),
        ({"calibrate__margin__nll": float("inf")}, "calibrate.margin.nll=inf must be a number above 0"),
        ({"calibrate__tie": float("nan")}, "calibrate.tie=nan must be a share"),
        ({"calibrate__tie": 1.5}, "calibrate.tie=1.5 must be a share"),
        ({"calibrate__tuning_samples": 1}, "calibrate.tuning_samples=1 must be a whole number of at least 2"),
        ({"prompt_cache_bytes": "much"}, "prompt_cache_bytes=.much. is no number of bytes"),
        ({"limit": 3}, "limit=3 has no meaning here"),
        ({"method__calibration": "x.yaml"}, "method.calibration is what this command writes"),
        ({"fidelity__max_tokens": 0}, "needs gold answers"),
        ({"_choices_": {"method": "full"}}, "method=full is what the others are measured against"),
        ({"calibrate__grid__alpha_l": [0, 5]}, "alpha_l=5.0 and alpha_h=3.0 do not fit"),
    ],
)
def test_settings_that_make_no_sense_are_refused(tmp_path, changes, message):
    """One message that names the setting, its value and what there is."""
    raised = {"calibrate__raised": {}} if "do not fit" in message else {}
    with pytest.raises(ValueError, match=message):
        main(make_cfg(tmp_path, **changes, **raised), Bench(gentle, smaller).parts())


def test_split_shares_small_subsets_and_refuses_single_samples(tmp_path):
    """A subset with fewer samples than asked for is shared in the same proportion; one sample cannot be shared."""
    bench = Bench(gentle, smaller, count=12)
    cfg = make_cfg(tmp_path)
    plan = read_plan(cfg.calibrate, "graded", bench.parts().make_policy(cfg.method))
    tuning, held_out = split(bench.load_task(cfg.task, None, limit=18, seed=0, protocol=None), plan, seed=3)
    assert (len(tuning.requests), len(held_out.requests)) == (4, 8)  # of 6 per subset: 6 * 6 // 18 = 2, and 4
    assert tuning.fingerprint != held_out.fingerprint
    other, _ = split(bench.load_task(cfg.task, None, limit=18, seed=0, protocol=None), plan, seed=4)
    assert [r.sample_id for r in other.requests] != [r.sample_id for r in tuning.requests]
    bench.requests = bench.requests[:3]
    with refused("setting-value", "task", "subset b", "graded"):
        split(bench.load_task(cfg.task, None, limit=18, seed=0, protocol=None), plan, seed=0)


def measured(resident, value, high, failed=0):
    """A grid point as `choose` sees it."""
    losses = {"nll": Estimate(value=value, num_samples=9, low=0.0, high=high)}
    empty = dict.fromkeys(item.name for item in fields(Measured))
    stated = {"losses": losses, "resident_bytes": resident, "num_failed": failed}
    return Measured(**empty | stated | {"within": not failed and high is not None and high <= RULE.margin})


@pytest.mark.parametrize(
    ("points", "tie", "best"),
    [
        ([(500, 0.0, 0.01), (400, 0.05, 0.09), (300, 0.09, 0.2)], 0.0, 1),  # the cheapest within the margin
        ([(500, 0.0, 0.2), (400, 0.05, 0.3)], 0.0, None),
        ([(500, 0.0, 0.0), (400, 0.05, 0.09), (400, 0.04, 0.08)], 0.0, 1),  # of equal bytes the gentler value
        ([(400, 0.01, 0.02), (397, 0.05, 0.09)], 0.01, 0),  # 3 bytes of 400 are not worth a loss
        ([(400, 0.01, 0.02), (397, 0.05, 0.09)], 0.0, 1),
        ([(400, 0.01, None), (500, 0.0, 0.0)], 0.0, 1),  # no interval, no proof
        ([(400, 0.01, 0.02, 1), (500, 0.0, 0.0)], 0.0, 1),  # a sample that did not end well
        # Ties: from the fewest good.
        ([(308, 0.0, 0.01), (305, 0.0, 0.01), (302, 0.01, 0.02), (300, 0.09, 0.3)], 0.01, 1),
    ],
)
def test_choice_and_ties(points, tie, best):
    """Fewest bytes within the margin; near-equal bytes go to the gentler value."""
    rule = Rule(**(vars(RULE) | {"tie": tie}))
    assert choose([measured(*point) for point in points], rule) == best


@pytest.mark.parametrize(
    ("value", "high", "proof", "good"),
    [
        (0.05, 0.09, "interval", True),
        (0.05, 0.12, "interval", False),
        (0.05, 0.12, "mean", True),
        (0.11, 0.12, "mean", False),
        (0.05, None, "interval", False),
        (0.05, None, "mean", True),
    ],
)
def test_proof_is_by_the_interval_or_by_the_mean(value, high, proof, good):
    """Non-inferiority asks for the upper end of the interval; the paper's way asks for the mean."""
    rule = Rule(**(vars(RULE) | {"proof": proof}))
    assert accepts(rule, measured(400, value, high)) is good
    assert accepts(rule, measured(400, value, high, failed=1)) is False


def point_with(values, scores, task):
    """A measured point from NLLs and scores by (subset, sample)."""
    records = [
        {
            "sample_id": f"{subset}/{index}",
            "subset": subset,
            "repeat": 0,
            "status": "ok",
            "scores": {"score": score},
            "fidelity": {"nll": nll, "kl_mean": nll / 10},
            "kept": {},
            "ledger": {"resident_bytes": 400.0 + index, "fp16_bytes": 1000.0},
        }
        for (subset, index, nll), score in zip(values, scores, strict=True)
    ]
    return Trial(settings={"a": 1}, experiment=SimpleNamespace(task=task, hash="x"), records=records)


def test_losses_against_a_plain_oracle(tmp_path):
    """Positive means worse; subsets weigh the same; intervals are scipy's stratified bootstrap, up to its small-sample
    stretch and the draws."""
    from scipy import stats

    task = Bench(gentle, smaller).load_task(None, None, limit=4, seed=0, protocol=None)
    rng = np.random.default_rng(0)
    extra = [rng.normal(0.2, 0.1, 30), rng.normal(0.4, 0.1, 60)]
    values = [("ab"[s], i, 1.0 + i % 7 + extra[s][i]) for s in (0, 1) for i in range(len(extra[s]))]
    plain = [("ab"[s], i, 1.0 + i % 7) for s in (0, 1) for i in range(len(extra[s]))]
    lost = [float(i % 5 != 0) for _, i, _ in values]
    point, full = point_with(values, lost, task), point_with(plain, [1.0] * len(plain), task)
    rule = Rule(**(vars(RULE) | {"resamples": 9999}))
    measurement = evaluate(point, full, rule)
    assert measurement.losses["nll"].value == pytest.approx(np.mean([e.mean() for e in extra]))
    assert measurement.losses["kl"].value == pytest.approx(np.mean([e.mean() for e in extra]) / 10)
    oracle = stats.bootstrap(
        tuple(extra), lambda a, b, axis: (a.mean(axis=axis) + b.mean(axis=axis)) / 2, method="percentile", rng=1
    ).confidence_interval
    width = oracle.high - oracle.low
    assert measurement.losses["nll"].low == pytest.approx(oracle.low, abs=0.1 * width)
    assert measurement.losses["nll"].high == pytest.approx(oracle.high, abs=0.1 * width)
    assert measurement.losses["score"].value == pytest.approx(0.2) and measurement.losses["score"].low > 0.1
    assert measurement.score == pytest.approx(0.8)
    task.metrics["score"] = type(task.metrics["score"])(False, "errors: fewer are better")
    assert loss(point, full, "score", rule).value == pytest.approx(-0.2)
    resident = np.mean([400.0 + i for _, i, _ in values])
    assert measurement.resident_bytes == pytest.approx(resident)
    assert measurement.bytes_ratio.value == pytest.approx(resident / 1000)
    assert measurement.bytes_ratio.low < measurement.bytes_ratio.value < measurement.bytes_ratio.high
    same = loss(full, full, "nll", rule)
    assert (same.value, same.low, same.high) == (0.0, 0.0, 0.0)


def test_points_equal_fresh_runs(tmp_path, tiny_model):
    """The whole sweep on a real engine: records from reused prompts are those of runs that read every prompt."""
    model = tiny_model("llama", "gqa3", 64)
    generator = np.random.default_rng(0)

    def tokens(count):
        return tuple(generator.integers(1, 320, count).tolist())

    requests = [
        Request(sample_id=f"a/{i}", subset="a", segments=(tokens(60 + i),), gold=tokens(5), max_new_tokens=4)
        for i in range(5)
    ]
    bench = Bench(gentle, smaller)
    bench.requests = requests
    task = bench.load_task(None, None, limit=9, seed=0, protocol=None)
    cfg = make_cfg(tmp_path, batch_size=2)
    cfg.method = method_settings("diffkv")
    cfg.method.window = 8
    for name in ("what", "rule", "calibrate", "_choices_"):  # the command's own, which are no settings of a run
        cfg.pop(name, None)
    made = {"check_task": lambda config: None, "check_chat": lambda config: None}
    made |= {"load_model": lambda cfg: model, "load_task": lambda *a, **k: task}
    parts = altered(Loaders(), **made)
    prompts = PromptCache(2**30)
    sweep = Sweep(cfg, "diffkv", parts, folder=tmp_path / "points", prompts=prompts)
    grid = [(0.0, 0.0), (1.0, 0.0), (1.0, 0.5), (2.0, 0.1)]
    points = [sweep.trial({"alpha_h": high, "alpha_l": low}, task) for high, low in grid]
    try:
        sweep.measure([*points, sweep.full(task)], "test")
        assert (prompts.num_read, prompts.num_reused) == (5, 20)
        for point in points:
            fresh, engine = {}, parts.make_engine(point.experiment.config, model, point.experiment.policy)
            engine.run(requests, on_outcome=lambda o, fresh=fresh: fresh.update({o.sample_id: o}))
            for record in point.records:
                outcome = fresh[record["sample_id"]]
                for name in ("text", "fidelity", "ledger", "kept", "token_ids"):
                    assert record[name] == json.loads(json.dumps(getattr(outcome, name))), name
    finally:
        model.model.set_attn_implementation("sdpa")
    assert len({json.dumps([r["fidelity"] for r in point.records]) for point in points}) == len(grid)


DEFAULT = Rule(criterion="nll", margin=0.05, proof="interval", tie=0.01, resamples=499, seed=0)


def rate(shape, proof):
    """The simulated rate at the default grid and sample counts of kvbench/extensions/calibrate/README.md."""
    rule = Rule(**(vars(DEFAULT) | {"proof": proof}))
    return false_confirmations(shape, rule, num_points=16, num_tuning=32, num_held_out=48, trials=300)


@pytest.mark.every(2)
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
    """The proof in conf/command/calibrate.yaml is the one that was simulated, and its margins are those of compare."""
    from kvbench.cli.commands import compose_command
    from kvbench.results.measures import LOSSES

    wanted = compose_command("calibrate", ["method=snapkv"]).calibrate
    assert wanted.proof == "interval"
    assert {name: wanted.margin[name] for name in LOSSES} == {n: lost.measure.margin for n, lost in LOSSES.items()}


def test_nothing_lost_is_no_luck():
    """If no sample loses anything, no setting can be lucky; too few samples prove nothing."""
    assert false_confirmations(np.zeros(9), DEFAULT, num_points=3, num_tuning=9, num_held_out=9) == 0.0
    noise = np.random.default_rng(0).normal(size=50)
    assert false_confirmations(noise, DEFAULT, num_points=3, num_tuning=4, num_held_out=4) == 0.0


def test_looks_are_counted(tmp_path, capsys, undrawn):
    """A second calibration with another margin on the same held-out samples is the second look, and says so; the same
    one again is no further look."""
    bench = Bench(gentle, smaller)
    for margin in (0.05, 0.2, 0.2):
        main(make_cfg(tmp_path, calibrate__margin__nll=margin), bench.parts())
    shown = capsys.readouterr().out
    files = list(tmp_path.rglob("calibration.json"))
    looks = sorted(json.loads(path.read_text())["looks"] for path in files)
    assert looks == [1, 2] and "have judged 2 calibrations" in shown
    assert "If every setting truly lost the margin" in " ".join(shown.split())
    folder = files[0].parent.parent
    assert _earlier_looks(folder, "none", json.loads(files[0].read_text())["sets"]["held_out"]["fingerprint"]) == 2


# The paper's rule ----


PAPERS = Rule(name="paper", criterion="score", margin=0.01, proof="mean", tie=0.0, resamples=199, seed=0)


def scored(right, failed=0, full=50):
    """A grid point of 100 problems with so many right answers, where the full cache has `full`."""
    losses = {"score": Estimate(value=(full - right) / 100, num_samples=100, low=-1.0, high=1.0)}
    empty = dict.fromkeys(item.name for item in fields(Measured))
    return Measured(
        **empty | {"losses": losses, "score": right / 100, "num_failed": failed, "within": right >= full - 1}
    )


@pytest.mark.parametrize(
    ("rights", "best", "tied"),
    [
        ([48, 50, 49, 50, 47], 1, "4"),  # a tie takes the smaller threshold
        ([50, 50, 50, 50, 50], 0, "2, 3, 4, 5"),
        ([10, 11, 12, 13, 55], 4, None),  # the highest wins, whatever it holds
        ([3, 2, 1, 0, 0], 0, None),  # and however bad
        ([(60, 1), 41, 40, 40, 40], 1, None),  # an answer that did not end well is no accuracy
        ([(60, 1)], None, None),
    ],
)
def test_the_highest_score_and_of_equal_ones_the_smaller_threshold(rights, best, tied):
    """Bytes play no part, and neither do margin and interval."""
    points = [scored(*(item if isinstance(item, tuple) else (item,))) for item in rights]
    assert choose(points, PAPERS) == best
    for point in points:
        point.bytes_ratio, point.resident_bytes = Estimate(value=0.5), 1.0
    said = why("alpha_h", (1.0, 2.0, 3.0, 4.0, 5.0)[: len(points)], points, best, PAPERS)
    assert (f"shared with {tied}, and" in said) if tied else "shared" not in said


def right_at(scores):
    """A loss of the bench that makes of 256 problems `scores[alpha_h, alpha_l]` right."""
    return lambda high, low: 0.7 - scores[high, low]


def paper_cfg(folder, **changes):
    """The command with `rule=paper` and its usual grids."""
    cfg = make_cfg(folder, rule="paper", calibrate__tuning_samples=20, calibrate__held_out_samples=20, **changes)
    cfg.calibrate.grid = {"alpha_h": None, "alpha_l": None}
    return cfg


def test_the_paper_explores_alpha_l_only_at_the_best_alpha_h(tmp_path, capsys, undrawn):
    """alpha_h of 1 to 5 with nothing pruned; then alpha_l, where 0 is known already. The file has the rule, why, the
    full cache's score and the data."""
    scores = {(high, 0.0): 0.7 - 0.1 * abs(high - 3) for high in (0.0, 1.0, 2.0, 3.0, 4.0, 5.0)}
    scores |= {(3.0, low): 0.5 for low in (0.02, 0.06, 0.08, 0.1)} | {(3.0, 0.04): 0.7, (1.0, 0.02): 0.6}
    bench = Bench(right_at(scores), smaller, count=200)
    main(paper_cfg(tmp_path), bench.parts())
    content = content_of(tmp_path, "yaml")
    first, second = content["tuning"]
    assert [(p["alpha_h"], p["alpha_l"]) for p in first["grid"]] == [(high, 0) for high in (1, 2, 3, 4, 5)]
    assert [(p["alpha_h"], p["alpha_l"]) for p in second["grid"]] == [
        (3, low) for low in (0, 0.02, 0.04, 0.06, 0.08, 0.1)
    ]
    assert content["settings"] == {"alpha_h": 3, "alpha_l": 0} and "shared with 0.04" in second["why"]
    assert first["full"]["score"] == max(point["score"] for point in first["grid"])
    assert content["rule"].startswith("the highest score") and content["data"]["remarks"]
    held_out = {
        sample for names in content_of(tmp_path, "json")["sets"]["held_out"]["samples"].values() for sample in names
    }
    tuned = [(high, low) for high, low, sample in bench.answered if sample not in held_out]
    assert {low for high, low in tuned if high != 3.0 and high is not None} == {0.0}
    said = capsys.readouterr()
    assert "alpha_h=3: the highest score" in said.err and "paper: alpha_h=3: the highest score" in said.out
    assert load(str(file_of(tmp_path, "yaml"))).settings == {"alpha_h": 3, "alpha_l": 0}


def test_the_low_tier_is_off_where_no_alpha_h_comes_near(tmp_path, undrawn):
    """As for the paper's Qwen2.5-7B: alpha_h = 0 joins the grid, and alpha_l is tuned with equal thresholds."""
    bench = Bench(lambda high, low: 0.0 if high <= 0.04 else 0.4, smaller, count=200)
    main(paper_cfg(tmp_path), bench.parts())
    first, second = content_of(tmp_path, "yaml")["tuning"]
    assert [point["alpha_h"] for point in first["grid"]] == [0, 1, 2, 3, 4, 5] and first["chosen"] == 0
    assert [(p["alpha_h"], p["alpha_l"]) for p in second["grid"][:3]] == [(0, 0), (0.02, 0.02), (0.04, 0.04)]


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"rule": "dearest"}, ("name-unknown", "rule", "rule=dearest")),
        (
            {"calibrate__criterion": "nll"},
            ("settings-conflict", "calibrate.criterion", "calibrate.criterion=nll", "rule=paper"),
        ),
        ({"limit": 5}, ("settings-conflict", "limit", "limit=5")),
        ({"limit": "after"}, ("setting-value", "limit", "limit='after'")),
        (
            {"calibrate__parameters": ["alpha_h"], "calibrate__grid__alpha_h": []},
            ("setting-value", "calibrate.grid.alpha_h", "calibrate.grid.alpha_h=[]"),
        ),
    ],
)
def test_values_that_do_not_fit_the_paper_are_refused(tmp_path, changes, error):
    """Named with the setting."""
    cfg = paper_cfg(tmp_path)
    for key, value in changes.items():
        OmegaConf.update(cfg, key.replace("__", "."), value, force_add=True)
    with refused(*error):
        main(cfg, Bench(gentle, smaller).parts())


def test_the_problems_are_named_as_what_they_are():
    """Test problems, those of other levels and a file with other rows than the benchmark's are said to be so; the
    training split with all of its rows is not."""
    task = Bench(gentle, smaller).load_task(None, None, limit=4, seed=0, protocol=None)
    task.name, whole = "math", {"file": "math/algebra_train.jsonl", "rows": 1744, "of": 1744}
    task.protocol, task.sources = {"problems": "train"}, [whole]
    description = describe_data(task, None, PAPERS)
    assert description["remarks"] == [] and "algebra_train.jsonl (1744 rows)" in description["said"]
    task.sources = [whole | {"rows": 4}]
    (remark,) = describe_data(task, None, PAPERS)["remarks"]
    assert "has 4 rows and the benchmark's 1744" in remark and remark in describe_data(task, None, PAPERS)["said"]
    task.name, task.protocol, task.sources = "math500", {"levels": [1, 2]}, []
    description = describe_data(task, "after:100", PAPERS)
    assert (
        description["settings"] == {"levels": [1, 2], "limit": "after:100"}
        and "training problems" in description["remarks"][0]
    )
    assert describe_data(task, "after:100", RULE)["remarks"] == []


def test_a_limit_says_what_samples_are_drawn_from(tmp_path, undrawn):
    """`after:` reaches the task, and both sets are drawn from what it leaves."""
    bench = Bench(gentle, smaller)
    seen = []

    def load_task(*args, limit, **named):
        seen.append(limit)
        return Bench.load_task(bench, *args, limit=40, **named)

    main(make_cfg(tmp_path, limit="after:3"), altered(bench.parts(), load_task=load_task))
    assert seen == ["after:3"] and content_of(tmp_path, "yaml")["data"]["settings"] == {"limit": "after:3"}


def test_the_luckiest_is_confirmed_more_often_than_it_should_be():
    """With the paper's rule and the mean, a setting that truly loses the margin is confirmed about every second time;
    the interval keeps it seldom."""
    shape = np.random.default_rng(1).normal(0, 0.05, 400)
    rates = {}
    for proof in ("mean", "interval"):
        rule = Rule(**(vars(PAPERS) | {"proof": proof}))
        rates[proof] = false_confirmations(shape, rule, num_points=10, num_tuning=40, num_held_out=40, trials=200)
    assert 0.35 < rates["mean"] < 0.65 and rates["interval"] < ALLOWED
